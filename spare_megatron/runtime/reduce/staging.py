"""The staging buffers of one rank: for the buckets of its reductions, and in between for the rounds of its gathers."""

from collections.abc import Callable

from torch import Tensor


class Staging:
    """A few flat tensors of one size, made when they are first needed and used again.

    What takes part in a transfer that is given up is not to be given back, for it may still be written.

    Args:
        make: Makes one, uninitialized.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of each."""
        if not self._free:
            self._free.append(self._make())
        return self._free[-1].nbytes

    def take(self) -> Tensor:
        """A tensor that nobody else uses."""
        return self._free.pop() if self._free else self._make()

    def give_back(self, tensor: Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._free.append(tensor)
