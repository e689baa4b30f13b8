"""Mutations of audits, suspects, own findings and shortages: bugs planted where groups are found to be faulty."""

from dataclasses import replace

from spare_megatron.core.audits.suspects import QuestionBudget
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import Action, AppendEntry
from spare_megatron.core.log.entries import Fence, Retry
from spare_megatron.core.log.events import VotesRead
from tests.protocol.audits import CountsAudits, VotesWithOldDigests
from tests.protocol.mutations import Protocol, ReportsNoBreak, counting_votes_with
from tests.protocol.shortages import LACKING


class JudgesByOneDigest(Controller):
    """Fences the first of two groups that differ, and asks no other one."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        actions = super()._decide(event, now_s)
        match actions:
            case (AppendEntry(index=index, entry=Retry(disputes=(dispute, *_))),):
                group = next((s.group for s in dispute.statements if s.group in self.members), None)
                if group is not None:
                    incarnation = dict(self.voters)[group]
                    fence = Fence(group=group, incarnation=incarnation, discard=True, is_outvoted=True)
                    return (AppendEntry(index=index, entry=fence),)
        return actions


class ForgetsFindingsOfTheLost(Controller):
    """Counts what members alone have found wrong themselves."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        of_lost = {group: vote for group, vote in event.votes.items() if group not in self.members}
        forgotten = {group: replace(vote, wrong_numbers="") for group, vote in of_lost.items()}
        return super()._decide(replace(event, votes={**event.votes, **forgotten}), now_s)


class FencesWithoutDiscarding(Controller):
    """Ends a group that has computed wrongly, and takes its sum for that of any lost group."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        return tuple(
            replace(action, entry=replace(action.entry, discard=False))
            if isinstance(action, AppendEntry) and isinstance(action.entry, Fence)
            else action
            for action in super()._decide(event, now_s)
        )


class CommitsWhatIsDisputed(Controller):
    """Asks a third group, and commits the sum with what it has found wrong."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        if self._audits.disputes:
            self.is_discarded = False
            votes = {group: replace(vote, audits=()) for group, vote in event.votes.items()}
            self._audits.disputes, event = (), replace(event, votes=votes)
        return super()._decide(event, now_s)


class CommitsSuspectsUnconfirmed(Controller):
    """Asks about suspects, and commits the sum whatever the answers are."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        if self._audits.disputes and all(one.is_suspicion for one in self._audits.disputes):
            votes = {group: replace(vote, losses=()) for group, vote in event.votes.items()}
            self._audits.disputes, event = (), replace(event, votes=votes)
        return super()._decide(event, now_s)


class AsksAboutAllSuspects(Controller):
    """Asks about suspects in every step."""

    def _retry(self, retry: Retry) -> tuple[Action, ...]:
        actions = super()._retry(retry)
        self._audits._budget = QuestionBudget()
        return actions


class FencesAtTheFirstFailure(Controller):
    """Gives a group that lacks a resource no second chance."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        self._failed = frozenset(self.members)
        return super()._decide(event, now_s)


class FencesThoseThatWait(Controller):
    """Takes every group without the whole sum for one that is itself the cause."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        if any(vote.failure for vote in event.votes.values()):
            votes = {g: vote if vote.is_complete else replace(vote, failure=LACKING) for g, vote in event.votes.items()}
            event = replace(event, votes=votes)
        return super()._decide(event, now_s)


class ForgetsFailures(Controller):
    """Lets a group that lacks a resource try again and again."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        self._failed = frozenset()
        return super()._decide(event, now_s)


MUTATIONS_OF_AUDITS = {
    "counts an audit into a sum": Protocol(audits_type=CountsAudits),
    "votes with digests of another attempt": Protocol(audits_type=VotesWithOldDigests),
    "judges by one digest against one": Protocol(controller_type=JudgesByOneDigest),
    "commits what is disputed": Protocol(controller_type=CommitsWhatIsDisputed),
}
MUTATIONS_OF_OWN_FINDINGS = {
    "commits sums of a group that found itself wrong": Protocol(controller_type=counting_votes_with(wrong_numbers="")),
    "keeps buckets of a sum that was found wrong": Protocol(controller_type=ForgetsFindingsOfTheLost),
    "fences without discarding": Protocol(controller_type=FencesWithoutDiscarding),
}
MUTATIONS_OF_SUSPECTS = {
    "commits suspects unconfirmed": Protocol(controller_type=CommitsSuspectsUnconfirmed),
    "asks about all suspects": Protocol(controller_type=AsksAboutAllSuspects),
}
MUTATIONS_OF_SHORTAGES = {
    "fences a group at its first failure": Protocol(controller_type=FencesAtTheFirstFailure),
    "fences groups that wait for one that fails": Protocol(controller_type=FencesThoseThatWait),
    "lets a group fail again and again": Protocol(controller_type=ForgetsFailures),
    "waits for groups that have failed": Protocol(voice_type=ReportsNoBreak),
}
