"""Runs that start again from the memory of their nodes."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import SnapshotConfig
from spare_megatron.driver.run import rank_main, start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import RestartRecord, SnapshotRecord
from spare_megatron.process.reports import RunEvent
from spare_megatron.process.specs import RankSpec
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.snapshot_memory import memory_files
from tests.integration.test_run_restart import assert_restarted, same_bits
from tests.integration.whole_run import Run, complete_run, entries_of, kill, read_run, tiny_config

pytestmark = pytest.mark.timeout(180)

STEPS = 7
ONE_RANK = LayoutConfig(num_groups=3)
TWO_LANES = LayoutConfig(num_groups=3, data_parallel=2)
COMMON = {"steps": STEPS, "redundancy": 2, "mode": "reproducible", "hidden_dropout": 0.1}


@pytest.fixture(scope="module")
def undisturbed(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of groups of one rank, without faults."""
    return complete_run(tiny_config(text_corpus, ONE_RANK, **COMMON), tmp_path_factory.mktemp("undisturbed") / "run")


def wiped_out_config(corpus: Path, layout: LayoutConfig) -> RunConfig:
    """All groups are lost. Snapshots after 2, 4, 6 steps, a checkpoint after 3."""
    faults = [kill(FaultPoint.FORWARD, 5, 0), kill(FaultPoint.BACKWARD, 5, 1), kill(FaultPoint.BACKWARD, 5, 2)]
    config = tiny_config(corpus, layout, **COMMON, faults=faults, max_restarts=1)
    return replace(
        config,
        snapshot=SnapshotConfig(every_steps=2),
        checkpoint=replace(config.checkpoint, interval_steps=3, asynchronous=False),
    )


def snapshot_server() -> psutil.Process:
    """That of this rank's node, by its log."""
    found = []
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(FileNotFoundError):  # a former rank that has ended
            if "/logs/keeper-" in os.readlink(f"/proc/{process.pid}/fd/1"):
                found.append(process)
    (one,) = found
    return one


def without_snapshot_server(spec: RankSpec, reports: Connection) -> None:
    """A rank; when that of group 0 starts again, its node's snapshot server is killed."""
    if spec.member == Member(GroupId(0), 1):
        process = snapshot_server()
        process.kill()
        process.wait(30.0)  # until the supervisor has reaped it
    rank_main(spec, reports)


def with_damage(spec: RankSpec, reports: Connection) -> None:
    """A rank; when it starts again, it overwrites some bytes of every snapshot on its node."""
    if spec.incarnation == 1:
        for file in memory_files(snapshot_server().pid):
            # The server may have found and dropped it already, on the request of another group.
            with contextlib.suppress(FileNotFoundError), file.open("r+b") as memory:
                memory.seek(1024)  # the end of the file may be room that no state takes
                memory.write(b"\xff" * 8)
    rank_main(spec, reports)


def run_with(main: Callable[[RankSpec, Connection], None], config: RunConfig, run_dir: Path) -> Run:
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=main)
    return read_run(config, run_dir, events)


def restarts_of(run: Run) -> set[tuple[int, int, str]]:
    """Committed steps taken over, steps to be done again, and where from."""
    return {(record.step, record.rework_steps, record.loaded_from) for record in run.journal.of(RestartRecord)}


def snapshots_of(run: Run) -> set[tuple[int, int, int]]:
    """Committed steps, group and rank of every copy that was kept."""
    return {(r.step, r.group, r.rank) for r in run.journal.of(SnapshotRecord) if r.is_kept}


