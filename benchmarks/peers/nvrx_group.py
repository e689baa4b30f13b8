"""One group of a run with NVIDIA's resiliency extension, in the peers' environment: in-process restart.

The wrapped function trains; when a group is lost, the extension has all others enter it again with new ranks. The model
and the optimizer stay in memory, which is the best that a user can do: only the step is repeated. Groups that had not
applied it when others had take the state over from one of these.
What is computed and reduced is what a group of ours computes and reduces, by the same code, in the same buckets.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

from benchmarks.peers.peer_group import PeerGroup, begin_group
from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.points import FaultPoint

_LOOPBACK = "127.0.0.1"
_UP_TIMEOUT_S = 120.0
_POLL_S = 0.0005


@dataclass(slots=True)
class _Training:
    """What outlives a restart."""

    config: RunConfig
    group: int
    folder: Path
    store_port: int
    timeout: timedelta
    up: Barrier
    trained: PeerGroup | None = None
    step: int = 0
    is_computed: bool = False

    def run(self, call: inprocess.CallWrapper) -> None:
        """From the step at hand to the last, over the groups that are left."""
        if self.trained is None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self.trained = PeerGroup(self.config, self.group, self.folder)
            self.up.wait(_UP_TIMEOUT_S)
        begun = self.step
        backend = self._connect(call.iteration, self.trained)
        if self.is_computed and self.step == begun:
            self.trained.write("discarded", begun)
        self.is_computed = False
        while self.step < self.config.train.steps:
            self.trained.compute(self.step)
            self.is_computed = True
            works = [backend.allreduce([buffer], dist.AllreduceOptions()) for buffer in self.trained.buffers]
            self.trained.reach(FaultPoint.IN_REDUCE)
            for work in works:
                while not work.is_completed():  # a wait in C++ would keep the restart out until gloo's own timeout
                    time.sleep(_POLL_S)
                work.wait()
            self.trained.reach(FaultPoint.AFTER_REDUCE)
            with call.atomic():
                self.trained.update(self.step)
                self.step += 1
                self.is_computed = False

    def _connect(self, iteration: int, trained: PeerGroup) -> dist.ProcessGroupGloo:
        """A communicator of the groups that are left, all of them at the step of the furthest."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        client = dist.TCPStore(
            _LOOPBACK, self.store_port, is_master=False, wait_for_workers=False, timeout=self.timeout
        )
        store = dist.PrefixStore(f"groups/{iteration}", client)
        store.set_timeout(self.timeout)
        store.set(f"step/{rank}", str(self.step))
        steps = [int(store.get(f"step/{other}")) for other in range(size)]
        furthest = max(steps)
        if rank == steps.index(furthest) and min(steps) < furthest:
            for key, part in trained.state().items():
                store.set(f"state/{key}", bytes(part.numpy()) if isinstance(part, torch.Tensor) else part)
        if self.step < furthest:
            tensors = torch.frombuffer(bytearray(store.get("state/tensors")), dtype=torch.uint8)
            trained.load_state({"description": store.get("state/description"), "tensors": tensors})
            self.step = furthest
        return dist.ProcessGroupGloo(store, rank, size, self.timeout)


def train_group(
    config: RunConfig, store_port: int, interval_s: float, timeout_s: float, folder: Path, group: int, up: Barrier
) -> None:
    """Trains as one group in a process of its own, and leaves it; all groups begin together."""
    begin_group(config, group, folder)
    os.environ |= {
        "RANK": str(group),
        "WORLD_SIZE": str(config.layout.num_groups),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(store_port),
    }
    interval, timeout = timedelta(seconds=interval_s), timedelta(seconds=timeout_s)
    training = _Training(config, group, folder, store_port, timeout, up)

    def run(call: inprocess.CallWrapper = None) -> None:
        training.run(call)

    inprocess.Wrapper(
        # The server is the world's, so that no group's death takes the store along.
        store_kwargs={"timeout": timedelta(seconds=60), "wait_for_workers": False},
        abort=None,
        monitor_thread_interval=interval,
        monitor_process_interval=interval,
        heartbeat_interval=interval,
        progress_watchdog_interval=interval,
        last_call_wait=interval,
        soft_timeout=timeout,
        hard_timeout=2 * timeout,
        heartbeat_timeout=3 * timeout,
        barrier_timeout=timedelta(seconds=60),
        completion_timeout=timedelta(seconds=60),
    )(run)()
    assert training.trained is not None, "it has come to the last step"
    training.trained.end()
