"""One group of a run with torchft, in the peers' environment: our model, data and optimizer, torchft's fault tolerance.

A step is torchft's: ask for a quorum, compute, all-reduce through the manager, ask whether to commit. What is computed
and reduced is exactly what a group of ours computes and reduces, by the same code, one flat buffer a step.
"""

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft.manager
from torch.distributed import ReduceOp
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing import CheckpointTransport

from benchmarks.peers.history import Event, EventKind
from spare_megatron.config.schema import RunConfig
from spare_megatron.control.tcp_store import listen
from spare_megatron.core.phases import Phase
from spare_megatron.core.stepplan import Microbatch
from spare_megatron.core.topology import ShardId
from spare_megatron.faults.injection import Injector
from spare_megatron.faults.trace import Fault, resolve_trace
from spare_megatron.mcore.probe import SilentProbe
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.processes import log_to_file

_LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_STORE_TIMEOUT = timedelta(seconds=60)
_UP_TIMEOUT_S = 120.0


class _LoopbackGloo(ProcessGroupGloo):
    """torchft's gloo group; the store where its members meet binds the loopback instead of every interface."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._rendezvous_store = listen(_LOOPBACK, _STORE_TIMEOUT)

    def get_reconfigure_handle(self) -> str:
        handle = json.loads(super().get_reconfigure_handle())
        return json.dumps({**handle, "store": f"{_LOOPBACK}:{self._rendezvous_store.port}"})


class _NoTransport(CheckpointTransport[Any]):
    """Nobody joins in these runs, so no checkpoint is ever sent; the default one would bind every interface."""

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:  # noqa: ARG002
        raise RuntimeError(f"step {step}: groups {dst_ranks} want a checkpoint, though nobody joins")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:  # noqa: ARG002
        raise RuntimeError(f"step {step}: this group is behind group {src_rank}, though nobody joins")

    def disallow_checkpoint(self) -> None:
        """None is allowed in the first place."""


class _InjectingProbe(SilentProbe):
    """Our trainer's moments, for the same injector that hits our ranks."""

    def __init__(self, injector: Injector) -> None:
        self.phases = injector.phases
        self._injector = injector

    def __call__(self, phase: Phase, /) -> None:
        self._injector(phase)


class _Group:
    def __init__(self, config: RunConfig, group: int, lighthouse: str, timeout: timedelta, events: Path) -> None:
        self._config, self._group = config, group
        self._events = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        faults = [fault for fault in resolve_trace(config) if fault.group == group]
        self._injector = Injector(faults, lambda fault: self._write("fault", fault.step), _stop)
        self._trainer = GroupTrainer(config, torch.device("cpu"), _InjectingProbe(self._injector))
        self._work = [Microbatch(ShardId(group), index) for index in range(config.spare.microbatches_per_shard)]
        self._store = listen(_LOOPBACK, _STORE_TIMEOUT)
        self._manager = _manager(group, lighthouse, timeout, self._store.port)

    def train(self) -> None:
        buffer = self._trainer.gradients.new_buffer()
        while (step := self._manager.current_step()) < self._config.train.steps:
            self._injector.step = step
            self._manager.start_quorum()
            self._trainer.begin_step(step)
            self._write("computed", step, len(self._trainer.compute(self._work)))
            self._injector(Phase.BEFORE_REDUCE)
            self._trainer.gradients.pack_into(buffer)
            self._manager.allreduce(buffer, reduce_op=ReduceOp.SUM).wait()
            if self._manager.should_commit():
                self._commit(step, buffer)
            else:
                self._write("discarded", step)

    def _commit(self, step: int, buffer: torch.Tensor) -> None:
        counted = self._trainer.gradients.read_totals(buffer).num_microbatches
        self._write("committed", step, counted)
        all_of_them = self._config.layout.num_groups * self._config.spare.microbatches_per_shard
        if step == 0 and counted != all_of_them:
            raise RuntimeError(f"the first step counted {counted} microbatches, not {all_of_them}: a group is missing")
        # The mean over the groups that are left, as torchft's own averaging gives it, in the scale of all groups.
        buffer.mul_(all_of_them / counted)
        self._trainer.update(buffer, self._trainer.gradients.read_totals(buffer).loss_sum)

    def _write(self, kind: EventKind, step: int, num_microbatches: int = 0) -> None:
        event = Event(kind=kind, group=self._group, step=step, at_s=time.time(), num_microbatches=num_microbatches)
        os.write(self._events, (json.dumps(asdict(event)) + "\n").encode())


def _manager(group: int, lighthouse: str, timeout: timedelta, store_port: int) -> Manager:
    """The manager, with its server on the loopback, where it would bind every interface."""
    server = torchft.manager.ManagerServer
    torchft.manager.ManagerServer = lambda **arguments: server(**{**arguments, "bind": f"{_LOOPBACK}:0"})
    return Manager(
        pg=_LoopbackGloo(timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=_LOOPBACK,
        store_port=store_port,
        lighthouse_addr=lighthouse,
        replica_id=f"group-{group}",
        hostname=_LOOPBACK,
        checkpoint_transport=_NoTransport(),
        init_sync=False,
    )


def _stop(fault: Fault) -> None:
    assert fault.kind == "stop", f"the injector carries out {fault.kind} itself"
    os.kill(os.getpid(), signal.SIGSTOP)


def train_group(config: RunConfig, group: int, lighthouse: str, timeout: timedelta, folder: Path, up: Barrier) -> None:
    """Trains as one group in a process of its own, and leaves it; all groups begin together."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log_to_file(folder, f"group-{group}")
    torch.set_num_threads(config.cluster.threads_per_rank)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = _Group(config, group, lighthouse, timeout, folder / f"group-{group}.jsonl")
    up.wait(_UP_TIMEOUT_S)
    trained.train()
    # Communicators that were abandoned would make an orderly exit wait for transfers that cannot end.
    sys.stderr.flush()
    os._exit(0)
