"""Plain Megatron on the same model and data, the baseline of all comparisons: one world in processes of this machine.

Uses what Megatron's own training loop does: global parallel state, DistributedDataParallel, schedules, optimizer.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import spare_megatron.mcore  # noqa: F401 before megatron-core, which may need an adaptation to be imported

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from spare_megatron.comm import nccl
from spare_megatron.config.schema import RunConfig
from spare_megatron.devices import gpu
from spare_megatron.driver.preflight import preflight
from spare_megatron.machine.gpus import name_in_torch, shown_to_children, visible_gpus
from spare_megatron.machine.interrupts import Deferral, deferred, never_in_children
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.model import Chunk, build_chunks, choose_deterministic_kernels
from spare_megatron.mcore.model.pipeline import summed_loss
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.mcore.optimizer.optimizer import build_optimizer, make_schedule, optimizer_config
from spare_megatron.process import processes
from spare_megatron.store import keys
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec

T = TypeVar("T")
TIMEOUT = timedelta(seconds=120)


def run_plain(config: RunConfig, look_at: Callable[[Sequence[int]], T]) -> tuple[list[float], T]:
    """Trains all steps; returns their end times at rank 0, and what `look_at` finds by the ranks' pids before they
    end. `config` has no problems, a resolved device and one node. RuntimeError: a rank ends early; see stderr.
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
            found = look_at([child.pid for child in ranks])
            processes.stop_children(ranks)
            return ends[0], found
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
    is_divided = config.optimizer.sharding == "stacked" or config.layout.data_parallel > 1 or device.type != "cpu"
    is_sharded = is_divided and config.optimizer.kind == "adam"
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


def join_world(config: RunConfig, rank: int, store: dist.Store, device: torch.device) -> None:
    """Makes this process `rank` of plain Megatron: tensor parallelism varies fastest, pipeline stages slowest.

    A CUDA `device` must be the current one. Collective over: all ranks.
    """
    torch.set_num_threads(config.cluster.threads_per_rank)
    is_gpu = device.type != "cpu"
    if not is_gpu:
        cpu.install()
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=config.parallel.num_ranks,
        timeout=TIMEOUT,
        device_id=device if is_gpu else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.layout.tensor_parallel,
        pipeline_model_parallel_size=config.layout.pipeline_parallel,
        expert_model_parallel_size=config.row_size,
    )


def train_steps(config: RunConfig, device: torch.device, *, is_sharded: bool) -> Iterator[Chunk]:
    """Trains step by step in Megatron's world; each data-parallel rank computes an equal part of the batch.

    Yields the rank's part of the model after each step. `is_sharded` selects the DistributedOptimizer (ZeRO-1). On
    GPUs, and with `reduce.overlap`, gradients are reduced during the backward pass and the DistributedOptimizer gathers
    parameters during the next forward pass: `start_param_sync(force_sync=True)` of the module gathers them before.
    """
    chunk, optimizer, learning_rate = build_rank(config, device, is_sharded=is_sharded)
    corpus, schedule = Corpus(config), get_forward_backward_func()
    for step in range(config.train.steps):
        chunk.module.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=_forward,
            data_iterator=_batches(config, corpus, step, device),
            model=[chunk.module],
            num_microbatches=len(_numbers(config, step)),
            seq_length=config.model.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        learning_rate.step(increment=1)
        yield chunk


def build_rank(
    config: RunConfig, device: torch.device, *, is_sharded: bool
) -> tuple[Chunk, MegatronOptimizer, OptimizerParamScheduler]:
    transformer = transformer_config(config, device)
    transformer.finalize_model_grads_func = finalize_model_grads
    chunk = _build(config, transformer, device, is_sharded)
    gathers_later = chunk.module.ddp_config.overlap_param_gather
    settings = optimizer_config(config)
    settings = replace(settings, use_distributed_optimizer=is_sharded, overlap_param_gather=gathers_later)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    optimizer = build_optimizer(settings, [chunk], groups, config.optimizer.rules)
    return chunk, optimizer, make_schedule(config, optimizer)


def _build(config: RunConfig, transformer: Any, device: torch.device, is_sharded: bool) -> Chunk:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (chunk,) = build_chunks(config, transformer, groups, device, transfers(config, device, is_sharded=is_sharded))
    chunk.module.broadcast_params()
    if chunk.module.ddp_config.overlap_grad_reduce:
        transformer.no_sync_func = chunk.module.no_sync
    return chunk


def transfers(config: RunConfig, device: torch.device, *, is_sharded: bool) -> DistributedDataParallelConfig:
    overlaps = config.reduce.overlap or device.type != "cpu"
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.reduce.mode != "fast_bf16",
        use_distributed_optimizer=is_sharded,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps and is_sharded,
    )


def _batches(config: RunConfig, corpus: Corpus, step: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    for number in _numbers(config, step):
        batch = corpus.microbatch(step, number)
        yield on_device(batch, config, device, parallel_state.get_context_parallel_group())


def _numbers(config: RunConfig, step: int) -> range:
    """The microbatches of this data-parallel rank."""
    num_ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    each = config.layout.num_groups * config.spare.ramp.at(step) // num_ranks
    return range(rank * each, (rank + 1) * each)


def _forward(batches: Iterator[dict[str, torch.Tensor]], module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = module(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss, counted = summed_loss(losses, batch.get("loss_mask"))
        num_tokens = torch.tensor(losses.numel(), dtype=torch.int) if counted is None else counted.int()
        return loss, num_tokens, {"loss": loss.detach()}

    return output, loss_function
