"""One job at a time in a directory."""

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spare_megatron.process.lock import LOCK, Locked, locked


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
