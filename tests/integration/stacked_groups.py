"""Several data-parallel groups with stacked optimizer state in the processes of one, and what they are held against.

Each rank holds a trainer for its position in every group. What the groups would send each other is handed over.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.mcore import trainer as trainer_module
from spare_megatron.mcore.corruption import flip_bit
from spare_megatron.mcore.gradients.partitions import StatePartitions
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.parameters import named_parameters
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.mcore.trainer import GroupTrainer, UpdateResult
from spare_megatron.stacking.layout import GroupId, PartitionId, ShardId
from spare_megatron.stacking.placement import Placement, make_placement
from spare_megatron.tools.bench.plain_megatron import build_rank, train_steps
from tests.integration.mcore_group import CPU, Arrays, agreed_loss, all_work, put_all, staged
from tests.integration.mcore_state_group import hand_over


def first_hosts(config: RunConfig) -> Placement:
    """Partition -> its hosts at the start of a run."""
    return make_placement("golomb", config.layout.num_groups, config.optimizer.redundancy)


def build_groups(config: RunConfig) -> list[GroupTrainer]:
    hosts = first_hosts(config)
    stacks = [hosts.stack(GroupId(group)) for group in range(config.layout.num_groups)]
    return [GroupTrainer(config, CPU, hosted=[PartitionId(shard) for shard in stack]) for stack in stacks]


def stacked(trainer: GroupTrainer) -> StackedOptimizer:
    assert trainer.stacked is not None
    return trainer.stacked


def gather(trainers: Sequence[GroupTrainer], owners: Sequence[int]) -> None:
    """Hands every partition's parameters from its owner to all others."""
    for number, owner in enumerate(owners):
        values = values_of(trainers[owner], PartitionId(number))
        for group, trainer in enumerate(trainers):
            if group != owner:
                stacked(trainer).write_values(PartitionId(number), 0, values)


def values_of(trainer: GroupTrainer, number: PartitionId) -> torch.Tensor:
    dtype = next(trainer.chunks[0].module.parameters()).dtype
    out = torch.empty(stacked(trainer).partitions.length(number), dtype=dtype)
    stacked(trainer).read_values(number, 0, out)
    return out


def summed(trainers: Sequence[GroupTrainer], config: RunConfig, step: int) -> tuple[torch.Tensor, LossSum]:
    """The sum over groups, each of which computes the shard of its number, and the loss."""
    buffers = []
    for group, trainer in enumerate(trainers):
        trainer.begin_step(step)
        trainer.compute([item for item in all_work(config) if item.shard == ShardId(group)])
        buffers.append(staged(trainer))
    whole = torch.stack(buffers).sum(dim=0)
    put_all(trainers[0], whole)
    return whole, agreed_loss(trainers[0])


def updated(trainer: GroupTrainer, total: torch.Tensor, loss: LossSum) -> UpdateResult:
    """Applies a sum over groups."""
    put_all(trainer, total)
    return trainer.update(loss)


def train_both_ways(config: RunConfig, num_steps: int) -> list[tuple[Arrays, UpdateResult, Arrays]]:
    """Trains with stacked state and, beside it, with the whole state in one group that is given the same sums.

    Returns:
        After every step this rank's parameters, what the update gave, and the parameters with whole state. Those with
        stacked state were the same bits in all groups, as was the state of every partition on its hosts.
    """
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    whole_state = GroupTrainer(replicated(config), CPU)
    answers = []
    for step in range(num_steps):
        total, loss = summed(trainers, config, step)
        results = {updated(trainer, total, loss) for trainer in (*trainers, whole_state)}
        assert len(results) == 1
        gather(trainers, [row[-1] for row in hosts])
        assert len({trainer.params_sha256() for trainer in trainers}) == 1
        answers.append((values_by_name(trainers[0]), results.pop(), values_by_name(whole_state)))
    assert_alike_on_hosts(trainers, hosts)
    return answers


def digests_of_changed_state(config: RunConfig) -> list[str]:
    """Of a partition as it is, and after a flipped bit in each kind of number in it, one after the other."""
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    advance(trainers, hosts, config, 0)
    optimizer, number = stacked(trainers[hosts[1][0]]), PartitionId(1)
    digests = [optimizer.state_digest(number).hexdigest()]
    model = [fragment.values for fragment in optimizer.partitions.fragments(number, slice(0, 3))]
    for values in (model[0], *optimizer.whole_partitions()[number]):
        flip_bit([values], 0)
        digests.append(optimizer.state_digest(number).hexdigest())
    return digests


def assert_alike_on_hosts(trainers: Sequence[GroupTrainer], hosts: Sequence[Sequence[int]]) -> None:
    for number, row in enumerate(hosts):
        assert len({stacked(trainers[group]).state_digest(PartitionId(number)).hexdigest() for group in row}) == 1
        for piece in range(stacked(trainers[0]).partitions.num_pieces(PartitionId(number))):
            states = {stacked(trainers[group]).read_piece(PartitionId(number), piece) for group in row}
            assert len(states) == 1
            assert any(states.pop().data)


def replicated(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, sharding="replicated"))


def model_values(trainer: GroupTrainer) -> list[torch.Tensor]:
    return [named.parameter.detach() for named in trainer.parameters_named()]


