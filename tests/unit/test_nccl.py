"""What is decided around NCCL: whether to connect, what counts after an abort, and who is aborted when.

A backend stands in for torch's, which needs a GPU; tests/gpu has what it does there.
"""

import ast
import os
import re
import runpy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import nccl, sum_watch
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.sum_watch import SumWatch
from spare_megatron.mcore.probe import SilentProbe
from spare_megatron.mcore.versions import installed_version
from spare_megatron.stacking.layout import GroupId

PATIENCE = timedelta(seconds=30)
GPU = torch.device("cuda", 0)


class Work:
    """A sum that waits for a group, until its backend is aborted: then it looks complete."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend
        self.has_come = False

    def is_completed(self) -> bool:
        return self.has_come or self._backend.is_aborted.is_set()

    def wait(self) -> None:
        """Nothing went wrong."""


class Backend:
    """A backend of torch's without a GPU."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.connected: list[torch.device] = []
        self.works: list[Work] = []
        self.num_aborts = 0
        self.is_aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def allreduce(self, _tensors: list[torch.Tensor], _options: Any) -> Work:
        self.works.append(Work(self))
        return self.works[-1]

    def abort(self) -> None:
        self.num_aborts += 1
        self.is_aborted.set()
        raise RuntimeError("NCCL has not ended yet")


@pytest.fixture
def torch_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")


# ------------------------------------------------------------------------------------------------------- connecting


def connect(store: dist.Store, is_wanted: Callable[[], bool], timeout: timedelta = PATIENCE) -> Backend:
    backend = nccl.connect(store, 0, 2, device=GPU, timeout=timeout, is_wanted=is_wanted)
    assert isinstance(backend, Backend)
    return backend


@pytest.mark.usefixtures("torch_with_nccl")
def test_a_rank_that_has_met_the_others_connects() -> None:
    store = dist.HashStore()
    other = threading.Thread(target=nccl.meet, args=(store, 2, PATIENCE))
    other.start()
    backend = connect(store, lambda: True)
    other.join()
    _, rank, size, options = backend.arguments
    assert (rank, size, options._timeout, options.config.blocking) == (0, 2, PATIENCE, 1)
    assert backend.connected == [GPU]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"


@pytest.mark.usefixtures("torch_with_nccl")
def test_no_rank_starts_to_connect_that_could_not_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", None)
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):  # the other never comes
        connect(dist.HashStore(), lambda: True, timedelta(milliseconds=20))
    store = dist.HashStore()
    store.add("here", 1)
    with pytest.raises(nccl.NoLongerWanted):  # it has come, and the log has moved on
        connect(store, lambda: False)


# ---------------------------------------------------------------------------------------------- what counts, and ends


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> CrossGroupCommunicator:
    """Of a rank with a GPU. Whatever it builds is there at once."""
    monkeypatch.setattr(nccl, "connect", lambda *_arguments, **_options: Backend())
    return CrossGroupCommunicator(
        group=GroupId(0),
        position=0,
        device=GPU,
        store=SimpleNamespace(rendezvous=lambda *_arguments: None),  # type: ignore[arg-type]
        timeout_s=PATIENCE.total_seconds(),
        ask_interval_s=0.01,
        probe=SilentProbe(),
    )


def post(communicator: CrossGroupCommunicator, key: int) -> Backend:
    """Builds a communicator and posts two sums."""
    communicator.start_build(key, [GroupId(0), GroupId(1)])
    communicator.start_attempt()
    assert communicator.connect(lambda: False)
    assert communicator.post(torch.zeros(1))
    assert communicator.post(torch.zeros(1))
    return communicator.first_in_flight().backend  # type: ignore[union-attr]


def test_sums_that_were_ended_do_not_count_though_they_look_complete(communicator: CrossGroupCommunicator) -> None:
    backend = post(communicator, 0)
    backend.works[0].has_come = True
    assert communicator.poll() == 1
    first = communicator.first_in_flight()
    assert first is not None
    communicator.abort_sum(first)
    assert backend.is_aborted.wait(PATIENCE.total_seconds())
    assert backend.works[1].is_completed()
    assert communicator.poll() == 0
    assert communicator.first_in_flight() is None
    assert communicator.evidence == "connection: aborted: the log has moved on"
    assert not communicator.post(torch.zeros(1))


def test_sums_that_are_ended_while_they_are_looked_at_do_not_count(communicator: CrossGroupCommunicator) -> None:
    backend = post(communicator, 0)
    first = communicator.first_in_flight()
    assert first is not None

    def is_completed() -> bool:
        communicator.abort_sum(first)
        return backend.is_aborted.wait(PATIENCE.total_seconds())

    backend.works[0].is_completed = is_completed  # type: ignore[method-assign]
    assert communicator.poll() == 0
    assert communicator.evidence == "connection: aborted: the log has moved on"


