"""One group of a run with torchft, in the peers' environment: our model, data and optimizer, torchft's fault tolerance.

A step is torchft's: ask for a quorum, compute, all-reduce through the manager, ask whether to commit. What is computed
and reduced is exactly what a group of ours computes and reduces, by the same code, in the same buckets.
"""

import json
import os
import sys
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchft.manager
from torch.distributed import ReduceOp
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing import CheckpointTransport

from benchmarks.peers.peer_group import PeerGroup, begin_group
from spare_megatron.config.schema import RunConfig
from spare_megatron.control.tcp_store import listen

_LOOPBACK = "127.0.0.1"
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


def _train(trained: PeerGroup, manager: Manager) -> None:
    while (step := manager.current_step()) < trained.config.train.steps:
        manager.start_quorum()
        trained.compute(step)
        for work in [manager.allreduce(buffer, reduce_op=ReduceOp.SUM) for buffer in trained.buffers]:
            work.wait()
        if manager.should_commit():
            trained.update(step)
        else:
            trained.write("discarded", step)


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


def train_group(config: RunConfig, lighthouse: str, timeout: timedelta, folder: Path, group: int, up: Barrier) -> None:
    """Trains as one group in a process of its own, and leaves it; all groups begin together."""
    begin_group(config, group, folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = PeerGroup(config, group, folder)
    store = listen(_LOOPBACK, _STORE_TIMEOUT)
    manager = _manager(group, lighthouse, timeout, store.port)
    up.wait(_UP_TIMEOUT_S)
    _train(trained, manager)
    # Communicators that were abandoned would make an orderly exit wait for transfers that cannot end.
    sys.stderr.flush()
    os._exit(0)
