"""A group that is admitted has its state confirmed by others."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from spare_megatron.core.actions import AdmitGroups
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.core.pieces import Piece, pieces_of
from spare_megatron.core.rejoin import in_order_to_give
from spare_megatron.mcore.state import ForeignState, IncomingState
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.piece_wire import Address, NotOffered, TransferBroken, WrongStep
from spare_megatron.process.processes import say
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.stacking.layout import Member
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.state_source import Content, StateSource
from spare_megatron.voting.agreement import GroupAgreement

_VOTE_POLL_S = 0.005


NO_DIGEST = "lacking"
"""What a group tells newcomers that lacks parameters itself: none will come."""


class JoinFailed(Exception):
    """The group was admitted and could not take the state over. It has nothing to go on with."""


def confirm(
    digest: str, action: AdmitGroups, head: int, agreement: GroupAgreement, timeout_s: float, probe: RankProbe
) -> None:
    """Makes sure that more than half of those who took part before hold the parameters that were taken over.

    Otherwise the copy of a wrong state could outvote the right ones in the next comparison. Whoever has been lost
    since the admission has no say: it may never tell.

    Args:
        digest: Of the parameters taken over.
        action: The admission.
        head: Entries of the log folded so far, that of the admission the last.
        agreement: The group's voice.
        timeout_s: Longest wait for the others.
        probe: Told that the rank is there while it waits, and of the end.

    Raises:
        JoinFailed: They do not, or have not said so in time.
    """
    end_s = time.monotonic() + timeout_s
    while (verdict := majority_holds(digest, _told(action, head, agreement))) is None:
        if time.monotonic() > end_s:
            raise JoinFailed(f"too few groups have told their parameters within {timeout_s:g} s")
        time.sleep(_VOTE_POLL_S)
        probe.progress()
    if not verdict:
        raise JoinFailed("the state that was taken over is not that of the other groups")
    probe(FaultPoint.JOIN_DONE)


def _told(action: AdmitGroups, head: int, agreement: GroupAgreement) -> list[str | None]:
    """What those have told so far who took part before and still do."""
    left = [member.group for member in action.earlier if not agreement.is_lost(member, head)]
    return agreement.digests(head - 1, left)


def majority_holds(digest: str, others: Sequence[str | None]) -> bool | None:
    """Whether more than half of the others hold the same parameters; None while too few have said so.

    >>> [majority_holds("a", others) for others in (["a", None, "a"], ["a", None, "b"], ["b", "b", None])]
    [True, None, False]
    """
    same = sum(other == digest for other in others)
    different = sum(other is not None and other != digest for other in others)
    if 2 * same > len(others):
        return True
    return False if 2 * different >= len(others) else None


_POLL_S = 0.005

_LOG_POLL_S = 0.010

_DESCRIPTION, _TENSORS = "description", "tensors"
"""The two parts of a state, as they are offered."""


class StateTransfer:
    """One rank's part in admitting groups: rank j of a donor gives, rank j of the newcomer takes.

    All who took part before let their state be read, so that the loss of a donor does not cost the newcomer its life.
    They go on meanwhile: their state does not change before the next update, which needs the newcomer.

    Args:
        trainer: The rank's part of the model.
        agreement: The group's voice.
        source: What others may read of this rank's state.
        find_server: Where the rank of the same position of a member serves its state.
        timeout_s: Longest wait for a donor to come so far, and for each piece of its state.
        probe: Told before a transfer begins, and that the rank is there while it waits.
    """

    def __init__(
        self,
        *,
        trainer: GroupTrainer,
        agreement: GroupAgreement,
        source: StateSource,
        find_server: Callable[[Member], Address],
        timeout_s: float,
        probe: RankProbe,
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._source = source
        self._find_server = find_server
        self._timeout_s = timeout_s
        self._probe = probe

    def run(self, action: AdmitGroups, head: int, *, has_state: bool) -> Member | None:
        """Offers the state to those who are admitted, or takes it, if this group is one of them.

        Collective over: all ranks of the group.

        Args:
            action: Who is admitted, and who gives to whom.
            head: Entries of the log folded so far.
            has_state: Whether this group has a state to give: all parameters are those of this step.

        Returns:
            Who has given its state to this group; None if it took part before.

        Raises:
            JoinFailed: The state has not come.
        """
        member, donor = self._agreement.member, None
        if member in (*action.donors, *action.members):
            self._probe.between_steps(action.step, FaultPoint.JOIN)
        if member in action.members:
            donor = self._take(action, head)
        else:
            self._offer(action.step, has_state)
        self._probe.between_steps(action.step, FaultPoint.JOIN_CONFIRM)
        return donor

    def _offer(self, step: int, has_state: bool) -> None:
        if not has_state:
            self._source.offer(step, {_DESCRIPTION: LengthFirst(b"")})
            return
        state = self._trainer.outgoing_state()
        tensors = _Told(state.tensors, self._probe)
        self._source.offer(step, {_DESCRIPTION: LengthFirst(state.description), _TENSORS: tensors})

    def _take(self, action: AdmitGroups, head: int) -> Member:
        """Takes the state of the first who gives it to all ranks of the group: whose it is goes into their vote."""
        failure = ""
        for donor in in_order_to_give(action, self._agreement.member):
            fetch = self._fetch_from(donor, action.step, head)
            with self._probe.during(Operation.SETTLE):
                [is_everywhere] = self._agreement.shared([fetch.state is not None])
            if fetch.state is not None and is_everywhere:
                with self._probe.during(Operation.CHECK), self._source.changing(action.step):
                    fetch.state.install()
                return donor
            why = fetch.failure if fetch.state is None else "another rank of this group could not take it"
            failure = f"group {donor.group} has not given its state: {why}"
            say(failure)
            del fetch  # there is no room for a second state
            if self._agreement.is_lost(self._agreement.member, head):
                break
        raise JoinFailed(failure)

    def _fetch_from(self, donor: Member, step: int, head: int) -> "_Fetch":
        """What has come from this donor. It is left as soon as the log says that it is lost."""
        fetch = _Fetch(self._find_server(donor), step, self._trainer, self._timeout_s, self._probe)
        fetch.start()
        ask_log_at_s = 0.0
        # Until it has ended: it may still write where the state of another is to go.
        while fetch.is_alive():
            fetch.join(_POLL_S)
            self._probe.progress()
            if not fetch.is_left and time.monotonic() >= ask_log_at_s:
                fetch.is_left = self._agreement.is_lost(donor, head)
                ask_log_at_s = time.monotonic() + _LOG_POLL_S
        return fetch


class _Fetch(threading.Thread):
    """Fetches the state of another rank into this one's tensors, beside the main thread.

    Attributes:
        state: The state, when all of its bytes are here.
        failure: Why they are not, for people.
        is_left: Set by the main thread: the other rank's group is lost.
    """

    def __init__(
        self, server: Address, step: int, trainer: GroupTrainer, timeout_s: float, probe: Callable[[FaultPoint], None]
    ) -> None:
        super().__init__(name="fetch-state", daemon=True)
        self._server = server
        self._step = step
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._probe = probe
        self.state: IncomingState | None = None
        self.failure = "it ended early"
        self.is_left = False

    def run(self) -> None:
        try:
            with contextlib.closing(PieceClient(self._server, self._timeout_s, is_over=lambda: self.is_left)) as client:
                description = self._description(client)
                if not description:
                    self.failure = "it lacks parameters itself"
                    return
                state = self._trainer.incoming_state(description)
                for piece in pieces_of(state.tensors.num_bytes):
                    state.tensors.write(piece, self._piece(client, _TENSORS, piece))
                    if not piece.start:
                        self._probe(FaultPoint.JOIN_TRANSFER)
                self.state = state
        except (TransferBroken, NotOffered, WrongStep, ForeignState) as error:
            self.failure = "it is lost" if self.is_left else str(error)

    def _description(self, client: PieceClient) -> bytes:
        """All but the tensors, as soon as the donor has come so far."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                length = self._piece(client, _DESCRIPTION, LengthFirst.PIECE)
                break
            except (NotOffered, WrongStep) as error:
                is_too_late = isinstance(error, WrongStep) and error.present > self._step
                if is_too_late or time.monotonic() > end_s:
                    raise
            time.sleep(_POLL_S)
        pieces = LengthFirst.pieces(length)
        return b"".join(self._piece(client, _DESCRIPTION, piece) for piece in pieces)

    def _piece(self, client: PieceClient, name: str, piece: Piece) -> memoryview:
        if self.is_left:
            raise TransferBroken("it is lost")
        return client.fetch(name, self._step, piece)


