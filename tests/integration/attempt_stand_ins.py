"""One rank's attempts with stand-ins: local sums, a communicator that completes sums as late as it may, votes."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from spare_megatron.comm.bucket_exchange import BucketExchange, BucketSums, Staging
from spare_megatron.comm.communicators import MOVED_ON
from spare_megatron.comm.slab_exchanges import SlabExchanges
from spare_megatron.config.schema import ReduceConfig, RunConfig
from spare_megatron.core.audits.suspects import LossWatch
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.core.log.bucket_window import cut
from spare_megatron.core.log.gradient_guard import GradientFinding
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.core.log.votes import Digests, Vote
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import PHASES_OF_A_BUCKET, FaultPoint
from spare_megatron.mcore.gradients.gradients import Totals
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.rank import train_step
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.state.rank_context import RankProgress, StepUnderWay
from spare_megatron.voting.agreement import GroupOpinion, RankOutcome
from spare_megatron.voting.voting import Voting
from tests.rank_context import rank_context

NUM_BUCKETS = 12
MEMBERS = (GroupId(0), GroupId(1))
COMPUTED = [Microbatch(ShardId(0), 0)]


class Sums:
    """Local sums of ones; every bucket holds ten elements, and is staged with whether they are unsound."""

    def __init__(self) -> None:
        self.buckets = cut(10 * NUM_BUCKETS, 10)
        self.local = torch.ones(10 * NUM_BUCKETS)
        self.measured: dict[int, float] = {}
        self.num_reads = 0
        self.stagings: list[torch.Tensor] = []
        self.wrong: dict[int, int] = {}  # bucket -> attempts in which its sum is still to come wrong
        self.checked: list[int] = []
        self.compared: list[int] = []  # before anything is sent
        self.found = ""
        self.kept: list[int] = []
        self.put_back: list[int] = []

    def mark_kept(self, num_kept: int, _num_kept_by_all: int) -> None:
        self.kept.append(num_kept)

    def new_staging(self) -> torch.Tensor:
        self.stagings.append(torch.empty(11))
        return self.stagings[-1]

    def measure(self, bucket: int, _limit: float) -> None:
        self.measured[bucket] = float(torch.linalg.vector_norm(self.of(bucket)))

    def norms(self) -> dict[int, float]:
        self.num_reads += 1
        measured, self.measured = self.measured, {}
        return measured

    def stage(self, bucket: int, staging: torch.Tensor, limit: float | None = None) -> torch.Tensor:
        if limit is not None:
            self.measure(bucket, limit)
        staging[:10] = self.of(bucket)
        staging[10] = not math.isfinite(self.measured.get(bucket, 0.0))
        return staging

    def on_summed(self, bucket: int, staging: torch.Tensor) -> int:
        assert math.isnan(staging[0]) or float(staging[1]) == 2.0, "only what is complete has arrived"
        return int(staging[10])

    def check(self, bucket: int, _staging: torch.Tensor, _places: Sequence[slice]) -> None:
        self.checked.append(bucket)

    def check_local(self, bucket: int) -> None:
        self.compared.append(bucket)

    def check_staged(self, bucket: int, staging: torch.Tensor) -> None:
        assert float(staging[1]) == 1.0, "before anything is sent"
        self.compared.append(bucket)

    def wrong_numbers(self) -> str:
        return self.found

    def wrong_sums(self) -> tuple[int, ...]:
        checked, self.checked = self.checked, []
        found = tuple(bucket for bucket in checked if self.wrong.get(bucket))
        for bucket in found:
            self.wrong[bucket] -= 1
        return found

    def extras(self, staged: torch.Tensor) -> torch.Tensor:
        return staged[-1:]

    def put(self, bucket: int, staging: torch.Tensor, _places: Sequence[slice]) -> None:
        self.put_back.append(bucket)
        self.of(bucket).copy_(staging[:10])

    def of(self, bucket: int) -> torch.Tensor:
        elements = self.buckets[bucket]
        return self.local[elements.start : elements.stop]

    def totals(self) -> Totals:
        return Totals(num_microbatches=(2,) * NUM_BUCKETS, loss=LossSum(0.0, 1))


class Communicator:
    """Two equal members; a sum is complete only when the rank waits for it, and the other dies before some bucket.

    The other's gradients are unsound in bucket `unsound`.
    """

    evidence = ""
    error: Exception | None = None
    error_of_build: Exception | None = None
    ready_at_s = 0.0
    num_posted_bytes = 0

    def __init__(self, num_sums: int) -> None:
        self.num_left = num_sums
        self.is_built = True
        self.in_flight: deque[torch.Tensor] = deque()
        self.most_in_flight = self.num_posted = self.num_summed = 0
        self.unsound: int | None = None
        self.abandoned: list[torch.Tensor] = []
        self._num_complete = 0

    def start_attempt(self) -> None:
        self._num_complete = 0
        self.evidence, self.error = "", None

    def is_ready(self) -> bool:
        return self.is_built

    def connect(self, is_decided: Callable[[], bool]) -> bool:
        if self.error_of_build is None and not is_decided():
            return True
        self.error = self.error_of_build
        self.evidence = f"rebuild: {self.error}" if self.error else MOVED_ON
        return False

    def find_error(self) -> Exception | None:
        return self.error

    def post(self, tensor: torch.Tensor) -> bool:
        assert not any(tensor.data_ptr() == given_up.data_ptr() for given_up in self.abandoned)
        self.in_flight.append(tensor)
        self.num_posted += 1
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return True

    def wait(self, _is_decided: Callable[[], bool]) -> bool:
        if not self.in_flight:
            return False
        if not self.num_left:
            self.abandoned += self.in_flight
            self.in_flight.clear()
            self.evidence = "connection: closed by peer"
            return False
        self.num_left -= 1
        summed = self.in_flight.popleft().mul_(2)
        summed[10] += self.num_summed == self.unsound
        self.num_summed += 1
        self._num_complete += 1
        return True

    def poll(self) -> int:
        num_complete, self._num_complete = self._num_complete, 0
        return num_complete


class Agreement:
    """A group of one rank, or as one rank sees it."""

    is_leader = True
    member = Member(GroupId(0))

    def __init__(self) -> None:
        self.votes: list[Vote] = []
        self.broken: dict[int, str] = {}
        self.head_is_written = False
        self.found = GradientFinding.SOUND  # by another rank
        self.stated = ""  # what its own checks have found wrong

    def is_over(self, index: int) -> bool:
        return self.head_is_written or index in self.broken

    def report_broken(self, index: int, cause: str) -> str:
        return cause if self.head_is_written else self.broken.setdefault(index, f"group 0: {cause}")

    def gathered(self, value: str) -> list[str]:
        return [value]

    def highest(self, value: int) -> int:
        return value

    def settle(self, outcome: RankOutcome) -> GroupOpinion:
        return GroupOpinion(
            is_complete=outcome.is_complete,
            loss=LossSum(0.0, 1),
            num_complete=(outcome.num_complete[0],),
            compute_s=(0.5,),
            finding=max(outcome.finding, self.found),
            wrong_sums=(outcome.wrong_sums.get(0),),
            wrong_positions=(0, 1)[: bool(self.stated)],
            wrong_numbers=(self.stated, "rank 1: another one")[: 2 * bool(self.stated)],
        )


class Votes(Voting):
    """Casts to a list."""

    def vote(self, _attempt: int, vote: Vote, _voters: Sequence[Member]) -> None:
        self.agreement.votes.append(vote)

    def confirm(self) -> None:
        pass


class Probe(SilentProbe):
    heartbeat = SimpleNamespace(spans=SimpleNamespace(passes=SimpleNamespace(total_s=lambda: 0.5)))

    def __init__(self) -> None:
        self.calls: list[FaultPoint] = []
        self.interrupted: list[Operation] = []

    def __call__(self, phase: FaultPoint, /) -> None:
        if phase not in PHASES_OF_A_BUCKET:
            self.calls.append(phase)

    def pace_s(self, _num_chunks: int) -> float:
        return 0.25

    def during(self, operation: Operation, /, *, in_backward: bool = False) -> AbstractContextManager[None]:
        if in_backward:
            self.interrupted.append(operation)
        return nullcontext()


class Rank:
    """The attempts of one rank, and what they are made of here."""

    def __init__(self, num_sums: int, *, overlaps: bool = False, is_alone: bool = True) -> None:
        self.sums, self.communicator = Sums(), Communicator(num_sums)
        self.agreement, self.probe = Agreement(), Probe()
        self.records: list[Any] = []
        self.judged: list[int] = []  # attempts whose losses were judged
        step = StepUnderWay(step=0, started_s=0.0, makespan=1, num_alive=2, computed=COMPUTED)
        self.progress = RankProgress(step=step)
        trainer: Any = SimpleNamespace(
            loss_sum=lambda: LossSum(0.0, 1),
            term_sums=list,
            microbatch_losses=dict,
            memory=tuple,
            checks=SimpleNamespace(found=str),
        )
        exchange = BucketExchange(
            position=0,
            lanes=(0,),
            is_alone=is_alone,
            sums=self.sums,  # type: ignore[arg-type]
            communicator=self.communicator,
            bucket_sums=BucketSums(self.sums, self.communicator),  # type: ignore[arg-type]
            staging=Staging(self.sums.new_staging),
            outlier_factor=0.0,
            probe=self.probe,
        )
        self.buckets = SlabExchanges(trainer, [exchange])
        self.ctx = rank_context(
            config=RunConfig(reduce=ReduceConfig(overlap=overlaps)),
            trainer=trainer,
            communicators=[self.communicator],
            voting=Votes(self.agreement, None, head=lambda: 0, write=self.records.append, probe=self.probe),
            journal=SimpleNamespace(write=self.records.append),
            probe=self.probe,
            progress=self.progress,
        )
        self.parts: Any = SimpleNamespace(
            sums=self.buckets,
            sites=None,
            digests=SimpleNamespace(for_vote=Digests),
            audits=SimpleNamespace(digests=lambda _attempt, _disputed: (), losses=lambda _disputed, has_suspects: ()),
            loss_watch=LossWatch(),
            reports=SimpleNamespace(
                clock=SimpleNamespace(on_reduced=lambda _ready_at_s: None),
                write_suspects=lambda attempt, *_: self.judged.append(attempt),
            ),
        )

    def attempt(self, number: int, *kept: int) -> Vote:
        train_step.attempt_reduce(self.ctx, self.parts, action(number, *kept))
        self.ctx.controller.head += 1
        return self.agreement.votes[-1]

    def compute(self, number: int, *kept: int) -> Callable[[int], None]:
        """Reports ready buckets before the attempt."""
        self.buckets.start_attempt(action(number, *kept))
        return partial(train_step._begin_early(self.ctx, self.parts, action(number, *kept), COMPUTED), 0)

    @property
    def num_posted(self) -> int:
        return self.communicator.num_posted


def action(number: int, *kept: int) -> AttemptReduce:
    voters = tuple(Member(group) for group in MEMBERS)
    return AttemptReduce(step=0, attempt=number, epoch=0, members=MEMBERS, voters=voters, plan_digest="", kept=kept)
