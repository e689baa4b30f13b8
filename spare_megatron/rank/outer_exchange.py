"""What ranks of several sites read from each other: differences of a round, and the outer state for a site without."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from spare_megatron.formats.frames import Address, NotOffered, WrongStep
from spare_megatron.formats.pieces import Piece, pieces_of
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.state.transfer.piece_client import PieceClient


class OuterSource:
    """What this rank offers, by name, each with a number that readers must name; a `piece_server.Source`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered: dict[str, tuple[int, TensorBytes]] = {}

    def offer(self, name: str, number: int, tensors: Sequence[Tensor]) -> None:
        with self._lock:
            self._offered[name] = (number, TensorBytes(tensors))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Blocks readers inside the block, in which contents change."""
        with self._lock:
            yield

    def read(self, name: str, step: int, piece: Piece) -> bytes | memoryview:
        with self._lock:
            if name not in self._offered:
                raise NotOffered(name)
            number, content = self._offered[name]
            if step != number:
                raise WrongStep(number)
            if piece.stop > content.num_bytes:
                raise NotOffered(f"{name}: {piece}")
            return content.read(piece)


class SiteContent(NamedTuple):
    """Contents at a site: their kind and number, and the address of each position."""

    kind: str
    number: int
    addresses: Mapping[int, str]

    def name(self, position: int) -> str:
        return f"{self.kind} {position}"


class Fetch(threading.Thread):
    """Fetches some bytes of each position from another site, beside the main thread. `failure`: why it has ended
    without. The main thread sets `is_left` when they are no longer wanted. `failed`: a fetch of the same, which this
    one continues.
    """

    def __init__(
        self, wanted: SiteContent, num_bytes: Mapping[int, int], timeout_s: float, failed: "Fetch | None" = None
    ) -> None:
        super().__init__(name="fetch-outer", daemon=True)
        self._wanted, self._timeout_s = wanted, timeout_s
        self.contents = {position: torch.empty(size, dtype=torch.uint8) for position, size in num_bytes.items()}
        self._fetched = dict.fromkeys(num_bytes, 0)  # bytes from the start
        if failed is not None:
            self.contents, self._fetched = failed.contents, failed._fetched
        self.is_complete = self.is_left = False
        self.failure = ""

    @property
    def num_fetched(self) -> int:
        return sum(self._fetched.values())

    def run(self) -> None:
        try:
            for position, content in self.contents.items():
                if self._fetched[position] < len(content):
                    self._fetch(Address.parse(self._wanted.addresses[position]), position, memoryview(content.numpy()))
            self.is_complete = True
        except Exception as error:  # noqa: BLE001  (another attempt follows while the bytes are wanted)
            self.failure = str(error) or type(error).__name__

    def _fetch(self, address: Address, position: int, into: memoryview) -> None:
        pieces = [piece for piece in pieces_of(len(into)) if piece.start >= self._fetched[position]]

        def room(size: int) -> memoryview:
            place = self._fetched[position]
            return into[place : place + size]

        with closing(PieceClient(address, self._timeout_s, is_over=lambda: self.is_left)) as client:
            for piece in client.fetch_each(self._wanted.name(position), self._wanted.number, pieces, room):
                self._fetched[position] = piece.stop
