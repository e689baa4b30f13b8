"""Large states in pieces: which ranges of bytes there are, and when the next may go."""

from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 1 << 20
"""Bytes of a piece: what a thread copies at a time, so that others wait for no more than that."""

LARGEST_PIECE_BYTES = 2 * PIECE_BYTES
"""Nobody asks for more at a time: pieces of slices are so many elements, whatever state each of them has."""


class Piece(NamedTuple):
    """A range of bytes, from start up to stop."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def pieces_of(num_bytes: int) -> Iterator[Piece]:
    """The pieces of so many bytes, in their order.

    >>> [piece.size for piece in pieces_of(2 * PIECE_BYTES + 5)] == [PIECE_BYTES, PIECE_BYTES, 5]
    True
    """
    for start in range(0, num_bytes, PIECE_BYTES):
        yield Piece(start, min(start + PIECE_BYTES, num_bytes))


class TokenBucket:
    """Keeps a receiver to so many bytes a second. A piece is earned byte by byte before it may be asked for.

    Args:
        bytes_per_s: The rate.
        now_s: The present time of a clock that never goes back. There is nothing in the bucket.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._earned_at_s = now_s

    def take(self, num_bytes: int, now_s: float) -> float:
        """When so many bytes more have been earned; now, if that was before. The next ones are earned from then on.

        >>> bucket = TokenBucket(bytes_per_s=100.0, now_s=1.0)
        >>> [bucket.take(50, now_s) for now_s in (1.0, 1.25, 2.75, 2.75)]
        [1.5, 2.0, 2.75, 3.25]
        """
        self._earned_at_s = max(self._earned_at_s + num_bytes / self._bytes_per_s, now_s)
        return self._earned_at_s
