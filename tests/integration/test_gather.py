"""The parameters of one rank as they are gathered, in the staging buffers of its reductions."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from spare_megatron.comm.bucket_exchange import Staging
from spare_megatron.comm.communicators import MOVED_ON
from spare_megatron.core.log.actions import GatherParams
from spare_megatron.core.log.bucket_window import MAX_STAGED
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.state.rank_context import RankProgress
from spare_megatron.state.stacked.params_gather import ParamsGather
from spare_megatron.store.interface import StoreLost
from tests.rank_context import rank_context

LENGTHS = (40, 40, 23)
OWNERS = (Member(GroupId(0)), Member(GroupId(3)), Member(GroupId(3)))
MEMBERS = (GroupId(0), GroupId(3))
HEAD = 7
"""Entries of the log that have been read."""


class Optimizer:
    """StatePartitions that are full of numbers of their group."""

    device = torch.device("cpu")

    def __init__(self, group: int, dtype: torch.dtype) -> None:
        self.values_dtype = dtype
        numbers = range(len(LENGTHS))
        self.values = [100.0 * group + torch.arange(LENGTHS[number], dtype=dtype) for number in numbers]
        self.partitions = SimpleNamespace(numbers=numbers, length=LENGTHS.__getitem__)

    def read_values(self, number: PartitionId, start: int, out: torch.Tensor) -> None:
        out.copy_(self.values[number][start : start + len(out)])

    def write_values(self, number: PartitionId, start: int, values: torch.Tensor) -> None:
        self.values[number][start : start + len(values)] = values


class Agreement:
    """A group of one rank, and what the store says to it."""

    def __init__(self, index: int) -> None:
        self.member = Member(MEMBERS[index])
        self.written: set[int] = set()
        self.broken: dict[int, str] = {}
        self.is_store_there = True
        self.num_questions = 0

    def highest(self, value: int) -> int:
        return value

    def is_written(self, index: int) -> bool:
        self.num_questions += 1
        if not self.is_store_there:
            raise StoreLost("the control store does not answer")
        return index in self.written

    def is_over(self, index: int) -> bool:
        return self.is_written(index) or index in self.broken

    def report_broken(self, index: int, cause: str) -> str:
        return cause if self.is_written(index) else self.broken.setdefault(index, f"group 0: {cause}")


class Communicator:
    """Fills the rows of the other member, round by round, when it is waited for; where it has none, it breaks, or is
    waited for in vain.
    """

    evidence = "connection: reset"
    error: Exception | None = None
    members = MEMBERS
    waits_for_ever = False

    def __init__(self, others: list[torch.Tensor], other: int) -> None:
        self.others, self.other = deque(others), other
        self.sent: list[torch.Tensor] = []
        self.in_flight: deque[torch.Tensor] = deque()
        self.most_in_flight = self.num_complete = 0

    def start_attempt(self) -> None:
        pass

    def connect(self, _is_decided: Callable[[], bool]) -> bool:
        return True

    def post_gather(self, received: torch.Tensor, mine: torch.Tensor) -> bool:
        assert received.is_contiguous()
        received.zero_()
        received[1 - self.other].copy_(mine)
        self.sent.append(mine.clone())
        self.in_flight.append(received)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return True

    def wait(self, is_decided: Callable[[], bool]) -> bool:
        is_over = is_decided()
        if not self.others:
            assert is_over or not self.waits_for_ever, "nothing ends the wait"
            if is_over:
                self.evidence = MOVED_ON
            return False
        self.in_flight.popleft()[self.other].copy_(self.others.popleft())
        self.num_complete += 1
        return True

    def poll(self) -> int:
        num_complete, self.num_complete = self.num_complete, 0
        return num_complete

    def give_up(self) -> None:
        self.in_flight.clear()

    def find_error(self) -> None:
        pass


class Rank:
    """A gather and what it is made of here."""

    def __init__(self, index: int, dtype: torch.dtype, others: list[torch.Tensor]) -> None:
        self.stagings: list[torch.Tensor] = []
        self.optimizer = Optimizer(MEMBERS[index], dtype)
        self.communicator = Communicator(others, 1 - index)
        self.agreement = Agreement(index)
        self.staging = Staging(self._new_staging)
        self.progress = RankProgress(lacks_params=True)
        parts = {"communicators": [self.communicator], "progress": self.progress}
        ctx = rank_context(self.agreement.member, agreement=self.agreement, head=HEAD, **parts)
        self.gather = ParamsGather(ctx, self.optimizer, self.staging)

    def run(self) -> None:
        self.gather.run(GatherParams(step=0, owners=OWNERS))

    def _new_staging(self) -> torch.Tensor:
        self.stagings.append(torch.full((13,), 7, dtype=torch.int64))
        return self.stagings[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_come_through_three_staging_buffers_of_any_kind(dtype: torch.dtype) -> None:
    nothing = [torch.zeros(())] * 100
    sent_by_1 = Rank(1, dtype, nothing)
    sent_by_1.run()
    rank = Rank(0, dtype, sent_by_1.communicator.sent)
    bucket = rank.staging.acquire()
    rank.staging.release(bucket)
    rank.run()
    assert not rank.progress.lacks_params
    expected = [
        100.0 * owner.group + torch.arange(length, dtype=dtype) for owner, length in zip(OWNERS, LENGTHS, strict=True)
    ]
    assert all(map(torch.equal, rank.optimizer.values, expected))
    assert rank.stagings[0] is bucket, "a buffer of the reduction"
    assert len(rank.stagings) == rank.communicator.most_in_flight == MAX_STAGED


def test_buffers_in_use_when_a_gather_broke_are_not_used_again() -> None:
    rank = Rank(0, torch.float32, [torch.zeros(())])
    rank.run()
    assert rank.progress.lacks_params
    under_way = {staging.data_ptr() for staging in rank.stagings}
    assert len(under_way) == MAX_STAGED
    assert under_way.isdisjoint(rank.staging.acquire().data_ptr() for _ in range(MAX_STAGED))


def test_a_rank_that_sees_a_gather_break_reports_it() -> None:
    rank = Rank(0, torch.float32, [torch.zeros(())])
    rank.run()
    assert rank.agreement.broken == {HEAD: "group 0: connection: reset"}
    assert (rank.progress.lacks_params, rank.progress.gather_evidence) == (True, "connection: reset")


def test_a_waiting_rank_gives_up_as_soon_as_a_broken_gather_is_reported() -> None:
    rank = Rank(0, torch.float32, [torch.zeros(())])
    rank.communicator.waits_for_ever = True
    reported = rank.agreement.broken[HEAD] = "group 1: connection: reset"
    rank.run()
    assert rank.agreement.broken == {HEAD: reported}
    assert (rank.progress.lacks_params, rank.progress.gather_evidence) == (True, reported)


def test_parameters_that_arrive_without_the_store_are_taken_before_the_store_counts_as_lost() -> None:
    """The partitions are updated, so a rank that exits without their parameters has nothing to save."""
    rank = Rank(0, torch.float32, [torch.zeros(())] * 100)
    rank.agreement.is_store_there = False
    with pytest.raises(StoreLost):
        rank.run()
    assert not rank.progress.lacks_params
    assert rank.agreement.num_questions == 1, "each may take as long as the store is waited for"


def test_without_the_store_a_gather_may_break() -> None:
    rank = Rank(0, torch.float32, [torch.zeros(())])
    rank.agreement.is_store_there = False
    with pytest.raises(StoreLost):
        rank.run()
    assert rank.progress.lacks_params
    assert rank.agreement.broken == {}


def test_a_broken_gather_is_not_reported_once_the_log_has_the_next_entry() -> None:
    rank = Rank(0, torch.float32, [torch.zeros(())])
    rank.communicator.waits_for_ever = True
    rank.agreement.written.add(HEAD)
    rank.run()
    assert rank.agreement.broken == {}
    assert rank.progress.lacks_params


def test_a_gather_that_completes_reports_nothing() -> None:
    rank = Rank(0, torch.float32, [torch.zeros(())] * 100)
    rank.run()
    assert rank.agreement.broken == {}
    assert (rank.progress.lacks_params, rank.progress.gather_evidence) == (False, "")


@pytest.mark.parametrize("number", [0, 5])
def test_parameters_that_contradict_their_checksum_have_not_come(number: int) -> None:
    sent_by_1 = Rank(1, torch.float32, [torch.zeros(())] * 100)
    sent_by_1.run()
    others = sent_by_1.communicator.sent
    others[number][0] ^= 1 << 9
    rank = Rank(0, torch.float32, others)
    rank.run()
    assert rank.progress.lacks_params
    assert rank.progress.gather_evidence == "gathered parameters contradict their checksums"
    assert rank.agreement.broken == {HEAD: "group 0: gathered parameters contradict their checksums"}
    others[number][0] ^= 1 << 9
    rank.communicator.others.extend(others)
    rank.run()
    assert not rank.progress.lacks_params, "the second gather brings what the first has not"
