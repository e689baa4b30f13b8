"""Which groups vote by way of which other, and what a group that passes votes on takes in.

Groups with consecutive ids form a *block*; the first of those that are left is its *relay*, which writes the votes of
its block into the control store at once. So a loss changes no other block than its own. Nothing depends on relays but
the load of the store: a vote that several write is one vote, for an attempt, a group and an incarnation name it.
"""

from collections.abc import Mapping, Sequence, Set

from spare_megatron.core.topology import Member


class Blocks:
    """The voters of an attempt by block.

    Args:
        voters: Who votes, ascending.
        fan_in: Most groups of a block. Where all voters belong to one block, as with any number of groups up to this,
            everybody is its own relay.

    Attributes:
        relays: Those who write votes, as long as nothing goes wrong; ascending.
    """

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
        """Who passes the voter's vote on; the voter itself where nobody does."""
        return self._relays[voter]

    def block_of(self, relay: Member) -> tuple[Member, ...]:
        """Whose votes the relay passes on, itself included."""
        return self._blocks[relay]


class BlockVotes:
    """The votes of one block on one attempt, as its relay takes them in.

    Args:
        attempt: The attempt.
        block: Who may vote here.
        relay: Who takes the votes.
        vote: Its own.
    """

    def __init__(self, attempt: int, block: Sequence[Member], relay: Member, vote: str) -> None:
        self.attempt = attempt
        self._block = frozenset(block)
        self._votes = {relay: vote}
        self._missing = set(block) - {relay}

    def take(self, attempt: int, voter: Member, vote: str) -> bool:
        """Takes a vote, unless it is one on another attempt, or of whoever does not vote here."""
        if attempt != self.attempt or voter not in self._block:
            return False
        self._votes.setdefault(voter, vote)
        self._missing.discard(voter)
        return True

    @property
    def votes(self) -> Mapping[Member, str]:
        """Those that have been taken."""
        return self._votes

    @property
    def missing(self) -> Set[Member]:
        """Whose votes have not."""
        return self._missing
