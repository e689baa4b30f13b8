"""The append-only log of decisions, and the votes that lead to one.

Keys: `log/{index}` holds entry `index`, written once by compare-and-set. `vote/{attempt}/{group}/{incarnation}` holds
a group's vote on an attempt, `votes/{attempt}` counts them. Nobody asks for the vote of an incarnation that is no
member, so it cannot stand for that of another. Entries and votes are text here; their meaning belongs to
`core.messages`.
"""

from collections.abc import Sequence

from spare_megatron.control.store import ControlStore

Voter = tuple[int, int]
"""A group and its incarnation."""


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

    def vote(self, attempt: int, voter: Voter, vote: str) -> int:
        """Casts the voter's only vote on the attempt; returns how many votes have been cast on it so far."""
        return self._store.put_counted(_vote_key(attempt, voter), vote, f"votes/{attempt}")

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

    def votes(self, attempt: int, voters: Sequence[Voter]) -> dict[int, str]:
        """The votes that these voters have cast on the attempt so far, by group."""
        found = self._store.get([_vote_key(attempt, voter) for voter in voters])
        return {group: vote for (group, _), vote in zip(voters, found, strict=True) if vote is not None}

    def forget_votes(self, attempt: int, voters: Sequence[Voter]) -> None:
        """Removes the votes of these voters on an attempt that nobody will ask for again."""
        self._store.delete([*(_vote_key(attempt, voter) for voter in voters), f"votes/{attempt}"])


def _vote_key(attempt: int, voter: Voter) -> str:
    group, incarnation = voter
    return f"vote/{attempt}/{group}/{incarnation}"
