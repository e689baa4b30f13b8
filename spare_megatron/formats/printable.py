"""Makes text from elsewhere safe to show: terminals and pages obey invisible characters. Visible ones stay."""

import unicodedata

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
