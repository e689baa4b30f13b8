"""One rank's part in a restart from, or an undo to, a snapshot in the memory of nodes."""

import contextlib
import hashlib
import mmap
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

from spare_megatron.core.log.events import HeldPartition, RestartState
from spare_megatron.core.log.votes import Held
from spare_megatron.core.saves.snapshot_policy import held_by_group, in_order_to_ask
from spare_megatron.formats.codec import decode, encode
from spare_megatron.formats.frames import Address, ConnectionBroken, NotOffered, TurnedAway, WrongStep
from spare_megatron.formats.pieces import Piece, pieces_of
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.state import ForeignState, IncomingState
from spare_megatron.process.snapshot_wire import Part, PartKey
from spare_megatron.stacking.layout import Member
from spare_megatron.stacking.state_partitions import Hosts
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient, SnapshotServerGone
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.state_transfer import JoinFailed, LengthFirst
from spare_megatron.store import keys

_CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a server that may be cut off: another may have the copy, and this one is asked again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""Pauses before the holders of a copy are asked again; doubled every time."""


_Read = Callable[[Piece, memoryview | None], memoryview]
"""Reads a piece of a copy, into given memory or into memory of its own."""


class _Unusable(Exception):
    """The copy held there differs from the snapshot."""


_Servers = dict[str, tuple[Member, str]]
"""Address -> the group that has announced a copy there, and the SHA-256 of the copy."""


class _Copy(NamedTuple):
    """A copy of this rank position's state in a snapshot: a state partition or, for None, all other state."""

    attempt: int
    partition: PartKey