class _Told:
    """Content that a probe is told of before the first of it is given."""

    def __init__(self, content: Content, probe: Callable[[FaultPoint], None]) -> None:
        self._content = content
        self._probe = probe
        self.num_bytes = content.num_bytes

    def read(self, piece: Piece) -> bytes:
        if not piece.start:
            self._probe(FaultPoint.JOIN_TRANSFER)
        return self._content.read(piece)


class LengthFirst:
    """Bytes to be read in pieces by who does not know how many they are.

    >>> content = LengthFirst(b"abc")
    >>> b"".join(content.read(piece) for piece in LengthFirst.pieces(content.read(LengthFirst.PIECE)))
    b'abc'
    """

    PIECE = Piece(0, 8)
    """Holds the length."""

    def __init__(self, content: bytes) -> None:
        self._data = len(content).to_bytes(self.PIECE.size) + content
        self.num_bytes = len(self._data)

    def read(self, piece: Piece) -> bytes:
        return self._data[piece.start : piece.stop]

    @classmethod
    def pieces(cls, length: bytes | memoryview) -> Iterator[Piece]:
        """The pieces of the content, from the bytes that hold its length."""
        for piece in pieces_of(int.from_bytes(length)):
            yield Piece(piece.start + cls.PIECE.stop, piece.stop + cls.PIECE.stop)
