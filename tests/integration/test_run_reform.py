"""Groups on several machines, some of which are lost for good: healthy machines of broken groups make whole ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import ClusterConfig, FaultConfig, FaultsConfig, LayoutConfig, OptimizerConfig
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.journal.records import PlacesRecord, UpdateRecord
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import alert_config, assert_masked, complete_run

pytestmark = pytest.mark.timeout(300)

STEPS = 10
RE_FORMED = (7, Member(GroupId(0), 1))
"""The step at whose end the re-formed group is taken in."""


def kill_machine(step: int, group: int, rank: int) -> FaultConfig:
    return FaultConfig(phase=FaultPoint.FORWARD, step=step, group=group, rank=rank, kind="kill_supervisor")


@pytest.mark.parametrize("optimizer", [OptimizerConfig(sharding="stacked", redundancy=3)])
def test_two_broken_groups_make_a_whole_one_that_changes_no_bit(
    text_corpus: Path, tmp_path: Path, optimizer: OptimizerConfig
) -> None:
    config = alert_config(
        text_corpus,
        LayoutConfig(num_groups=4, pipeline_parallel=2),
        steps=STEPS,
        faults=[kill_machine(2, 0, 0), kill_machine(4, 1, 1)],
        redundancy=3,
        rejoins=1,
        mode="reproducible",
        optimizer=optimizer,
        cluster=ClusterConfig(device="cpu", num_nodes=8),
    )
    plain = replace(config, faults=FaultsConfig(), cluster=replace(config.cluster, num_nodes=1))
    run = complete_run(config, tmp_path / "run", Watch(awaited=frozenset({RE_FORMED})))
    assert_masked(run)
    rejoined = [(e.member, e.step) for e in run.events if isinstance(e, GroupRejoined)]
    assert rejoined == [(RE_FORMED[1], RE_FORMED[0] + 1)]
    # Machine 2, of group 1, takes the place of machine 0.
    assert {tuple(map(tuple, record.holdings)) for record in run.journal.of(PlacesRecord)} == {((2, 0, 1),)}
    assert {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1} == {0, 2, 3}
    whole = complete_run(plain, tmp_path / "whole")
    assert run.summary.params_sha256 == whole.summary.params_sha256
