"""Copies state partitions from their hosts in the background: those that lack a copy, and those that move."""

import threading
import time
from collections.abc import Sequence

from spare_megatron.core.log.actions import StartRepairs
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.saves.partition_copies import PartitionCopies, WholeCopy
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.piece_frames import Address, NotOffered, TransferBroken, WrongStep
from spare_megatron.formats.pieces import TokenBucket
from spare_megatron.journal.records import RedundancyRecord, RepairRecord
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.process.processes import say
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.stacking.state_partitions import Repair
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.served_state import PartitionContent

_TIMEOUT_S = 10.0
"""A donor that sends no piece for this long is asked anew. A lost one is left as soon as the log says so."""

_OTHER_STEP_S = 0.002
"""Donor and receiver are one update apart; soon both have made it."""

_BROKEN_S = 0.2


class PartitionRepairs:
    """The copies that one rank makes: assigned and queried by the main thread, made by a background thread."""

    def __init__(
        self,
        ctx: RankContext,
        optimizer: StackedOptimizer,
        contents: Sequence[PartitionContent],
        *,
        awaits_update: bool,  # gradients are summed only for the groups that were to receive them then
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._ctx = ctx
        self._optimizer = optimizer
        self._contents = contents
        self._awaits_update = awaits_update
        self._timeout_s = timeout_s
        self._error: Exception | None = None  # that ended the thread
        self._copying = PartitionCopies(ctx.member, lambda number: contents[number].num_pieces)
        self._servers: dict[Member, Address] = {}  # of the donors
        self._bytes_per_s = ctx.config.optimizer.repair_mib_per_s * 2**20
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
        """Replaces the copies to be made, and drops partitions that are neither hosted nor to be copied.

        Partitions hosted without their state begin here at the start of a run. Later, that raises `ValueError`.
        """
        hosted = {PartitionId(number) for number, row in enumerate(action.hosts) if self._ctx.member in row}
        with self._lock:
            first_step = action.first_step if self._awaits_update else 0
            kept = self._copying.assign(action.copies, action.hosts, time.monotonic(), first_step)
            for number in range(len(action.hosts)):
                if number not in kept:
                    self._optimizer.drop(PartitionId(number))
            if missing := hosted - self._optimizer.hosted:
                self._optimizer.start_partitions(sorted(missing))
            donors = self._copying.donors
            self._servers = {donor: self._servers.get(donor) or self._ctx.find_server(donor) for donor in donors}
        self._wake.set()

    def whole(self) -> dict[PartitionId, bool]:
        """Whether each partition to be copied is whole here, ascending. Raises what ended the background thread."""
        if self._error is not None:
            raise self._error
        with self._lock:
            return self._copying.whole()

    def made(self, number: PartitionId) -> WholeCopy:
        with self._lock:
            return self._copying.made(number)

    @property
    def step(self) -> int:
        """Committed steps in the partitions held here."""
        return self._optimizer.num_updates

    def num_bytes(self, number: PartitionId) -> int:
        return self._contents[number].num_bytes

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
            is_early = job is not None and self._copying.first_step(job[0]) > self._optimizer.num_updates
        if is_early:
            return _OTHER_STEP_S
        if job is None or server is None:
            self._hang_up()
            self._bucket = self._earned_at_s = None
            return None
        repair, index = job
        self._bucket = self._bucket or TokenBucket(self._bytes_per_s, now_s)
        if self._earned_at_s is None:
            self._earned_at_s = self._bucket.reserve(self._contents[repair.partition].piece(index).size, now_s)
        if self._earned_at_s > now_s:
            return self._earned_at_s - now_s
        try:
            self._copy(repair, index, server)
        except WrongStep:
            return _OTHER_STEP_S
        except (NotOffered, TransferBroken) as error:
            say(f"state partition {repair.partition}, from group {repair.donor.group}: {error}")
            self._hang_up()
            return _BROKEN_S
        self._earned_at_s = None
        return 0.0

    def _copy(self, repair: Repair, index: int, server: Address) -> None:
        """Copies one piece; drops it if the step has changed meanwhile or the copy is not wanted any more."""
        content = self._contents[repair.partition]
        step = self._optimizer.num_updates
        data = self._connected(repair.donor, server).fetch(content.name, step, content.piece(index))
        self._ctx.probe(FaultPoint.REPAIR)
        with self._lock:
            if self._copying.is_wanted(repair) and content.install(index, step, bytes(data)):
                self._copying.install(repair, index, time.monotonic())

    def _connected(self, donor: Member, server: Address) -> PieceClient:
        if self._client is None or self._client[0] != donor:
            self._hang_up()
            self._client = donor, PieceClient(server, self._timeout_s, is_over=lambda: donor not in self._servers)
        return self._client[1]

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client[1].close()
        self._client = None


class GroupRepairs:
    """One rank's part in its group's copies: agrees on those that are whole, and journals them."""

    def __init__(self, ctx: RankContext, repairs: PartitionRepairs) -> None:
        self._ctx = ctx
        self._repairs = repairs
        self._journaled: frozenset[PartitionId] = frozenset()
        self._moving: frozenset[PartitionId] = frozenset()  # to this group

    def start(self, action: StartRepairs) -> None:
        """Assigns these copies, which are all that any group is to make."""
        member = self._ctx.member
        self._repairs.assign(action)
        self._journaled &= frozenset(self._repairs.whole())
        self._moving = frozenset(move.partition for move in action.moves if move.receiver == member)
        record = RedundancyRecord(
            group=member.group,
            step=self._repairs.step,
            num_missing=len(action.repairs),
            num_hosted=sum(member in row for row in action.hosts),
        )
        self._ctx.write_if_leader(record)

    def restored(self) -> tuple[PartitionId, ...]:
        """The group's copies that are whole on all of its ranks. Collective over: all ranks of the group."""
        here = self._repairs.whole()
        if not here:
            return ()
        with self._ctx.probe.during(Operation.SETTLE):
            everywhere = self._ctx.agreement.shared(list(here.values()))
        restored = tuple(number for number, is_whole in zip(here, everywhere, strict=True) if is_whole)
        if self._ctx.agreement.is_leader:
            for number in restored:
                if number not in self._journaled:
                    self._write(number)
        self._journaled = frozenset(restored)
        return restored

    def _write(self, number: PartitionId) -> None:
        made = self._repairs.made(number)
        record = RepairRecord(
            group=self._ctx.member.group,
            step=self._repairs.step,
            slice=number,
            donor=made.repair.donor.group,
            is_move=number in self._moving,
            num_bytes=self._repairs.num_bytes(number),
            repair_s=round(made.repair_s, 6),
        )
        self._ctx.journal.write(record)
