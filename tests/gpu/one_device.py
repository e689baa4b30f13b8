"""A process with a device of its own, and what it is asked to do there.

Tasks take the device and the configuration first and return something that can be pickled. All of them also run on a
CPU, which shows on every machine that they measure what they say.
"""

import mmap
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore import host_copies
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.plans import Microbatch
from tests.integration.mcore_group import Arrays, all_work, reduce_alone, staged

GPU = "cuda:0"
DEVICES = ["cpu", pytest.param(GPU, marks=pytest.mark.gpu)]
TIMEOUT_S = 300.0
"""The first kernels of a process are loaded and, by transformer-engine, compiled."""


def run_on(device: str, task: Callable[..., Any], config: RunConfig, *arguments: Any) -> Any:
    """What the task returned, in a process that is the only rank of its world."""
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")  # CUDA cannot be forked
    context.set_forkserver_preload(["spare_megatron.mcore.trainer", __name__])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(device, sender, task, config, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            raise TimeoutError(f"no answer from {device} within {TIMEOUT_S:g} s")
        answer, error = receiver.recv()
    finally:
        process.kill()
        process.join()
    if error:
        raise RuntimeError(f"on {device}:\n{error}")
    return answer


def _run(
    name: str, sender: Connection, task: Callable[..., Any], config: RunConfig, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=dist.FileStore(f"{folder}/store", 1),
                rank=0,
                world_size=1,
                timeout=timedelta(seconds=TIMEOUT_S / 2),
            )
            sender.send((task(device, config, *arguments), None))
    except Exception:  # noqa: BLE001  (the parent shall see it, whatever it is)
        sender.send((None, traceback.format_exc()))


# ------------------------------------------------------------------------------------------------------------ tasks


def values_and_gradients(device: torch.device, config: RunConfig) -> tuple[Arrays, Arrays]:
    """Of each parameter its value and its gradient, summed over all microbatches of step 0."""
    trainer = GroupTrainer(config, device)
    trainer.begin_step(0)
    trainer.compute(all_work(config))
    reduce_alone(trainer)
    trainer.gradients.finish()
    named = list(trainer.parameters_named())
    values = {item.name: item.parameter.detach().float().cpu().numpy() for item in named}
    return values, {item.name: item.main_grad.float().cpu().numpy() for item in named}


def sums_of(device: torch.device, config: RunConfig, *ways: Sequence[Sequence[Microbatch]]) -> list[np.ndarray]:
    """What is staged of step 0 for each way to compute it, a way being the works of its calls."""
    trainer = GroupTrainer(config, device)
    found = []
    for calls in ways:
        trainer.begin_step(0)
        for work in calls:
            trainer.compute(work)
        found.append(staged(trainer).cpu().numpy())
    return found


def unsound_buckets(device: torch.device, config: RunConfig) -> tuple[list[int], dict[int, float]]:
    """What the sums of buckets say, of which the last half is poisoned; and their norms. Staging must not wait."""
    trainer = GroupTrainer(config, device)
    sums = trainer.gradients
    trainer.begin_step(0)
    trainer.compute(all_work(config))
    staged = []
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    for bucket in range(len(sums.buckets)):
        if bucket == len(sums.buckets) // 2:
            sums.poison()
        sums.measure(bucket, sys.float_info.max)
        staged.append(sums.stage(bucket, sums.new_staging()))
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return [sums.on_summed(bucket, part) for bucket, part in enumerate(staged)], sums.norms()


def losses_of_steps(device: torch.device, config: RunConfig, num_steps: int) -> list[float]:
    """The mean loss of each step."""
    trainer = GroupTrainer(config, device)
    return [_train(trainer, config, step) for step in range(num_steps)]


def copied_beside_training(device: torch.device, config: RunConfig) -> tuple[bytes, bytes, bytes]:
    """The state after a step: copied at once; copied by a thread while the next step computes; and after its update."""
    host_copies.BUFFER_BYTES = 10_007  # so that there are many batches
    trainer = GroupTrainer(config, device)
    _train(trainer, config, 0)
    before = _whole_state(trainer)
    copy = trainer.state_copy()
    memory = mmap.mmap(-1, copy.num_bytes)
    thread = threading.Thread(target=copy.write, args=(memory,))
    thread.start()
    trainer.begin_step(1)
    trainer.compute(all_work(config))
    thread.join()
    loss_sum = reduce_alone(trainer).loss_sum
    trainer.update(loss_sum)
    return before, memory[:], _whole_state(trainer)


def _whole_state(trainer: GroupTrainer) -> bytes:
    copy = trainer.state_copy()
    memory = mmap.mmap(-1, copy.num_bytes)
    copy.write(memory)
    return memory[:]


def _train(trainer: GroupTrainer, config: RunConfig, step: int) -> float:
    trainer.begin_step(step)
    trainer.compute(all_work(config))
    return trainer.update(reduce_alone(trainer).loss_sum).loss
