"""Mutations of rounds with other sites: bugs planted where a site agrees on what a round has come to."""

from dataclasses import replace

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import Action, AppendEntry
from spare_megatron.core.log.entries import Commit, Synced
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.membership import Change
from tests.protocol.mutations import Protocol


class AdmitsBeforeARound(Controller):
    """Has newcomers take the state that the round is about to change."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        match actions := super()._decide(event, now_s):
            case (AppendEntry(entry=Commit(sync=True) as commit),):
                return (replace(actions[0], entry=replace(commit, admit=event.waiting)),)
        return actions


class DecidesByTheSpeaker(Controller):
    """Takes the word of one group for what all have."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        found = next((vote.synced for vote in event.votes.values() if vote.synced), None)
        if not self.is_syncing or found is None or event.attempt != self.attempt:
            return super()._decide(event, now_s)
        entry = Synced(step=self.step, attempt=self.attempt, **found._asdict())
        return (AppendEntry(index=self.head, entry=entry),)


class ForgetsTheRound(Controller):
    """Goes on with the next step after a loss in a round."""

    def _lose(self, fence: object, change: Change) -> tuple[Action, ...]:
        self.is_syncing = False
        return super()._lose(fence, change)  # type: ignore[arg-type]


MUTATIONS_OF_ROUNDS = {
    "admits before a round": Protocol(controller_type=AdmitsBeforeARound),
    "decides a round by one vote": Protocol(controller_type=DecidesByTheSpeaker),
    "forgets a round after a loss": Protocol(controller_type=ForgetsTheRound),
}
