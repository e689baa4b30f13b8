"""How far one rank is with the buckets of its flat gradient space, and which sums everybody holds.

The buckets of an attempt are reduced in order, each out of place, and at most `WINDOW` are in flight. While it is not
certain that every member holds the sum of a bucket, each member keeps its own local sum of it: should the attempt fail,
what is missing is added to the local sums, and the next attempt reduces them again. From then on the sum takes the
place of the local sum, and its staging buffer is free.

Nobody has to ask for that certainty. A member whose bucket i is complete has heard from all that they posted i; where
the sums go to some members alone, a small sum for all that goes along says so. All follow the same rule: who posts i
has so many buckets complete itself. So these are complete on every member. The rule is that at most `WINDOW` buckets
are in flight and at most `MAX_STAGED` staged, from the first that may be incomplete somewhere to the one that is
posted; so it follows from itself, bucket by bucket:

    bucket posted                       0 1 2 3 4 5 6 7 8
    complete on the member by then      0 0 1 3 4 4 5 7 8

    complete here      0 1 2 3 4 5      6 of them; 5 is complete, so all have posted it, with 4 of them complete
    complete on all    0 1 2 3          their sums take the place of the local sums
    staged                     4 5 6    and 7 waits until 6 is complete here, thus 4 on all

Two of four buckets are posted while another is in flight. With four staging buffers all could be, with two none.

The least number of complete buckets over the survivors of a failed attempt is therefore at least what any of them has
written over its local sums, and every survivor holds the sums of all buckets before it, as far as they go to it
(`stacking.state_partitions`): they stay, with what a lost group contributed to them.
"""

WINDOW = 2
"""Buckets in flight: one is reduced while the next is copied and connected."""

MAX_STAGED = 3
"""Staging buffers that a rank needs at most; more than `WINDOW`, or no bucket could be posted that none waits for."""


def cut(num_elements: int, bucket_elements: int) -> tuple[range, ...]:
    """The buckets of a flat space: equal but for the last.

    >>> cut(10, 4)
    (range(0, 4), range(4, 8), range(8, 10))
    """
    starts = range(0, num_elements, bucket_elements)
    return tuple(range(start, min(start + bucket_elements, num_elements)) for start in starts)


class BucketWindow:
    """One rank's progress through the buckets of one attempt.

    Args:
        num_buckets: Buckets of the rank's gradient space.
        kept: Buckets whose sums every survivor holds from earlier attempts; this one begins after them.

    Attributes:
        num_posted: Buckets that are in flight, complete or kept.
        num_complete: Buckets whose sums this rank holds, counted from the first.
    """

    def __init__(self, num_buckets: int, kept: int) -> None:
        if not 0 <= kept <= num_buckets:
            raise ValueError(f"{kept} buckets are said to be kept, the rank has {num_buckets}")
        self._num_buckets = num_buckets
        self._kept = kept
        self._complete_before = _complete_before(num_buckets - kept)
        self.num_posted = kept
        self.num_complete = kept

    @property
    def num_everywhere(self) -> int:
        """Buckets whose sums every member of the attempt holds for certain."""
        num_complete = self.num_complete - self._kept
        return self._kept + (self._complete_before[num_complete - 1] if num_complete else 0)

    @property
    def is_complete(self) -> bool:
        return self.num_complete == self._num_buckets

    def may_post(self, num_ready: int) -> bool:
        """Whether the next bucket can be sent, of those whose local sums are ready: the first `num_ready`."""
        if self.num_posted >= min(num_ready, self._num_buckets):
            return False
        return self.num_complete - self._kept >= self._complete_before[self.num_posted - self._kept]

    def post(self) -> int:
        """Sends the next bucket. Returns which."""
        self.num_posted += 1
        return self.num_posted - 1

    def complete(self) -> range:
        """The first bucket in flight is complete. Returns the buckets that every member holds as of now."""
        before = self.num_everywhere
        self.num_complete += 1
        return range(before, self.num_everywhere)


def _complete_before(num_buckets: int) -> list[int]:
    """For each bucket of an attempt, how many are complete at least on a member that posts it.

    >>> _complete_before(9)
    [0, 0, 1, 3, 4, 4, 5, 7, 8]
    """
    before: list[int] = []
    for bucket in range(num_buckets):
        complete = max(bucket + 1 - WINDOW, 0)
        while bucket + 1 - (before[complete - 1] if complete else 0) > MAX_STAGED:
            complete += 1
        before.append(complete)
    return before
