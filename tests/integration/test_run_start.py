"""The start of a run: ranks that die of something of their own, and ranks that take their time."""

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.driver.run import start_run
from spare_megatron.journal.records import LossRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.reports import GroupLost, Message, RunEvent
from spare_megatron.process.specs import RankMain, RankSpec
from spare_megatron.rank import rank
from tests.integration.whole_run import Run, complete_run, fenced_groups, read_run, tiny_config

pytestmark = pytest.mark.timeout(120)

ERROR = "ImportError: libcudart.so.12: cannot open shared object file"
STEPS = 2
SHORT_S, LATE_S = 3.0, 6.0
"""A timeout of the groups, and what takes longer."""


def unimportable(groups: frozenset[int], spec: RankSpec, reports: Connection) -> None:
    """In these groups what a rank is made of cannot be imported."""
    if spec.group in groups:
        raise ImportError(ERROR.partition(": ")[2])
    rank.run_rank(spec, reports)


def crashing(spec: RankSpec, reports: Connection) -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def late(spec: RankSpec, reports: Connection) -> None:
    """The second stage comes late."""
    if spec.rank == 1:
        time.sleep(LATE_S)
    rank.run_rank(spec, reports)


def loads_late(spec: RankSpec, reports: Connection) -> None:
    """The second stage reads its part of the checkpoint from slow storage."""
    if spec.rank == 1:
        load = GroupTrainer.load_checkpoint

        def load_late(trainer: GroupTrainer, *args: Any) -> None:
            (spec.run_dir / f"late-{spec.group}").touch()
            time.sleep(LATE_S)
            load(trainer, *args)

        GroupTrainer.load_checkpoint = load_late  # type: ignore[method-assign]
    rank.run_rank(spec, reports)


def started(config: RunConfig, run_dir: Path, rank_main: RankMain) -> Run:
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=rank_main)
    return read_run(config, run_dir, events)


def test_a_healthy_run_names_its_kernels_and_leaves_all_logs_empty(text_corpus: Path, tmp_path: Path) -> None:
    """c10d warned in every rank that it had no host name for a socket, because no name server is asked."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2)
    run = started(tiny_config(text_corpus, layout, steps=STEPS), tmp_path / "run", rank.run_rank)
    assert run.summary.verdict == "valid"
    texts = [event.text for event in run.events if isinstance(event, Message)]
    assert "layers: megatron-core, adam: torch, fusions: none" in texts
    logs = {file.name: file.read_text() for file in (run.run_dir / "logs").iterdir()}
    assert len(logs) == 5, "four ranks and a supervisor"
    assert not any(logs.values()), logs


def num_losses(run: Run) -> Counter[int]:
    """Group -> how often it was lost."""
    return Counter(loss.group for loss in run.journal.of(LossRecord))


def test_what_all_ranks_raise_at_the_start_ends_the_run_at_once_and_is_its_reason(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Each group used up its restarts, and the run was reported as wiped out."""
    # A group waits for a heartbeat until it is started for the third time.
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), rejoins=3, max_restarts=3)
    run = started(config, tmp_path / "run", partial(unimportable, frozenset(range(3))))
    assert (run.summary.outcome, run.summary.steps_committed) == ("failed", 0)
    assert "raised the same before training began" in run.summary.outcome_reason
    assert run.summary.outcome_reason.endswith(ERROR)
    assert max(num_losses(run).values()) <= 2, "the first to raise may have started again before the next one raised"
    lost = [event for event in run.events if isinstance(event, GroupLost)]
    assert {event.record.group for event in lost} > {lost[0].record.group}
    assert all(ERROR in event.traceback for event in lost)
    for event in lost:
        (log,) = (run.run_dir / "logs").glob(f"group-{event.record.group:04d}-rank-0.log")
        assert ERROR in log.read_text()


def test_groups_that_all_crash_at_the_start_end_the_run(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), rejoins=3, max_restarts=3)
    run = started(config, tmp_path / "run", crashing)
    assert run.summary.outcome == "failed"
    assert run.summary.outcome_reason.startswith("all groups were lost before training began; group ")
    assert run.summary.outcome_reason.endswith(": rank 0: SIGABRT")


@pytest.mark.parametrize(("num_groups", "num_nodes", "broken"), [(3, 1, {1}), (4, 2, {2, 3})])
def test_a_machine_that_is_broken_from_the_start_is_masked(
    text_corpus: Path, tmp_path: Path, num_groups: int, num_nodes: int, broken: set[int]
) -> None:
    """A node with two groups on which nothing can be imported; or one group, as on a broken GPU."""
    cluster = ClusterConfig(device="cpu", num_nodes=num_nodes)
    config = tiny_config(text_corpus, LayoutConfig(num_groups=num_groups), steps=STEPS, rejoins=1, cluster=cluster)
    run = started(config, tmp_path / "run", partial(unimportable, frozenset(broken)))
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert run.summary.steps_committed == STEPS
    assert fenced_groups(run.journal) == set(num_losses(run)) == broken
    assert {loss.cause for loss in run.journal.of(LossRecord)} == {ERROR}


def patient(config: RunConfig) -> RunConfig:
    """Ranks of a group wait for each other for a short time only."""
    return replace(config, control=replace(config.control, group_timeout_s=SHORT_S))


def test_ranks_of_a_group_may_start_far_apart(text_corpus: Path, tmp_path: Path) -> None:
    config = patient(tiny_config(text_corpus, LayoutConfig(num_groups=1, pipeline_parallel=2), steps=STEPS))
    run = started(config, tmp_path / "run", late)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert num_losses(run) == {}


def test_ranks_of_a_group_may_take_a_checkpoint_over_far_apart(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=1, pipeline_parallel=2), steps=STEPS + 1)
    saving = replace(config, checkpoint=replace(config.checkpoint, interval_steps=STEPS, asynchronous=False))
    complete_run(saving, tmp_path / "first")
    first = tmp_path / "first" / "checkpoints" / f"step-{STEPS:08d}"
    config = patient(replace(config, checkpoint=replace(config.checkpoint, load=str(first))))
    run = started(config, tmp_path / "run", loads_late)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert [path.name for path in run.run_dir.glob("late-*")] == ["late-0"]
    assert num_losses(run) == {}
