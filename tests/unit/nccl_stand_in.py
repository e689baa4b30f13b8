"""A backend in place of torch's, which needs a GPU, and communicators that use it."""

import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.comm import nccl
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.nccl import WarmUp, no_warm_up
from spare_megatron.devices import gpu
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId

PATIENCE = timedelta(seconds=30)
GPU = torch.device("cuda", 0)


class Work:
    """A sum that waits for a group, until its backend is aborted: then it looks complete."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend
        self.has_come = False
        self.num_polls = 0
        self.result = 0

    def is_completed(self) -> bool:
        self.num_polls += 1
        assert not self._backend.is_aborting, "torch would wait for the end of the abort, and keep the GIL"
        return self.has_come or self._backend.is_aborted.is_set()

    def get_future_result(self) -> Any:
        return SimpleNamespace(done=self.is_completed, value=lambda: self.result)

    def block_current_stream(self) -> None:
        """The stream goes on."""

    def wait(self) -> None:
        raise AssertionError("of a failed work it aborts the communicator, in this thread")


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
        self.is_aborting = False
        self.is_aborted = threading.Event()
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.is_inside = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def allreduce(self, _tensors: list[torch.Tensor], _options: Any) -> Work:
        self.is_inside.set()
        assert self.may_return.wait(PATIENCE.total_seconds())
        self.is_inside.clear()
        self.works.append(Work(self))
        return self.works[-1]

    def abort(self) -> None:
        assert not self.is_inside.is_set(), "NCCL would free what another thread uses"
        self.num_aborts += 1
        self.is_aborting = True
        assert self.may_abort.wait(PATIENCE.total_seconds())
        self.is_aborting = False
        self.is_aborted.set()
        raise RuntimeError("NCCL has not ended yet")


def new_communicator(
    monkeypatch: pytest.MonkeyPatch, warm_up: WarmUp = no_warm_up, ask_interval_s: float = 0.01
) -> CrossGroupCommunicator:
    monkeypatch.setattr(nccl, "own_stream", lambda _device: nullcontext())
    monkeypatch.setattr(nccl, "event_now", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(gpu, "synchronize", lambda _device: None)
    return CrossGroupCommunicator(
        group=GroupId(0),
        position=0,
        device=GPU,
        store=SimpleNamespace(rendezvous=lambda *_arguments: None),  # type: ignore[arg-type]
        timeout_s=PATIENCE.total_seconds(),
        ask_interval_s=ask_interval_s,
        probe=SilentProbe(),
        warm_up=warm_up,
    )


def post(communicator: CrossGroupCommunicator, key: int) -> Backend:
    """Builds a communicator and posts two sums."""
    communicator.start_build(key, [GroupId(0), GroupId(1)])
    communicator.start_attempt()
    assert communicator.connect(lambda: False)
    assert communicator.post(torch.zeros(1))
    assert communicator.post(torch.zeros(1))
    return communicator.first_in_flight().connection.backend  # type: ignore[union-attr, attr-defined]
