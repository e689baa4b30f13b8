"""Groups that leave a run and come back, and further ones that join it: by request, and by the notice of a machine."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, OptimizerConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.proofs.proof import fold_journal
from spare_megatron.journal.records import ContributionRecord, LossRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.process.reports import RanksStarted, RunEvent, StepCommitted
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, complete_run, entries_of, tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS, AWAITED = 48, 8
STACKED = OptimizerConfig(sharding="stacked", redundancy=2)


def losses(run: Run) -> list[tuple[int, float]]:
    return sorted({(record.step, record.loss) for record in run.journal.of(UpdateRecord)})


def run_of(run: Run) -> RunRecord:
    [record] = run.journal.of(RunRecord)
    return record


def drained(run: Run) -> list[list[int]]:
    """The members that each commit drains, if any."""
    return [member for entry in entries_of(run.journal) for member in entry.get("drain", ())]


def test_groups_leave_and_join_and_change_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    """From 4 groups to 6 and then to 3, in part by notice. Nothing is computed again.

    The further groups have a node of their own, which has nothing to do at first, and in the end.
    """
    notice = tmp_path / "notice-2"
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=STEPS,
        redundancy=3,
        num_microbatches=3,
        mode="reproducible",
        hidden_dropout=0.1,
        optimizer=STACKED,
    )
    whole = complete_run(config, tmp_path / "whole")
    run_dir = tmp_path / "run"
    asked: set[str] = set()

    def ask(command: str, *which: str) -> None:
        if command + which[0] not in asked:
            asked.add(command + which[0])
            result = CliRunner().invoke(app, [command, str(run_dir), *which])
            assert result.exit_code == 0, result.output

    def on_event(event: RunEvent) -> None:
        match event:
            case RanksStarted(node=0):
                ask("grow", "4", "5")
            case StepCommitted(num_alive=6):
                notice.touch()
                ask("drain", "1")

    growing = replace(
        config,
        layout=replace(config.layout, max_groups=6),
        data=replace(config.data, access="shared"),
        cluster=ClusterConfig(device="cpu", num_nodes=3, notice_file=str(tmp_path / "notice-{node}")),
    )
    assert problems(growing, look_at_machine(growing)) == []
    watch = Watch(awaited=frozenset((AWAITED, Member(GroupId(group), 1)) for group in (4, 5)))
    run = complete_run(growing, run_dir, watch, on_event)
    assert (run.summary.verdict, run.summary.reasons) == ("valid", ())
    assert sorted(drained(run)) == [[1, 0], [4, 1], [5, 1]]
    numbers = [len(commit.members) for commit in fold_journal(run.journal, run_of(run)).commits]
    changes = [count for count, _ in groupby(numbers)]
    assert changes[:2] == [4, 6]
    assert changes[2:] in ([3], [4, 3], [5, 3], [5, 4, 3]), "each leaves once others have its part of the state"
    assert losses(run) == losses(whole)
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert run.journal.of(LossRecord) == []
    assert (run.summary.groups_lost, run.summary.microbatches_recomputed) == (0, 0)
    state = read_run_state(run_dir)
    assert state.groups() == ["alive", "drained", "alive", "alive", "drained", "drained"]
    assert state.damage == []
    computed = {record.group for record in run.journal.of(ContributionRecord) if record.microbatches}
    assert computed == {0, 1, 2, 3, 4, 5}, "further groups compute, too"
