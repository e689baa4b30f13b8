"""Progress of one rank through the gradient buckets of an attempt, and which sums every member holds for certain.

Buckets are reduced in order, out of place, at most `WINDOW` in flight. A rank keeps its local sum of a bucket until
every member must hold the reduced sum. That bucket i is complete proves how many each member had complete, so after a
failed attempt all survivors hold every bucket that any has overwritten. Proof: docs/protocol_sums.md.
"""

WINDOW = 2
"""Buckets in flight: one is reduced while the next is copied and connected."""

MAX_STAGED = 3
"""Staging buffers of a rank; more than `WINDOW`, or two buckets would never be in flight."""


def cut(num_elements: int, bucket_elements: int) -> tuple[range, ...]:
    """The buckets of a flat space, of equal size but for the last.

    >>> cut(10, 4)
    (range(0, 4), range(4, 8), range(8, 10))
    """
    starts = range(0, num_elements, bucket_elements)
    return tuple(range(start, min(start + bucket_elements, num_elements)) for start in starts)


class BucketWindow:
    """One rank's progress through an attempt's buckets, after the `kept` ones of earlier attempts.

    `num_posted` buckets are in flight, complete or kept; the rank holds the sums of the first `num_complete`.
    """

    def __init__(self, num_buckets: int, kept: int) -> None:
        if not 0 <= kept <= num_buckets:
            raise ValueError(f"{kept} buckets should be kept, the rank has {num_buckets}")
        self._num_buckets = num_buckets
        self._kept = kept
        self._complete_before = _complete_before(num_buckets - kept)
        self.num_posted = kept
        self.num_complete = kept

    @property
    def num_everywhere(self) -> int:
        """Leading buckets whose sums every member of the attempt holds for certain."""
        num_complete = self.num_complete - self._kept
        return self._kept + (self._complete_before[num_complete - 1] if num_complete else 0)

    @property
    def is_complete(self) -> bool:
        return self.num_complete == self._num_buckets

    def may_post(self, num_ready: int) -> bool:
        """Whether the next bucket may be sent, with the local sums of the first `num_ready` ready."""
        if self.num_posted >= min(num_ready, self._num_buckets):
            return False
        return self.num_complete - self._kept >= self._complete_before[self.num_posted - self._kept]

    def post(self) -> int:
        """Records the next bucket as sent; returns its index."""
        self.num_posted += 1
        return self.num_posted - 1

    def complete(self) -> range:
        """Records the first bucket in flight as complete; returns the buckets that every member now holds, too."""
        before = self.num_everywhere
        self.num_complete += 1
        return range(before, self.num_everywhere)


def _complete_before(num_buckets: int) -> list[int]:
    """For each bucket of an attempt, the least number of complete buckets on a member that posts it.

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
