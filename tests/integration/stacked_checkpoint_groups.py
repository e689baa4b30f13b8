"""Tasks of ranks with checkpoints of state partitions: each rank holds a trainer for its position in every group."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.group_checkpoint import join_partitions
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, PartitionId
from tests.integration import stacked_groups as groups
from tests.integration.checkpoint_group import Curve
from tests.integration.mcore_group import CPU

PARTITIONED, WHOLE = "partitioned", "whole"


def save_both_ways(config: RunConfig, folder: Path, before: int, after: int) -> Curve:
    """Trains with stacked state and, beside it, with all state in one group; writes a checkpoint of each; trains on.

    Returns:
        The curve of what came after.
    """
    trainers, hosts = groups.build_groups(config), groups.first_hosts(config).hosts
    whole_state = GroupTrainer(groups.replicated(config), CPU)
    all_trainers = [*trainers, whole_state]
    train(all_trainers, hosts, config, range(before))
    ranks = dist.new_group(backend="gloo")
    owners = [row[-1] for row in hosts]
    write_partitions(trainers, owners, folder / PARTITIONED, ranks)
    _make(folder / WHOLE, ranks)
    state = whole_state.checkpoint_state()
    state.copy()
    state.write(folder / WHOLE, ranks, lambda: None)
    return train(all_trainers, hosts, config, range(before, before + after))


def write_partitions(
    trainers: Sequence[GroupTrainer], owners: Sequence[int], folder: Path, ranks: dist.ProcessGroup
) -> None:
    """Every group writes the partitions that it owns, and one of them twice; the first all else."""
    for group, trainer in enumerate(trainers):
        mine = [PartitionId(number) for number, owner in enumerate(owners) if owner == group]
        state = trainer.checkpoint_state(sorted(groups.stacked(trainer).hosted), has_rest=group == 0)
        state.copy()
        if group == 0:
            _make(folder, ranks)
            state.write(folder, ranks, lambda: None)
        _make(folder / f"slices-{group}", ranks)
        state.write(folder / f"slices-{group}", ranks, lambda: None, mine)
        for number in sorted(groups.stacked(trainer).hosted - set(mine))[: group == 1]:
            _make(folder / "slices-again", ranks)
            state.write(folder / "slices-again", ranks, lambda: None, [number])
    if ranks.rank() == 0:
        join_partitions(folder, [*(f"slices-{group}" for group in range(len(trainers))), "slices-again"])
    dist.barrier(ranks)


def load_and_train_both_ways(config: RunConfig, folder: Path, before: int, after: int) -> list[tuple[Curve, str]]:
    """Goes on from a checkpoint of partitions, and from one of all state, with stacked and with whole state each.

    Returns:
        The curve and the digest of the parameters of the four.
    """
    hosts = groups.first_hosts(config).hosts
    answers = []
    for name in (PARTITIONED, WHOLE):
        trainers = groups.build_groups(config)
        for group, trainer in enumerate(trainers):
            stack = groups.first_hosts(config).stack(GroupId(group))
            trainer.load_checkpoint(folder / name, [PartitionId(shard) for shard in stack])
        whole_state = GroupTrainer(groups.replicated(config), CPU)
        whole_state.load_checkpoint(folder / name)
        for number, row in enumerate(hosts):
            states = {
                groups.stacked(trainers[group]).read_piece(PartitionId(number), piece)
                for group in row
                for piece in range(groups.stacked(trainers[group]).partitions.num_pieces(PartitionId(number)))
            }
            assert len(states) == 1
        curve = train([*trainers, whole_state], hosts, config, range(before, before + after))
        answers += [(curve, digest(trainer)) for trainer in (trainers[0], whole_state)]
    return answers


def load_and_save_both_ways(config: RunConfig, folder: Path, into: Path) -> list[str]:
    """Loads both checkpoints, with stacked and with whole state each, and writes all four again at once. Returns the
    digests of the model's parameters.
    """
    hosts, ranks = groups.first_hosts(config).hosts, dist.new_group(backend="gloo")
    _make(into, ranks)
    digests = []
    for name in (PARTITIONED, WHOLE):
        trainers = groups.build_groups(config)
        for group, trainer in enumerate(trainers):
            stack = groups.first_hosts(config).stack(GroupId(group))
            trainer.load_checkpoint(folder / name, [PartitionId(shard) for shard in stack])
        write_partitions(trainers, [row[-1] for row in hosts], into / f"{name}-{PARTITIONED}", ranks)
        whole_state = GroupTrainer(groups.replicated(config), CPU)
        whole_state.load_checkpoint(folder / name)
        _make(into / f"{name}-{WHOLE}", ranks)
        state = whole_state.checkpoint_state()
        state.copy()
        state.write(into / f"{name}-{WHOLE}", ranks, lambda: None)
        digests += [digest(trainer) for trainer in (*trainers, whole_state)]
    return digests


def train(trainers: Sequence[GroupTrainer], hosts: Sequence[Sequence[int]], config: RunConfig, steps: range) -> Curve:
    """The last trainer has all state; all apply the same sums and come to the same."""
    curve = []
    stacked = trainers[:-1]
    for step in steps:
        total, loss = groups.summed(stacked, config, step)
        results = {groups.updated(trainer, total, loss) for trainer in trainers}
        groups.gather(stacked, [row[-1] for row in hosts])
        assert len({digest(trainer) for trainer in trainers}) == 1
        (result,) = results
        curve.append((result.loss, result.grad_norm, result.learning_rate))
    return curve


def digest(trainer: GroupTrainer) -> str:
    """Of the parameters as the model computes with them."""
    values = [values.view(torch.uint8).numpy().tobytes() for values in groups.model_values(trainer)]
    return hashlib.sha256(b"".join(values)).hexdigest()


def contents(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """All tensors of a checkpoint whole, as torch alone reads them, and what is the same on all ranks."""
    metadata = torch_checkpoint.FileSystemReader(folder).read_metadata()
    tensors = {
        key: torch.empty(found.size, dtype=found.properties.dtype)
        for key, found in metadata.state_dict_metadata.items()
        if isinstance(found, torch_checkpoint.TensorStorageMetadata)
    }
    torch_checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors, torch.load(folder / "common.pt")


def _make(folder: Path, ranks: dist.ProcessGroup) -> None:
    if ranks.rank() == 0:
        folder.mkdir()
    dist.barrier(ranks)
