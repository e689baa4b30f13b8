"""The append-only log of decisions, and the votes that lead to one.

Keys: `log/{index}` holds entry `index`, written once by compare-and-set. `vote/{attempt}/{group}` holds a
group's vote on an attempt, `votes/{attempt}` counts them. Entries and votes are text here; their meaning
belongs to `core.messages`.
"""

from collections.abc import Sequence

from spare_megatron.control.store import ControlStore


class DecisionLog:
    """One connection's view of the log."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store

    def append(self, index: int, entry: str) -> str:
        """Writes the entry at the index unless another stands there; returns the one that stands."""
        return self._store.put_if_absent(f"log/{index}", entry)

    def has(self, index: int) -> bool:
        """Whether the entry is written. Cheap: this is what a rank in a reduction polls."""
        return self._store.exists(f"log/{index}")

    def wait(self, index: int, timeout_s: float) -> str:
        """The entry, as soon as it is written.

        Raises:
            StoreTimeout: It was not written within timeout_s seconds.
        """
        return self._store.wait(f"log/{index}", timeout_s)

    def vote(self, attempt: int, group: int, vote: str) -> int:
        """Casts the group's only vote on the attempt; returns how many groups have voted on it so far."""
        # Everybody voted on the attempt before this one, so nobody is still reading the votes before that.
        obsolete = (f"vote/{attempt - 2}/{group}", f"votes/{attempt - 2}")
        return self._store.put_counted(f"vote/{attempt}/{group}", vote, f"votes/{attempt}", obsolete)

    def votes(self, attempt: int, groups: Sequence[int]) -> dict[int, str]:
        """The votes that these groups have cast on the attempt so far."""
        found = self._store.get([f"vote/{attempt}/{group}" for group in groups])
        return {group: vote for group, vote in zip(groups, found, strict=True) if vote is not None}
