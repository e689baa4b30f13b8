"""One rank's part in starting again from a snapshot, fetched from the memory of nodes."""

import contextlib
import hashlib
import json
import mmap
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

from torch import Tensor

from spare_megatron.control.store import ControlStore
from spare_megatron.core.pieces import Piece, pieces_of
from spare_megatron.core.restart_messages import Waiting
from spare_megatron.core.snapshots import Held, HeldSlice, held_by_group
from spare_megatron.core.topology import GroupId, Member, SliceId
from spare_megatron.mcore.state import ForeignState, IncomingState
from spare_megatron.mcore.tensor_bytes import TensorBytes
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.agreement import GroupAgreement
from spare_megatron.runtime.join import JoinFailed
from spare_megatron.runtime.keeper_client import KeeperClient, KeeperGone
from spare_megatron.runtime.keeper_wire import Part
from spare_megatron.runtime.piece_client import PieceClient
from spare_megatron.runtime.piece_wire import Address, NotOffered, TransferBroken, WrongStep
from spare_megatron.runtime.state_transfer import LengthFirst

_POLL_S = 0.05


class _Unusable(Exception):
    """What is held there is not the snapshot."""


class _Copy(NamedTuple):
    """Of this rank position: a slice in the snapshot of an attempt, or all but slices."""

    attempt: int
    slice: SliceId | None


