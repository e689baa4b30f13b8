"""JSON encoding of journal lines: one object per record, with its writer (`source`) and its time (`at_s`)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spare_megatron.journal.records import (
    AuditRecord,
    CadenceRecord,
    CheckpointRecord,
    ContributionRecord,
    CulpritRecord,
    DisputeRecord,
    EndRecord,
    EntryRecord,
    EvaluationRecord,
    ExaminationRecord,
    FaultRecord,
    LadderRecord,
    LossRecord,
    PacesRecord,
    ParamsRecord,
    PlacesRecord,
    RankRecord,
    Record,
    RecoveryRecord,
    RedundancyRecord,
    RepairRecord,
    RestartRecord,
    SnapshotRecord,
    StartRecord,
    StorageRecord,
    SuspicionRecord,
    TermsRecord,
    UpdateRecord,
    VoteRecord,
)
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.version import __version__

FORMAT = 5
"""Journal format that this version writes; rises with every change that the previous reader cannot handle."""


_FORMER_FIELDS = {"cadence": ("restart_s",)}
"""Fields of format 1 records that later formats dropped; ignored when read."""


KINDS: dict[str, type[Record]] = {
    "run": RunRecord,
    "rank": RankRecord,
    "contribution": ContributionRecord,
    "vote": VoteRecord,
    "audit": AuditRecord,
    "dispute": DisputeRecord,
    "evaluation": EvaluationRecord,
    "entry": EntryRecord,
    "paces": PacesRecord,
    "suspicion": SuspicionRecord,
    "update": UpdateRecord,
    "params": ParamsRecord,
    "recovery": RecoveryRecord,
    "restart": RestartRecord,
    "fault": FaultRecord,
    "loss": LossRecord,
    "start": StartRecord,
    "places": PlacesRecord,
    "examination": ExaminationRecord,
    "culprit": CulpritRecord,
    "ladder": LadderRecord,
    "cadence": CadenceRecord,
    "checkpoint": CheckpointRecord,
    "snapshot": SnapshotRecord,
    "redundancy": RedundancyRecord,
    "repair": RepairRecord,
    "end": EndRecord,
    "storage": StorageRecord,
    "terms": TermsRecord,
}

_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    source: str
    at_s: float
    record: Record


def encode_line(line: Line) -> str:
    """The line as JSON, without a line end."""
    head: Mapping[str, Any] = {"record": _NAMES[type(line.record)], "source": line.source, "at_s": round(line.at_s, 6)}
    # `asdict` would copy every list in the record; only dataclasses in it are copied.
    values = {field.name: getattr(line.record, field.name) for field in fields(line.record)}
    return json.dumps({**head, **values}, separators=(",", ":"), default=asdict)


def decode_line(text: str) -> Line:
    """Decodes what `encode_line` wrote; raises ValueError for a damaged text or an unknown kind."""
    try:
        fields = json.loads(text)
    except RecursionError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"not a record: {text[:80]}")
    name = str(fields.pop("record", None))
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"record of unknown kind: {text[:80]}")
    for former in _FORMER_FIELDS.get(name, ()):
        fields.pop(former, None)
    try:
        source, at_s = fields.pop("source"), fields.pop("at_s")
        return Line(source=source, at_s=at_s, record=kind(**fields))
    except (KeyError, TypeError) as error:
        raise ValueError(f"damaged record: {error}: {text[:80]}") from error


ORIGIN = "origin.json"


def origin_field(run_dir: Path, name: str) -> str | None:
    """Field of `origin.json`; empty if the file lacks it, None without a readable file (a copied journal)."""
    try:
        text = (run_dir / ORIGIN).read_bytes()
    except OSError:
        return None
    try:
        return str(json.loads(text)[name])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


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
            record = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):  # reported by the reader of the whole journal
        return {}
    return record if isinstance(record, dict) else {}


def _origin(run_dir: Path) -> str:
    """Version and commit that wrote the journal, for an error message."""
    version, commit = origin_field(run_dir, "version"), origin_field(run_dir, "commit")
    if version and commit:
        return f"written by spare_megatron {version}, commit {commit}"
    return "origin.json does not say by which version it was written"
