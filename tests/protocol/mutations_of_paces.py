"""Mutations of dealing by pace: bugs planted where the evidence is counted, and where paces come into force."""

from collections.abc import Iterable
from dataclasses import replace

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import Action
from spare_megatron.core.log.entries import Fence
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.membership import Change
from spare_megatron.stacking.layout import Member
from spare_megatron.stacking.pace_evidence import exceptions
from spare_megatron.stacking.plans import StepPlan, make_plan
from tests.protocol.mutations import Protocol
from tests.protocol.mutations_of_membership import DealsToTheDrained


class CountsWhatItHasRead(Controller):
    """Counts the paces in the votes that it reads, not those in the log: few groups read all votes."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        actions = super()._decide(event, now_s)
        if actions and not (self.is_trained or self.is_evaluating):
            measured = {group: event.votes[group].pace_ns for group in self.members if event.votes[group].pace_ns}
            self._paces.fold(exceptions(measured, self._paces.dealt), self.members, self._idle(self.members))
        return actions


class RedealsTheStepUnderWay(Controller):
    """Deals the step anew by the latest evidence when a group is lost in it, though the others have computed it."""

    def _lose(self, fence: Fence, change: Change) -> tuple[Action, ...]:
        latest = {group: about.estimate() for group, about in self._paces._about.items()}
        members = tuple(voter.group for voter in change.voters)
        is_covered = not self._setup.placement.uncovered(frozenset(members))
        if self._plans and latest and is_covered and not self.is_evaluating:
            paces = replace(self._dealt_paces, permille={**self._paces.dealt, **latest})
            work = self._dealing.work(members, paces)
            self._plans[0] = make_plan(self.step, self.epoch, work)
        return super()._lose(fence, change)


class DealsToTheDrainedBySlowness(DealsToTheDrained):
    """Deals the step after a slow group was drained by paces that still have it."""

    def _is_dealt_to(self, left: Iterable[Member]) -> bool:
        return any(member.group in self._paces.dealt for member in left)

    def _plan(self, *, after: str = "") -> StepPlan:
        return Controller._plan(self, after=after) if self.is_evaluating else super()._plan(after=after)


MUTATIONS_OF_PACES = {
    "counts the paces that it has read itself": Protocol(controller_type=CountsWhatItHasRead),
    "deals the step under way by new paces": Protocol(controller_type=RedealsTheStepUnderWay),
    "deals work to a group drained as slow": Protocol(controller_type=DealsToTheDrainedBySlowness),
}
