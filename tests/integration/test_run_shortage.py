"""Groups that lack open files when a loss has them connect again."""

from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import FaultRecord, LossRecord, VoteRecord
from tests.integration.short_rank import short_ranks
from tests.integration.whole_run import Run, entries_of, kill, losses_of, read_run, tiny_config

pytestmark = pytest.mark.timeout(180)

LOST, STEP = 3, 2
LACKING = "too many open files; raise `ulimit -n`"


def with_a_loss(corpus: Path, run_dir: Path, layout: LayoutConfig, *short: tuple[int, int], num_failures: int) -> Run:
    config = tiny_config(
        corpus, layout, steps=4, mode="reproducible", faults=[kill(FaultPoint.FORWARD, STEP, LOST)], heartbeat_s=1.0
    )
    start_run(config, run_dir, lambda _: None, rank_main=short_ranks(*short, num_failures=num_failures))
    run = read_run(config, run_dir, ())
    assert len(run.journal.of(FaultRecord)) == 1
    return run


def assert_finished(run: Run) -> None:
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert not any("reduce.timeout_s" in vote.evidence for vote in run.journal.of(VoteRecord)), "none waits in vain"


@pytest.mark.parametrize("layout", [LayoutConfig(num_groups=4), LayoutConfig(num_groups=4, pipeline_parallel=2)])
def test_a_group_that_cannot_connect_once_costs_one_attempt(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    calm = with_a_loss(text_corpus, tmp_path / "calm", layout, num_failures=0)
    failing = layout.pipeline_parallel - 1
    run = with_a_loss(text_corpus, tmp_path / "run", layout, (1, failing), num_failures=1)
    assert_finished(run)
    assert [loss.group for loss in run.journal.of(LossRecord)] == [LOST]
    failures = [entry["failures"] for entry in entries_of(run.journal) if entry["entry"] == "retry"]
    assert [failure for failure in failures if failure] == [[[1, LACKING]]]
    [evidence] = {vote.evidence for vote in run.journal.of(VoteRecord) if vote.group == 0 and LACKING in vote.evidence}
    assert evidence.startswith("group 1: rebuild: [Errno 24] Too many open files")
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert run.summary.params_sha256 == calm.summary.params_sha256


def test_a_group_that_cannot_connect_again_is_lost_alone_with_the_cause(text_corpus: Path, tmp_path: Path) -> None:
    run = with_a_loss(text_corpus, tmp_path / "run", LayoutConfig(num_groups=4), (1, 0), num_failures=99)
    assert_finished(run)
    causes = {loss.group: loss.cause for loss in run.journal.of(LossRecord)}
    assert causes.keys() == {1, LOST}
    assert causes[1] == f"fenced: it could not connect to the others in two attempts of step {STEP}: {LACKING}"


def test_if_no_group_can_connect_the_run_halts_with_the_cause(text_corpus: Path, tmp_path: Path) -> None:
    everyone = [(group, 0) for group in range(4)]
    run = with_a_loss(text_corpus, tmp_path / "run", LayoutConfig(num_groups=4), *everyone, num_failures=99)
    assert run.summary.outcome == "halted", run.summary
    assert run.summary.outcome_reason == f"no group can connect to the others, group 0 for this: {LACKING}"
    assert [loss.group for loss in run.journal.of(LossRecord)] == [LOST]
