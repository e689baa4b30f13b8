"""The optimizer state of slices as bytes: what hosts serve, and what those who copy it install."""

from spare_megatron.core.pieces import Piece
from spare_megatron.core.topology import SliceId
from spare_megatron.mcore.stacked_optimizer import PieceState, StackedOptimizer
from spare_megatron.runtime.wire.piece_wire import NotOffered


class SliceContent:
    """The state of one slice; a `state_source.Content`. Its pieces are the optimizer's, and only whole ones are read.

    Args:
        optimizer: The rank's slices.
        number: The slice.
    """

    def __init__(self, optimizer: StackedOptimizer, number: SliceId) -> None:
        self._optimizer = optimizer
        self._number = number
        self.num_bytes = optimizer.slices.length(number) * optimizer.element_bytes

    @property
    def name(self) -> str:
        """By which it is asked for."""
        return f"slice-{self._number}"

    @property
    def num_pieces(self) -> int:
        return self._optimizer.slices.num_pieces(self._number)

    def piece(self, index: int) -> Piece:
        """The bytes of one of its pieces."""
        place = self._optimizer.slices.place(self._number, index)
        return Piece(place.start * self._optimizer.element_bytes, place.stop * self._optimizer.element_bytes)

    def read(self, piece: Piece) -> bytes:
        """The bytes of a piece.

        Raises:
            NotOffered: The slice is not hosted here, or it has no such piece.
        """
        index = piece.start // self.piece(0).size
        if self._number not in self._optimizer.hosted or piece != self.piece(index):
            raise NotOffered(f"slice {self._number}, {piece}")
        return self._optimizer.read_piece(self._number, index).data

    def install(self, index: int, step: int, data: bytes) -> bool:
        """Takes over a piece as of a step; False if that is not the present one, and nothing is changed."""
        return self._optimizer.install_piece(self._number, index, PieceState(num_updates=step, data=data))


def slice_contents(optimizer: StackedOptimizer) -> list[SliceContent]:
    """All slices, whoever hosts them, by their numbers."""
    return [SliceContent(optimizer, SliceId(number)) for number in range(optimizer.slices.num_slices)]
