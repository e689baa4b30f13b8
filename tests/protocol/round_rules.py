"""What is expected of rounds with other sites in a history."""

from collections.abc import Mapping

from spare_megatron.core.log.entries import Commit, Synced
from spare_megatron.core.log.votes import RoundResult, Vote
from tests.protocol.incarnations import Incarnation
from tests.protocol.violation import Violation


class RoundObserver:
    """What is expected of rounds: one follows each commit whose votes ask for it, before all else."""

    def __init__(self) -> None:
        self.is_due = False

    def committed(self, writer: str, entry: Commit, votes: Mapping[Incarnation, Vote]) -> None:
        if entry.sync != any(vote.sync for vote in votes.values()):
            raise Violation(f"{writer} writes {entry}, and the members voted {votes}")
        if entry.sync and entry.admit:
            raise Violation(f"{writer} writes {entry}: who is admitted would take the state before the round")
        self.is_due = entry.sync

    def expects(self, writer: str, entry: object, votes: Mapping[Incarnation, Vote | None]) -> bool:
        """Whether a round is due, whose right end the entry is."""
        if isinstance(entry, Synced) != self.is_due:
            raise Violation(f"{writer} writes {entry}; is a round due: {self.is_due}")
        if isinstance(entry, Synced):
            self._synced(writer, entry, votes)
        return isinstance(entry, Synced)

    def _synced(self, writer: str, entry: Synced, votes: Mapping[Incarnation, Vote | None]) -> None:
        results = {vote.synced for vote in votes.values() if vote is not None}
        if results != {RoundResult(entry.round, entry.sites, entry.digest)}:
            raise Violation(f"{writer} writes {entry}, and the members have {results}")
        self.is_due = False
