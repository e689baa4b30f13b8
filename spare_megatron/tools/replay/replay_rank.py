"""Computes audited microbatches once more, as one rank of a group that is alone, and prints their digests as JSON."""

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.process.processes import die_with, set_gpu_environment
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import TcpStoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """What one rank is to compute: `microbatches` (shard, index) of a step, with the parameters that `config` loads."""

    config: str
    parent: int
    """The process that starts it, and with which it ends."""
    store: tuple[str, int]
    """Host and port of the store by which the ranks of the group meet."""
    rank: int
    device: str
    number: int
    """Of the rank among those that may share its device."""
    step: int
    microbatches: list[tuple[int, int]]


def replayed(config: RunConfig, task: ReplayTask) -> list[dict[str, Any]]:
    """Of each microbatch the boundaries on this rank, its linear number, and the addresses of its sequences.

    Collective over: all ranks of the group.
    """
    import torch.distributed as dist

    from spare_megatron.mcore.trainer import GroupTrainer
    from spare_megatron.rank.bootstrap import choose_device

    device = choose_device(config, task.device, task.number)
    timeout_s = config.control.startup_timeout_s
    host, port = task.store
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=open_store(TcpStoreSpec(host=host, port=port)).rendezvous("replay", task.rank, timeout_s),
        rank=task.rank,
        world_size=config.parallel.ranks_per_group,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    trainer = GroupTrainer(config, device)
    microbatches = [Microbatch(ShardId(shard), index) for shard, index in task.microbatches]
    trainer.begin_step(task.step)
    trainer.audit(microbatches)
    found = []
    for microbatch in microbatches:
        number = microbatch.shard * config.spare.ramp.at(task.step) + microbatch.index
        boundaries = trainer.passes.boundaries(microbatch)
        samples = trainer.corpus.addresses(task.step, number)
        found.append({"boundaries": boundaries, "number": number, "samples": samples})
    return found


def main() -> None:
    task = ReplayTask(**json.loads(sys.argv[1]))
    die_with(task.parent)  # before the imports, which take seconds
    config = load_run_config(Path(task.config)).config
    if config.cluster.device == "gpu":
        set_gpu_environment(config.parallel)
    import torch

    from spare_megatron.mcore.model.training_samples import prepare_index

    torch.set_num_threads(config.cluster.threads_per_rank)
    if task.rank == 0:
        prepare_index(config)  # the other ranks wait for this one
    print("replayed", json.dumps(replayed(config, task)), flush=True)
    torch.distributed.barrier()  # an earlier exit would break connections that others read from
    os._exit(0)  # a program may have started threads


if __name__ == "__main__":
    main()
