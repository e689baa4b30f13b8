"""The votes of a history: who has voted what on which attempt, whether in time, and what the votes confirm."""

from collections.abc import Callable, Collection
from itertools import combinations

from spare_megatron.core.log.votes import Vote
from tests.protocol.confirming import has_majority, is_unconfirmed
from tests.protocol.incarnations import Incarnation, incarnation_of
from tests.protocol.partitions import WRONG
from tests.protocol.violation import Violation


class Ballots:
    """All votes, by voter and attempt."""

    def __init__(self) -> None:
        self._votes: dict[tuple[Incarnation, int], Vote] = {}
        self._too_late: set[tuple[Incarnation, int]] = set()  # cast after the voter was fenced
        self.cast_on: Callable[[int], set[Incarnation]] = lambda _attempt: set()
        """Those whose votes on an attempt have reached the store."""

    def add(self, process: str, attempt: int, vote: Vote) -> None:
        key = (incarnation_of(process), attempt)
        if key in self._votes:
            raise Violation(f"{process} votes again on attempt {attempt}")
        self._votes[key] = vote

    def lost(self, ended: Collection[Incarnation], attempt: int) -> None:
        """Members end: what they have not cast by now comes too late."""
        self._too_late |= {(one, attempt) for one in set(ended) - self.cast_on(attempt)}

    def on(self, attempt: int) -> dict[Incarnation, Vote]:
        return {voter: vote for (voter, number), vote in self._votes.items() if number == attempt}

    def in_time(self, attempt: int) -> dict[Incarnation, Vote]:
        """Also of those lost since they voted: their gradients are in the sum."""
        return {voter: vote for voter, vote in self.on(attempt).items() if (voter, attempt) not in self._too_late}

    def of(self, members: Collection[Incarnation], attempt: int) -> dict[Incarnation, Vote | None]:
        return {incarnation: self._votes.get((incarnation, attempt)) for incarnation in sorted(members)}

    def stated(self, attempt: int, *, is_late: bool = False) -> set[Incarnation]:
        """Those that say that they found themselves wrong; late votes may be seen or not."""
        votes = self.on(attempt) if is_late else self.in_time(attempt)
        return {voter for voter, vote in votes.items() if vote.wrong_numbers}

    def is_unconfirmed(
        self, incarnation: Incarnation, members: Collection[Incarnation], attempt: int, redundancy: int
    ) -> bool:
        """Whether it has state that is wrong by now, or that other groups' votes do not confirm."""
        votes = self.on(attempt)
        own = votes[incarnation]
        reported = [own.params_digest, own.state_digest, *(digest.value for digest in own.partition_digests)]
        of_members = [vote for voter, vote in votes.items() if voter in members or voter == incarnation]
        of_others = [vote for voter, vote in votes.items() if voter not in members and voter != incarnation]
        # The group that decides may have seen the votes of some lost groups, and not those of others.
        some_of_others = (some for number in range(len(of_others) + 1) for some in combinations(of_others, number))
        return any(one.startswith(WRONG) for one in reported) or any(
            is_unconfirmed(own, [*of_members, *some], redundancy) for some in some_of_others
        )

    def have_majority(self, members: Collection[Incarnation], attempt: int, *, has_partitions: bool) -> bool:
        """Whether the votes on parameters and copies show which groups are right."""
        votes = self.on(attempt)
        params = {incarnation: vote.params_digest for incarnation, vote in votes.items() if vote.params_digest}
        states: dict[Incarnation, str] = {}
        digests: set[tuple[int, str]] = set()
        for incarnation, vote in sorted(votes.items(), key=lambda item: item[0] not in members):
            # What was copied confirms nothing but its donor's.
            digest = (incarnation[0] if vote.copied_from is None else vote.copied_from, vote.state_digest)
            if vote.state_digest and digest not in digests:
                states[incarnation] = vote.state_digest
                digests.add(digest)
        is_reported = any(vote.state_digest for vote in votes.values())
        is_known = has_majority(params, members) and (not is_reported or has_majority(states, members))
        # With state partitions the majority may have a wrong value from its owner.
        return is_known and not (has_partitions and len(set(params.values())) > 1)