def test_each_backend_is_ended_once_and_the_next_is_sound(communicator: CrossGroupCommunicator) -> None:
    first = post(communicator, 0)
    communicator.give_up()
    assert first.is_aborted.wait(PATIENCE.total_seconds())
    second = post(communicator, 1)
    for work in second.works:
        work.has_come = True
    assert communicator.poll() == 2
    assert (first.num_aborts, second.num_aborts) == (1, 0)


def test_a_group_alone_has_nothing_to_end(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(nccl, "abort", ended.append)
    communicator.start_build(0, [GroupId(0)])
    communicator.start_attempt()
    assert communicator.post(torch.zeros(1))
    alone = communicator.first_in_flight()
    assert alone is not None
    communicator.abort_sum(alone)
    assert communicator.poll() == 1
    assert ended == []


def test_a_group_of_transfers_that_breaks_stays_open_in_no_thread_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "mine")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(assert_mine(stream)))
    opened_in: list[int] = []

    def assert_mine(stream: object) -> None:
        assert stream == "mine"

    def lose_connection() -> None:
        raise RuntimeError("connection lost")

    backend = SimpleNamespace(
        _start_coalescing=lambda: opened_in.append(threading.get_ident()), _end_coalescing=lambda: "the work"
    )
    assert nccl.coalesced(backend, GPU, lambda: None) == "the work"
    with pytest.raises(RuntimeError, match="connection lost"):
        nccl.coalesced(backend, GPU, lose_connection)
    assert len(opened_in) == 2
    assert threading.get_ident() not in opened_in


# --------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(("found", "is_refused"), [((2, 26, 2), False), ((2, 30, 7, "rc1"), False), ((2, 25, 1), True)])
def test_processes_of_ranks_start_with_a_supported_nccl_alone(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int | str, ...], is_refused: bool
) -> None:
    backend = SimpleNamespace(get_runtime_nccl_version=lambda: found)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))  # that of torch's build, whatever is loaded
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    with pytest.raises(ImportError, match=r"NCCL 2\.25\.1 is installed") if is_refused else nullcontext():
        nccl.prepare_process()
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "1"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


@pytest.mark.parametrize(
    "missing", ["Options._timeout", "NCCLConfig.blocking", "abort", "_start_coalescing", "get_runtime_nccl_version"]
)
def test_a_torch_without_a_name_that_is_used_is_refused_at_import(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    complete = MagicMock(Options=MagicMock(_timeout=None))
    owner, _, name = missing.rpartition(".")
    delattr(getattr(complete, owner) if owner else complete, name)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", complete, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    found = f"torch {installed_version('torch')} has no torch.distributed.ProcessGroupNCCL.{missing}, "
    with pytest.raises(ImportError, match=re.escape(found) + ".*pip install"):
        runpy.run_path(nccl.__file__)


def test_every_private_name_of_torch_is_looked_up_at_import() -> None:
    """By the modules that sum over the groups: private attributes of what is not their own."""
    trees = [ast.parse(path.read_text()) for path in Path(nccl.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and ast.unparse(node.value) != "self"
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_names"]
    names = {str(word.value) for call in calls for word in call.args if isinstance(word, ast.Constant)}
    assert used <= {name.rpartition(".")[2] for name in names}


# -------------------------------------------------------------------------------------------------------- the watch


class Scene:
    """A watch, what it sees, and whom it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_flight: object | None = None
        self.head = 7
        self.num_written = 7
        self.ended: list[object] = []
        self.num_connections = 0
        monkeypatch.setattr(
            sum_watch, "DecisionLog", lambda _store: SimpleNamespace(has=lambda index: index < self.num_written)
        )
        watched: Any = SimpleNamespace(first_in_flight=lambda: self.in_flight, abort_sum=self.ended.append)
        self.watch = SumWatch(watched, self._connect, lambda: self.head)

    def _connect(self) -> Any:
        self.num_connections += 1

    def look(self, times: int) -> None:
        for _ in range(times):
            self.watch.poll()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_sums_in_vain_are_ended_if_the_main_thread_leaves_them(scene: Scene) -> None:
    scene.in_flight = stuck = object()
    scene.look(5)
    assert scene.ended == []
    scene.num_written = 8
    scene.look(1)
    assert scene.ended == []  # the main thread may be about to
    scene.look(1)
    assert scene.ended == [stuck]


def test_a_main_thread_that_gets_on_is_left_alone(scene: Scene) -> None:
    scene.look(3)
    assert scene.num_connections == 0
    for _ in range(4):  # other sums each time
        scene.in_flight = object()
        scene.look(1)
    assert scene.num_connections == 0
    for _ in range(4):  # the same, and the log is read as it is written
        scene.num_written += 1
        scene.look(1)
        scene.head += 1
        scene.look(1)
    scene.in_flight, scene.num_written = None, scene.head + 1
    scene.look(3)
    assert scene.ended == []
