"""Client of the decision log, the append-only entries that every process folds, and of the votes that lead to them.

Keys: `log/{index}` holds entry `index`, zero-padded so that lexicographic order is log order, and is written once, by
compare-and-set. `broken/{index}` marks the collective preceding entry `index` as failed.
`vote/{attempt}/{group}/{incarnation}` holds the votes that this member has cast on an attempt: its own and, as a relay,
those of others. `votes/{attempt}` counts casts, repeated ones included. Votes of incarnations that are not members are
never read. Entries and votes are opaque text here; `core.entries` and `core.votes` define them.
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
"""Over all ranks of a run: a quarter of what the embedded store's server answers with one processor."""

LOG = "log/"
"""The directory that holds the entries and nothing else; they are written in lexicographic order."""


class DecisionLog:
    """The decision log over one store connection."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store

    def append(self, index: int, entry: str) -> str:
        """Writes the entry if the index is free; returns the entry stored there."""
        return self._store.put_if_absent(entry_key(index), entry)

    def has(self, index: int) -> bool:
        """Whether the entry is written; the cheap poll of a rank in a reduction."""
        return self._store.exists(entry_key(index))

    def report_broken(self, index: int) -> None:
        """Marks the collective preceding entry `index` as failed."""
        self._store.put(_broken_key(index), "broken")

    def is_broken(self, index: int) -> bool:
        """Whether a rank has marked that collective as failed; as cheap as `has`."""
        return self._store.exists(_broken_key(index))

    def wait(self, index: int, timeout_s: float) -> str:
        """Blocks until the entry is written and returns it; raises `StoreTimeout` after timeout_s seconds."""
        return self._store.wait(entry_key(index), timeout_s)

    def entries(self, indices: Sequence[int]) -> list[str | None]:
        """A few consecutive entries, None for those that are not written."""
        return self._store.get([entry_key(index) for index in indices])

    def read(self, index: int, most: int) -> list[str]:
        """Written entries from the index on: at least half of those that exist, at most `most`.

        Cost: some log2(most) small reads. The index must be at or before the head.
        """
        number = most if self._is_written(index) else 0
        while number and not self._is_written(index + number - 1):  # if it is, all before it are
            number //= 2
        found = self.entries(range(index, index + number)) if number else []
        return [entry for entry in found if entry is not None]

    def find_head(self, from_index: int) -> int:
        """The first index without an entry, as of the read; all earlier indices have one.

        Cost: some 2 log2(d) small reads for a head d entries away. `from_index` must be at or before the head.
        """
        step = 1
        while self._is_written(from_index + step - 1):
            from_index, step = from_index + step, 2 * step
        return bisect_left(
            range(from_index + step - 1), True, lo=from_index, key=lambda index: not self._is_written(index)
        )

    def _is_written(self, index: int) -> bool:
        # Not `has`: it may start a watch, which first reads all entries from this index on.
        return self.entries([index]) != [None]

    def cast(self, attempt: int, writer: Voter, votes: Mapping[_Voter, str], forget: Sequence[int] = ()) -> int:
        """Casts votes with one write. A vote that several writers cast is the same vote.

        Args:
            attempt: The attempt.
            writer: The casting member; it casts once per attempt.
            votes: Encoded votes by voter.
            forget: Attempts whose votes by this writer are no longer read.

        Returns:
            Votes cast on the attempt so far, repeated casts included: never too few, so the caster of the last vote
            always learns that it may be the last.
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
            # The first cast on this attempt: all groups voted on the one before, so no count before that is read again.
            self._store.delete([_count_key(attempt - 2)])
        return num_votes

    def num_votes(self, attempt: int) -> int:
        """Votes cast so far, repeated casts included, in one small read; for groups whose own vote has been cast."""
        return self._store.counted(_count_key(attempt))

    def announce(self, member: Voter) -> None:
        """Announces that the member is up and waits to be admitted."""
        group, incarnation = member
        self._store.put(f"waiting/{group}", str(incarnation))

    def waiting(self, groups: Sequence[int]) -> list[Voter]:
        """Latest announced incarnation of each of these groups that has ever announced itself."""
        found = self._store.get([f"waiting/{group}" for group in groups]) if groups else []
        return [(group, int(text)) for group, text in zip(groups, found, strict=True) if text is not None]

    def announce_restart(self, member: Voter, text: str) -> None:
        """Announces that the member has restarted after a wipe-out, with the encoded state that it can offer."""
        group, incarnation = member
        self._store.put(f"restart/{group}", f"{incarnation} {text}")

    def waiting_to_restart(self, groups: Sequence[int]) -> list[tuple[Voter, str]]:
        """Latest restart announcement of each of these groups that has ever made one: member and text."""
        found = self._store.get([f"restart/{group}" for group in groups])
        parts = [(group, text.partition(" ")) for group, text in zip(groups, found, strict=True) if text is not None]
        return [((group, int(incarnation)), text) for group, (incarnation, _, text) in parts]

    def publish_digest(self, index: int, group: int, digest: str) -> None:
        """Publishes the digest of the group's parameters as of entry `index`, for the groups that the entry admits."""
        self._store.put(f"digest/{index}/{group}", digest)

    def digests(self, index: int, groups: Sequence[int]) -> list[str | None]:
        """The digests that these groups have published so far, None for the others."""
        return self._store.get([f"digest/{index}/{group}" for group in groups])

    def votes(self, attempt: int, voters: Sequence[Voter], relays: Sequence[Voter] = ()) -> dict[int, str]:
        """The votes that these voters have cast on the attempt so far, by group.

        Reads the casts of the relays first, then the keys of those voters that are not found there.
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
        self._store.put(_relay_key(member), address)

    def relay(self, member: Voter) -> str | None:
        """Address of the member's relay, None if it has published none."""
        return self._store.get([_relay_key(member)])[0]


def ask_interval_s(num_ranks: int) -> float:
    """Seconds between looks at the log of a rank that waits for something else.

    A loss is usually seen on a socket first.

    >>> ask_interval_s(16), ask_interval_s(8000)
    (0.01, 0.4)
    """
    return max(_ASK_INTERVAL_S, num_ranks / _MOST_ASKS_PER_S)


def entry_key(index: int) -> str:
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
