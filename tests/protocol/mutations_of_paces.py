"""Mutations of dealing by pace: bugs planted where the evidence is counted, and where paces come into force."""

from dataclasses import replace

from spare_megatron.core.actions import Action
from spare_megatron.core.controller import Controller
from spare_megatron.core.entries import Fence
from spare_megatron.core.events import VotesRead
from spare_megatron.core.pace_evidence import exceptions
from spare_megatron.stacking.plans import make_plan
from tests.protocol.mutations import Protocol


class CountsWhatItHasRead(Controller):
    """Counts the paces in the votes that it reads, not those in the log: few groups read all votes."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        actions = super()._decide(event, now_s)
        if actions and not (self._is_over or self._is_evaluating):
            measured = {group: event.votes[group].pace_ns for group in self.members if event.votes[group].pace_ns}
            self._paces.fold(exceptions(measured, self._paces.dealt), self.members, self._idle())
        return actions


class RedealsTheStepUnderWay(Controller):
    """Deals the step anew by the latest evidence when a group is lost in it, though the others have computed it."""

    def _lose(self, fence: Fence) -> tuple[Action, ...]:
        latest = {group: about.estimate() for group, about in self._paces._about.items()}
        is_covered = not self._setup.placement.uncovered(frozenset(self.members))
        if self._plans and latest and is_covered and not self._is_evaluating:
            paces = replace(self._dealt_paces, permille={**self._paces.dealt, **latest})
            work = self._dealing.work(self.members, paces)
            self._plans[0] = make_plan(self.step, self.epoch, work)
        return super()._lose(fence)


MUTATIONS_OF_PACES = {
    "counts the paces that it has read itself": Protocol(controller_type=CountsWhatItHasRead),
    "deals the step under way by new paces": Protocol(controller_type=RedealsTheStepUnderWay),
}