def values_by_name(trainer: GroupTrainer) -> Arrays:
    return {named.name: named.parameter.detach().float().numpy().copy() for named in trainer.parameters_named()}


# ------------------------------------------------------------------------------------------- a group without state


def repair_a_group(config: RunConfig, piece_elements: int) -> int:
    """A group takes over the parameters after two steps, then the state of a partition, one piece between two steps.

    Returns:
        The pieces.
    """
    trainer_module.StatePartitions = partial(StatePartitions, piece_elements=piece_elements)
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    number, donor = PartitionId(0), trainers[hosts[0][1]]
    for step in range(2):
        advance(trainers, hosts, config, step)
    newcomer = GroupTrainer(config, CPU)
    hand_over(donor, newcomer)
    assert stacked(newcomer).hosted == frozenset()
    num_pieces = stacked(donor).partitions.num_pieces(number)
    for piece in range(num_pieces):
        state = stacked(donor).read_piece(number, piece)
        if piece % 2 == 0:  # an update between reading and installing: the piece is too old
            advance([*trainers, newcomer], hosts, config, 2 + piece)
            assert not stacked(newcomer).install_piece(number, piece, state)
            state = stacked(donor).read_piece(number, piece)
        assert number not in stacked(newcomer).hosted
        assert stacked(newcomer).install_piece(number, piece, state)
    assert stacked(newcomer).hosted == {number}
    advance([*trainers, newcomer], hosts, config, 2 + num_pieces)
    assert_alike_on_hosts([*trainers, newcomer], [(hosts[0][1], len(trainers))])
    return num_pieces


def advance(trainers: Sequence[GroupTrainer], hosts: Sequence[Sequence[int]], config: RunConfig, step: int) -> None:
    """One step of the first groups, applied by all."""
    total, loss = summed(trainers[: config.layout.num_groups], config, step)
    for trainer in trainers:
        updated(trainer, total, loss)
    gather(trainers, [row[0] for row in hosts])
    assert len({trainer.params_sha256() for trainer in trainers}) == 1


# --------------------------------------------------------------------------------------- Megatron's own, and memory


def train_zero(config: RunConfig, num_steps: int) -> Arrays:
    """Parameters of this rank after some steps of plain Megatron with its DistributedOptimizer."""
    divide_world(config)
    for step, chunk in enumerate(train_steps(config, CPU, is_sharded=True), start=1):
        if step == num_steps:
            return {named.name: named.parameter.detach().float().numpy() for named in named_parameters([chunk])}
    raise AssertionError(f"the run has fewer than {num_steps} steps")


def divide_world(config: RunConfig) -> None:
    cpu.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.layout.tensor_parallel,
        pipeline_model_parallel_size=config.layout.pipeline_parallel,
    )


def apply_to_zero(config: RunConfig, num_steps: int) -> Arrays:
    """This rank's parameters after Megatron's DistributedOptimizer has applied gradients that are made up."""
    divide_world(config)
    chunk, optimizer, schedule = build_rank(config, CPU, is_sharded=True)
    for step in range(num_steps):
        make_up_gradients([chunk], step)
        optimizer.step()
        schedule.step(increment=1)
    return {named.name: named.parameter.detach().float().numpy() for named in named_parameters([chunk])}


def apply_to_stacked(config: RunConfig, num_steps: int) -> Arrays:
    """The same by groups with stacked state."""
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    for step in range(num_steps):
        for trainer in trainers:
            make_up_gradients(trainer.chunks, step)
            stacked(trainer).step()
        gather(trainers, [row[0] for row in hosts])
    return values_by_name(trainers[0])


def make_up_gradients(chunks: Sequence[Chunk], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for named in named_parameters(chunks):
        named.main_grad.copy_(torch.randn(named.main_grad.shape, generator=generator) * 1e-3)


def state_bytes(config: RunConfig) -> tuple[int, int, list[int]]:
    """After an update: elements of this rank's parameters, and bytes of optimizer state where all of it is in one
    group, and where it is stacked, in each."""
    trainers, whole_state = build_groups(config), GroupTrainer(replicated(config), CPU)
    total, loss = summed(trainers, config, 0)
    for trainer in (*trainers, whole_state):
        updated(trainer, total, loss)
    parameters = model_values(whole_state)
    optimizer = whole_state._optimizer.megatron
    tensors = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    main = [named.parameter.main_param for named in whole_state.parameters_named() if config.model.precision == "bf16"]
    size = sum(tensor.nbytes for tensor in (*tensors, *main))
    hosted = [stacked(trainer).whole_partitions().values() for trainer in trainers]
    return sum(map(torch.numel, parameters)), size, [sum(state.nbytes for state in states) for states in hosted]


def zero_bytes(config: RunConfig) -> int:
    """The same of this rank of plain Megatron with its DistributedOptimizer."""
    divide_world(config)
    chunk, optimizer, _ = build_rank(config, CPU, is_sharded=True)
    make_up_gradients([chunk], 0)
    optimizer.step()
    (sharded,) = optimizer.chained_optimizers
    tensors = [tensor for state in sharded.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    main = [tensor for group in sharded.shard_fp32_from_float16_groups for tensor in group]
    return sum(tensor.nbytes for tensor in (*tensors, *main))
