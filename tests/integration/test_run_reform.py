"""Groups on several machines, some of which are lost for good: healthy machines of broken groups make whole ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import (
    ClusterConfig,
    FaultConfig,
    FaultsConfig,
    LayoutConfig,
    OptimizerConfig,
    RunConfig,
)
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.journal.records import PlacesRecord, UpdateRecord
from spare_megatron.process.reports import GroupRejoined, RunEvent
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.forked_supervisors import Forked, Forks
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, alert_config, assert_masked, complete_run

pytestmark = pytest.mark.timeout(300)

STEPS = 12
RE_FORMED = (6, Member(GroupId(0), 1))
"""The step at whose end the re-formed group is taken in."""
COME_BACK = (9, Member(GroupId(1), 1))
"""Likewise the group that machines come back for."""


def kill_machine(step: int, group: int, rank: int) -> FaultConfig:
    return FaultConfig(phase=FaultPoint.FORWARD, step=step, group=group, rank=rank, kind="kill_supervisor")


@pytest.fixture(scope="module")
def config(text_corpus: Path) -> RunConfig:
    return alert_config(
        text_corpus,
        LayoutConfig(num_groups=4, pipeline_parallel=2),
        steps=STEPS,
        faults=[kill_machine(2, 0, 0), kill_machine(4, 1, 1)],
        redundancy=3,
        rejoins=1,
        mode="reproducible",
        optimizer=OptimizerConfig(sharding="stacked", redundancy=3),
        cluster=ClusterConfig(device="cpu", num_nodes=8),
    )


@pytest.fixture(scope="module")
def plain(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same without losses."""
    one = replace(config, faults=FaultsConfig(), cluster=replace(config.cluster, num_nodes=1))
    return complete_run(one, tmp_path_factory.mktemp("plain") / "run")


def rejoined(run: Run) -> list[tuple[Member, int]]:
    return [(event.member, event.step) for event in run.events if isinstance(event, GroupRejoined)]


def holdings(run: Run) -> Mapping[int, list[list[int]]]:
    return {record.index: record.holdings for record in run.journal.of(PlacesRecord)}


def groups_at_the_end(run: Run) -> set[int]:
    return {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1}


def test_two_broken_groups_make_a_whole_one_that_changes_no_bit(config: RunConfig, plain: Run, tmp_path: Path) -> None:
    run = complete_run(config, tmp_path / "run", Watch(awaited=frozenset({RE_FORMED})))
    assert_masked(run)
    assert rejoined(run) == [(RE_FORMED[1], RE_FORMED[0] + 1)]
    assert holdings(run) == {0: [[2, 0, 1]]}, "machine 2, of group 1, takes the place of machine 0"
    assert groups_at_the_end(run) == {0, 2, 3}
    assert run.summary.params_sha256 == plain.summary.params_sha256


@dataclass(frozen=True)
class LateForks(Forks):
    """Starts no supervisor in the place of a lost one before a file is there."""

    may_come: Path = Path()

    def start(self, run_dir: Path, node: int, incarnation: int) -> Forked | None:
        return None if incarnation and not self.may_come.exists() else super().start(run_dir, node, incarnation)


def test_machines_that_come_back_to_taken_places_take_those_that_were_left(
    config: RunConfig, plain: Run, tmp_path: Path
) -> None:
    """Supervisors as on other machines. Those of the lost ones come once the re-formed group has been taken in."""
    launcher = LateForks(may_come=tmp_path / "may_come")

    def on_event(event: RunEvent) -> None:
        if isinstance(event, GroupRejoined):
            launcher.may_come.touch()

    watch = Watch(awaited=frozenset({RE_FORMED, COME_BACK}))
    run = complete_run(config, tmp_path / "run", watch, on_event, launcher=launcher)  # type: ignore[arg-type]
    assert_masked(run)
    assert rejoined(run) == [(member, step + 1) for step, member in (RE_FORMED, COME_BACK)]
    re_formed, *came = [holding for _, found in sorted(holdings(run).items()) for holding in found]
    assert re_formed == [2, 0, 1]
    # Machine 8 replaces machine 0, whose place machine 2 has; machine 11 replaces machine 3 in its own.
    assert sorted(came) == [[8, 2, 1], [11, 3, 1]]
    assert groups_at_the_end(run) == {0, 1, 2, 3}
    assert run.summary.params_sha256 == plain.summary.params_sha256
