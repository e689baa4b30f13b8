"""Votes by way of relays, as in `voting.voting`, over connections that delay, repeat and lose what they carry.

Timeouts are not simulated: at any moment a relay may cast the votes that it has, and a process that waits for a relay
may go on without it.
"""

from collections.abc import Callable, Collection

from spare_megatron.core.log.actions import AttemptFinish, AttemptReduce, ReadVotes
from spare_megatron.core.log.relays import Blocks
from spare_megatron.core.log.votes import Vote
from spare_megatron.formats.codec import encode, set_fields
from spare_megatron.stacking.layout import Member
from tests.protocol.links import Links
from tests.protocol.surroundings import Steps, Surroundings


class Relaying:
    """One process's votes and log entries."""

    def __init__(self, member: Member, links: Links, world: Surroundings) -> None:
        self._member, self._links, self._world = member, links, world
        self._box = world.post.boxes[member]
        self._entry_receivers: Collection[Member] = ()
        self._cast_on: list[int] = []
        self._reliance = world.reliance_type(None)

    def vote(self, action: AttemptReduce | AttemptFinish, vote: Vote) -> Steps:
        """Casts the group's vote, or has it cast. Returns all votes if the last may be among those that it has cast."""
        attempt, text = action.attempt, encode(set_fields(vote))
        blocks = Blocks(action.voters, self._world.fan_in)
        relay = blocks.relay_of(self._member)
        block = blocks.block_of(relay) if relay == self._member else ()
        self._entry_receivers = ()
        if relay != self._member:
            self._reliance = self._world.reliance_type(relay)
            box = self._world.post.boxes[relay]
            self._send(lambda: box.votes.append((attempt, self._member, text)))
            if (yield from self._is_relayed(self._links.head)):
                return None
            self._world.invariants.counts["vote without its relay"] += 1
        self._reliance = self._world.reliance_type(None)
        votes = self._world.votes_type(attempt, block, self._member, text)
        while votes.missing and not self._world.post.gives_up():
            yield None
            while self._box.votes:
                votes.add_vote(*self._box.votes.pop(0))
        self._world.invariants.counts["vote of a block"] += len(votes.votes) > 1
        self._entry_receivers = votes.entry_receivers
        past = [old for old in self._cast_on if old < attempt - 1]
        self._cast_on = [*self._cast_on[len(past) :], attempt]
        return (yield from self._links.speak(lambda voice: voice.cast(attempt, votes.votes, action.voters, past)))

    def read_votes(self, action: ReadVotes) -> Steps:
        """The votes cast so far; None if it is not this process that reads them."""
        if self._reliance.is_placed:
            self._world.invariants.counts["votes left to a relay"] += 1
            return None
        num_votes = yield from self._links.speak(lambda voice: voice.num_votes(action.attempt))
        if num_votes < action.num_left:
            self._world.invariants.counts["votes not read yet"] += 1
            return None
        return (yield from self._links.speak(lambda voice: voice.read_votes(action.attempt, action.voters)))

    def read_entry(self, index: int) -> Steps:
        """Reads the entry, from the relay if that is faster, and passes it to the block."""
        is_relayed = self._reliance.is_placed and (yield from self._is_relayed(index))
        text = self._box.entries[index] if is_relayed else (yield from self._links.await_entry(index))
        for member in self._entry_receivers:
            box = self._world.post.boxes[member]
            self._send(lambda box=box: box.entries.update({index: text}))
        [event] = self._links.take_entry(index, text)
        self._reliance.fold(event.entry)
        return [event]

    def _is_relayed(self, index: int) -> Steps:
        while index not in self._box.entries and not self._world.post.gives_up():
            yield None
        return index in self._box.entries

    def _send(self, arrive: Callable[[], None]) -> None:
        def travel() -> Steps:
            yield None
            arrive()

        for _ in range(self._world.post.num_copies()):
            self._world.start_in_background(f"message of {self._member}", travel())
