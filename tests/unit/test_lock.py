"""One job at a time in a directory, under whatever name, and wherever it is moved."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.driver import run
from spare_megatron.driver.storage_watch import DirectoryWatch
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.files import JournalWriter, read_journal
from spare_megatron.journal.records import EndRecord
from spare_megatron.machine.lock import LOCK, Locked, held_path, hold_alone, hold_shared, is_held, is_locked, locked
from spare_megatron.process.reports import RunDirectoryMoved
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, folder_of, visible_steps
from spare_megatron.state.checkpoint.start_checkpoint import require_own_checkpoints
from spare_megatron.state.checkpoint.verification import read_manifest
from tests.unit.test_checkpoints import save

NUM_DRAWN = 1000
_PR_SET_DUMPABLE = 4


def hold(folder: Path, pipe: Connection) -> None:
    with locked(folder):
        pipe.send("held")
        pipe.recv()


def test_a_second_job_learns_who_has_the_directory_and_may_have_it_once_that_one_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(tmp_path / "run", theirs))
    holder.start()
    try:
        assert ours.poll(60.0)
        expected = f"is in use by process {holder.pid} on host {socket.gethostname()}"
        with pytest.raises(Locked, match=expected), locked(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.join()
    with locked(tmp_path / "run"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "run" / LOCK).read_text()


def test_a_lock_that_says_nothing_yet_is_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK).write_text("")
        with pytest.raises(Locked, match="has not written its name yet"), locked(tmp_path):
            pass


def hold_with_others(folder: Path, pipe: Connection) -> None:
    pipe.send("waits")
    fd = hold_shared(folder)
    pipe.send("held")
    pipe.recv()
    pipe.send(hold_alone(fd))
    pipe.recv()


def test_processes_that_follow_a_killed_holder_keep_others_out_until_the_last_has_ended(tmp_path: Path) -> None:
    """A second run saved into the folder of one whose nodes trained on without their driver."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(4)]
    mains = [hold, *[hold_with_others] * 3]
    processes = [
        context.Process(target=main, args=(tmp_path, theirs)) for main, (_, theirs) in zip(mains, pipes, strict=True)
    ]
    driver, *nodes = processes

    def next_of(number: int) -> str:
        assert pipes[number][0].poll(60.0)
        return str(pipes[number][0].recv())

    try:
        driver.start()
        assert next_of(0) == "held"
        for number, node in enumerate(nodes, start=1):
            node.start()
            assert next_of(number) == "waits"
        assert (is_locked(tmp_path), is_held(tmp_path)) == (True, True)
        driver.kill()
        driver.join()
        assert [next_of(number) for number in (1, 2, 3)] == ["held"] * 3
        expected = f"by a run whose nodes train on without their driver, process {driver.pid} on host"
        for node in nodes:
            assert (is_locked(tmp_path), is_held(tmp_path)) == (False, True)
            with pytest.raises(Locked, match=expected), locked(tmp_path):
                pass
            pipes[nodes.index(node) + 1][0].send("ends")
            assert next_of(nodes.index(node) + 1) == str(node is nodes[-1])
            node.kill()
            node.join()
        assert (is_locked(tmp_path), is_held(tmp_path)) == (False, False)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    with locked(tmp_path):
        assert is_locked(tmp_path)


# ------------------------------------------------------------------------------------------ starts that overlap


def steps_of_a_run(config: RunConfig, run_dir: Path, log: list[str]) -> Iterator[None]:
    """A run in the steps between which others may come: looks at its directories, waits, takes them, writes, ends."""
    try:
        run._refuse_used(run_dir)
        require_own_checkpoints(config, folder_of(config.checkpoint, run_dir), ())
        yield
        with run._held_directories(config, run_dir, ()) as held:
            yield
            (held / "config.toml").write_text(config.metrics.run_id)
            yield
            folder = folder_of(config.checkpoint, held)
            for step in (2, 4):
                save(folder, step, config=config)
                yield
            log.append(config.metrics.run_id)
    except (ValueError, FileExistsError) as error:
        log.append(f"{config.metrics.run_id}: {type(error).__name__}")


def names_of(path: Path) -> list[Path]:
    """The same directory by other names, of which some lead there through a link."""
    link = path.with_name(f"{path.name}-link")
    if not link.is_symlink():
        link.symlink_to(path, target_is_directory=True)
    return [path, path.parent / ".." / path.parent.name / path.name, *([link] if path.is_dir() else [])]


def owner_of(path: Path) -> str:
    return (path / "config.toml").read_text() if (path / "config.toml").exists() else ""


def trainings_in(folder: Path) -> set[str]:
    return {read_manifest(checkpoint_path(folder, step)).run_id for step in visible_steps(folder)}


