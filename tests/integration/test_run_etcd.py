"""Whole runs that agree through etcd, whose leader is killed under them."""

import dataclasses
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.process.reports import RunEvent, StepCommitted, StoreAway
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.etcd_gateway import EtcdGateway
from spare_megatron.store.spec import EtcdStoreSpec
from tests.integration.etcd_cluster import NUM_MEMBERS, EtcdCluster, running_cluster
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import alert_config, assert_masked, complete_run, kill, tiny_config

pytestmark = pytest.mark.timeout(120)


def with_etcd(config: RunConfig, cluster: EtcdCluster, **settings: object) -> RunConfig:
    control = dataclasses.replace(config.control, store="etcd", endpoints=cluster.endpoints, **settings)
    return dataclasses.replace(config, control=control)


def keys_left(cluster: EtcdCluster) -> int:
    gateway = EtcdGateway(EtcdStoreSpec(endpoints=cluster.endpoints, prefix="", timeout_s=60.0))
    return int(gateway.call("/v3/kv/range", {"key": "AA==", "range_end": "AA==", "count_only": True}).get("count", 0))


@pytest.fixture
def own_cluster(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_cluster(etcd_binary, tmp_path) as cluster:
        yield cluster


def test_losses_are_masked_and_no_key_is_left(own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path) -> None:
    faults = [kill("backward", 1, 2), kill("in_reduce", 2, 1, 1)]
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    config = with_etcd(tiny_config(text_corpus, layout, faults=faults), own_cluster)
    num_keys: list[int] = []

    def count_keys(event: RunEvent) -> None:
        if isinstance(event, StepCommitted):
            num_keys.append(keys_left(own_cluster))

    assert_masked(complete_run(config, tmp_path / "run", on_event=count_keys))
    assert min(num_keys) > 0
    assert keys_left(own_cluster) == 0


def test_no_key_of_a_run_is_left_that_ended_by_a_failure(
    own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path
) -> None:
    """Its journal has all of the log; runs that fail one after another would fill etcd."""
    num_keys: list[int] = []

    def kill_supervisor(event: RunEvent) -> None:
        if isinstance(event, StepCommitted) and not num_keys:
            num_keys.append(keys_left(own_cluster))
            [supervisor] = [child for child in multiprocessing.active_children() if child.name == "supervisor-0"]
            supervisor.kill()

    config = with_etcd(tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=1000), own_cluster)
    run = complete_run(config, tmp_path / "run", on_event=kill_supervisor)
    assert num_keys[0] > 0
    assert (run.summary.outcome, run.summary.outcome_reason) == ("failed", "node 0: its supervisor died: SIGKILL")
    assert keys_left(own_cluster) == 0


def test_the_run_goes_on_when_the_leader_of_etcd_is_killed(
    own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path
) -> None:
    """After the first committed step; a group is lost two steps later, with two members of etcd left."""
    killed: list[int] = []

    def kill_leader(event: RunEvent) -> None:
        if isinstance(event, StepCommitted) and not killed:
            killed.append(own_cluster.leader())
            own_cluster.kill(killed[0])

    config = with_etcd(
        tiny_config(text_corpus, LayoutConfig(num_groups=3), steps=6, faults=[kill("forward", 3, 1)]), own_cluster
    )
    assert_masked(complete_run(config, tmp_path / "run", on_event=kill_leader))
    assert len(killed) == 1
    assert len(own_cluster.members) == 2
    assert own_cluster.leader() != killed[0]
    answer = CliRunner().invoke(app, ["check", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.output
    assert "valid" in answer.output


@pytest.mark.alone
def test_training_pauses_while_etcd_has_no_quorum_and_no_group_is_lost(
    own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path
) -> None:
    """Two of three members stand still, from the first step that the driver receives, until the run has noticed."""
    paused: list[int] = []

    def pause_two(event: RunEvent) -> None:
        if isinstance(event, StepCommitted) and not paused:
            paused.extend((0, 1))
            for member in paused:
                own_cluster.pause(member)
        if isinstance(event, StoreAway):
            for member in paused:
                own_cluster.resume(member)

    # More than are committed before the driver receives the first, however late it does.
    config = with_etcd(alert_config(text_corpus, LayoutConfig(num_groups=3), steps=30), own_cluster)
    run = complete_run(config, tmp_path / "run", on_event=pause_two)
    assert paused
    assert any(isinstance(event, StoreAway) for event in run.events)
    assert_masked(run)


def test_a_lost_group_comes_back_over_etcd(own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path) -> None:
    tiny = tiny_config(text_corpus, LayoutConfig(num_groups=3), steps=6, faults=[kill("forward", 2, 1)], rejoins=1)
    watch = Watch(awaited=frozenset({(3, Member(GroupId(1), 1))}))
    run = complete_run(with_etcd(tiny, own_cluster), tmp_path / "run", watch)
    assert_masked(run)
    assert run.summary.groups_rejoined == 1


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_are_masked_while_the_leader_of_etcd_is_killed_again_and_again(
    own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path
) -> None:
    """Every 20 steps it is killed, right before a group is lost, and its member started again 10 steps later."""
    period = 20
    dead: list[int] = []
    killed: list[int] = []

    def harass(event: RunEvent) -> None:
        if not isinstance(event, StepCommitted):
            return
        if event.step == period * len(killed) + 5 and not dead:
            dead.append(own_cluster.leader())
            killed.append(event.step)
            own_cluster.kill(dead[0])
        if event.step == period * len(killed) - 5 and dead:
            own_cluster.start(dead.pop())

    faults = [kill("forward", 6, 1), kill("in_reduce", 26, 2), kill("after_vote", 46, 3)]
    faults[1] = dataclasses.replace(faults[1], kind="hang")
    config = alert_config(text_corpus, LayoutConfig(num_groups=4), steps=3 * period, faults=faults, rejoins=1)
    run = complete_run(with_etcd(config, own_cluster, store_timeout_s=30.0), tmp_path / "run", on_event=harass)
    assert_masked(run)
    assert killed == [5, 25, 45]
    assert len(own_cluster.members) == 3


@pytest.mark.parametrize("loses", ["all", "its keys"])
def test_a_run_whose_etcd_loses_its_log_ends_and_names_its_saved_state(
    own_cluster: EtcdCluster, text_corpus: Path, tmp_path: Path, loses: str
) -> None:
    """All members come back empty, as without a volume; or another program removes the keys of the run."""
    lost: list[int] = []

    def lose(event: RunEvent) -> None:
        if not isinstance(event, StepCommitted) or lost:
            return
        lost.append(keys_left(own_cluster))
        if loses == "its keys":
            gateway = EtcdGateway(EtcdStoreSpec(endpoints=own_cluster.endpoints, prefix="", timeout_s=60.0))
            gateway.call("/v3/kv/deleterange", {"key": "AA==", "range_end": "AA=="})
            return
        for number in list(own_cluster.members):
            own_cluster.kill(number)
            shutil.rmtree(tmp_path / f"member-{number}")
        for number in range(NUM_MEMBERS):
            own_cluster.start(number)

    config = with_etcd(tiny_config(text_corpus, LayoutConfig(num_groups=3), steps=3000), own_cluster)
    run = complete_run(config, tmp_path / "run", on_event=lose)
    assert lost
    assert lost[0] > 0
    assert run.summary.outcome == "failed"
    assert run.summary.outcome_reason.startswith("the control store is gone: "), run.summary.outcome_reason
    assert "confirmed" in run.summary.outcome_reason
    assert "the state is in" in run.summary.outcome_reason
    assert 0 < run.summary.steps_committed < 3000
