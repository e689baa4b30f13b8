"""What ranks are asked to do for tests of copies that are made in the background while training goes on."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import StartRepairs
from spare_megatron.formats.frames import NotOffered
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore import trainer as trainer_module
from spare_megatron.mcore.gradients.partitions import StatePartitions
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import Repair
from spare_megatron.state.stacked.partition_copier import PartitionRepairs, partition_contents
from spare_megatron.state.transfer.piece_server import PieceServer, Source
from spare_megatron.state.transfer.state_transfer import StateSource
from tests.integration.mcore_group import CPU
from tests.integration.mcore_state_group import hand_over
from tests.integration.stacked_groups import build_groups, first_hosts, gather, stacked, summed, updated
from tests.rank_context import rank_context

TIMEOUT_S = 40.0
PIECES_A_STEP = 5


def repair_while_training(config: RunConfig, piece_elements: int, bytes_per_s: float) -> dict[str, int]:
    """A group that came back copies all state partitions of another over the wire, while all groups go on training.

    Returns:
        How many partitions and pieces it took over, and how many steps were made meanwhile.
    """
    trainer_module.StatePartitions = partial(StatePartitions, piece_elements=piece_elements)
    trainers, hosts = build_groups(config), first_hosts(config).hosts
    donor, newcomer = trainers[1], GroupTrainer(config, CPU)
    source = StateSource({content.name: content for content in partition_contents(stacked(donor))})
    meter = _Meter(source)
    server = PieceServer("127.0.0.1", meter, TIMEOUT_S)
    server.start()
    _advance(trainers, hosts, config, 0, source)
    hand_over(donor, newcomer)
    me = Member(GroupId(len(trainers)), 1)
    whom = Member(GroupId(1))
    limited = replace(config, optimizer=replace(config.optimizer, repair_mib_per_s=bytes_per_s / 2**20))
    ctx = rank_context(me, config=limited, servers={whom: server.address})
    contents = partition_contents(stacked(newcomer))
    repairs = PartitionRepairs(ctx, stacked(newcomer), contents, awaits_update=False)
    wanted = sorted(stacked(donor).hosted)
    assert wanted
    repairs.run_in_background()
    asked = tuple(Repair(number, whom, me) for number in wanted)
    all_hosts = tuple(tuple(Member(GroupId(group)) for group in row) for row in hosts)
    repairs.assign(StartRepairs(repairs=asked, hosts=all_hosts))
    step, end_s = 1, time.monotonic() + TIMEOUT_S
    while not all(repairs.whole().values()):
        assert time.monotonic() < end_s, repairs.whole()
        meter.give(PIECES_A_STEP, lambda: all(repairs.whole().values()) or time.monotonic() > end_s)
        _advance([*trainers, newcomer], hosts, config, step, source)
        step += 1
    _advance([*trainers, newcomer], hosts, config, step, source)
    partitions = stacked(donor).partitions
    _assert_same_partitions(donor, newcomer, wanted)

    # The log names it a host of the first, and wants no more of the others.
    as_host = tuple((*row, me) if number == wanted[0] else row for number, row in enumerate(all_hosts))
    repairs.assign(StartRepairs(repairs=(), hosts=as_host))
    assert {number for number in stacked(newcomer).hosted if partitions.length(number)} == {wanted[0]}
    _advance([*trainers, newcomer], hosts, config, step + 1, source)
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pieces"]
    num_pieces = sum(partitions.num_pieces(number) for number in wanted)
    return {"partitions": len(wanted), "pieces": num_pieces, "steps": step - 1}


def _assert_same_partitions(donor: GroupTrainer, newcomer: GroupTrainer, numbers: Sequence[PartitionId]) -> None:
    for number in numbers:
        for piece in range(stacked(donor).partitions.num_pieces(number)):
            assert stacked(donor).read_piece(number, piece) == stacked(newcomer).read_piece(number, piece)
    assert stacked(newcomer).hosted == stacked(donor).hosted


class _Meter:
    """Gives so many pieces a step: steps this small, in this same process, would leave no time for any."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._num_left = 0
        self._changed = threading.Condition()

    def give(self, number: int, is_over: Callable[[], bool]) -> None:
        """Returns when so many pieces more have been given, or it is over."""
        with self._changed:
            self._num_left += number
            self._changed.notify_all()
            while self._num_left and not is_over():
                self._changed.wait(0.01)

    def read(self, name: str, step: int, piece: Piece) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_left, TIMEOUT_S):
                raise NotOffered("no step was made for too long")
            self._num_left -= 1
            self._changed.notify_all()
        return self._source.read(name, step, piece)


def _advance(
    trainers: Sequence[GroupTrainer], hosts: Sequence[Sequence[int]], config: RunConfig, step: int, source: StateSource
) -> None:
    """One step of the first groups, applied by all. The state may be read while they compute."""
    total, loss = summed(trainers[: config.layout.num_groups], config, step)
    with source.changing(step + 1):
        for trainer in trainers:
            updated(trainer, total, loss)
    gather(trainers, [row[0] for row in hosts])
    assert len({trainer.params_sha256() for trainer in trainers}) == 1
