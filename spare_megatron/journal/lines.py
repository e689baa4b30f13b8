"""JSON encoding of journal lines: one object per record, with its writer (`source`) and its time (`at_s`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

from spare_megatron.formats.codec import decode, decode_head, encode
from spare_megatron.journal import records
from spare_megatron.journal.records import Record
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.version import __version__

R = TypeVar("R", bound=Record)

FORMAT = 6
"""Journal format that this version writes; rises with every change that the previous reader cannot handle."""

_FORMER_FIELDS = {"cadence": ("restart_s",)}
"""Fields of format 1 records that later formats dropped; ignored when read."""

KINDS: dict[str, type[Record]] = {
    name.removesuffix("Record").lower(): kind
    for name, kind in {**vars(records), "RunRecord": RunRecord}.items()
    if name.endswith("Record") and kind is not Record
}
"""Kind, as lines have it -> its class. Every class of records whose name ends in `Record` is a kind."""
_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    source: str
    at_s: float
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    record: str
    source: str
    at_s: float


def records_of(lines: Iterable[Line], kind: type[R]) -> list[R]:
    return [line.record for line in lines if isinstance(line.record, kind)]


def encode_line(line: Line) -> str:
    """The line as JSON, without a line end."""
    head = encode(_Head(record=_NAMES[type(line.record)], source=line.source, at_s=round(line.at_s, 6)))
    return f"{head[:-1]},{encode(line.record)[1:]}"


def decode_line(text: str) -> Line:
    """Decodes what `encode_line` wrote; raises ValueError for a damaged text or an unknown kind."""
    try:
        head = decode_head(text, _Head)
    except JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"not a record: {error}: {text[:80]}") from error
    kind = KINDS.get(head.record)
    if kind is None:
        raise ValueError(f"record of unknown kind: {text[:80]}")
    try:
        record = decode(text, kind, beside=("record", "source", "at_s", *_FORMER_FIELDS.get(head.record, ())))
    except ValueError as error:
        raise ValueError(f"damaged record: {error}: {text[:80]}") from error
    return Line(source=head.source, at_s=head.at_s, record=record)


ORIGIN = "origin.json"


def origin_field(run_dir: Path, name: str) -> str | None:
    """Field of `origin.json`; empty if the file lacks it, None without a readable file (a copied journal)."""
    try:
        text = (run_dir / ORIGIN).read_bytes()
    except OSError:
        return None
    try:
        return str(decode(text, dict).get(name, ""))
    except ValueError:
        return ""


def journal_files(run_dir: Path) -> list[Path]:
    """The files of a journal. FileNotFoundError: there is none; ValueError: its format is later or unknown."""
    require_known_format(run_dir)
    files = sorted((run_dir / "journal").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    return files


def require_known_format(run_dir: Path) -> None:
    """Raises ValueError if the journal's format is later or unknown; passes without a first record."""
    found = _first_record(run_dir).get("format", FORMAT)
    if found not in range(FORMAT + 1):
        raise ValueError(
            f"the journal of {run_dir} is of format {found!r} ({_origin(run_dir)}); spare_megatron {__version__} reads "
            f"formats 1 to {FORMAT}: use the version that wrote it, or a later one"
        )


def _first_record(run_dir: Path) -> dict[str, Any]:
    try:
        with (run_dir / "journal" / "driver.jsonl").open("rb") as file:
            return decode(file.readline(), dict)
    except (OSError, ValueError):  # reported by the reader of the whole journal
        return {}


def _origin(run_dir: Path) -> str:
    """Version and commit that wrote the journal, for an error message."""
    version, commit = origin_field(run_dir, "version"), origin_field(run_dir, "commit")
    if version and commit:
        return f"written by spare_megatron {version}, commit {commit}"
    return "origin.json does not say by which version it was written"
