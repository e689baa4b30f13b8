"""What ranks spent their time on around an event: `RUN_DIR/timeline`, a file for each node."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spare_megatron.journal.files import AppendingFile

FOLDER = "timeline"

RecoveryStage = Literal["agree", "patch", "rebuild", "reduce"]
"""What `RecoveryRecord` tells the seconds of."""
RECOVERY_NAMES: Mapping[RecoveryStage, str] = {
    "agree": "recovery: agree",
    "patch": "recovery: patch",
    "rebuild": "recovery: rebuild",
    "reduce": "recovery: reduce",
}
"""Names of the spans of a recovery's stages. They begin and end in the middle of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a rank's main thread did.

    Attributes:
        name: What: an operation of `core.failure_detector`, the forward or backward pass of a microbatch, or a stage
        of a recovery.
        step: The step.
        began_s: When, on the monotonic clock of the rank's machine.
        ended_s: When it ended.
        microbatch: Shard and index, of a pass.
    """

    name: str
    step: int
    began_s: float
    ended_s: float
    microbatch: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """Spans of one life of one rank.

    Attributes:
        group: Its group.
        rank: Its place in the group.
        incarnation: Which life of the group it is.
        stage: Its pipeline stage.
        machine: The same for all ranks that share a monotonic clock.
        wall_s: What that clock lacked to the wall clock when this was written.
        spans: In the order in which they ended.
    """

    group: int
    rank: int
    incarnation: int
    stage: int
    machine: str
    wall_s: float
    spans: Sequence[Span]


def spans_file(run_dir: Path, node: int) -> Path:
    """Where the spans of a node's ranks are."""
    return run_dir / FOLDER / f"node-{node:04d}.jsonl"


class SpansFile(AppendingFile):
    """Appends what the ranks of one node did."""

    def __init__(self, run_dir: Path, node: int) -> None:
        super().__init__(spans_file(run_dir, node))

    def write(self, spans: RankSpans) -> None:
        rows = [
            [span.name, span.step, round(span.began_s, 6), round(span.ended_s, 6), *(span.microbatch or ())]
            for span in spans.spans
        ]
        head = {name: getattr(spans, name) for name in RankSpans.__slots__ if name != "spans"}
        self.append(json.dumps(head | {"spans": rows}, separators=(",", ":")) + "\n")


def read_spans_of(run_dir: Path) -> list[RankSpans]:
    """Everything under `RUN_DIR/timeline`.

    Raises:
        FileNotFoundError: There is nothing: the run lost no group, or is no run.
        ValueError: A line is not what was written.
    """
    files = sorted((run_dir / FOLDER).glob("node-*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"{run_dir} holds no {FOLDER}: spans are kept around losses and returns of groups, and of the last steps"
        )
    return [_decode(text, file) for file in files for text in file.read_text().split("\n")[:-1]]


def _decode(text: str, file: Path) -> RankSpans:
    try:
        fields = json.loads(text)
        spans = [
            Span(name=name, step=step, began_s=began_s, ended_s=ended_s, microbatch=tuple(place) if place else None)
            for name, step, began_s, ended_s, *place in fields.pop("spans")
        ]
        return RankSpans(**fields, spans=spans)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: damaged line: {error}: {text[:80]}") from error
