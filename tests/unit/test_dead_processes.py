"""Exceptions that end the processes of a run reach its driver as text."""

import multiprocessing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.process import processes
from spare_megatron.process.reports import NodeEnded, next_report
from spare_megatron.process.specs import NodeSpec
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process


def raise_something(*_: object) -> NoReturn:
    raise MemoryError("there is [none]\nleft")


def serve_and_raise(_address: str, _port: int, pipe: Any) -> NoReturn:
    pipe.send(1234)
    pipe.recv()
    raise_something()


def test_a_store_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user read `exit code 1`."""
    monkeypatch.setattr(processes, "serve", raise_something)
    context: Any = multiprocessing.get_context("fork")
    with pytest.raises(RuntimeError, match=r"the control store died at start: MemoryError: there is \[none\] left$"):
        processes.start_embedded_store(context, "127.0.0.1")


def test_a_store_that_ends_later_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "serve", serve_and_raise)
    context: Any = multiprocessing.get_context("fork")
    child, _ = processes.start_embedded_store(context, "127.0.0.1")
    child.reports.send("end")
    assert processes.why_ended(child) == "MemoryError: there is [none] left"
    processes.end_child(child)


def test_a_supervisor_that_raises_says_so_to_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its driver knew that it had ended with exit code 1, and the user had to find its log."""
    monkeypatch.setattr(node_process.processes, "log_to_file", lambda *_: None)
    monkeypatch.setattr(node_process, "_look_after", raise_something)
    ours, theirs = Pipe()
    spec = NodeSpec(
        node=1,
        config=RunConfig(),
        run_dir=tmp_path,
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        faults=(),
        rank_main=raise_something,
    )
    with pytest.raises(MemoryError):
        node_process.look_after(spec, theirs)
    assert ours.poll(10.0)
    ended = next_report(ours)
    assert isinstance(ended, NodeEnded)
    assert (ended.node, ended.failure) == (1, "its supervisor raised MemoryError: there is [none] left")
