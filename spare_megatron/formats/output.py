"""What is shown and written: text that is safe to show, files written whole or not at all, errors that name a path."""

import errno
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_OF_A_DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class NotWritten(OSError):
    """A path cannot be written; the message adds setting, path and remedy to `reason`, the error alone."""

    def __init__(self, error: OSError, setting: str, path: Path) -> None:
        remedy = "choose another"
        if error.errno in _NO_ROOM:
            remedy = "make room there, or choose another"
        elif error.errno in _NOT_ALLOWED:
            remedy = "choose one that you may write"
        self.reason = reason_of(error)
        super().__init__(f"{self.reason}: {setting} {real_paths(str(path))}: {remedy}")


def reason_of(error: OSError) -> str:
    """The error without the path."""
    return str(error) if error.errno is None else f"[Errno {error.errno}] {error.strerror}"


def real_paths(text: str, quoted: Callable[[str], str] = str) -> str:
    """The text with each path of a descriptor (`machine.lock`) replaced by where that is now, `quoted` for the text."""

    def target(found: re.Match[str]) -> str:
        try:
            return quoted(os.readlink(found[0]))
        except OSError:  # its process has ended
            return found[0]

    return _OF_A_DESCRIPTOR.sub(target, text) if "/proc/" in text else text


@contextmanager
def named_errors(setting: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` about the path, or about no path, into `NotWritten`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, NotWritten | BrokenPipeError) or not _is_about(error, path):
            raise
        raise NotWritten(error, setting, path) from error


@contextmanager
def whole_file(setting: str, path: Path) -> Iterator[Path]:
    """Yields a temporary path that becomes the file when the block ends; an error leaves nothing behind.

    What is no plain file, or lies in an unwritable folder, is written in place. Raises NotWritten.
    """
    with named_errors(setting, path):
        if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
            yield path
            return
        target = path.resolve()
        aside = target.with_name(f".{target.name}.{os.uname().nodename}-{os.getpid()}")
        try:
            yield aside
            if target.exists():
                shutil.copymode(target, aside)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)


def _is_about(error: OSError, path: Path) -> bool:
    """Whether an error is about the path, a folder above it or a file beside it, or about no path."""
    if not isinstance(error.filename, str | os.PathLike):
        return True
    other, path = (Path(real_paths(str(one))).absolute() for one in (error.filename, path))
    return other.is_relative_to(path.parent) or path.is_relative_to(other)


_SHOWN = frozenset(("Zs", "Co", "Cn"))
"""Categories that `str.isprintable` refuses though terminals show them: spaces of other scripts, private characters,
and characters newer than this Python.
"""
_JOINERS = "\u200c\u200d"
"""Parts of Persian and Indian words and of emoji."""


def printable(text: str, keep: str = "") -> str:
    r"""Escapes control characters, changes of direction, invisible characters and lone surrogates, except `keep`.

    >>> printable("a\x1b[2Jb\nc"), printable("[/x] :smile: \\n"), printable("a\tb", keep="\t")
    ('a\\x1b[2Jb\\nc', '[/x] :smile: \\n', 'a\tb')
    >>> printable("\u202egpj.exe"), printable("\udc80")
    ('\\u202egpj.exe', '\\udc80')
    """
    if text.isprintable():
        return text
    return "".join(char if _is_shown(char) or char in keep else _escaped(char) for char in text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or char in _JOINERS or unicodedata.category(char) in _SHOWN


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
