"""Text files and files of JSON lines, cut into batches that can be read in any process.

A text file is one document; each JSON line holds one under a key. Batches come in the sorted order of the paths.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import msgspec

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
_READ = (".gz", ".zst")
_COMPRESSED = (*_READ, ".bz2", ".xz", ".lz4", ".zip")
_BATCH_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 16
"""Read from a file at once; compressed text can be a thousand times as long."""
_MOST_NAMED = 3


class NoText(Exception):
    """A file cannot become a document."""


@dataclass(slots=True)
class Skipped:
    """Files that are no document, and documents without tokens, by reason."""

    files: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Skipped") -> None:
        self.files.update(other.files)
        self.documents.update(other.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Text files; those in `named` are refused if they are no text, the others are skipped."""

    paths: tuple[Path, ...]
    named: frozenset[Path]
    num_input_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """Consecutive lines of a file; `num_input_bytes` is their share of the file, which may be compressed."""

    path: Path
    key: str
    first_line: int
    lines: bytes
    num_input_bytes: int


Batch = TextFiles | JsonLines

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
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in excluded_folders]
        for name in names:
            path = Path(where, name)
            if name.endswith(suffixes or "") and path.is_file():
                yield path


def json_lines_among(paths: Sequence[Path], json_key: str | None) -> frozenset[Path]:
    """The files of JSON lines. ValueError: there are some and no key is given, or their compression is not read."""
    found = [path for path in paths if _is_json_lines(path, has_key=json_key is not None)]
    if found and json_key is None:
        raise ValueError(
            f"{_some(found)}: each line is a document, but the key of its text is not given; give it, as in --json-key "
            f"text, or choose other files with --suffix and --exclude"
        )
    unread = [path for path in found if path.suffix.lower() in _COMPRESSED and path.suffix.lower() not in _READ]
    if unread:
        raise ValueError(f"{_some(unread)}: only {' and '.join(_READ)} are decompressed; compress them so, or unpack")
    return frozenset(found)


def _some(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return f"{', '.join(map(str, paths[:_MOST_NAMED]))}{more}"


def _is_json_lines(path: Path, *, has_key: bool) -> bool:
    """By its name, also where it is compressed. A .json file, as Megatron calls JSON lines, by its first line if JSON
    lines are asked for, else by the first two.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if not suffixes or suffixes[-1] != ".json":
        return bool(suffixes) and suffixes[-1] in JSON_LINES
    try:
        lines = next(_line_batches(path))[0].split(b"\n")
        return all(isinstance(json.loads(line), dict) for line in lines[: 1 if has_key else 2])
    except (OSError, ValueError, StopIteration):
        return False


# ----------------------------------------------------------------------------------------------------------- batches


def batches_of(
    paths: Sequence[Path], json_lines: frozenset[Path], json_key: str | None, named: frozenset[Path]
) -> Iterator[Batch]:
    """The input in batches of about 256 KiB of text. ValueError: a file of JSON lines is damaged."""
    waiting: list[Path] = []
    size = 0

    def files() -> TextFiles:
        return TextFiles(paths=tuple(waiting), named=named & set(waiting), num_input_bytes=size)

    for path in paths:
        if waiting and (path in json_lines or size >= _BATCH_BYTES):
            yield files()
            waiting, size = [], 0
        if path not in json_lines:
            waiting.append(path)
            size += path.stat().st_size
            continue
        assert json_key is not None
        first_line = 1
        for lines, num_bytes in _line_batches(path):
            yield JsonLines(path=path, key=json_key, first_line=first_line, lines=lines, num_input_bytes=num_bytes)
            first_line += lines.count(b"\n")
    if waiting:
        yield files()


def _line_batches(path: Path) -> Iterator[tuple[bytes, int]]:
    """Whole lines, and how far the reading of the file has gone on for them."""
    with path.open("rb") as file:
        pieces: list[bytes] = []
        size = position = 0
        for piece in _decompressed(path, file):
            pieces.append(piece)
            size += len(piece)
            if size >= _BATCH_BYTES and (cut := piece.rfind(b"\n") + 1):
                pieces[-1] = piece[:cut]
                yield b"".join(pieces), file.tell() - position
                position, pieces, size = file.tell(), [piece[cut:]], len(piece) - cut
        if size:
            yield b"".join(pieces), file.tell() - position


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
        raise ValueError(f"{path} cannot be decompressed: {error}; copy or write it anew") from error
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
            return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
    return None


# --------------------------------------------------------------------------------------------------------- documents


def documents_in(batch: Batch, skipped: Skipped, *, is_byte_0_text: bool) -> Iterator[str]:
    """The documents of a batch; counts in `skipped` what is none. ValueError: a named file is no text, or a line holds
    no text under the key. A text file with byte 0 is taken for a binary one in any case.
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
                    yield text
        return
    for number, line in enumerate(batch.lines.split(b"\n"), batch.first_line):
        if not line.strip():
            continue
        text = _text_of(line, batch, number)
        if not text:
            skipped.documents["empty"] += 1
        elif not is_byte_0_text and "\0" in text:
            skipped.documents["with byte 0"] += 1
        else:
            yield text


def _read_text(path: Path, skipped: Skipped) -> str:
    """What the file holds. Raises NoText where that is no text."""
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


def _text_of(line: bytes, batch: JsonLines, number: int) -> str:
    try:
        return str(_decoder(batch.key).decode(line).text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # the json module takes NaN, too, and says what is wrong
    where = f"{batch.path}, line {number}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; repair it, or leave the file out with --exclude") from error
    found = value.get(batch.key) if isinstance(value, dict) else None
    if isinstance(found, str):
        if any("\ud800" <= character <= "\udfff" for character in found):
            raise ValueError(f"{where} has half of a surrogate pair, which is not Unicode text; repair it")
        return found
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object; each line needs one, with the text under --json-key")
    if batch.key in value:
        raise ValueError(f"{where} has {type(found).__name__} under --json-key {batch.key}; give the key of a string")
    keys = ", ".join(value) or "none"
    raise ValueError(f"{where} has no --json-key {batch.key}; its keys are {keys}")
