"""Trains with plain Megatron in processes of this machine, as the baseline of `spare bench`."""

import contextlib
import signal
import time
from multiprocessing.connection import Connection

import torch

from spare_megatron.comm import nccl
from spare_megatron.config.schema import RunConfig
from spare_megatron.devices import gpu
from spare_megatron.driver.preflight import preflight
from spare_megatron.machine.gpus import name_in_torch, shown_to_children, visible_gpus
from spare_megatron.machine.interrupts import Deferral, deferred, never_in_children
from spare_megatron.mcore.model.model import choose_deterministic_kernels
from spare_megatron.process import processes
from spare_megatron.store import keys
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec
from spare_megatron.tools.bench.bench_machine import Memory, memory_of
from spare_megatron.tools.bench.plain_megatron import TIMEOUT, join_world, train_steps


def run_plain(config: RunConfig) -> tuple[list[float], Memory]:
    """Trains all steps; returns the end times of the steps at rank 0, and the memory of the fullest rank. `config` has
    no problems, a resolved device and one node. Raises RuntimeError if a rank ends early; its traceback is on stderr.
    """
    preflight(config)
    with deferred() as interrupts:
        context = processes.fork_server()
        store, spec = processes.start_embedded_store(context, config.control.listen_address, wait=interrupts.wait)
        ranks_from = processes.rank_context(config.cluster.device, context)
        if config.cluster.device == "gpu":
            processes.set_gpu_environment(config.parallel)  # as for our ranks
        with never_in_children():
            ranks = []
            for rank in range(config.parallel.num_ranks):
                with shown_to_children(visible_gpus()[rank].uuid if config.cluster.device == "gpu" else None):
                    ranks.append(processes.start_child(ranks_from, f"plain-{rank}", train_plain, config, rank, spec))
        try:
            ends = [_receive_ends(rank, interrupts) for rank in ranks]
            pids = [child.process.pid for child in ranks if child.process.pid is not None]
            memory = memory_of(pids, is_gpu=config.cluster.device == "gpu")
            processes.stop_children(ranks)
            return ends[0], memory
        finally:
            processes.kill(ranks)  # all at once: a rank that loses a peer prints a traceback
            for child in [*ranks, store]:
                processes.end_child(child)


def train_plain(config: RunConfig, rank: int, spec: StoreSpec, parent: Connection) -> None:
    """Trains as one rank, sends the wall-clock end time of every step, and waits for the parent before it exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    device = torch.device(name_in_torch(config.cluster.device))
    if device.type != "cpu":
        nccl.check_nccl()
        choose_deterministic_kernels(config)
        gpu.set_device(device)
    join_world(config, rank, open_store(spec).rendezvous(keys.PLAIN_WORLD, rank, TIMEOUT.total_seconds()), device)
    ends = []
    is_sharded = config.optimizer.sharding == "stacked" or config.layout.data_parallel > 1 or device.type != "cpu"
    for _ in train_steps(config, device, is_sharded=is_sharded):
        if device.type != "cpu":
            gpu.synchronize(device)
        ends.append(time.time())
    parent.send(ends)
    with contextlib.suppress(EOFError):
        parent.recv()


def _receive_ends(child: processes.Child, interrupts: Deferral) -> list[float]:
    interrupts.wait([child.reports])
    try:
        ends: list[float] = child.reports.recv()
    except EOFError:
        raise RuntimeError(f"{child.process.name} of plain Megatron has ended early; see above") from None
    return ends
