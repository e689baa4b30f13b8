"""Text files and files of JSON, cut into batches that can be read in any process.

A text file is one document; each JSON object holds one under a key. Batches come in the sorted order of the paths.
"""

import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import msgspec

JSON_LINES, JSON = (".jsonl", ".ndjson", ".jsonlines"), ".json"
_READ = (".gz", ".zst")
_COMPRESSED = (*_READ, ".bz2", ".xz", ".lz4", ".zip")
_BATCH_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 16
"""Read from a file at once; compressed text can be a thousand times as long."""
_MOST_VALUE_BYTES = 1 << 28
"""Longest JSON value that is read as a whole: an array, or an object over several lines."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""Of `zstd --long=31`, the largest that zstd writes."""
_MOST_NAMED, _MOST_KEYS = 3, 8
_ONE_A_LINE = "write each document as a JSON object on a line of its own"
_LINES_TRIED = 100
_MARK = "\ufeff"
_BLANK = " \t\r\n" + _MARK
Form = Literal["lines", "value"]
"""How a file holds JSON: an object on each line, or one value, an array of objects or an object."""


class NoText(Exception):
    """A file cannot become a document."""


@dataclass(slots=True)
class Skipped:
    """Files that are not documents, and documents without tokens, by reason."""

    files: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Skipped") -> None:
        self.files.update(other.files)
        self.documents.update(other.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Text files; those in `named` are refused if they are not text, others are skipped."""

    paths: tuple[Path, ...]
    named: frozenset[Path]
    num_input_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """Consecutive objects of a file, one on a line; `num_input_bytes` is their share of it, which may be compressed."""

    path: Path
    key: str
    unit: str
    """What messages count in the file: its lines, or the items of its array."""
    first: int
    """Number of the first one, from 1."""
    lines: bytes
    num_input_bytes: int


Batch = TextFiles | JsonLines


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is not empty, and where it stands, for messages."""

    where: str
    text: str


# ------------------------------------------------------------------------------------------------------------- files


def find_files(
    inputs: Sequence[Path], *, suffixes: Sequence[str] = (), excluded_folders: frozenset[str] = frozenset()
) -> list[Path]:
    """The files to read, in sorted order, each once. A file named as input is taken whatever its suffix. ValueError: an
    input does not exist, or there is nothing to read.
    """
    found: set[Path] = set()
    for given in inputs:
        if given.is_file():
            found.add(given)
        elif given.is_dir():
            found |= set(_files_below(given, tuple(suffixes), excluded_folders))
        else:
            raise ValueError(f"--input {given} is neither a file nor a folder")
    if not found:
        wanted = f" with suffix {' or '.join(suffixes)}" if suffixes else ""
        raise ValueError(f"--input {' '.join(map(str, inputs))} holds no files{wanted}; give it some text")
    return sorted(found)


def _files_below(folder: Path, suffixes: tuple[str, ...], excluded_folders: frozenset[str]) -> Iterator[Path]:
    """Each folder is read once: links to it, which are followed, may lead to it again, or in a circle."""
    read: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        found = os.stat(where)
        if (found.st_dev, found.st_ino) in read:
            folders.clear()
            continue
        read.add((found.st_dev, found.st_ino))
        folders[:] = sorted(name for name in folders if name not in excluded_folders)
        for name in names:
            path = Path(where, name)
            if name.endswith(suffixes or "") and _is_file(path):
                yield path


def _is_file(path: Path) -> bool:
    """Whether this is a file, perhaps through a link, which has to lead somewhere."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise ValueError(f"--input {error.filename} cannot be read: {error.strerror}") from error


def json_among(paths: Sequence[Path], json_key: str | None) -> dict[Path, Form]:
    """Maps each JSON file to its form. ValueError: a key and no JSON, JSON and no key, or one is not decompressed."""
    found = {path: form for path in paths if (form := _json_form(path, has_key=json_key is not None))}
    if found and json_key is None:
        raise ValueError(
            f"{_some(list(found))}: each line is a document, but the key of its text is not given; give it, as in "
            f"--json-key text, or choose other files with --suffix and --exclude"
        )
    if json_key is not None and not found:
        raise ValueError(f"--json-key {json_key}: no JSON in {_some(paths)}; leave the key out, or name other files")
    unread = [path for path in found if path.suffix.lower() in _COMPRESSED and path.suffix.lower() not in _READ]
    if unread:
        raise ValueError(f"{_some(unread)}: only {' and '.join(_READ)} are decompressed; compress them so, or unpack")
    return found


def _some(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return f"{', '.join(map(str, paths[:_MOST_NAMED]))}{more}"


def _json_form(path: Path, *, has_key: bool) -> Form | None:
    """By the name, also where it is compressed, and by the content; None: it is text.

    Without a key, .json is JSON lines, as Megatron calls them, if two of its first lines are objects.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    name = suffixes[-1] if suffixes else ""
    if name in JSON_LINES:
        return "lines"
    try:
        if has_key:
            return _form_with_key(path, is_json=name == JSON)
        return "lines" if name == JSON and _has_objects(path) else None
    except ValueError:  # reading it says why
        return "lines" if has_key and name == JSON else None


def _form_with_key(path: Path, *, is_json: bool) -> Form | None:
    """JSON by name or not, it is JSON lines if its first line is an object. ValueError: it cannot be read."""
    begin = _begin(path, _CHUNK_BYTES).lstrip(_BLANK.encode())[:1]
    if begin == b"{" and _is_object(next(_lines_in(path))):
        return "lines"
    if is_json:
        return "value" if begin else "lines"
    if begin in (b"{", b"[") and _is_value(path):
        return "value"
    return "lines" if _has_objects(path) else None


def _has_objects(path: Path) -> bool:
    """Whether two of its first lines are objects: it is JSON lines, though others are damaged."""
    return sum(map(_is_object, islice(_lines_in(path), _LINES_TRIED))) > 1


def _lines_in(path: Path) -> Iterator[bytes]:
    """The lines that are not blank."""
    for lines, _ in _line_batches(path, "lines"):
        yield from (line for line in lines.split(b"\n") if line.strip(_BLANK.encode()))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(_loads(line.decode("utf-8-sig")), dict)
    except ValueError:
        return False


def _is_value(path: Path) -> bool:
    """Whether it is one value, or too long for one: then reading it says so."""
    content = _begin(path, _MOST_VALUE_BYTES)
    if len(content) <= _MOST_VALUE_BYTES:
        try:
            _as_lines(path, [content])
        except ValueError:
            return False
    return True


def _begin(path: Path, num_bytes: int) -> bytes:
    """The content, up to its end or a few more bytes than these."""
    with _reading(path) as file:
        return _joined(_decompressed(path, file), num_bytes)


def _joined(pieces: Iterable[bytes], num_bytes: int) -> bytes:
    """The pieces until they have more bytes than these."""
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > num_bytes:
            break
    return b"".join(found)


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """ValueError: it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


# ----------------------------------------------------------------------------------------------------------- batches


def batches_of(
    paths: Sequence[Path], json_forms: Mapping[Path, Form], json_key: str | None, named: frozenset[Path]
) -> Iterator[Batch]:
    """The input in batches of about 256 KiB of text. ValueError: a file cannot be read, or one of JSON is damaged."""
    waiting: list[Path] = []
    size = 0

    def files() -> TextFiles:
        return TextFiles(paths=tuple(waiting), named=named & set(waiting), num_input_bytes=size)

    for path in paths:
        if waiting and (path in json_forms or size >= _BATCH_BYTES):
            yield files()
            waiting, size = [], 0
        if path not in json_forms:
            waiting.append(path)
            size += path.stat().st_size if path.is_file() else 0
            continue
        assert json_key is not None
        form, first = json_forms[path], 1
        unit = "line" if form == "lines" else "item"
        for lines, num_bytes in _line_batches(path, form):
            yield JsonLines(path=path, key=json_key, unit=unit, first=first, lines=lines, num_input_bytes=num_bytes)
            first += lines.count(b"\n")
    if waiting:
        yield files()


def _line_batches(path: Path, form: Form) -> Iterator[tuple[bytes, int]]:
    """Whole lines, and how far the reading of the file has gone on for them."""
    with _reading(path) as file:
        pieces: list[bytes] = []
        size = position = 0
        content: Iterable[bytes] = _decompressed(path, file)
        for piece in content if form == "lines" else _as_lines(path, content):
            pieces.append(piece)
            size += len(piece)
            if size >= _BATCH_BYTES and (cut := piece.rfind(b"\n") + 1):
                pieces[-1] = piece[:cut]
                yield b"".join(pieces), file.tell() - position
                position, pieces, size = file.tell(), [piece[cut:]], len(piece) - cut
        if size:
            yield b"".join(pieces), file.tell() - position


def _as_lines(path: Path, pieces: Iterable[bytes]) -> list[bytes]:
    """The items of an array, or the only value, each on a line. ValueError: it is not JSON, or too long."""
    content = _joined(pieces, _MOST_VALUE_BYTES)
    if len(content) > _MOST_VALUE_BYTES:
        raise ValueError(f"{path} is one JSON value of more than {_MOST_VALUE_BYTES >> 20} MiB; {_ONE_A_LINE}")
    try:
        value = _loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number, reason = content.count(b"\n", 0, error.start) + 1, str(error)
    except json.JSONDecodeError as error:
        number, reason = error.lineno, error.msg
    except ValueError as error:
        number, reason = 1, str(error)
    else:
        return [json.dumps(item).encode() + b"\n" for item in (value if isinstance(value, list) else [value])]
    raise ValueError(f"{path}, line {number} is not JSON: {reason}; repair it, or {_ONE_A_LINE}")


def _decompressed(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The content in pieces, over all members of a compressed file. ValueError: it is damaged or cut short."""
    start = _decompressors(path)
    if start is None:
        yield from iter(lambda: file.read(_CHUNK_BYTES), b"")
        return
    new, damages = start
    member: Any = None
    try:
        while data := file.read(_CHUNK_BYTES):
            while data := data if member else data.lstrip(b"\0"):  # zeros may fill up the last block of a tape
                member = member or new()
                yield member.decompress(data)
                data, member = (member.unused_data, None) if member.eof else (b"", member)
    except damages as error:
        how = " with a smaller window, as of zstd --long=27" if "memory" in str(error) else ""
        raise ValueError(f"{path} cannot be decompressed: {error}; copy or write it anew{how}") from error
    if member is not None:
        raise ValueError(f"{path} is cut short; copy or write it anew")


def _decompressors(path: Path) -> tuple[Callable[[], Any], type[Exception]] | None:
    """Makes the decompressor of one member, and what it raises for damaged data; None: nothing is compressed."""
    match path.suffix.lower():
        case ".gz":
            return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
        case ".zst":
            try:
                import zstandard
            except ImportError as error:
                needs = "needs the package zstandard, which is not installed: pip install 'spare_megatron[text]'"
                raise ValueError(f"{path} {needs}") from error
            return (
                lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj(),
                zstandard.ZstdError,
            )
    return None


# --------------------------------------------------------------------------------------------------------- documents


def documents_in(batch: Batch, skipped: Skipped, *, is_byte_0_text: bool) -> Iterator[Document]:
    """The documents of a batch; counts others in `skipped`. ValueError: a named file is not text, or a line has no text
    under the key. A file with byte 0 always counts as binary.
    """
    if isinstance(batch, TextFiles):
        for path in batch.paths:
            try:
                text = _read_text(path, skipped)
            except NoText as error:
                if path in batch.named:
                    raise ValueError(f"--input {path} {error}; give files of UTF-8 text") from error
            else:
                if text:
                    yield Document(str(path), text)
        return
    for number, line in enumerate(_decoded(batch).split("\n"), batch.first):
        if not line.strip(_BLANK):
            continue
        where = f"{batch.path}, {batch.unit} {number}"
        text = _text_of(line, batch.key, where)
        if not text:
            skipped.documents["empty"] += 1
        elif not is_byte_0_text and "\0" in text:
            skipped.documents["with byte 0"] += 1
        else:
            yield Document(where, text)


def _decoded(batch: JsonLines) -> str:
    try:
        return batch.lines.decode()
    except UnicodeDecodeError as error:
        number = batch.first + batch.lines.count(b"\n", 0, error.start)
        raise ValueError(f"{batch.path}, line {number} is not JSON: {error}; repair it") from error


def _read_text(path: Path, skipped: Skipped) -> str:
    """What the file holds. Raises NoText if it is not text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        skipped.files["not UTF-8"] += 1
        raise NoText("is not UTF-8, as compressed and binary files are not") from error
    except OSError as error:
        skipped.files["unreadable"] += 1
        raise NoText(f"cannot be read: {error.strerror}") from error
    if "\0" in text:
        skipped.files["with byte 0"] += 1
        raise NoText("holds byte 0, as binary files do")
    if not text:
        skipped.files["empty"] += 1
    return text


@cache
def _decoder(key: str) -> msgspec.json.Decoder[Any]:
    """Decodes the one field and skips the others, several times as fast as the json module."""
    return msgspec.json.Decoder(msgspec.defstruct("Line", [("text", str, msgspec.field(name=key))]))


def _text_of(line: str, key: str, where: str) -> str:
    try:
        return str(_decoder(key).decode(line).text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass  # the json module takes NaN and keys with quotes, too, and says what is wrong
    try:
        value = _loads(line.removeprefix(_MARK))
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; repair it, or leave the file out with --exclude") from error
    found = value.get(key) if isinstance(value, dict) else None
    if isinstance(found, str):
        if any("\ud800" <= character <= "\udfff" for character in found):
            raise ValueError(f"{where} has half of a surrogate pair, which is not Unicode text; repair it")
        return found
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object; each needs to be one, with the text under --json-key")
    if key in value:
        raise ValueError(f"{where} has {type(found).__name__} under --json-key {key}; give the key of a string")
    keys = ", ".join(map(repr, islice(value, _MOST_KEYS))) or "none"
    raise ValueError(f"{where} has no --json-key {key}; its keys are {keys}")


def _loads(text: str) -> Any:
    """The value as the json module reads it. ValueError: it does not."""
    try:
        return json.loads(text, parse_int=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _no_number(digits: str) -> int:
    """In place of an integer, which may have more digits than Python converts."""
    return 0
