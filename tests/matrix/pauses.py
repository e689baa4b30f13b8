"""Rows of the fault matrix in which both hosts of a shard are lost, and come back while the others pause; one of them
where groups are re-formed, as each has lost a machine.
"""

from dataclasses import replace
from pathlib import Path

from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.faults.points import FaultKind, FaultPoint
from spare_megatron.journal.records import PlacesRecord
from tests.integration.whole_run import Run, assert_masked, complete_run, entries_of, fenced_groups, retries_of
from tests.matrix.cells import HOSTS, NUM_GROUPS, NUM_STAGES, STEP, PauseCell
from tests.matrix.trial import Outcome, assert_same_bits, config_of, found_after_s

_ONCE_MORE = {FaultPoint.AFTER_REDUCE, FaultPoint.AFTER_VOTE}
"""Moments of an attempt that may still be committed: a host that is back by then is admitted, and nothing pauses."""


def run_pause_cell(cell: PauseCell, corpus: Path, run_dir: Path, expected: Run) -> Outcome:
    """Runs the cell; asserts that no committed step is done again and that the run ends like the expected one."""
    kind: FaultKind = "kill_supervisor" if cell.is_reformed else "kill"
    faults = [FaultConfig(phase=cell.phase, step=STEP, group=group, rank=group % 2, kind=kind) for group in HOSTS]
    run = complete_run(_paused(config_of(corpus, faults, isolate=False, is_stacked=cell.is_stacked), cell), run_dir)
    assert_masked(run)  # with it, that both faults struck
    num_moves = sum(len(record.holdings) for record in {r.index: r for r in run.journal.of(PlacesRecord)}.values())
    assert num_moves == cell.is_reformed
    kinds = [entry["entry"] for entry in entries_of(run.journal)]
    assert "resume" in kinds or cell.phase in _ONCE_MORE, kinds
    assert "restart" not in kinds
    assert_same_bits(run, expected)
    found_s = max(found_after_s(run, fault) for fault in faults)
    return Outcome(
        fenced=tuple(sorted(fenced_groups(run.journal))),
        found_s=found_s,
        recovery_s=_pause_s(run),
        num_retries=retries_of(run.journal)[STEP],
        params_sha256=run.summary.params_sha256,
    )


def _paused(config: RunConfig, cell: PauseCell) -> RunConfig:
    spare = replace(config.spare, redundancy=2, rejoins=3, granularity=cell.granularity)
    num_nodes = NUM_GROUPS * NUM_STAGES if cell.is_reformed else 1
    return replace(config, spare=spare, cluster=replace(config.cluster, num_nodes=num_nodes))


def _pause_s(run: Run) -> float:
    """Seconds from the last fence to the end of the pause."""
    read = [(line.at_s, line.record.entry["entry"]) for line in run.journal.lines if hasattr(line.record, "entry")]
    resumed_s = [at_s for at_s, kind in read if kind == "resume"]
    fenced_s = [at_s for at_s, kind in read if kind == "fence" and at_s < min(resumed_s, default=0.0)]
    return min(resumed_s) - max(fenced_s) if resumed_s and fenced_s else 0.0
