"""Computes audited microbatches once more, as one rank of a group that is alone, and prints their digests as JSON."""

import os
import sys
from datetime import timedelta
from pathlib import Path

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.codec import decode, encode
from spare_megatron.machine.gpus import name_in_torch
from spare_megatron.process.processes import die_with, set_gpu_environment
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.tools.replay.replay_ranks import OfRank, Recomputed, ReplayTask


def replayed(config: RunConfig, task: ReplayTask) -> OfRank:
    """What this rank finds. Collective over: all ranks of the group."""
    import torch.distributed as dist

    from spare_megatron.mcore.trainer import GroupTrainer
    from spare_megatron.rank.bootstrap import choose_device

    device = choose_device(config, name_in_torch("cpu" if task.rank.gpu is None else "gpu"), task.rank.number)
    timeout_s = config.control.startup_timeout_s
    host, port = task.store
    own_config = config.with_stages(task.stages)
    dist.init_process_group(
        "nccl" if device.type != "cpu" else "gloo",
        store=open_store(TcpStoreSpec(host=host, port=port)).rendezvous("replay", task.rank.rank, timeout_s),
        rank=task.rank.rank,
        world_size=own_config.parallel.ranks_per_group,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    trainer = GroupTrainer(own_config, device, slabs=config.slabs)
    microbatches = [Microbatch(ShardId(shard), index) for shard, index in task.wanted.microbatches]
    trainer.begin_step(task.wanted.step)
    trainer.audit(microbatches)
    found = []
    for microbatch in microbatches:
        number = microbatch.shard * config.spare.ramp.at(task.wanted.step) + microbatch.index
        boundaries = trainer.passes.boundaries(microbatch)
        samples = trainer.corpus.addresses(task.wanted.step, number)
        found.append(Recomputed(boundaries=boundaries, number=number, samples=samples))
    return found


def main() -> None:
    config_file, parent, text = sys.argv[1:]
    task = decode(text, ReplayTask)
    die_with(int(parent))  # before the imports, which take seconds
    config = load_run_config(Path(config_file)).config
    if config.cluster.device == "gpu":
        set_gpu_environment(config.parallel)
    import torch

    from spare_megatron.mcore.model.training_samples import prepare_index

    torch.set_num_threads(config.cluster.threads_per_rank)
    if task.rank.rank == 0:
        prepare_index(config)  # the other ranks wait for this one
    print("replayed", encode(replayed(config, task)), flush=True)
    torch.distributed.barrier()  # an earlier exit would break connections that others read from
    os._exit(0)  # a program may have started threads


if __name__ == "__main__":
    main()