def test_of_starts_that_overlap_none_writes_where_another_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that found its directory empty before it took it wrote into that of a run which had ended meanwhile."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng = random.Random(0)
    outcomes = set()
    for number in range(NUM_DRAWN):
        base = tmp_path / str(number)
        dirs, folders = [base / "a", base / "b"], [base / "saved", base / "other"]
        for made in rng.sample([*dirs, *folders], 2):
            made.mkdir(parents=True)
        base.mkdir(exist_ok=True)
        log: list[str] = []
        runs = []
        for index in range(rng.randint(2, 3)):
            folder = rng.choice(["", *map(str, rng.choice([names_of(one) for one in folders]))])
            config = RunConfig()
            config = replace(
                config,
                checkpoint=replace(config.checkpoint, folder=folder),
                metrics=replace(config.metrics, run_id=f"run {index}"),
            )
            runs.append(steps_of_a_run(config, rng.choice(names_of(rng.choice(dirs))), log))
        left = list(runs)
        while left:
            one = rng.choice(left)
            if next(one, "over") == "over":
                left.remove(one)
        ended = [text for text in log if ":" not in text]
        assert ended, "one of them has taken what it needs"
        owners = [owner for path in dirs if (owner := owner_of(path))]
        assert sorted(owners) == sorted(ended), (number, log)
        for folder in [*folders, *(path / "checkpoints" for path in dirs)]:
            assert len(trainings_in(folder)) <= 1, (number, folder)
        outcomes |= set(log)
        shutil.rmtree(base)
    assert {"run 0", "run 1: FileExistsError", "run 1: Locked", "run 1: ValueError"} <= outcomes


# ---------------------------------------------------------------------------------------------- moved directories


def test_files_that_are_opened_after_a_move_lie_where_the_directory_is(tmp_path: Path) -> None:
    """They were made anew at the old place."""
    run_dir, moved = tmp_path / "run", tmp_path / "there" / "moved"
    with locked(run_dir) as held:
        first = JournalWriter(held, "first")
        moved.parent.mkdir()
        run_dir.rename(moved)
        run_dir.mkdir()  # another takes the name
        second = JournalWriter(held, "second")
        for writer in (first, second):
            writer.write(EndRecord(outcome="finished", reason=f"in {held}"))
            writer.close()
        with pytest.raises(Locked), locked(moved):
            pass
        with locked(run_dir):
            pass
    assert [path.name for path in run_dir.iterdir()] == [LOCK]
    assert {end.reason for end in read_journal(moved).of(EndRecord)} == {f"in {moved}"}


def test_other_processes_reach_a_moved_directory_by_the_same_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with held_path(tmp_path / "run") as held:
        (tmp_path / "run").rename(tmp_path / "moved")
        process = multiprocessing.get_context("spawn").Process(target=_touch, args=(held / "file",))
        process.start()
        process.join(200.0)
    assert process.exitcode == 0
    assert (tmp_path / "moved" / "file").exists()


def _touch(path: Path) -> None:
    path.touch()


def test_a_process_that_is_hidden_from_others_uses_the_path_of_the_directory(tmp_path: Path) -> None:
    """Its descriptors are closed to the ranks: they found no directory by them."""
    process = multiprocessing.get_context("spawn").Process(target=_hold_in_hiding, args=(tmp_path,))
    process.start()
    process.join(200.0)
    assert process.exitcode == 0


def _hold_in_hiding(folder: Path) -> None:
    with held_path(folder) as held:
        assert held != folder
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    with locked(folder) as held:
        assert held == folder


def moves(run_dir: Path, act: Callable[[], object]) -> tuple[list[RunDirectoryMoved], str]:
    found: list[RunDirectoryMoved] = []
    with held_path(run_dir) as held:
        watch = DirectoryWatch(held, found.append)
        assert watch.poll() == ""
        assert found == []
        act()
        return found, watch.poll() + watch.poll()


def test_a_move_is_reported_once_and_differs_from_a_removal(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "a" / "run", tmp_path / "b"
    run_dir.mkdir(parents=True)
    found, removed = moves(run_dir, lambda: run_dir.parent.rename(other))
    assert (found, removed) == ([RunDirectoryMoved(path=other / "run", former=run_dir)], "")
    odd = other / "run (deleted)"
    found, removed = moves(other / "run", lambda: (other / "run").rename(odd))
    assert (found, removed) == ([RunDirectoryMoved(path=odd, former=other / "run")], "")
    found, removed = moves(odd, lambda: shutil.rmtree(odd))
    assert (found, removed) == ([], f"{odd}" * 2)


def test_paths_of_descriptors_are_named_by_where_they_lead(tmp_path: Path) -> None:
    strange = tmp_path / 'a "quoted" \u00e9'
    strange.mkdir()
    with held_path(strange) as held:
        assert real_paths(f"full: {held}/journal") == f"full: {strange}/journal"
        with contextlib.closing(JournalWriter(held, "one")) as writer:
            writer.write(EndRecord(outcome="failed", reason=f"full: {held}/x"))
        (end,) = read_journal(held).of(EndRecord)
        assert end.reason == f"full: {strange}/x"
    assert real_paths(f"{held}") == f"{held}", "its process has closed it"
