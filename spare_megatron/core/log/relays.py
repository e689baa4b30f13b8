"""Relays: which groups vote through which other group, and what a relay collects.

The first remaining group of a block of consecutive ids is its relay: it writes all votes of its block into the control
store with one write. Relays only reduce the load of the store: duplicates of a vote count once.
"""

from collections.abc import Sequence, Set

from spare_megatron.core.log.entries import Entry, Fence
from spare_megatron.stacking.layout import Member


class Blocks:
    """The voters of an attempt by block, at most `fan_in` each; in a single block each is its own relay."""

    def __init__(self, voters: Sequence[Member], fan_in: int) -> None:
        blocks: dict[int, list[Member]] = {}
        for voter in voters:
            blocks.setdefault(voter.group // fan_in, []).append(voter)
        if len(blocks) == 1:
            blocks = {index: [voter] for index, voter in enumerate(voters)}
        self._blocks = {block[0]: tuple(block) for block in blocks.values()}
        self._relays = {voter: block[0] for block in blocks.values() for voter in block}
        self.relays = tuple(self._blocks)

    def relay_of(self, voter: Member) -> Member:
        """The relay of a voter; the voter itself if it votes directly."""
        return self._relays[voter]

    def block_of(self, relay: Member) -> tuple[Member, ...]:
        """The voters whose votes the relay passes on, itself included."""
        return self._blocks[relay]


class BlockVotes:
    """The votes of one block on one attempt, as its relay collects them; starts with the relay's own vote."""

    def __init__(self, attempt: int, block: Sequence[Member], relay: Member, vote: str) -> None:
        self.attempt = attempt
        self._relay = relay
        self._block = frozenset(block)
        self.votes = {relay: vote}
        self.missing = set(block) - {relay}

    def add_vote(self, attempt: int, voter: Member, vote: str) -> bool:
        """Accepts a vote on this attempt by a member of the block; returns whether it did."""
        if attempt != self.attempt or voter not in self._block:
            return False
        self.votes.setdefault(voter, vote)
        self.missing.discard(voter)
        return True

    def fold(self, entry: Entry) -> bool:
        """Folds an entry while votes are missing; returns whether they are needed no more. After a loss, they are."""
        if not isinstance(entry, Fence) or entry.hits(self._relay):
            return True
        self.missing = {voter for voter in self.missing if not entry.hits(voter)}
        return False

    @property
    def entry_receivers(self) -> Set[Member]:
        """Members to which the relay passes the next entry: those whose votes it casts, as they rely on that."""
        return frozenset(self.votes)


class Reliance:
    """What a group leaves to its relay in one attempt: casting its vote, and reading all votes after each loss.

    Every remaining voter has a remaining reader (itself or its relay) that reads after its vote was cast, so the last
    reader finds all votes: about N / f + f reads of N / f writes for N groups in blocks of f (docs/protocol_step.md).
    `relay` is None if the group votes itself.
    """

    def __init__(self, relay: Member | None) -> None:
        self._relay = relay

    def fold(self, entry: Entry) -> None:
        if self._relay is not None and isinstance(entry, Fence) and entry.hits(self._relay):
            self._relay = None

    @property
    def is_placed(self) -> bool:
        return self._relay is not None
