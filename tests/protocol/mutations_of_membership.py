"""Mutations of pauses and drains: bugs planted where groups wait for others to come back, or leave by request."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import Action, AppendEntry, AttemptReduce, ComputePatch, ComputeStep
from spare_megatron.core.log.entries import Commit, Fence, Resume, Retry
from spare_megatron.core.log.events import HostsRead
from spare_megatron.core.log.membership import Change
from spare_megatron.core.saves.checkpoint_policy import Saves
from spare_megatron.core.saves.checkpoint_validity import CheckpointValidity
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch, StepPlan
from tests.protocol.buckets import Buckets
from tests.protocol.communicators import Sums
from tests.protocol.mutations import Protocol, given


class ResumesWithoutHosts(Controller):
    """Resumes with the first group that comes back."""

    def _await_hosts(self, event: HostsRead, now_s: float) -> tuple[Action, ...]:
        asked = tuple(self.not_fenced(event.waiting))
        if self.pause is None or not asked:
            return super()._await_hosts(event, now_s)
        entry = Resume(step=self.step, attempt=self.attempt, admit=asked)
        return (AppendEntry(index=self.head, entry=entry), self.pause)


class KeepsBucketsInAPause(Controller):
    """Resumes with the buckets that the attempt before the pause kept."""

    _kept: tuple[int, ...] = ()

    def _retry(self, retry: Retry) -> tuple[Action, ...]:
        self._kept = retry.kept
        return super()._retry(retry)

    def _resume(self, change: Change) -> tuple[Action, ...]:
        kept = self._kept
        return tuple(_with_kept(action, kept) for action in super()._resume(change))


def _with_kept(action: Action, kept: tuple[int, ...]) -> Action:
    if isinstance(action, AttemptReduce):
        return replace(action, kept=kept)
    if isinstance(action, ComputeStep | ComputePatch) and action.into is not None:
        return replace(action, into=replace(action.into, kept=kept))
    return action


class CountsKeptBucketsTwice(Buckets):
    """Computes from zero sums, but not in the buckets that were kept in the same step."""

    def compute(self, work: Iterable[Microbatch]) -> None:
        kept = {} if self._is_applied else dict(self._in_place)
        super().compute(work)
        for bucket, sums in kept.items():
            self._local[bucket] += [item for brought in sums.values() for item in brought]
        self._is_applied = False

    _is_applied = False

    def sums(self) -> list[Sums] | None:
        found = super().sums()
        self._is_applied = found is not None
        return found


class DealsToTheDrained(Controller):
    """Deals the step after a drain as if no group had left."""

    _before: tuple[GroupId, ...] = ()

    def _is_dealt_to(self, left: Iterable[Member]) -> bool:
        return bool(left)

    def _admit(self, change: Change) -> tuple[Action, ...]:
        self._before = tuple(voter.group for voter in change.voters) if self._is_dealt_to(change.left) else ()
        return super()._admit(change)

    def _plan(self, *, after: str = "") -> StepPlan:
        present, before = self.members, self._before
        self.members, self._before = before or present, ()
        try:
            return super()._plan(after=after)
        finally:
            self.members = present


class DrainsAnyone(Controller):
    """Lets all groups leave that are asked to, whatever only they host."""

    def _let_leave(self, commit: Commit) -> Commit:
        return commit if self.step + 1 < self.num_steps else replace(commit, drain=())


class DrainsTheUncompared(Controller):
    """Lets groups leave as soon as others have copied what they host."""

    def _let_leave(self, commit: Commit) -> Commit:
        commit = super()._let_leave(commit)
        if self.ownership is None:
            return commit
        after = self.ownership.with_copies(commit.restored, commit.released, commit.leaving)
        return replace(commit, drain=tuple(member for member in commit.leaving if after.has_handed_over(member)))


class DrainsWriters(Controller):
    """Lets groups leave before the checkpoints that they have written are compared."""

    def _let_leave(self, commit: Commit) -> Commit:
        validity, saves = self._validity, self._saves
        self._validity, self._saves = CheckpointValidity(), Saves(None, self._setup)
        try:
            return super()._let_leave(commit)
        finally:
            self._validity, self._saves = validity, saves


class KeepsTheDrained(Controller):
    """Goes on with groups that have left."""

    def _change(self, asked: Iterable[Member], drained: Iterable[Member] = ()) -> None:
        super()._change(asked)


class TakesBackWhoHasLeft(Controller):
    """Admits the incarnation again that was drained."""

    def _change(self, asked: Iterable[Member], drained: Iterable[Member] = ()) -> None:
        known = dict(self.last_fenced)
        super()._change(asked, drained)
        self.last_fenced = known


class ForgetsEarlierFences(Controller):
    """Knows of each group the last fence alone, though an earlier one may name a later incarnation."""

    def _on_fence(self, fence: Fence) -> None:
        super()._on_fence(fence)
        self.last_fenced[fence.group] = fence.incarnation


class RetriesInTheSameAttempt(Controller):
    """Takes a retry for a part of the attempt that has failed."""

    def _on_retry(self, retry: Retry) -> Iterator[str]:
        yield from super()._on_retry(retry)
        self.attempt -= 1


MUTATIONS_OF_THE_FOLD = {
    "forgets the fence of a later incarnation": Protocol(controller_type=ForgetsEarlierFences),
    "retries in the same attempt": Protocol(controller_type=RetriesInTheSameAttempt),
}
MUTATIONS_OF_PAUSES = {
    "restarts though all state is there": Protocol(controller_type=given("__init__", pause_s=None)),
    "resumes without hosts": Protocol(controller_type=ResumesWithoutHosts),
    "resumes with kept buckets": Protocol(controller_type=KeepsBucketsInAPause),
    "counts kept buckets twice": Protocol(buckets_type=CountsKeptBucketsTwice),
}
MUTATIONS_OF_DRAINS = {
    "deals work to a drained group": Protocol(controller_type=DealsToTheDrained),
    "keeps a drained group": Protocol(controller_type=KeepsTheDrained),
    "takes back who has left": Protocol(controller_type=TakesBackWhoHasLeft),
    "drains the last host": Protocol(controller_type=DrainsAnyone),
    "drains before copies are compared": Protocol(controller_type=DrainsTheUncompared),
    "drains the writer of a checkpoint": Protocol(controller_type=DrainsWriters),
}
