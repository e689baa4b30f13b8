"""Large states in pieces: which ranges of bytes there are, and when the next may go."""

from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 1 << 20
"""Bytes of a piece: what a thread copies at a time, so that others wait for no more than that."""


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
    """Keeps a sender to so many bytes a second; whoever was idle may send one piece at once, and no more.

    Args:
        bytes_per_s: The rate.
        now_s: The present time of the clock that is handed in with every call.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = now_s

    def take(self, num_bytes: int, now_s: float) -> float:
        """Counts so many bytes as sent as soon as they may be; returns how long they have to wait, in seconds.

        >>> bucket = TokenBucket(bytes_per_s=100.0, now_s=0.0)
        >>> [bucket.take(50, now_s) for now_s in (0.0, 0.0, 0.75, 10.0, 10.0)]
        [0.0, 0.5, 0.25, 0.0, 0.5]
        """
        begins_at_s = max(self._free_at_s, now_s)
        self._free_at_s = begins_at_s + num_bytes / self._bytes_per_s
        return begins_at_s - now_s
