"""Computes audited microbatches once more, as one rank of a group that is alone, and prints their digests as JSON."""

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.data import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.rank.bootstrap import choose_device
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """What one rank is to compute: `microbatches` (shard, index) of a step, with the parameters that `config` loads.

    `meeting` is the file in which the ranks of the group meet.
    """

    config: str
    meeting: str
    rank: int
    device: str
    step: int
    microbatches: list[tuple[int, int]]


def replayed(config: RunConfig, task: ReplayTask) -> list[dict[str, Any]]:
    """Of each microbatch the boundaries on this rank, its linear number, and the addresses of its sequences.

    Collective over: all ranks of the group.
    """
    device = choose_device(config, task.device, task.rank)
    num_ranks = config.parallel.ranks_per_group
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(task.meeting, num_ranks),
        rank=task.rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=config.control.startup_timeout_s),
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
    config = load_run_config(Path(task.config)).config
    torch.set_num_threads(config.cluster.threads_per_rank)
    if task.rank == 0:
        prepare_index(config)  # the other ranks wait for this one
    print("replayed", json.dumps(replayed(config, task)), flush=True)
    dist.barrier()  # an earlier exit would break connections that others read from
    os._exit(0)  # a program may have started threads


if __name__ == "__main__":
    main()
