"""One rank's part in starting again from a snapshot, fetched from the memory of nodes."""

import contextlib
import hashlib
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from spare_megatron.control.store import ControlStore
from spare_megatron.core.pieces import Piece, pieces_of
from spare_megatron.core.snapshots import Held
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.mcore.state import ForeignState
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.agreement import GroupAgreement
from spare_megatron.runtime.join import JoinFailed
from spare_megatron.runtime.keeper_client import KeeperClient, KeeperGone
from spare_megatron.runtime.piece_client import PieceClient
from spare_megatron.runtime.piece_wire import Address, NotOffered, TransferBroken, WrongStep
from spare_megatron.runtime.state_transfer import LengthFirst

_POLL_S = 0.05


class _Unusable(Exception):
    """What is held there is not the snapshot."""


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
        self._own: dict[int, str] = {}  # SHA-256 of what the own node has, by attempt

    def held(self) -> tuple[tuple[Held, ...], tuple[str, ...]]:
        """Snapshots of the group's rank positions that are whole on its nodes, and why others are not.

        Collective over: all ranks of the group.
        """
        held: tuple[Held, ...] = ()
        rejected: tuple[str, ...] = ()
        asking = ThreadPoolExecutor(max_workers=1)
        try:
            told = asking.submit(self._keeper.held, self._store.local_host()).result(self._timeout_s)
        except (KeeperGone, TimeoutError) as error:
            rejected = (f"rank {self._position}: {error or 'the keeper of its node does not answer'}",)
        else:
            held = told.held
            rejected = tuple(
                f"rank {self._position}: the snapshot of attempt {attempt} is not what was copied, by its SHA-256"
                for attempt in told.damaged
            )
            self._own = {one.attempt: one.sha256 for one in held}
            self._store.put(_keeper_key(self._member, self._position), told.server)
        finally:
            asking.shutdown(wait=False)
        gathered = self._agreement.gathered((held, rejected))
        return (
            tuple(one for some, _ in gathered for one in some),
            tuple(text for _, texts in gathered for text in texts),
        )

    def load(self, attempt: int) -> None:
        """Takes over the snapshot of this attempt: from the own node where it is there.

        Raises:
            JoinFailed: Nobody has it any more, or gave it in time.
        """
        failure = "nobody has it"
        if attempt in self._own:
            try:
                self._take_over(_pieces_of(self._keeper.memory(attempt)), self._own[attempt])
                return
            except (KeeperGone, ForeignState, _Unusable) as error:
                failure = str(error)
        servers = self._servers(attempt)
        end_s = time.monotonic() + self._timeout_s
        while servers and time.monotonic() < end_s:
            for server, sha256 in list(servers.items()):
                try:
                    with contextlib.closing(PieceClient(Address.parse(server), self._timeout_s)) as client:
                        self._take_over(partial(client.fetch, str(self._position), attempt), sha256)
                    return
                except TransferBroken as error:  # perhaps for having too much to do
                    failure = str(error)
                except (NotOffered, WrongStep, ForeignState, _Unusable) as error:
                    failure = str(error)
                    del servers[server]
            time.sleep(_POLL_S)
        raise JoinFailed(f"the snapshot of attempt {attempt} has not come: {failure}")

    def _servers(self, attempt: int) -> dict[str, str]:
        """Who has said to have it, each with its SHA-256: the next groups after this one first."""
        num_groups = len(self._groups)
        waiting = sorted(
            self._agreement.waiting_to_restart(self._groups),
            key=lambda one: (one.member.group - self._member.group) % num_groups,
        )
        found: dict[str, str] = {}
        for one in waiting:
            for held in one.held:
                if (held.attempt, held.position) == (attempt, self._position):
                    found[self._store.wait(_keeper_key(one.member, self._position), self._timeout_s)] = held.sha256
        return found

    def _take_over(self, read: Callable[[Piece], memoryview], sha256: str) -> None:
        """Takes over what is read, if it is what was copied."""
        digest = hashlib.sha256()

        def checked(piece: Piece) -> memoryview:
            content = read(piece)
            digest.update(content)
            self._progress()
            return content

        head = checked(LengthFirst.PIECE)
        description = b"".join(checked(piece) for piece in LengthFirst.pieces(head))
        start = LengthFirst.PIECE.stop + len(description)
        state = self._trainer.incoming_state(description)
        for piece in pieces_of(state.tensors.num_bytes):
            state.tensors.write(piece, checked(Piece(start + piece.start, start + piece.stop)))
        if digest.hexdigest() != sha256:
            raise _Unusable("it is not what was copied, by its SHA-256")
        state.install()


def _pieces_of(memory: mmap.mmap) -> Callable[[Piece], memoryview]:
    """Reads pieces of it, each once and for all: what is checked is what is taken over."""
    return lambda piece: memoryview(bytearray(memory[piece.start : piece.stop]))


def _keeper_key(member: Member, rank: int) -> str:
    """Where the address of the keeper of a rank's node stands in the control store."""
    return f"keeper/{member.group}/{member.incarnation}/{rank}"
