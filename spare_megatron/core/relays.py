"""Which groups vote by way of which other, and what a group that passes votes on takes in.

Groups with consecutive ids form a *block*; the first of those that are left is its *relay*, which writes the votes of
its block into the control store at once. So a loss changes no other block than its own. Nothing depends on relays but
the load of the store: a vote that several write is one vote, for an attempt, a group and an incarnation name it.
"""

from collections.abc import Mapping, Sequence, Set

from spare_megatron.core.entries import Entry, Fence
from spare_megatron.stacking.layout import Member


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
        self._relay = relay
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

    def fold(self, entry: Entry) -> bool:
        """Takes in what the log says while votes are missing. Returns whether nobody needs them any more.

        After a loss everybody who is left still votes, and finds that out at a moment of its own: who did not wait for
        them would have most of a large run vote directly.
        """
        if not isinstance(entry, Fence) or entry.hits(self._relay):
            return True
        self._missing = {voter for voter in self._missing if not entry.hits(voter)}
        return False

    @property
    def votes(self) -> Mapping[Member, str]:
        """Those that have been taken."""
        return self._votes

    @property
    def missing(self) -> Set[Member]:
        """Whose votes have not."""
        return self._missing

    @property
    def told(self) -> Set[Member]:
        """Who hears from the relay what the log says next: those whose votes it casts, for who hears relies on that."""
        return frozenset(self._votes)


class Reliance:
    """What a group leaves to its relay in one attempt: to cast its vote, and to read all votes after each loss.

    Args:
        relay: Who casts the vote; None if the group does it itself, as relays do.

    Notes:
        After the last loss of an attempt somebody must find the votes of all who are left. Everybody votes before it
        folds that loss. Who casts reads after its cast and after the loss. Who does not has heard an entry from its
        relay, which passes entries on only once it has cast that vote. If the relay is left, it reads after that cast;
        if it is lost, with this loss or an earlier one, the group itself reads after the loss. So whoever is left has
        a reader that is left, and that reads after its vote was cast: the last of the readers finds all votes. Lost
        readers are other losses. It also finds as many votes counted as groups are left, for a cast ends with the
        count, and nobody needs to read before that. With N groups in blocks of f, at most some N / f + f read what some
        N / f have written.
    """

    def __init__(self, relay: Member | None) -> None:
        self._relay = relay

    def fold(self, entry: Entry) -> None:
        """Takes an entry of the log in."""
        if self._relay is not None and isinstance(entry, Fence) and entry.hits(self._relay):
            self._relay = None

    @property
    def is_placed(self) -> bool:
        """Whether the group leaves it to a relay, which is not lost."""
        return self._relay is not None