class SnapshotLoader:
    """Finds and loads the snapshots of this rank position in the memory of nodes, its own and others."""

    def __init__(self, ctx: RankContext, snapshot_server: SnapshotClient) -> None:
        self._ctx = ctx
        self._snapshot_server = snapshot_server
        self._timeout_s = ctx.config.reduce.timeout_s
        self._own: dict[_Copy, str] = {}  # on the rank's own node, with SHA-256
        self._broken: set[str] = set()  # servers to be asked after the others
        self._lost: set[Member] = set()  # holders that were lost while they were asked

    def announce_intact(self) -> tuple[tuple[Held, ...], tuple[HeldPartition, ...], tuple[str, ...]]:
        """Announces this rank's intact snapshots. Returns those of rank positions, those of partitions that all ranks
        have, and why others are unusable. Collective over: all ranks of the group.
        """
        held: tuple[Held, ...] = ()
        partitions: tuple[HeldPartition, ...] = ()
        rejected: tuple[str, ...] = ()
        self._own, server = {}, ""
        asking = ThreadPoolExecutor(max_workers=1)
        try:
            answer = asking.submit(self._snapshot_server.list_intact, self._ctx.store.local_host()).result(
                self._timeout_s
            )
        except (SnapshotServerGone, TimeoutError) as error:
            rejected = (f"rank {self._ctx.spec.rank}: {error or 'the snapshot server of its node does not answer'}",)
        else:
            held, partitions = answer.held, answer.partitions
            rejected = tuple(
                f"rank {self._ctx.spec.rank}: the snapshot of attempt {attempt} is not what was copied, by its SHA-256"
                for attempt in answer.damaged
            )
            self._own = {_Copy(one.attempt, None): one.sha256 for one in held}
            self._own |= {_Copy(one.attempt, one.partition): one.sha256 for one in partitions}
            server = answer.server
        finally:
            asking.shutdown(wait=False)
        copies = encode([server, list(self._own.items())])
        self._ctx.store.put(keys.snapshot_server(self._ctx.member, self._ctx.spec.rank), copies)
        gathered = self._ctx.agreement.gathered((held, partitions, rejected))
        return (
            tuple(one for some, _, _ in gathered for one in some),
            held_by_group([some for _, some, _ in gathered]),
            tuple(text for _, _, texts in gathered for text in texts),
        )

    def load(self, attempt: int, hosts: Hosts, members: Collection[Member], holders: Collection[Member] = ()) -> None:
        """Loads the snapshot of this attempt with what the group hosts, from the rank's own node where it is there,
        else from `holders`; without these from groups that have announced for a restart that they have it. Raises
        JoinFailed if no server has it any more, or none has answered in time.
        """

        @cache
        def waiting() -> Sequence[RestartState]:
            return self._ctx.agreement.waiting_to_restart(self._ctx.groups)

        def load_part(number: PartKey, prepare: Callable[[bytes], TensorBytes]) -> None:
            copy = _Copy(attempt, number)
            failure = self._load_own(copy, prepare)
            if failure:
                among = holders or _announcing(copy, waiting(), self._ctx.spec.rank)
                servers = self._servers(copy, among, members)
                if holders and not servers:  # another group on a node has what a holder that is gone has copied there
                    servers = self._servers(copy, members, members)
                self._load_from(servers, copy, prepare, failure)

        incoming: list[IncomingState] = []

        def prepare(description: bytes) -> TensorBytes:
            incoming.append(self._ctx.trainer.incoming_state(description))
            return incoming[-1].tensors

        load_part(None, prepare)
        incoming[-1].install()
        self._ctx.optimizer_state.load(hosts, lambda number, state: load_part(number, lambda _: state))

    def _load_own(self, copy: _Copy, prepare: Callable[[bytes], TensorBytes]) -> str:
        """Loads the copy on the rank's own node; returns why it cannot, empty if it has."""
        if copy not in self._own:
            return "no node has it"
        try:
            self._read(_pieces_of(self._snapshot_server.memory(*copy)), self._own[copy], prepare)
        except (SnapshotServerGone, ForeignState, _Unusable) as error:
            return str(error)
        return ""

    def _load_from(self, servers: _Servers, copy: _Copy, prepare: Callable[[bytes], TensorBytes], failure: str) -> None:
        """Loads the copy from the first of these servers that has it; asks again for as long as some server is busy."""
        name = Part(self._ctx.spec.rank, copy.partition).name
        alive_at_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while servers and time.monotonic() - alive_at_s < self._timeout_s:
            for server, (holder, sha256) in list(servers.items()):
                try:
                    with contextlib.closing(self._connected(server, holder)) as client:
                        self._read(partial(client.fetch, name, copy.attempt), sha256, prepare)
                    self._broken.discard(server)
                    return
                except TurnedAway as error:
                    failure, alive_at_s = str(error), time.monotonic()
                except ConnectionBroken as error:
                    failure = str(error)
                    self._broken.add(server)
                except (NotOffered, WrongStep, ForeignState, _Unusable) as error:
                    failure = str(error)
                    del servers[server]
                self._ctx.probe.progress()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise JoinFailed(f"the snapshot of attempt {copy.attempt} of rank {name} has not come: {failure}")

    def _connected(self, server: str, holder: Member) -> PieceClient:
        return PieceClient(
            Address.parse(server),
            self._timeout_s,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            is_over=lambda: self._has_just_lost(holder),
        )

    def _has_just_lost(self, holder: Member) -> bool:
        """Whether the log says anew that the holder is lost: another may have the copy; if none, its node is waited
        for.
        """
        if holder in self._lost or not self._ctx.agreement.is_lost(holder, self._ctx.controller.head):
            return False
        self._lost.add(holder)
        return True

    def _servers(self, copy: _Copy, holders: Collection[Member], members: Collection[Member]) -> _Servers:
        """The servers that should have the copy, in the order in which to ask, broken ones last."""
        found: _Servers = {}
        for holder in in_order_to_ask(holders, members, self._ctx.member.group):
            text = self._ctx.store.wait(keys.snapshot_server(holder, self._ctx.spec.rank), self._timeout_s)
            server, copies = decode(text, tuple[str, list[tuple[_Copy, str]]])
            if sha256 := dict(copies).get(copy):
                found[server] = holder, sha256
        return dict(sorted(found.items(), key=lambda one: one[0] in self._broken))

    def _read(self, read: _Read, sha256: str, prepare: Callable[[bytes], TensorBytes]) -> None:
        """Reads a whole copy; raises `_Unusable` if it is not what was copied."""
        digest = hashlib.sha256()

        def checked(piece: Piece, into: memoryview | None = None) -> memoryview:
            content = read(piece, into)
            digest.update(content)
            self._ctx.probe.progress()
            return content

        head = checked(LengthFirst.PIECE)
        description = b"".join(checked(piece) for piece in LengthFirst.pieces(head))
        start = LengthFirst.PIECE.stop + len(description)
        tensors = prepare(description)
        with tensors.writing() as writer:
            for piece in pieces_of(tensors.num_bytes):
                checked(Piece(start + piece.start, start + piece.stop), writer.room(piece.size))
                writer.write(piece)
        if digest.hexdigest() != sha256:
            raise _Unusable("it is not what was copied, by its SHA-256")


def _announcing(copy: _Copy, waiting: Sequence[RestartState], rank: int) -> list[Member]:
    """The groups that have announced the copy of this rank."""
    holders = []
    for one in waiting:
        of_rank = {(held.attempt, held.position) for held in one.held}
        of_partitions = {(held.attempt, held.partition) for held in one.partitions}
        if (copy.attempt, rank) in of_rank if copy.partition is None else copy in of_partitions:
            holders.append(one.member)
    return holders


def _pieces_of(memory: mmap.mmap) -> _Read:
    """Reads each piece once, into other memory: what is checked is what is loaded."""

    def read(piece: Piece, into: memoryview | None = None) -> memoryview:
        content = memoryview(bytearray(piece.size)) if into is None else into
        content[:] = memory[piece.start : piece.stop]
        return content

    return read
