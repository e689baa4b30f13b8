"""Client of the decision log, the append-only entries that every process folds, and of the votes that lead to them.

Entries are written once, by compare-and-set, under keys whose lexicographic order is log order. Votes of incarnations
that are not members are never read. Entries and votes are opaque text here; `core.log.entries` and `core.log.votes`
define it.
"""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from spare_megatron.formats.codec import encode
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore, StoreTimeout, lost_key, read_values

_ASK_INTERVAL_S = 0.010
_MOST_ASKS_PER_S = 20_000
"""Over all ranks of a run, two keys each: half of what the embedded store's server answers with one processor."""
_POLL_S, _POLL_S_PER_GROUP = 0.05, 0.001
_CHECK_S = 2.0
"""Longest time for which a process relies on entries that it has seen."""


class DecisionLog:
    """The decision log over one store connection.

    A store that has lost entries which it had confirmed counts as lost, though it answers. So the newest entry that is
    known here is looked up again every `check_s`, and no entry is written after one that is gone. What reads or
    appends raises `StoreLost` if it is gone or another one.
    """

    def __init__(self, store: ControlStore, check_s: float = _CHECK_S) -> None:
        self.store = store
        self._check_s = check_s
        self._checked_at_s = time.monotonic()
        self._num_known = 0
        self._newest: str | None = None
        """The last known entry, the run's name while none is known; None if it has not been read."""

    def note(self, index: int, entry: str) -> None:
        """Notes an entry that is written. Raises StoreLost if another one stood there before."""
        if index == self._num_known - 1 and self._newest not in (None, entry):
            raise lost_key(keys.entry(index))
        if index >= self._num_known - 1:
            self._num_known, self._newest = index + 1, entry

    def expect(self, head: int) -> None:
        """Notes that so many entries are written."""
        if head > self._num_known:
            self._num_known, self._newest = head, None

    def check(self) -> None:
        """Raises StoreLost if the store has lost what is known here. Looks again after `check_s`."""
        now_s = time.monotonic()
        if now_s - self._checked_at_s >= self._check_s:
            self._checked_at_s = now_s
            self._require()

    def _require(self) -> None:
        key = keys.entry(self._num_known - 1) if self._num_known else keys.RUN_NAME
        (value,) = self.store.get([key])
        is_known = self._num_known > 0 or self._newest is not None  # the embedded store has no name
        if is_known and (value is None or self._newest not in (None, value)):
            raise lost_key(key)
        self._newest = value

    def append(self, index: int, entry: str) -> str:
        """Writes the entry if the index is free, after all before it; returns the entry stored there."""
        self.check()
        stored = self.store.put_if_absent(keys.entry(index), entry, after=keys.entry(index - 1) if index else None)
        self.note(index, stored)
        return stored

    def has(self, index: int) -> bool:
        """Whether the entry is written; the cheap poll of a rank in a reduction."""
        self.check()
        return self.store.exists(keys.entry(index))

    def report_broken(self, index: int, cause: str) -> str:
        """Marks the collective preceding entry `index` as failed; returns the cause of the first such mark."""
        return self.store.put_if_absent(keys.broken(index), cause)

    def is_broken(self, index: int) -> bool:
        """Whether a rank has marked that collective as failed; as cheap as `has`."""
        return self.store.exists(keys.broken(index))

    def wait(self, index: int, timeout_s: float) -> str:
        """Blocks until the entry is written and returns it; raises `StoreTimeout` after timeout_s seconds."""
        key, left_s = keys.entry(index), timeout_s
        while True:
            self.check()
            try:
                entry = self.store.wait(key, min(left_s, _CHECK_S))
                break
            except StoreTimeout as late:
                self._require()
                left_s -= _CHECK_S
                if left_s <= 0:
                    raise StoreTimeout(f"{key} was not written within {timeout_s:g} s") from late
        self.note(index, entry)
        return entry

    def entries(self, indices: Sequence[int]) -> list[str | None]:
        """A few consecutive entries, None for those that are not written."""
        return self.store.get([keys.entry(index) for index in indices])

    def written(self, start: int, end: int) -> list[str]:
        """A few consecutive entries, all of which are known to be written."""
        found = self.entries(range(start, end))
        for index, entry in enumerate(found, start):
            if entry is None:
                raise lost_key(keys.entry(index))
            self.note(index, entry)
        return [entry for entry in found if entry is not None]

    def read(self, index: int, most: int = 512) -> list[str]:
        """Written entries from the index on: at least half of those that exist, at most `most`.

        Cost: some log2(most) small reads. The index must be at or before the head.
        """
        self.expect(index)
        self.check()
        number = most if self._is_written(index) else 0
        while number and not self._is_written(index + number - 1):  # if it is, all before it are
            number //= 2
        return self.written(index, index + number) if number else []

    def read_few(self, index: int, number: int) -> list[str]:
        """Those of these consecutive entries that are written. Cost: two requests if all are. The index is as above."""
        self.expect(index)
        self.check()
        found: list[str] = []
        for entry in self.entries(range(index, index + number)):
            if entry is None:
                break
            self.note(index + len(found), entry)
            found.append(entry)
        return found

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

    def cast(self, attempt: int, writer: Member, votes: Mapping[Member, str], forget: Sequence[int] = ()) -> int:
        """Casts encoded votes by voter with one write; a `writer` casts once per attempt.

        Votes by this writer on the attempts in `forget` are no longer read. Returns the votes cast so far, repeated
        casts included: never too few, so the caster of the last vote always learns that it may be the last.
        """
        voters: dict[str, list[Member]] = {}
        for voter, vote in votes.items():
            voters.setdefault(vote, []).append(voter)
        num_votes = self.store.put_counted(
            keys.votes(attempt, writer),
            encode(list(voters.items())),
            keys.num_votes(attempt),
            weight=len(votes),
            forget=[keys.votes(past, writer) for past in forget],
        )
        if num_votes == len(votes):
            # The first cast on this attempt: all groups voted on the one before, so no count before that is read again.
            self.store.delete([keys.num_votes(attempt - 2)])
        return num_votes

    def num_votes(self, attempt: int) -> int:
        """Votes cast so far, repeated casts included, in one small read; for groups whose own vote has been cast."""
        return self.store.counted(keys.num_votes(attempt))

    def votes(self, attempt: int, voters: Sequence[Member], relays: Sequence[Member] = ()) -> dict[GroupId, str]:
        """Votes cast so far, by group: reads the casts of the relays, then the keys of voters not found there."""
        found = self._written_by(attempt, relays)
        found |= self._written_by(attempt, [voter for voter in voters if voter not in found])
        return {voter.group: found[voter] for voter in voters if voter in found}

    def _written_by(self, attempt: int, writers: Sequence[Member]) -> dict[Member, str]:
        found = read_values(
            self.store, [keys.votes(attempt, writer) for writer in writers], list[tuple[str, list[Member]]]
        )
        return {voter: vote for casts in found for vote, voters in casts or () for voter in voters}


def poll_interval_s(num_groups: int) -> float:
    """Seconds between looks of a waiting leader at keys of all groups: every leader reads those of all others."""
    return max(_POLL_S, _POLL_S_PER_GROUP * num_groups)


def ask_interval_s(num_ranks: int) -> float:
    """Seconds between looks at the log of a rank that waits for something else.

    A loss is usually seen on a socket first.

    >>> ask_interval_s(16), ask_interval_s(8000)
    (0.01, 0.4)
    """
    return max(_ASK_INTERVAL_S, num_ranks / _MOST_ASKS_PER_S)
