"""Groups that leave a run and come back, at the request of a user and by the notice of a machine."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.main import app
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, OptimizerConfig
from spare_megatron.journal.follow import read_run_state
from spare_megatron.journal.records import ContributionRecord, LossRecord
from spare_megatron.process.reports import GroupRejoined, RanksStarted, RunEvent, StepCommitted
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, complete_run, entries_of, tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS, AWAITED = 40, 8
STACKED = OptimizerConfig(sharding="stacked", redundancy=2)


def drained(run: Run) -> list[list[int]]:
    """The members that each commit drains, if any."""
    return [member for entry in entries_of(run.journal) for member in entry.get("drain", ())]


def test_groups_leave_and_come_back_and_change_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    """One that is asked to leave, and back; then those of a node, by its notice. No microbatch is computed again."""
    notice = tmp_path / "notice-1"
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=STEPS,
        redundancy=3,
        mode="reproducible",
        hidden_dropout=0.1,
        optimizer=STACKED,
        cluster=ClusterConfig(device="cpu", num_nodes=2),
    )
    whole = complete_run(config, tmp_path / "whole")
    run_dir = tmp_path / "run"
    asked: list[str] = []

    def ask(command: str, which: str) -> None:
        if command not in asked:
            asked.append(command)
            result = CliRunner().invoke(app, [command, str(run_dir), which])
            assert result.exit_code == 0, result.output

    def on_event(event: RunEvent) -> None:
        match event:
            case RanksStarted(node=0):
                ask("drain", "1")
            case StepCommitted(num_alive=3):
                ask("grow", "1")
            case GroupRejoined():
                notice.touch()

    watch = Watch(awaited=frozenset({(AWAITED, Member(GroupId(1), 1))}))
    with_notice = replace(config, cluster=replace(config.cluster, notice_file=str(tmp_path / "notice-{node}")))
    run = complete_run(with_notice, run_dir, watch, on_event)
    assert (run.summary.verdict, run.summary.reasons) == ("valid", ())
    assert drained(run) == [[1, 0], [2, 0], [3, 0]]
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert run.journal.of(LossRecord) == []
    assert (run.summary.groups_lost, run.summary.microbatches_recomputed) == (0, 0)
    state = read_run_state(run_dir)
    assert state.groups() == ["alive", "alive", "drained", "drained"]
    assert sum("left after step" in event.text for event in state.events(99)) >= 2
    last = [record for record in run.journal.of(ContributionRecord) if record.step == STEPS - 1]
    assert {record.group for record in last} == {0, 1}
