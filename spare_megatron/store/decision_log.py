"""The append-only log of decisions, and the votes that lead to one.

Keys: `log/{index}` holds entry `index`, with as many zeros before it that the order of their texts is theirs. It is
written once, by compare-and-set. `broken/{index}` says that what all groups do together before it is broken.
`vote/{attempt}/{group}/{incarnation}` holds the votes on an attempt that this group has written: its own, and as a
relay those of others. `votes/{attempt}` counts votes, one that several have written as often as that. Nobody asks for
the vote of an incarnation that is no member, so it cannot stand for that of another. Entries and votes are text here;
their meaning belongs to `core.entries` and `core.votes`.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeVar

from spare_megatron.store.interface import ControlStore

Voter = tuple[int, int]
"""A group and its incarnation."""
_Voter = TypeVar("_Voter", bound=Voter)

_ASK_INTERVAL_S = 0.010
_MOST_ASKS_PER_S = 20_000
"""Of all ranks of a run: a quarter of what the embedded store's server answers with one processor."""

LOG = "log/"
"""The directory of the entries and of nothing else, which are written in the order of their names."""


class DecisionLog:
    """One connection's view of the log."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store

    def append(self, index: int, entry: str) -> str:
        """Writes the entry at the index unless another stands there; returns the one that stands."""
        return self._store.put_if_absent(entry_key(index), entry)

    def has(self, index: int) -> bool:
        """Whether the entry is written. Cheap: this is what a rank in a reduction polls."""
        return self._store.exists(entry_key(index))

    def tell_broken(self, index: int) -> None:
        """Says that what all groups do together before this entry is broken."""
        self._store.put(_broken_key(index), "broken")

    def is_broken(self, index: int) -> bool:
        """Whether somebody has said so. As cheap as `has`."""
        return self._store.exists(_broken_key(index))

    def wait(self, index: int, timeout_s: float) -> str:
        """The entry, as soon as it is written.

        Raises:
            StoreTimeout: It was not written within timeout_s seconds.
        """
        return self._store.wait(entry_key(index), timeout_s)

    def entries(self, indices: Sequence[int]) -> list[str | None]:
        """Those of a few entries in a row that are written, None for each other."""
        return self._store.get([entry_key(index) for index in indices])

    def read(self, index: int, most: int) -> list[str]:
        """The entries that are written from the index on, in a few requests; half as many as there are, at least.

        Args:
            index: An index at or before the head.
            most: So many at most.
        """
        number = most if self._is_written(index) else 0
        while number and not self._is_written(index + number - 1):  # if it is, all before it are
            number //= 2
        found = self.entries(range(index, index + number)) if number else []
        return [entry for entry in found if entry is not None]

    def find_head(self, from_index: int) -> int:
        """The first index without an entry: every one before it has one. It may have one, too, by now.

        Cost: some 2 log2(d) small reads if it is d entries away.

        Args:
            from_index: An index at or before it.
        """
        step = 1
        while self._is_written(from_index + step - 1):
            from_index, step = from_index + step, 2 * step
        return bisect_left(
            range(from_index + step - 1), True, lo=from_index, key=lambda index: not self._is_written(index)
        )

    def _is_written(self, index: int) -> bool:
        # Not by `has`, which may begin to follow the log, and is told of all of it first.
        return self.entries([index]) != [None]

    def cast(self, attempt: int, writer: Voter, votes: Mapping[_Voter, str], forget: Sequence[int] = ()) -> int:
        """Casts some votes at once.

        Args:
            attempt: What they are about.
            writer: Who casts them, only once in an attempt.
            votes: By voter. One that is cast again, by whomever, is the same.
            forget: Attempts of which nobody needs any more what this writer has written.

        Returns:
            How many votes have been cast on the attempt so far. It is never less than that, but more where some have
            been cast again, so that whoever casts the last one finds that it may be the last.
        """
        voters: dict[str, list[_Voter]] = {}
        for voter, vote in votes.items():
            voters.setdefault(vote, []).append(voter)
        num_votes = self._store.put_counted(
            _vote_key(attempt, writer),
            json.dumps(list(voters.items())),
            _count_key(attempt),
            weight=len(votes),
            forget=[_vote_key(past, writer) for past in forget],
        )
        if num_votes == len(votes):
            # The first. Everybody voted on the attempt before this one, so nobody counts those before that.
            self._store.delete([_count_key(attempt - 2)])
        return num_votes

    def num_votes(self, attempt: int) -> int:
        """How many votes have been cast on the attempt so far, for whoever has had one cast, in one small read."""
        return self._store.counted(_count_key(attempt))

    def announce(self, member: Voter) -> None:
        """Says that the member is up and waits to be admitted."""
        group, incarnation = member
        self._store.put(f"waiting/{group}", str(incarnation))

    def waiting(self, groups: Sequence[int]) -> list[Voter]:
        """Those of these groups that have ever waited to be admitted, as the last incarnation that did."""
        found = self._store.get([f"waiting/{group}" for group in groups]) if groups else []
        return [(group, int(text)) for group, text in zip(groups, found, strict=True) if text is not None]

    def announce_restart(self, member: Voter, text: str) -> None:
        """Says that the member was started again after a wipe-out, and what it has."""
        group, incarnation = member
        self._store.put(f"restart/{group}", f"{incarnation} {text}")

    def waiting_to_restart(self, groups: Sequence[int]) -> list[tuple[Voter, str]]:
        """Those of these groups that have ever said so, as the last incarnation that did, each with what it has."""
        found = self._store.get([f"restart/{group}" for group in groups])
        parts = [(group, text.partition(" ")) for group, text in zip(groups, found, strict=True) if text is not None]
        return [((group, int(incarnation)), text) for group, (incarnation, _, text) in parts]

    def publish_digest(self, index: int, group: int, digest: str) -> None:
        """Tells newcomers which parameters the group holds as of the entry that admits them."""
        self._store.put(f"digest/{index}/{group}", digest)

    def digests(self, index: int, groups: Sequence[int]) -> list[str | None]:
        """What these groups have told so far."""
        return self._store.get([f"digest/{index}/{group}" for group in groups])

    def votes(self, attempt: int, voters: Sequence[Voter], relays: Sequence[Voter] = ()) -> dict[int, str]:
        """The votes that these voters have cast on the attempt so far, by group.

        Args:
            attempt: The attempt.
            voters: Whose votes are asked for.
            relays: Who may have cast those of others. Who is not found there is looked for by itself.
        """
        found = self._written_by(attempt, relays)
        found |= self._written_by(attempt, [voter for voter in voters if voter not in found])
        return {voter[0]: found[voter] for voter in voters if voter in found}

    def _written_by(self, attempt: int, writers: Sequence[Voter]) -> dict[Voter, str]:
        found = self._store.get([_vote_key(attempt, writer) for writer in writers]) if writers else []
        return {
            (group, incarnation): vote
            for text in found
            if text is not None
            for vote, voters in json.loads(text)
            for group, incarnation in voters
        }

    def publish_relay(self, member: Voter, address: str) -> None:
        """Says where the member takes votes of others."""
        self._store.put(_relay_key(member), address)

    def relay(self, member: Voter) -> str | None:
        """Where the member takes votes of others, if it does."""
        return self._store.get([_relay_key(member)])[0]


def ask_interval_s(num_ranks: int) -> float:
    """How often each of a run's ranks looks at the log while it waits for something else, in seconds.

    A loss is usually seen on a socket first.

    >>> ask_interval_s(16), ask_interval_s(8000)
    (0.01, 0.4)
    """
    return max(_ASK_INTERVAL_S, num_ranks / _MOST_ASKS_PER_S)


def entry_key(index: int) -> str:
    """Where an entry stands."""
    return f"{LOG}{index:010}"


def _vote_key(attempt: int, voter: Voter) -> str:
    group, incarnation = voter
    return f"vote/{attempt}/{group}/{incarnation}"


def _broken_key(index: int) -> str:
    return f"broken/{index}"


def _count_key(attempt: int) -> str:
    return f"votes/{attempt}"


def _relay_key(member: Voter) -> str:
    group, incarnation = member
    return f"relay/{group}/{incarnation}"
