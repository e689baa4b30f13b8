"""Parts that look into single ranks: memory over aborts, and what the steps of a reduction cost."""

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.gpu_check.scene import Scene, mib, seconds
from spare_megatron.comm import nccl
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.slow_machines.examination_rules import Load
from spare_megatron.mcore.gradients import checksums
from spare_megatron.mcore.gradients.fixed_point import choose_kernels
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.processes import set_gpu_environment
from spare_megatron.process.snapshot_wire import Part
from spare_megatron.slow_machines import device_checks
from spare_megatron.stacking.layout import GroupId, Layout, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.state.snapshot.mapped_files import MappedFiles
from spare_megatron.store.tcp_store import TcpControlStore, listen

NUM_ABORTS = 10
_TIMEOUT_S = 60.0
_SUM_BYTES = 64 * 2**20
_MOST_GROWTH_BYTES = 32 * 2**20
"""Device memory that an abort may cost for good: a GiB in 32 losses."""
_ROUNDS = 5
_ROUNDS_OF_A_COPY = 3
_NUM_INTEGERS, _INTEGERS_OF_A_BUCKET = 1_300_000_000, 1 << 24


def _ask(
    scene: Scene, task: Callable[..., Any], *ways: tuple[Any, ...], environment: Mapping[str, str] | None = None
) -> list[Any]:
    """What a process for each of `ways` sends, all at once. Raises RuntimeError if one ends early, TimeoutError."""
    forking, spawning = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
    context: ForkServerContext | SpawnContext = forking if scene.is_dry else spawning  # CUDA cannot be forked
    context.set_forkserver_preload([__name__])
    os.environ.update({"OMP_NUM_THREADS": "1", **(environment or {})})
    pipes, processes = [], []
    try:
        for way in ways:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=task, args=(*way, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        if not all(pipe.poll(2 * _TIMEOUT_S) for pipe in pipes):
            raise TimeoutError(f"no answer of {task.__name__} within {2 * _TIMEOUT_S:g} s")
        try:
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError(f"a process of {task.__name__} ended early; the log has its traceback") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


# ------------------------------------------------------------------------------------------------- memory over aborts


def abort_often(scene: Scene) -> None:
    """Two ranks on one GPU. Raises RuntimeError if device memory grows by more than the limit from abort to abort."""
    server = listen("127.0.0.1", timedelta(seconds=_TIMEOUT_S))
    num_bytes = 2**20 if scene.is_dry else _SUM_BYTES
    ways = [(group, scene.device, server.port, num_bytes) for group in range(2)]
    before, *after = _ask(scene, sum_and_abort, *ways)[0]
    scene.report(after_each_abort=after)
    device_bytes = (after[0]["device_bytes"] - before["device_bytes"]) / len(ways)  # that of all processes
    text = f"{mib(device_bytes)} of the GPU, {mib(after[0]['host_bytes'] - before['host_bytes'])} of host memory"
    scene.report(("a communicator of two ranks that share a GPU, over sockets", text))
    # The last few aborted communicators are still alive while their threads end, so that the first aborts add to them.
    middle = len(after) // 2 + 1
    growth = {key: (after[-1][key] - after[middle][key]) / (len(after) - 1 - middle) for key in after[0]}
    text = (
        f"{mib(after[-1]['device_bytes'] - after[0]['device_bytes'])} of the GPU in all; per abort, of the last few: "
        f"{mib(growth['device_bytes'])} of the GPU, {mib(growth['host_bytes'])} of host memory, "
        f"{growth['threads']:.1f} threads, {growth['files']:.1f} files"
    )
    scene.report(
        (f"{NUM_ABORTS} aborts of a communicator with a sum in flight: growth, per abort later on", text), growth=growth
    )
    if growth["device_bytes"] > _MOST_GROWTH_BYTES:
        raise RuntimeError(f"an abort costs {mib(growth['device_bytes'])} of the GPU, limit {mib(_MOST_GROWTH_BYTES)}")


def sum_and_abort(group: int, name: str, port: int, num_bytes: int, answer: Connection) -> None:
    """Sends the memory in use before and with each communicator; all but the last were aborted in a sum of group 0."""
    device = torch.device(name)
    if device.type == "cuda":
        set_gpu_environment(Layout(num_groups=2))
        nccl.share_gpu(group)
        torch.cuda.set_device(device)
    store = TcpControlStore("127.0.0.1", port)
    communicator = CrossGroupCommunicator(
        group=GroupId(group),
        position=0,
        device=device,
        store=store,
        timeout_s=_TIMEOUT_S,
        ask_interval_s=0.05,
        probe=SilentProbe(),
    )
    torch.ones(num_bytes // 4, device=device)  # CUDA's context, and what torch keeps for the tensors below
    found: list[dict[str, int]] = []
    for what in ("has a context", "has measured"):
        store.put(f"{what}/{group}", "")
        store.wait(f"{what}/{1 - group}", _TIMEOUT_S)
        found = found or [_in_use(device)]
    for number in range(NUM_ABORTS + 1):
        communicator.start_build(number, [GroupId(0), GroupId(1)])
        communicator.start_attempt()
        tensor = torch.ones(num_bytes // 4, device=device)
        if not (communicator.connect(lambda: False) and communicator.reduce(tensor, lambda: False)):
            raise RuntimeError(f"communicator {number}: {communicator.evidence}")
        if tensor[-1].item() != 2:
            raise RuntimeError(f"communicator {number}: the sum of 1 and 1 is {tensor[-1].item()}")
        found.append(_in_use(device))
        if group == 0 and number < NUM_ABORTS:
            communicator.post(torch.ones(num_bytes // 4, device=device))  # the other rank never does
    answer.send(found)
    threading.Event().wait(_TIMEOUT_S)  # until it is killed: the other rank may still need this one


def _in_use(device: torch.device) -> dict[str, int]:
    process = psutil.Process()
    device_bytes = 0
    if device.type == "cuda":
        free, memory = torch.cuda.mem_get_info(device)
        device_bytes = memory - free
    host_bytes = process.memory_info().rss
    return {
        "device_bytes": device_bytes,
        "host_bytes": host_bytes,
        "threads": process.num_threads(),
        "files": process.num_fds(),
    }


# ------------------------------------------------------------------------------------------------- examination


def examine_device(scene: Scene) -> None:
    """What a machine in quarantine does, and another one beside it. Raises RuntimeError if anything came out wrong."""
    server = listen("127.0.0.1", timedelta(seconds=_TIMEOUT_S))
    ways = [(rank, scene.device, server.port) for rank in range(2)]
    own, other = _ask(scene, examine, *ways)
    for what, spent_s in own["seconds"].items():
        scene.report((f"examination: {what}", seconds(spent_s)))
    scene.report(examined=own, beside=other)
    wrong = own["wrong"] + other["wrong"]
    if wrong or own["digest"] != other["digest"]:
        raise RuntimeError("; ".join(wrong) or "the same products differ between two processes")


def examine(rank: int, name: str, port: int, answer: Connection) -> None:
    """Rank 0 is examined: it fills most of the memory that is free."""
    if name != "cpu":
        nccl.share_gpu(rank)
    load, found, spent_s = Load(seed=1, leaves_waits_out=False), list[str](), dict[str, float]()

    def timed(what: str, errors: Iterator[str]) -> None:
        began_s = time.monotonic()
        found.extend(errors)
        spent_s[what] = time.monotonic() - began_s

    store, timeout = TcpControlStore("127.0.0.1", port), timedelta(seconds=_TIMEOUT_S)
    meeting = store.rendezvous("examination", rank, _TIMEOUT_S)
    timed("a transfer and back", device_checks.transfer(meeting, rank, name, "transfer", timeout))
    digest, product_s, repeated, clock = device_checks.multiply(load, name)
    spent_s["a repetition of the chain of products"] = product_s
    timed("products with known results", device_checks.check_products(load, name))
    spent_s["a copy in memory"] = device_checks.copy(load, name)
    if rank == 0:
        store.wait("the other is done", _TIMEOUT_S)  # it needs memory, too
    timed("patterns in memory", device_checks.check_memory(name, is_own=rank == 0))
    if name != "cpu":
        torch.cuda.empty_cache()
    store.put("the other is done", "")
    answer.send({"digest": digest, "wrong": repeated + found, "seconds": spent_s, "clock": clock})


# -------------------------------------------------------------------------------------------- costs around the sums


def time_costs(scene: Scene) -> None:
    alone = ("layout.num_groups=1", "spare.redundancy=1", "spare.microbatches_per_shard=2", "reduce.bucket_mib=128")
    config = load_run_config(Path("gpt_1p3b_node"), scene.settings(*alone)).config
    prepare_index(config)
    for connections in ("1",) if scene.is_dry else ("1", "8"):
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        [found] = _ask(scene, costs_of_a_rank, (config, scene.device), environment=environment)
        scene.report(**{f"connections_{connections}": found})
        for what, spent_s in found.items():
            scene.report((f"{what}, CUDA_DEVICE_MAX_CONNECTIONS={connections}", seconds(spent_s)))
    [found] = _ask(scene, costs_of_integers, (scene.device, 1 << 20 if scene.is_dry else _NUM_INTEGERS))
    scene.report(integers=found)
    for what, spent_s in found.items():
        scene.report((what, seconds(spent_s)))


def costs_of_a_rank(config: RunConfig, name: str, answer: Connection) -> None:
    """Sends median seconds, each until the device has finished, of a group of one rank after its first update."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=_TIMEOUT_S))
        answer.send(_costs(GroupTrainer(config, device), config, device))


def costs_of_integers(name: str, num_elements: int, answer: Connection) -> None:
    """Sends median seconds of what `reduce.mode=reproducible` takes from local sums and from what arrives, by torch
    alone and as ranks take it.
    """
    device = torch.device(name)
    local = torch.randint(-(2**40), 2**40, (num_elements,), device=device)
    buckets, staging = local.split(_INTEGERS_OF_A_BUCKET), torch.empty_like(local[:_INTEGERS_OF_A_BUCKET])
    counted, found = local[:3], {}

    def stage(read: type[checksums.SectionSums]) -> None:
        for bucket in buckets:
            section = read(bucket, staging[: len(bucket)])
            section.squares()
            section.checksum(counted)

    def check(read: type[checksums.SectionSums]) -> None:
        for bucket in buckets:
            read(bucket).checksum(counted)

    for by, read in (("by torch alone", checksums.SectionSums), ("in use", choose_kernels(device)[1])):
        stage(read)  # compiles
        found[f"staging, norms and checksums of integer sums, {by}"] = _median_s(partial(stage, read), device)
        found[f"checksums of what arrives, {by}"] = _median_s(partial(check, read), device)
    answer.send(found)


def _costs(trainer: GroupTrainer, config: RunConfig, device: torch.device) -> dict[str, float]:
    work = [Microbatch(ShardId(0), index) for index in range(config.spare.microbatches_per_shard)]
    sums = trainer.slabs[0].gradients
    staging = sums.new_staging()

    def stage_all() -> None:
        for bucket in range(len(sums.buckets)):
            sums.stage(bucket, staging)

    trainer.begin_step(0)
    trainer.compute(work)
    for bucket in range(len(sums.buckets)):
        sums.stage(bucket, staging)
        sums.on_summed(bucket, staging)
        sums.put(bucket, staging)
    trainer.update(sums.totals().loss)
    trainer.begin_step(1)
    fd = os.memfd_create("snapshot")
    os.posix_fallocate(fd, 0, trainer.state_copy().num_bytes)
    mapped = MappedFiles(torch.cuda.cudart() if device.type == "cuda" else None)
    file = mapped.map(Part(0), fd)

    def copy() -> None:
        trainer.state_copy().write(file.memory, file.range_bytes)

    def copy_beside() -> None:
        copying = threading.Thread(target=trainer.state_copy().write, args=(file.memory, file.range_bytes))
        copying.start()
        trainer.compute(work)
        copying.join()

    found = {
        "digest of the parameters": _median_s(lambda: trainer.params_digest().hexdigest(), device),
        "norms of all buckets": _median_s(lambda: [sums.norm(bucket) for bucket in range(len(sums.buckets))], device),
        "staging of all buckets": _median_s(stage_all, device),
        "two microbatches": _median_s(lambda: trainer.compute(work), device),
        "snapshot copy": _median_s(copy, device, _ROUNDS_OF_A_COPY),
        "snapshot copy beside two microbatches": _median_s(copy_beside, device, _ROUNDS_OF_A_COPY),
    }
    mapped.register()
    if device.type == "cuda" and not mapped.failure:
        found |= {
            "registering a snapshot's memory": mapped.last_register_s,
            "snapshot copy into registered memory": _median_s(copy, device, _ROUNDS_OF_A_COPY),
            "the same beside two microbatches": _median_s(copy_beside, device, _ROUNDS_OF_A_COPY),
        }
    mapped.keep(())
    os.close(fd)
    return found


def _median_s(call: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    spent_s = []
    for _ in range(rounds):
        began_s = time.monotonic()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent_s.append(time.monotonic() - began_s)
    return statistics.median(spent_s)
