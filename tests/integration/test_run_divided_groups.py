"""Groups whose ranks stand on several nodes come back, on the nodes that are left and those that are back."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import ClusterConfig, FaultConfig, FaultsConfig, LayoutConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import LossRecord, StartRecord, UpdateRecord
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.forked_supervisors import Forks
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import assert_masked, complete_run, kill, tiny_config

pytestmark = pytest.mark.timeout(300)

STEPS = 10
AWAITED = (4, 8)
"""The steps at whose ends the first and the second group that is lost are admitted."""


def test_a_group_comes_back_after_the_loss_of_a_rank_and_of_a_whole_node_and_changes_no_bit(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The second group to be lost has its leader on the lost node, and only the one that is back to take it in."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2)
    faults = [
        kill(FaultPoint.BACKWARD, 2, 1, rank=1),
        FaultConfig(phase=FaultPoint.FORWARD, step=AWAITED[0] + 2, group=0, rank=0, kind="kill_supervisor"),
    ]
    config = tiny_config(
        text_corpus,
        layout,
        steps=STEPS,
        faults=faults,
        rejoins=1,
        mode="reproducible",
        hidden_dropout=0.1,
        cluster=ClusterConfig(device="cpu", num_nodes=4),
    )
    plain = replace(config, faults=FaultsConfig(), cluster=replace(config.cluster, num_nodes=1))
    whole = complete_run(plain, tmp_path / "whole")
    watch = Watch(awaited=frozenset({(AWAITED[0], Member(GroupId(1), 1)), (AWAITED[1], Member(GroupId(0), 1))}))
    run = complete_run(config, tmp_path / "run", watch, launcher=Forks())  # type: ignore[arg-type]
    assert_masked(run)
    rejoined = [(e.member.group, e.member.incarnation, e.step) for e in run.events if isinstance(e, GroupRejoined)]
    assert rejoined == [(1, 1, AWAITED[0] + 1), (0, 1, AWAITED[1] + 1)]
    started = {(line.source, line.record) for line in run.journal.lines if isinstance(line.record, StartRecord)}
    assert started == {
        (source, StartRecord(group=group, incarnation=1, num_ranks=1, num_spares=0))
        for source, group in (("supervisor-2", 1), ("supervisor-3", 1), ("supervisor-0-life-1", 0), ("supervisor-1", 0))
    }
    assert not any(record.is_given_up for record in run.journal.of(LossRecord))
    assert {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1} == {0, 1}
    assert run.summary.groups_rejoined == 2
    assert run.summary.params_sha256 == whole.summary.params_sha256