class SnapshotLoader:
    """What the nodes hold for this rank.

    Args:
        member: The group.
        position: The rank inside it.
        trainer: The rank's part of the model.
        keeper: That of its node.
        agreement: The group's voice.
        store: The control store, where keepers' addresses are told.
        groups: All groups of the run.
        timeout_s: Longest wait for the keeper, and for the snapshot.
        progress: Told that the rank gets on.
    """

    def __init__(
        self,
        *,
        member: Member,
        position: int,
        trainer: GroupTrainer,
        keeper: KeeperClient,
        agreement: GroupAgreement,
        store: ControlStore,
        groups: Sequence[GroupId],
        timeout_s: float,
        progress: Callable[[], None],
    ) -> None:
        self._member = member
        self._position = position
        self._trainer = trainer
        self._keeper = keeper
        self._agreement = agreement
        self._store = store
        self._groups = groups
        self._timeout_s = timeout_s
        self._progress = progress
        self._own: dict[_Copy, str] = {}  # what the own node has, and its SHA-256

    def held(self) -> tuple[tuple[Held, ...], tuple[HeldSlice, ...], tuple[str, ...]]:
        """Snapshots of the group's rank positions that are whole on its nodes.

        Collective over: all ranks of the group.

        Returns:
            They, those of slices that are there for all ranks of the group, and why others are not whole.
        """
        held: tuple[Held, ...] = ()
        slices: tuple[HeldSlice, ...] = ()
        rejected: tuple[str, ...] = ()
        asking = ThreadPoolExecutor(max_workers=1)
        try:
            told = asking.submit(self._keeper.held, self._store.local_host()).result(self._timeout_s)
        except (KeeperGone, TimeoutError) as error:
            rejected = (f"rank {self._position}: {error or 'the keeper of its node does not answer'}",)
        else:
            held, slices = told.held, told.slices
            rejected = tuple(
                f"rank {self._position}: the snapshot of attempt {attempt} is not what was copied, by its SHA-256"
                for attempt in told.damaged
            )
            self._own = {_Copy(one.attempt, None): one.sha256 for one in held}
            self._own |= {_Copy(one.attempt, one.slice): one.sha256 for one in slices}
            copies = [[*copy, sha256] for copy, sha256 in self._own.items()]
            self._store.put(_keeper_key(self._member, self._position), json.dumps([told.server, copies]))
        finally:
            asking.shutdown(wait=False)
        gathered = self._agreement.gathered((held, slices, rejected))
        return (
            tuple(one for some, _, _ in gathered for one in some),
            held_by_group([some for _, some, _ in gathered]),
            tuple(text for _, _, texts in gathered for text in texts),
        )

    def load(self, attempt: int, slices: Collection[SliceId]) -> None:
        """Takes over the snapshot of this attempt: from the own node what is there.

        Args:
            attempt: The snapshot.
            slices: Where the optimizer's state is stacked, the slices to hold from here on; else there are none.

        Raises:
            JoinFailed: Nobody has it any more, or gave it in time.
        """
        waiting = cache(lambda: self._agreement.waiting_to_restart(self._groups))
        incoming: list[IncomingState] = []

        def begin(description: bytes) -> TensorBytes:
            incoming.append(self._trainer.incoming_state(description))
            return incoming[-1].tensors

        self._load(_Copy(attempt, None), waiting, begin)
        incoming[-1].install()
        optimizer = self._trainer.stacked
        if optimizer is None:
            return
        states = {number: optimizer.empty_state(number) for number in slices}
        for number, state in states.items():
            self._load(_Copy(attempt, number), waiting, partial(_in_place, state))
        optimizer.hold(states)

    def _load(
        self, copy: _Copy, waiting: Callable[[], Sequence[Waiting]], begin: Callable[[bytes], TensorBytes]
    ) -> None:
        """Fills the tensors that belong to the description of what is copied."""
        failure = "nobody has it"
        if copy in self._own:
            try:
                self._read(_pieces_of(self._keeper.memory(*copy)), self._own[copy], begin)
                return
            except (KeeperGone, ForeignState, _Unusable) as error:
                failure = str(error)
        name = Part(self._position, copy.slice).name
        servers = self._servers(copy, waiting())
        end_s = time.monotonic() + self._timeout_s
        while servers and time.monotonic() < end_s:
            for server, sha256 in list(servers.items()):
                try:
                    with contextlib.closing(PieceClient(Address.parse(server), self._timeout_s)) as client:
                        self._read(partial(client.fetch, name, copy.attempt), sha256, begin)
                    return
                except TransferBroken as error:  # perhaps for having too much to do
                    failure = str(error)
                except (NotOffered, WrongStep, ForeignState, _Unusable) as error:
                    failure = str(error)
                    del servers[server]
            time.sleep(_POLL_S)
        raise JoinFailed(f"the snapshot of attempt {copy.attempt} of rank {name} has not come: {failure}")

    def _servers(self, copy: _Copy, waiting: Sequence[Waiting]) -> dict[str, str]:
        """Who has said to have it, each with its SHA-256: the next groups after this one first."""
        num_groups = len(self._groups)
        found: dict[str, str] = {}
        for one in sorted(waiting, key=lambda one: (one.member.group - self._member.group) % num_groups):
            if copy.slice is None:
                is_there = any((held.attempt, held.position) == (copy.attempt, self._position) for held in one.held)
            else:
                is_there = any((held.attempt, held.slice) == copy for held in one.slices)
            if is_there:
                key = _keeper_key(one.member, self._position)
                server, copies = json.loads(self._store.wait(key, self._timeout_s))
                for attempt, number, sha256 in copies:
                    if (attempt, number) == copy:
                        found[server] = sha256
        return found

    def _read(self, read: Callable[[Piece], memoryview], sha256: str, begin: Callable[[bytes], TensorBytes]) -> None:
        """Reads all of it, which has to be what was copied."""
        digest = hashlib.sha256()

        def checked(piece: Piece) -> memoryview:
            content = read(piece)
            digest.update(content)
            self._progress()
            return content

        head = checked(LengthFirst.PIECE)
        description = b"".join(checked(piece) for piece in LengthFirst.pieces(head))
        start = LengthFirst.PIECE.stop + len(description)
        tensors = begin(description)
        for piece in pieces_of(tensors.num_bytes):
            tensors.write(piece, checked(Piece(start + piece.start, start + piece.stop)))
        if digest.hexdigest() != sha256:
            raise _Unusable("it is not what was copied, by its SHA-256")


def _in_place(state: Tensor, description: bytes) -> TensorBytes:
    """Of a slice nothing is told but the numbers."""
    return TensorBytes([state])


def _pieces_of(memory: mmap.mmap) -> Callable[[Piece], memoryview]:
    """Reads pieces of it, each once and for all: what is checked is what is taken over."""
    return lambda piece: memoryview(bytearray(memory[piece.start : piece.stop]))


def _keeper_key(member: Member, rank: int) -> str:
    """Where the address of the keeper of a rank's node stands in the control store, and what it has of the rank."""
    return f"keeper/{member.group}/{member.incarnation}/{rank}"
