"""Checkpoints of groups whose state is wrong are never used, however late that is found and they are written."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.events import Event
from spare_megatron.driver.run import start_run
from spare_megatron.journal.records import CheckpointRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.reports import RunEvent
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import assembly, rank, train_step
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.train_step import Components, read_entry
from spare_megatron.stacking.layout import GroupId
from spare_megatron.state.checkpoint import saver
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.verification import newest_valid, refusal_of
from spare_megatron.state.rank_context import RankContext
from spare_megatron.voting.agreement import Fenced
from tests.integration.whole_run import Run, entries_of, read_run, tiny_config

pytestmark = pytest.mark.timeout(120)

NUM_GROUPS = 4
WRONG_GROUP = GroupId(0)
EVERY = 2
PATIENCE_S = 60.0


def finished_with(main: Callable[[RankSpec, Connection], None], corpus: Path, run_dir: Path, *, steps: int) -> Run:
    """A run that saves every two steps, first by the group whose state is wrong, and puts that group out."""
    config: RunConfig = tiny_config(corpus, LayoutConfig(num_groups=NUM_GROUPS), steps=steps)
    config = replace(
        config,
        train=replace(config.train, params_check_every_steps=0),
        checkpoint=replace(config.checkpoint, interval_steps=EVERY, keep_last=9),
    )
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=main)
    run = read_run(config, run_dir, events)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    [fence] = [entry for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    assert (fence["group"], fence["discard"]) == (WRONG_GROUP, True)
    assert {record.group for record in run.journal.of(CheckpointRecord) if record.step == EVERY} <= {WRONG_GROUP}
    return run


# ----------------------------------------------------------------------------------------------- wrong moments


class _WrongMoments(GroupSaves):
    """Its first moment of one parameter changes before it is saved."""

    def save(self, action: SaveCheckpoint) -> None:
        if action.step == EVERY:
            assert action.member.group == WRONG_GROUP, "it is the first to save"
            adam = first_moments(self._ctx.trainer)
            adam["exp_avg"].view(-1)[0] += 0.01
        super().save(action)


def first_moments(trainer: GroupTrainer) -> dict[str, Any]:
    """What torch's Adam keeps of a parameter, the tensors themselves."""
    state = trainer._optimizer.state_dict()["megatron"]  # type: ignore[union-attr]
    each: dict[str, Any] = next(iter(state.get("optimizer", state)["state"].values()))
    return each


def with_wrong_moments(spec: RankSpec, reports: Connection) -> None:
    if spec.group == WRONG_GROUP:
        assembly.GroupSaves = _WrongMoments
    rank.run_rank(spec, reports)


def test_moments_that_are_wrong_when_they_are_saved_refuse_the_checkpoint(text_corpus: Path, tmp_path: Path) -> None:
    """The parameters are right when they are saved; the moments beside them are not, and compared, too."""
    run = finished_with(with_wrong_moments, text_corpus, tmp_path / "run", steps=3 * EVERY)
    [reason] = [entry["reason"] for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    assert reason == f"its state before step {EVERY} differs from that of 3 groups"
    folder = tmp_path / "run" / "checkpoints"
    if EVERY in visible_steps(folder):  # else it was not written by then, and never is
        assert refusal_of(checkpoint_path(folder, EVERY)) == f"group 0: {reason}"
    assert not [record for record in run.journal.of(CheckpointRecord) if record.outcome == "failed"]
    found = newest_valid(folder).found
    assert found is not None
    assert found.manifest.step == 3 * EVERY


# ----------------------------------------------------------------------------------------------- written after that


class _WrongParameter(GroupSaves):
    """A parameter changes before it is saved."""

    def save(self, action: SaveCheckpoint) -> None:
        named = next(iter(self._ctx.trainer.parameters_named()))
        named.parameter.data.view(-1)[0] += 1.0
        super().save(action)


def _read_late(ctx: RankContext, parts: Components, index: int) -> Sequence[Event]:
    """Looks at the group's fence when the group has come to the end of its save."""
    try:
        return read_entry(ctx, parts, index)
    except Fenced:
        [(save, writing)] = parts.saves._saver._under_way
        wait([writing], PATIENCE_S)
        (ctx.spec.run_dir / "ended").write_text(f"{save.outcome}: {save.reason}")
        raise


def save_late(spec: RankSpec, reports: Connection) -> None:
    """The wrong group makes no folder for its save before all others have refused it.

    The next save, which would remove that folder as left behind, waits for the end of it.
    """
    refuse, prepare = saver.refuse, saver.Saver._prepare

    def on_refused(folder: Path, action: RefuseCheckpoint) -> None:
        refuse(folder, action)
        (spec.run_dir / f"refused-by-{spec.group}").touch()

    def prepare_late(*arguments: Any) -> None:
        pattern, number = ("refused-by-*", NUM_GROUPS - 1) if spec.group == WRONG_GROUP else ("ended", 1)
        end_s = time.monotonic() + PATIENCE_S
        while len(list(spec.run_dir.glob(pattern))) < number:
            assert time.monotonic() < end_s, f"there are not {number} of {pattern}"
            time.sleep(0.01)
        prepare(*arguments)

    saver.refuse = on_refused
    saver.Saver._prepare = prepare_late  # type: ignore[method-assign]
    if spec.group == WRONG_GROUP:
        assembly.GroupSaves = _WrongParameter  # type: ignore[misc]
        train_step.read_entry = _read_late
    rank.run_rank(spec, reports)


def test_a_fenced_group_does_not_publish_what_it_begins_to_write_afterwards(text_corpus: Path, tmp_path: Path) -> None:
    finished_with(save_late, text_corpus, tmp_path / "run", steps=2 * EVERY)
    assert (tmp_path / "run" / "ended").read_text() == (
        "failed: rank 0: what was to be saved does not count: "
        f"group 0: its parameters before step {EVERY} differ from those of 3 groups"
    )
    assert visible_steps(tmp_path / "run" / "checkpoints") == [2 * EVERY]
