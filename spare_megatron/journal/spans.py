"""Spans: what ranks spent their time on around an event, in `RUN_DIR/timeline`, one file per node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from spare_megatron.formats.codec import decode, encode
from spare_megatron.journal.files import AppendingFile
from spare_megatron.journal.records import RecoveryRecord
from spare_megatron.stacking.layout import GroupId

FOLDER = "timeline"

RecoveryStage = Literal["agree", "patch", "rebuild", "reduce"]
"""Stages that `RecoveryRecord` has the seconds of."""
RECOVERY_NAMES: Mapping[RecoveryStage, str] = {stage: f"recovery: {stage}" for stage in get_args(RecoveryStage)}
"""Span names of the stages of a recovery; these spans begin and end in the middle of others."""


@dataclass(slots=True)
class RecoveryTimes:
    """Stages of one recovery, one after the other; `timed_until_s` is on their clock, `_at_s` fields are wall clock."""

    computed_at_s: float
    noticed_at_s: float
    timed_until_s: float
    lost: list[GroupId] = field(default_factory=list)
    spent_s: dict[RecoveryStage, float] = field(default_factory=lambda: dict.fromkeys(RECOVERY_NAMES, 0.0))

    def end_stage(self, stage: RecoveryStage, at_s: float) -> None:
        self.spent_s[stage] += at_s - self.timed_until_s
        self.timed_until_s = at_s

    def record(self, group: GroupId, step: int, num_patched: int) -> RecoveryRecord:
        return RecoveryRecord(
            group=group,
            step=step,
            lost=[int(lost) for lost in self.lost],
            computed_at_s=self.computed_at_s,
            noticed_at_s=self.noticed_at_s,
            agree_s=self.spent_s["agree"],
            patch_s=self.spent_s["patch"],
            rebuild_s=self.spent_s["rebuild"],
            reduce_s=self.spent_s["reduce"],
            num_patched=num_patched,
        )


class Span(NamedTuple):
    """An activity of a rank's main thread.

    Attributes:
        name: An operation of `core.machines.failure_detector`, a forward or backward pass, or a stage of a recovery.
        began_s: On the monotonic clock of the rank's machine, as `ended_s`.
        shard: That of a pass, as `microbatch` is its index; else -1.
    """

    name: str
    step: int
    began_s: float
    ended_s: float
    shard: int = -1
    microbatch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """Spans of one rank in one incarnation, ordered by end; `rank` is the position in the group."""

    group: int
    rank: int
    incarnation: int
    stage: int
    machine: str
    """Equal for ranks that share a monotonic clock."""
    wall_s: float
    """Wall clock minus that monotonic clock, at the time of writing."""
    spans: Sequence[Span]
    lane: int = 0
    """The lane of its group."""


def spans_file(run_dir: Path, node: int) -> Path:
    return run_dir / FOLDER / f"node-{node:04d}.jsonl"


class SpansFile(AppendingFile):
    def __init__(self, run_dir: Path, node: int) -> None:
        super().__init__(spans_file(run_dir, node))

    def write(self, spans: RankSpans) -> None:
        rows = [span._replace(began_s=round(span.began_s, 6), ended_s=round(span.ended_s, 6)) for span in spans.spans]
        self.append(encode(replace(spans, spans=rows)) + "\n")


def read_spans_of(run_dir: Path) -> list[RankSpans]:
    """Reads everything under `RUN_DIR/timeline`; FileNotFoundError without spans, ValueError for a damaged line."""
    files = sorted((run_dir / FOLDER).glob("node-*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"{run_dir} holds no {FOLDER}: spans are kept around losses and returns of groups, and of the last steps"
        )
    return [_decode(text, file) for file in files for text in file.read_text().split("\n")[:-1]]


def _decode(text: str, file: Path) -> RankSpans:
    try:
        return decode(text, RankSpans)
    except ValueError as error:
        raise ValueError(f"{file}: damaged line: {error}: {text[:80]}") from error
