"""What ranks of a group are asked to do for tests of states that are taken over."""

from dataclasses import dataclass, replace

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.pieces import Piece
from spare_megatron.mcore.state import ForeignState
from spare_megatron.mcore.tensor_bytes import TensorBytes
from spare_megatron.mcore.trainer import GroupTrainer, UpdateResult
from tests.integration.mcore_group import CPU, all_work, reduce_alone

_ODD = 997
"""Bytes of a piece: ends in the middle of tensors and of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """What became of two trainers, one of which has taken over the state of the other.

    Attributes:
        params: Digests of the donor's parameters before, of both right after, and of both some steps later.
        later: What the last update said on both.
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


def hand_over(donor: GroupTrainer, newcomer: GroupTrainer) -> int:
    """The donor's state into the newcomer, in many small pieces; returns its bytes."""
    outgoing = donor.outgoing_state()
    incoming = newcomer.incoming_state(outgoing.description)
    for start in range(0, outgoing.tensors.num_bytes, _ODD):
        piece = Piece(start, min(start + _ODD, outgoing.tensors.num_bytes))
        incoming.tensors.write(piece, memoryview(bytearray(outgoing.tensors.read(piece))))
    incoming.install()
    return outgoing.tensors.num_bytes


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
    return trainer.update(0.0)


def _whole(tensors: TensorBytes) -> bytes:
    return tensors.read(Piece(0, tensors.num_bytes))
