"""What ranks of a group are asked to do for tests of states that are taken over."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.peers.peer_group import PeerGroup
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.corruption import flip_bit
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.group_checkpoint import AnyOptimizer
from spare_megatron.mcore.optimizer import optimizer
from spare_megatron.mcore.state import ForeignState
from spare_megatron.mcore.trainer import GroupTrainer, UpdateResult
from tests.integration.mcore_group import CPU, agreed_loss, all_work, reduce_alone

_ODD = 997
"""Bytes of a piece: ends in the middle of tensors and of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """What became of two trainers, one of which has taken over the state of the other.

    Attributes:
        params: Digests of the donor's parameters before, of both right after, and of both some steps later.
        later: What the last update returned on both.
        states: All bytes of both, some steps later.
        num_bytes: Bytes taken over.
    """

    params: tuple[str, str, str, str, str]
    later: tuple[UpdateResult, UpdateResult]
    states: tuple[bytes, bytes]
    num_bytes: int


def take_over(config: RunConfig, num_steps: int) -> TakenOver:
    """Some steps on one trainer, its state into a new one, and as many steps on both."""
    donor = GroupTrainer(config, CPU)
    for step in range(num_steps):
        _train(donor, config, step)
    newcomer = GroupTrainer(config, CPU)
    before = donor.params_sha256()
    num_bytes = hand_over(donor, newcomer)
    after = donor.params_sha256(), newcomer.params_sha256()
    for step in range(num_steps, 2 * num_steps):
        later = _train(donor, config, step), _train(newcomer, config, step)
    return TakenOver(
        params=(before, *after, donor.params_sha256(), newcomer.params_sha256()),
        later=later,
        states=(_whole(donor.outgoing_state().tensors), _whole(newcomer.outgoing_state().tensors)),
        num_bytes=num_bytes,
    )


def through_a_file(config: RunConfig, num_steps: int, folder: Path) -> tuple[bytes, bytes]:
    """All bytes of the state of a trainer after some steps, and of one that has loaded the file of it."""
    donor, newcomer = GroupTrainer(config, CPU), GroupTrainer(config, CPU)
    for step in range(num_steps):
        _train(donor, config, step)
    path = folder / f"{dist.get_rank()}.state"
    donor.save_state(path)
    newcomer.load_state([path])
    return _whole(donor.outgoing_state().tensors), _whole(newcomer.outgoing_state().tensors)


def rests(config: RunConfig, num_steps: int) -> tuple[list[str], list[str]]:
    """Digests of what the state has beside parameters, and of these: of a trainer after some steps, of one that has
    trained as long, of one that has taken its state over, and of that with a moment, and then a count, changed.
    """
    donor, other = GroupTrainer(config, CPU), GroupTrainer(config, CPU)
    for step in range(num_steps):
        _train(donor, config, step)
        _train(other, config, step)
    newcomer = GroupTrainer(config, CPU)
    hand_over(donor, newcomer)
    found = [(one.rest_of_state().hexdigest(), one.params_sha256()) for one in (donor, other, newcomer)]
    flip_bit(newcomer.moments(), 0)
    found.append((newcomer.rest_of_state().hexdigest(), newcomer.params_sha256()))
    _count_one_more(newcomer._optimizer)
    found.append((newcomer.rest_of_state().hexdigest(), newcomer.params_sha256()))
    return [rest for rest, _ in found], [params for _, params in found]


def biases_taken_over(config: RunConfig) -> tuple[list[str], list[np.ndarray]]:
    """Digests of the parameters of a mixture after two steps, of a new trainer, of that once it has taken the state
    over, and of that with one bias changed; and all biases of the first.
    """
    donor, newcomer = GroupTrainer(config, CPU), GroupTrainer(config, CPU)
    for step in range(2):
        _train(donor, config, step)
    digests = [one.params_digest().hexdigest() for one in (donor, newcomer)]
    hand_over(donor, newcomer)
    digests.append(newcomer.params_digest().hexdigest())
    next(newcomer.slabs[0].gradients.experts.biases())[1][0] += 1.0
    digests.append(newcomer.params_digest().hexdigest())
    return digests, [biases.numpy() for _, biases in donor.slabs[0].gradients.experts.biases()]


