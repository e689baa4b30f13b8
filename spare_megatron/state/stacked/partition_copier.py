"""Copies state partitions from their hosts in the background: those that lack a copy, and those that move."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spare_megatron.core.log.actions import StartRepairs
from spare_megatron.core.saves.partition_copies import PartitionCopies
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.frames import Address, ConnectionBroken, NotOffered, WrongStep
from spare_megatron.formats.pieces import Piece, TokenBucket
from spare_megatron.mcore.optimizer.stacked_optimizer import PieceState, StackedOptimizer
from spare_megatron.process.processes import say
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.stacking.state_partitions import Repair, hosted_by
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.piece_client import PieceClient

_TIMEOUT_S = 10.0
"""A donor that sends no piece for this long is asked anew. A lost one is left as soon as the log says so."""

_OTHER_STEP_S = 0.002
"""Donor and receiver are one update apart; soon both have made it."""

_BROKEN_S = 0.2


class PartitionContent:
    """The state of one partition; a `Content`. Its pieces are the optimizer's, and only whole ones are read."""

    def __init__(self, optimizer: StackedOptimizer, number: PartitionId) -> None:
        self._optimizer = optimizer
        self._number = number
        self.num_bytes = optimizer.partitions.length(number) * optimizer.element_bytes

    @property
    def name(self) -> str:
        return f"partition-{self._number}"

    @property
    def num_pieces(self) -> int:
        return self._optimizer.partitions.num_pieces(self._number)

    def piece(self, index: int) -> Piece:
        """The byte range of one of its pieces."""
        place = self._optimizer.partitions.place(self._number, index)
        return Piece(place.start * self._optimizer.element_bytes, place.stop * self._optimizer.element_bytes)

    def read(self, piece: Piece) -> bytes:
        """The bytes of a piece. Raises `NotOffered` if the partition is not hosted here or has no such piece."""
        index = piece.start // self.piece(0).size
        if self._number not in self._optimizer.hosted or piece != self.piece(index):
            raise NotOffered(f"state partition {self._number}, {piece}")
        return self._optimizer.read_piece(self._number, index).data

    def install(self, index: int, step: int, data: bytes) -> bool:
        """Installs a piece as of a step; False, changing nothing, if the state here is of another step."""
        return self._optimizer.install_piece(self._number, index, PieceState(num_updates=step, data=data))


def partition_contents(optimizer: StackedOptimizer) -> list[PartitionContent]:
    """All state partitions by number, hosted here or not."""
    return [PartitionContent(optimizer, number) for number in optimizer.partitions.numbers]


@dataclass
class PartitionRepairs:
    """The copies that one rank makes: assigned and queried by the main thread, made by a background thread."""

    ctx: RankContext
    optimizer: StackedOptimizer
    contents: Sequence[PartitionContent]
    awaits_update: bool  # gradients are summed only for the groups that were to receive them then
    timeout_s: float = _TIMEOUT_S

    def __post_init__(self) -> None:
        self._error: Exception | None = None  # that ended the thread
        self._copying = PartitionCopies(self.ctx.member, lambda number: self.contents[number].num_pieces)
        self._servers: dict[Member, Address] = {}  # of the donors
        self._bytes_per_s = self.ctx.config.optimizer.repair_mib_per_s * 2**20
        self._bucket: TokenBucket | None = None
        self._earned_at_s: float | None = None
        self._client: tuple[Member, PieceClient] | None = None
        self._lock = threading.Lock()  # guards what both threads use; held to install a piece
        self._wake = threading.Event()

    # ---------------------------------------------------------------------------------------------- the main thread

    def run_in_background(self) -> None:
        """Starts the thread that makes assigned copies until the process ends."""
        threading.Thread(target=self._run, name="repair", daemon=True).start()

    def assign(self, action: StartRepairs) -> None:
        """Replaces the copies to be made, and drops partitions that are neither hosted nor to be copied. Hosted ones
        without state begin here at the start of a run; later that raises `ValueError`.
        """
        hosted = set(hosted_by(action.hosts, self.ctx.member))
        with self._lock:
            first_step = action.first_step if self.awaits_update else 0
            kept = self._copying.assign(action.copies, action.hosts, time.monotonic(), first_step)
            for number in range(len(action.hosts)):
                if number not in kept:
                    self.optimizer.drop(PartitionId(number))
            if missing := hosted - self.optimizer.hosted:
                self.optimizer.start_partitions(sorted(missing))
            donors = self._copying.donors
            self._servers = {donor: self._servers.get(donor) or self.ctx.find_server(donor) for donor in donors}
        self._wake.set()

    def whole(self) -> dict[PartitionId, bool]:
        """Whether each partition to be copied is whole here, ascending. Raises what ended the background thread."""
        if self._error is not None:
            raise self._error
        with self._lock:
            return self._copying.whole()

    def made(self, number: PartitionId) -> tuple[Repair, float]:
        with self._lock:
            return self._copying.made(number)

    @property
    def step(self) -> int:
        """Committed steps in the partitions held here."""
        return self.optimizer.num_updates

    def num_bytes(self, number: PartitionId) -> int:
        return self.contents[number].num_bytes

    # ------------------------------------------------------------------------------------------- the thread of its own

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                pause_s = self.work(time.monotonic())
                self._wake.wait(pause_s)
        except Exception as error:  # noqa: BLE001  (raised where it ends the rank: in its main thread)
            self._error = error

    def work(self, now_s: float) -> float | None:
        """Fetches a piece if it is time. Returns the seconds until there is more to do; None if nothing is assigned."""
        with self._lock:
            job = self._copying.next()
            server = None if job is None else self._servers[job[0].donor]
            is_early = job is not None and self._copying.first_step(job[0]) > self.optimizer.num_updates
        if is_early:
            return _OTHER_STEP_S
        if job is None or server is None:
            self._hang_up()
            self._bucket = self._earned_at_s = None
            return None
        repair, index = job
        self._bucket = self._bucket or TokenBucket(self._bytes_per_s, now_s)
        if self._earned_at_s is None:
            self._earned_at_s = self._bucket.reserve(self.contents[repair.partition].piece(index).size, now_s)
        if self._earned_at_s > now_s:
            return self._earned_at_s - now_s
        try:
            self._copy(repair, index, server)
        except WrongStep:
            return _OTHER_STEP_S
        except (NotOffered, ConnectionBroken) as error:
            say(f"state partition {repair.partition}, from group {repair.donor.group}: {error}")
            self._hang_up()
            return _BROKEN_S
        self._earned_at_s = None
        return 0.0

    def _copy(self, repair: Repair, index: int, server: Address) -> None:
        """Copies one piece; drops it if the step has changed meanwhile or the copy is not wanted any more."""
        content = self.contents[repair.partition]
        step = self.optimizer.num_updates
        data = self._connected(repair.donor, server).fetch(content.name, step, content.piece(index))
        self.ctx.probe(FaultPoint.REPAIR)
        with self._lock:
            if self._copying.is_wanted(repair) and content.install(index, step, bytes(data)):
                self._copying.install(repair, index, time.monotonic())

    def _connected(self, donor: Member, server: Address) -> PieceClient:
        if self._client is None or self._client[0] != donor:
            self._hang_up()
            self._client = donor, PieceClient(server, self.timeout_s, is_over=lambda: donor not in self._servers)
        return self._client[1]

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client[1].close()
        self._client = None
