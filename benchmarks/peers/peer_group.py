"""What a group of any peer is made of, in the peers' environment: our model and data, our injector, events."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from benchmarks.peers.history import Event, EventKind, read_events
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.planned_faults import resolve_trace
from spare_megatron.faults.injection import Injector
from spare_megatron.faults.points import Fault, FaultPoint
from spare_megatron.mcore.corruption import CORRUPTIONS
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.processes import log_to_file
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch

OUR_FAULT = 70
"""Exit status of a group in which what failed is ours, not the peer's."""
END_SUFFIX = ".end"
"""Of the file in which a group that has come to the end leaves the digest of its parameters, and whether its losses and
local gradients were finite."""

_PR_SET_PDEATHSIG = 1
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _or_ends(ours: Callable[_P, _T]) -> Callable[_P, _T]:
    """Ends the process where this fails: a peer would take it for a failed transfer, and have that in its figures."""

    @wraps(ours)
    def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return ours(*arguments, **named)
        except Exception:  # noqa: BLE001  (whatever it is)
            traceback.print_exc()
            os._exit(OUR_FAULT)

    return call


def begin_group(config: RunConfig, group: int, folder: Path) -> None:
    """Prepares a forked process: it dies with its parent, logs to a file, and computes as ours do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log_to_file(folder, f"group-{group}")
    torch.set_num_threads(config.cluster.threads_per_rank)


class PeerGroup:
    """A group's model, work and events. The default torch.distributed world must be this process alone."""

    def __init__(self, config: RunConfig, group: int, folder: Path) -> None:
        self.config, self.group = config, group
        events = folder / f"group-{group}.jsonl"
        self._events = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        fired = {event.step for event in read_events([events]) if event.kind == "fault"}
        faults = [fault for fault in resolve_trace(config) if fault.group == group and fault.step not in fired]
        self._injector = Injector(faults, lambda fault: self.write("fault", fault.step), self._inflict)
        self._trainer = GroupTrainer(config, torch.device("cpu"), _InjectingProbe(self._injector))
        self._work = [Microbatch(ShardId(group), index) for index in range(config.spare.microbatches_per_shard)]
        self._sums = self._trainer.slabs[0].gradients
        self._stagings = [self._sums.new_staging() for _ in self._sums.buckets]
        self.buffers: list[torch.Tensor] = []
        """What is to be reduced, bucket by bucket."""
        self._at_hand: torch.Tensor | None = None
        self._was_finite = True
        self._end_file = folder / f"group-{group}{END_SUFFIX}"

    def compute(self, step: int) -> None:
        """Computes the group's own shard of the step and fills the buffers."""
        self._injector.step = step
        self._trainer.begin_step(step)
        self.write("computed", step, len(self._trainer.compute(self._work)))
        self.reach(FaultPoint.BEFORE_REDUCE)
        self.buffers = [self._sums.stage(bucket, staging) for bucket, staging in enumerate(self._stagings)]
        self._was_finite &= all(bool(buffer.isfinite().all()) for buffer in self.buffers)  # the loss rides in one
        self._show_buckets(FaultPoint.STAGED)

    def _show_buckets(self, phase: FaultPoint) -> None:
        for elements, buffer in zip(self._sums.buckets, self.buffers, strict=True):
            self._at_hand = buffer[: len(elements)]  # without the counts that ride in it
            self.reach(phase)

    def reach(self, phase: FaultPoint) -> None:
        """Here a fault may strike."""
        self._injector(phase)

    @_or_ends
    def state(self) -> dict[str, Any]:
        """A copy of the whole state between two updates: what a group of ours gives to one that comes back."""
        outgoing = self._trainer.outgoing_state()
        tensors = torch.empty(outgoing.tensors.num_bytes, dtype=torch.uint8)
        for part, place in outgoing.tensors.beside(tensors):
            place.copy_(part)
        return {"description": outgoing.description, "tensors": tensors}

    @_or_ends
    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave on another group."""
        incoming = self._trainer.incoming_state(state["description"])
        tensors = state["tensors"]
        for part, place in incoming.tensors.beside(tensors):
            part.copy_(place)
        incoming.install()

    def update(self, step: int) -> None:
        """Applies the mean over the groups that are left, in the scale of all groups.

        Raises:
            RuntimeError: The first step lacks a group.
        """
        self._show_buckets(FaultPoint.SUMMED)
        self._arrived()
        counted = min(self._sums.totals().num_microbatches)
        self.write("committed", step, counted)
        all_of_them = self.config.layout.num_groups * self.config.spare.microbatches_per_shard
        if step == 0 and counted != all_of_them:
            raise RuntimeError(f"the first step counted {counted} microbatches, not {all_of_them}: a group is missing")
        for bucket, buffer in enumerate(self.buffers):
            self._sums.put(bucket, buffer.mul_(all_of_them / counted))
        self._arrived()
        self._trainer.update(self._sums.totals().loss)

    def _arrived(self) -> None:
        for bucket, buffer in enumerate(self.buffers):
            self._sums.on_summed(bucket, buffer)

    def end(self) -> None:
        """Notes how it ends after the last step, and leaves the process.

        Communicators that were abandoned would make an orderly exit wait for transfers that cannot end.
        """
        note = {"params_sha256": self._trainer.params_sha256(), "was_finite": self._was_finite}
        self._end_file.write_text(json.dumps(note))
        sys.stderr.flush()
        os._exit(0)

    def _inflict(self, fault: Fault) -> None:
        """What the injector does not carry out itself, as our ranks and their supervisors do."""
        if fault.kind in CORRUPTIONS:
            CORRUPTIONS[fault.kind](self._trainer, fault, self._at_hand)
            return
        assert fault.kind == "stop", f"the injector carries out {fault.kind} itself"
        os.kill(os.getpid(), signal.SIGSTOP)

    def write(self, kind: EventKind, step: int, num_microbatches: int = 0) -> None:
        """Reports an event. It is stored when this returns, whatever becomes of the process."""
        event = Event(kind=kind, group=self.group, step=step, at_s=time.time(), num_microbatches=num_microbatches)
        os.write(self._events, (json.dumps(asdict(event)) + "\n").encode())


class _InjectingProbe(SilentProbe):
    """Our trainer's moments, for the same injector that hits our ranks."""

    def __init__(self, injector: Injector) -> None:
        self.phases = injector.phases
        self._injector = injector

    def __call__(self, phase: FaultPoint, /) -> None:
        self._injector(phase)
