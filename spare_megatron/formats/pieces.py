"""Splits large states into pieces, and limits their rate."""

from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 1 << 20
"""Bytes that a thread copies at a time, which bounds how long others wait."""

LARGEST_PIECE_BYTES = 2 * PIECE_BYTES
"""Largest request; pieces of state partitions are counted in elements."""


class Piece(NamedTuple):
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def pieces_of(num_bytes: int) -> Iterator[Piece]:
    """The pieces of this many bytes, in order.

    >>> [piece.size for piece in pieces_of(2 * PIECE_BYTES + 5)] == [PIECE_BYTES, PIECE_BYTES, 5]
    True
    """
    for start in range(0, num_bytes, PIECE_BYTES):
        yield Piece(start, min(start + PIECE_BYTES, num_bytes))


class TokenBucket:
    """Limits a receiver to a rate, byte by byte; empty at `now_s`, a time of a monotonic clock."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._earned_at_s = now_s

    def reserve(self, num_bytes: int, now_s: float) -> float:
        """When this many more bytes are earned, at the earliest now.

        >>> bucket = TokenBucket(bytes_per_s=100.0, now_s=1.0)
        >>> [bucket.reserve(50, now_s) for now_s in (1.0, 1.25, 2.75, 2.75)]
        [1.5, 2.0, 2.75, 3.25]
        """
        self._earned_at_s = max(self._earned_at_s + num_bytes / self._bytes_per_s, now_s)
        return self._earned_at_s
