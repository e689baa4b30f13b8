"""What a real run's journal says about the costs that a simulation needs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import (
    ContributionRecord,
    Line,
    RecoveryRecord,
    RunRecord,
    UpdateRecord,
)
from spare_megatron.journal.summary import Recovery, find_recoveries

_SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Medians of a run. Times of steps come from those without a loss; None: the run had nothing to measure it by.

    Attributes:
        name: Name of the run.
        num_groups: Groups it began with.
        redundancy: Hosts of each shard.
        microbatches_per_shard: Microbatches of a shard.
        granularity: What groups take over from lost ones: whole shards or microbatches.
        num_steps: Committed steps without a loss.
        num_recoveries: Losses recovered from.
        compute_s: Computing one shard on one group.
        reduce_s: Rest of a step, from the last group's contribution to the update: reduction, vote, commit, update.
        jitter: Relative spread of compute over groups and steps, as a standard deviation.
        detect_s: From a loss to the fence, as far as it held up the step.
        agree_s: To the decision whether the sum was complete.
        rebuild_s: Waiting for the new communicator, which is built while the patch is computed.
        patch_s: Computing one microbatch of a lost group.
        retry_s: From the new communicator to the commit.
    """

    name: str
    num_groups: int
    redundancy: int
    microbatches_per_shard: int
    granularity: str
    num_steps: int
    num_recoveries: int
    compute_s: float
    reduce_s: float
    jitter: float
    detect_s: float | None
    agree_s: float | None
    rebuild_s: float | None
    patch_s: float | None
    retry_s: float | None

    @property
    def costs(self) -> dict[str, float]:
        """The cost model's settings that the run has measured, by name."""
        measured = {
            "compute_s": self.compute_s,
            "reduce_s": self.reduce_s,
            "jitter": self.jitter,
            "detect_s": self.detect_s,
            "agree_s": self.agree_s,
            "rebuild_s": self.rebuild_s,
        }
        return {name: value for name, value in measured.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepOfGroup:
    """One group's part of a step without a loss: seconds per shard, and seconds of the rest."""

    compute_s: float
    rest_s: float


def calibrate(journal: Journal) -> Calibration:
    """The costs of a run.

    Raises:
        ValueError: The journal has no run record, or no step without a loss.
    """
    runs = journal.of(RunRecord)
    if not runs:
        raise ValueError("its journal has no run record, so nothing can be measured by it")
    steps = list(_steps(journal, runs[0]))
    if not steps:
        raise ValueError("its journal has no step that was committed without a loss, so nothing can be measured by it")
    recoveries = find_recoveries(journal)
    compute_s = [step.compute_s for step in steps]
    return Calibration(
        name=runs[0].name,
        num_groups=runs[0].num_groups,
        redundancy=runs[0].redundancy,
        microbatches_per_shard=runs[0].microbatches_per_shard,
        granularity=runs[0].granularity,
        num_steps=len({record.step for record in journal.of(UpdateRecord)} - _hit_steps(journal)),
        num_recoveries=len(recoveries),
        compute_s=median(compute_s),
        reduce_s=median(step.rest_s for step in steps),
        jitter=_relative_spread(compute_s),
        detect_s=_median_of(recoveries, "detect_s"),
        agree_s=_median_of(recoveries, "agree_s"),
        rebuild_s=_median_of(recoveries, "rebuild_s"),
        patch_s=_patch_s(journal.of(RecoveryRecord)),
        retry_s=_median_of(recoveries, "reduce_s"),
    )


def _steps(journal: Journal, run: RunRecord) -> Iterator[_StepOfGroup]:
    """Every group's part of every step without a loss.

    A contribution is written when the group has computed and before it reduces, an update when it has applied the sum.
    """
    contributed: dict[tuple[int, int], tuple[float, int]] = {}
    last_at_s: dict[int, float] = defaultdict(float)
    for line in journal.lines:
        if isinstance(record := line.record, ContributionRecord):
            count = sum(len(indices) for indices in record.microbatches.values())
            contributed[record.group, record.attempt] = (line.at_s, count)
            last_at_s[record.attempt] = max(last_at_s[record.attempt], line.at_s)
    hit = _hit_steps(journal)
    for line, update in _updates(journal):
        at_s, count = contributed.get((update.group, update.attempt), (0.0, 0))
        if count and update.step not in hit:
            compute_s = update.step_s - (line.at_s - at_s)
            yield _StepOfGroup(
                compute_s=max(0.0, compute_s) * run.microbatches_per_shard / count,
                rest_s=max(0.0, line.at_s - last_at_s[update.attempt]),
            )


def _updates(journal: Journal) -> Iterator[tuple[Line, UpdateRecord]]:
    for line in journal.lines:
        if isinstance(line.record, UpdateRecord):
            yield line, line.record


def _hit_steps(journal: Journal) -> set[int]:
    return {record.step for record in journal.of(RecoveryRecord)}


def _median_of(recoveries: Sequence[Recovery], field: str) -> float | None:
    return median(getattr(recovery, field) for recovery in recoveries) if recoveries else None


def _patch_s(records: Sequence[RecoveryRecord]) -> float | None:
    per_microbatch_s = [record.patch_s / record.num_patched for record in records if record.num_patched]
    return median(per_microbatch_s) if per_microbatch_s else None


def _relative_spread(samples: Sequence[float]) -> float:
    """Standard deviation over the median, estimated by medians so that single slow steps do not count."""
    middle = median(samples)
    return _SIGMA_OF_MAD * median(abs(sample - middle) for sample in samples) / middle if middle > 0 else 0.0