def test_a_wipe_out_starts_again_from_memory_and_ends_bitwise_like_the_run_without_faults(
    text_corpus: Path, tmp_path: Path
) -> None:
    """On one node, whose server has a copy of each of two rank positions: lanes, which divide the optimizer state."""
    whole = complete_run(tiny_config(text_corpus, TWO_LANES, **COMMON), tmp_path / "whole")
    config = wiped_out_config(text_corpus, TWO_LANES)
    run = complete_run(config, tmp_path / "run")
    assert_restarted(run, 1)
    assert restarts_of(run) == {(4, 1, "memory")}
    (restart,) = [entry for entry in entries_of(run.journal) if entry["entry"] == "restart"]
    assert restart["snapshot"] is not None
    # The last one is copied while the last step is computed, and written down when that is applied.
    assert snapshots_of(run) == {(step, group, rank) for step in (2, 4, 6) for group, rank in ((0, 0), (1, 1))}
    assert all(record.is_kept for record in run.journal.of(SnapshotRecord))
    assert same_bits(config, whole, run)


def test_a_node_that_has_lost_its_snapshot_server_takes_the_snapshot_from_another(
    text_corpus: Path, tmp_path: Path, undisturbed: Run
) -> None:
    """Nodes 0 and 1 keep the state; node 0 forgets it, and node 2 has never had it."""
    config = wiped_out_config(text_corpus, ONE_RANK)
    config = replace(config, cluster=ClusterConfig(device="cpu", num_nodes=3))
    # Nodes are watched before the run begins, when they have most to do.
    config = replace(config, control=replace(config.control, heartbeat_interval_s=5.0))
    run = run_with(without_snapshot_server, config, tmp_path / "run")
    assert_restarted(run, 1)
    assert restarts_of(run) == {(4, 1, "memory")}
    assert {(step, group) for step, group, _ in snapshots_of(run)} >= {(4, 0), (4, 1)}
    assert same_bits(config, undisturbed, run)


def test_state_partitions_restart_from_memory_even_if_parameters_came_late(text_corpus: Path, tmp_path: Path) -> None:
    """Group 1 is lost before the update after which a snapshot is due: the others lack its parameters at first. In its
    next incarnation it has to fetch its partitions. Partition 0 is on groups 0 and 3 alone.
    """
    common = {
        "steps": STEPS,
        "mode": "reproducible",
        "hidden_dropout": 0.1,
        "optimizer": OptimizerConfig(sharding="stacked"),
    }
    layout = LayoutConfig(num_groups=4)
    whole = complete_run(tiny_config(text_corpus, layout, **common), tmp_path / "whole")
    faults = [kill(FaultPoint.AFTER_COMMIT, 3, 1), *(kill(FaultPoint.AFTER_COMMIT, 5, group) for group in (0, 3))]
    config = tiny_config(text_corpus, layout, **common, faults=faults, max_restarts=1)
    config = replace(
        config,
        snapshot=SnapshotConfig(every_steps=2),
        cluster=ClusterConfig(device="cpu", num_nodes=4),
        control=replace(config.control, heartbeat_interval_s=5.0),
    )
    run = complete_run(config, tmp_path / "run")
    assert_restarted(run, 1)
    assert restarts_of(run) == {(4, 2, "memory")}
    assert any(
        entry["entry"] == "retry" and entry["step"] == 4 and entry["gather"] for entry in entries_of(run.journal)
    )
    partitions = {
        (r.group, number)
        for r in run.journal.of(SnapshotRecord)
        if (r.step, r.is_kept) == (2, True)
        for number in r.slices
    }
    assert partitions == {(group, number) for number in range(4) for group in (number, (number - 1) % 4)}
    assert same_bits(config, whole, run)


def test_snapshots_that_have_changed_are_refused_and_the_checkpoint_helps(
    text_corpus: Path, tmp_path: Path, undisturbed: Run
) -> None:
    config = wiped_out_config(text_corpus, ONE_RANK)
    run = run_with(with_damage, config, tmp_path / "run")
    assert_restarted(run, 1)
    assert restarts_of(run) == {(3, 2, "storage")}
    rejected = {text for event in run.events if isinstance(event, RestartRecord) for text in event.rejected}
    assert any("the snapshot of attempt" in text and "SHA-256" in text for text in rejected)
    assert same_bits(config, undisturbed, run)
