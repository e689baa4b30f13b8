"""A run whose global batch grows, with a masked loss and a wipe-out while it does."""

import json
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import ContributionRecord, RestartRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, complete_run, kill, losses_of, patched_in, tiny_config
from tests.unit.journal_in_memory import check_journal

pytestmark = pytest.mark.timeout(180)

NUM_GROUPS, SIZES = 3, [1, 1, 2, 3, 3]
"""Microbatches of a shard in each step."""
DUMPED = [1, 2, 4]
"""Steps whose gradients are compared with the full model's."""


def test_losses_and_a_restart_to_a_smaller_batch_leave_every_bit_as_it_is(text_corpus: Path, tmp_path: Path) -> None:
    """One loss is masked; that of all others, later, is a wipe-out, and training begins again with small batches.

    Gradients are those of a process with the full model over the batch of each step. The interleaved schedule pads a
    batch that is no multiple of its stages.
    """
    faults = [kill(FaultPoint.BACKWARD, 1, 2), kill(FaultPoint.FORWARD, 3, 0), kill(FaultPoint.FORWARD, 3, 1)]
    layout = LayoutConfig(num_groups=NUM_GROUPS, pipeline_parallel=2, virtual_pipeline=2)
    runs = {}
    for name, trace in (("whole", []), ("run", faults)):
        config = tiny_config(
            text_corpus,
            layout,
            steps=len(SIZES),
            redundancy=2,
            num_microbatches=max(SIZES),
            mode="reproducible",
            faults=trace,
            max_restarts=1,
        )
        config = replace(config, spare=replace(config.spare, ramp_start=1, ramp_steps=3))
        watch = Watch(dump_steps=frozenset(DUMPED)) if name == "whole" else None
        runs[name] = complete_run(config, tmp_path / name, watch)
    whole, run = runs["whole"], runs["run"]
    for each, num_restarts in ((whole, 0), (run, 1)):
        assert (each.summary.outcome, each.summary.verdict) == ("finished", "valid"), each.summary
        assert each.summary.restarts == num_restarts
    assert {record.step for record in run.journal.of(RestartRecord)} == {0}
    assert sum(patched_in(run.journal).values()) > 0
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert all(len(applied) == 1 for applied in losses_of(run.journal).values())
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert_sizes(whole)
    assert_sizes(run)
    assert_exact(whole, DUMPED)


def assert_sizes(run: Run) -> None:
    """Each update counted the microbatches of its step; so do the contributions, the check and the metrics."""
    for record in run.journal.of(UpdateRecord):
        assert record.num_microbatches == NUM_GROUPS * SIZES[record.step]
    if not run.config.faults.trace:
        brought = Counter[int]()
        for contribution in run.journal.of(ContributionRecord):
            brought[contribution.step] += sum(map(len, contribution.microbatches.values()))
        assert [brought[step] for step in range(len(SIZES))] == [NUM_GROUPS * size for size in SIZES]
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    tokens = {row["step"]: row["train/tokens"] for row in rows if "train/tokens" in row}
    assert [tokens[step] for step in sorted(tokens)] == [total * NUM_GROUPS * 32 for total in accumulate(SIZES)]
    for other in ([], [1, 1, 2]):
        verdict = check_journal(with_ramp(run.journal, other))
        assert verdict.verdict == "invalid"
        assert any("the sum did not count" in reason for reason in verdict.reasons), verdict.reasons


def with_ramp(journal: Journal, ramp: list[int]) -> Journal:
    """The journal of a run that says it had another ramp."""
    lines = (
        replace(line, record=replace(line.record, ramp=ramp)) if isinstance(line.record, RunRecord) else line
        for line in journal.lines
    )
    return Journal(lines=tuple(lines))
