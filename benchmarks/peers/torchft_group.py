"""One group of a run with torchft, in the peers' environment: our model, data and optimizer, torchft's fault tolerance.

A step is torchft's: ask for a quorum, compute, all-reduce through the manager, ask whether to commit. What is computed
and reduced is exactly what a group of ours computes and reduces, by the same code, in the same buckets. A group that
comes back takes the state over from another by torchft's own transport, while it computes its first step for nothing.
"""

import json
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchft.checkpointing.http_transport
import torchft.manager
from torch.distributed import ReduceOp
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

from benchmarks.peers.peer_group import PeerGroup, begin_group
from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.store.tcp_store import listen

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


class _LoopbackServer(ThreadingHTTPServer):
    """Serves states on the loopback, where torchft's would on every interface."""

    def __init__(self, _address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__((_LOOPBACK, 0), handler)


class _LoopbackTransport(HTTPTransport[Any]):
    """torchft's default way for a state to a group that comes back."""

    def address(self) -> str:
        return f"http://{_LOOPBACK}:{self._server.server_port}/checkpoint/"


def _train(trained: PeerGroup, manager: Manager) -> None:
    while (begun := manager.current_step()) < trained.config.train.steps:
        manager.start_quorum()
        trained.compute(begun)
        works = [manager.allreduce(buffer, reduce_op=ReduceOp.SUM) for buffer in trained.buffers]
        trained.reach(FaultPoint.IN_REDUCE)
        for work in works:
            work.wait()
        trained.reach(FaultPoint.AFTER_REDUCE)
        if not manager.should_commit():
            trained.write("discarded", begun)
            continue
        step = manager.current_step() - 1  # not what it had begun if it has just taken over a state
        if not manager.is_participating():
            trained.write("joined", step)
        trained.update(step)


def loopback_manager(name: str, lighthouse: str, timeout: timedelta, store_port: int, **more: Any) -> Manager:
    """A manager with its servers on the loopback, where they would bind every interface."""
    torchft.checkpointing.http_transport._IPv6HTTPServer = _LoopbackServer
    server = torchft.manager.ManagerServer
    torchft.manager.ManagerServer = lambda **arguments: server(**{**arguments, "bind": f"{_LOOPBACK}:0"})
    return Manager(
        pg=_LoopbackGloo(timeout),
        min_replica_size=1,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=_LOOPBACK,
        store_port=store_port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=_LOOPBACK,
        checkpoint_transport=_LoopbackTransport(timeout, num_chunks=0),
        init_sync=False,
        **{"load_state_dict": None, "state_dict": None, **more},
    )


def train_group(
    config: RunConfig, lighthouse: str, timeout: timedelta, folder: Path, group: int, up: Barrier | None
) -> None:
    """Trains as one group in a process of its own, and leaves it; those that are there at first begin together."""
    begin_group(config, group, folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = PeerGroup(config, group, folder)
    store = listen(_LOOPBACK, _STORE_TIMEOUT)
    state = {"load_state_dict": trained.load_state, "state_dict": trained.state}
    manager = loopback_manager(f"group-{group}", lighthouse, timeout, store.port, **state)
    if up is not None:
        up.wait(_UP_TIMEOUT_S)
    _train(trained, manager)
    trained.end()