def _count_one_more(own: AnyOptimizer) -> None:
    if isinstance(own, optimizer.Optimizer):
        adam = optimizer.parts_of(own.megatron)[-1].optimizer
        next(iter(adam.state.values()))["step"] += 1.0
    else:
        own.schedule.num_steps += 1


def updates_counted(config: RunConfig, num_updates: int) -> list[set[float]]:
    """What optimizers of an fp32 model believe to have done that take over the state after some updates.

    The first three are torch's: with its own state, as a checkpoint of partitions has it, and that of a fused Adam,
    which counts updates in its parameter groups alone. The others are fused ones, before and after they load the first
    two states.
    """
    trainer = GroupTrainer(config, CPU)
    first, second = (optimizer.Optimizer(config, trainer.chunks, trainer.process_groups) for _ in range(2))
    for _ in range(num_updates):
        first.step()
    own, of_fused = first.state_dict(), first.state_dict()
    of_fused["megatron"] = copy.deepcopy(of_fused["megatron"])
    for of_parameter in of_fused["megatron"]["state"].values():
        del of_parameter["step"]
    of_partitions = copy.deepcopy(of_fused)
    of_partitions["megatron"]["state"]["common_step"] = torch.tensor(float(num_updates))
    found = []
    for state in (own, of_partitions, of_fused):
        second.load_state_dict(copy.deepcopy(state))
        found.append({float(each["step"]) for each in second.megatron.optimizer.state.values()})
    optimizer.USING_PYTORCH_OPTIMIZER = False
    for state in (own, of_partitions):
        second.megatron = _FusedAdam()
        found.append(set(second.update_counts()[1:]))
        second.load_state_dict(copy.deepcopy(state))
        found.append(set(second.update_counts()))
    return found


class _FusedAdam:
    """Takes what transformer-engine's does: two moments of each parameter, and nothing else. Its groups of parameters
    have a count of updates from the first one on.
    """

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [number]} for number in range(2)]

    def get_parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(1)]

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": self.param_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, of_parameter in state["state"].items():
            if set(of_parameter) != {"exp_avg", "exp_avg_sq"}:
                raise KeyError(f"{key}: {set(of_parameter)}")


def hand_over(donor: GroupTrainer, newcomer: GroupTrainer) -> int:
    """The donor's state into the newcomer, in many small pieces; returns its bytes."""
    outgoing = donor.outgoing_state()
    incoming = newcomer.incoming_state(outgoing.description)
    with incoming.tensors.writing() as writer:
        for start in range(0, outgoing.tensors.num_bytes, _ODD):
            piece = Piece(start, min(start + _ODD, outgoing.tensors.num_bytes))
            writer.room(piece.size)[:] = outgoing.tensors.read(piece)
            writer.write(piece)
    incoming.install()
    return outgoing.tensors.num_bytes


def peers_hand_over(config: RunConfig, folder: Path) -> tuple[bytes, bytes, bytes]:
    """All bytes of one group's state, and those of another's before it took them over and after."""
    donor, newcomer = (PeerGroup(config, number, folder) for number in range(2))
    trained = donor.state()
    trained["tensors"] += 1
    donor.load_state(trained)
    before = newcomer.state()["tensors"].numpy().tobytes()
    newcomer.load_state(donor.state())
    return trained["tensors"].numpy().tobytes(), before, newcomer.state()["tensors"].numpy().tobytes()


def refusal_of_another_model(config: RunConfig) -> str:
    """What a trainer raised that was to take over the state of a wider model."""
    wide = replace(config, model=replace(config.model, hidden_size=2 * config.model.hidden_size))
    description = GroupTrainer(wide, CPU).outgoing_state().description
    try:
        GroupTrainer(config, CPU).incoming_state(description)
    except ForeignState as error:
        return str(error)
    return ""


def _train(trainer: GroupTrainer, config: RunConfig, step: int) -> UpdateResult:
    trainer.begin_step(step)
    trainer.compute(all_work(config))
    reduce_alone(trainer)
    return trainer.update(agreed_loss(trainer))


def _whole(tensors: TensorBytes) -> bytes:
    return bytes(tensors.read(Piece(0, tensors.num_bytes)))
