"""Copies state to groups that are admitted, and has it confirmed by the other groups."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from spare_megatron.core.controller.comparison import majority_holds
from spare_megatron.core.log.actions import AdmitGroups
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.machines.group_starts import in_order_to_give
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.piece_frames import Address, NotOffered, TransferBroken, WrongStep
from spare_megatron.formats.pieces import Piece, pieces_of
from spare_megatron.mcore.state import IncomingState
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.processes import say
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.stacking.layout import Member
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.served_state import Content, StateSource
from spare_megatron.voting.agreement import GroupAgreement

_POLL_S = 0.005
_LOG_POLL_S = 0.010
_DESCRIPTION, _TENSORS = "description", "tensors"
"""Names of the two parts of a state, as they are offered."""


class JoinFailed(Exception):
    """The group could not get the state with which it was to take part."""


def confirm(
    digest: str, action: AdmitGroups, head: int, agreement: GroupAgreement, timeout_s: float, probe: RankProbe
) -> None:
    """Checks that more than half of the groups that took part before hold the copied parameters (`digest`).

    Otherwise copies of a wrong state could outvote the right ones. Groups lost since the admission, the last of the
    `head` log entries folded, do not count. Raises JoinFailed if they do not, or not within `timeout_s`.
    """
    end_s = time.monotonic() + timeout_s
    while (verdict := majority_holds(digest, _published_digests(action, head, agreement))) is None:
        if time.monotonic() > end_s:
            raise JoinFailed(f"too few groups published digests of their parameters within {timeout_s:g} s")
        time.sleep(_POLL_S)
        probe.progress()
    if not verdict:
        raise JoinFailed("the copied state differs from that of the other groups")
    probe(FaultPoint.JOIN_DONE)


def _published_digests(action: AdmitGroups, head: int, agreement: GroupAgreement) -> list[str | None]:
    """The digests published so far by groups that took part before and still do."""
    left = [member.group for member in action.earlier if not agreement.is_lost(member, head)]
    return agreement.digests(head - 1, left)


class StateTransfer:
    """One rank's part in admitting groups: rank j of a donor gives, rank j of the newcomer takes.

    All groups that took part before offer their state, in case a donor is lost, until the next update, which needs the
    newcomer. A donor has `timeout_s` to reach the step, and for each piece.
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
        """Offers the state to the groups that are admitted or, if this is one of them, takes it.

        Returns the donor; None if this group took part before. `has_state`: all parameters here are those of this step;
        `head` counts the log entries folded so far. Collective over: all ranks of the group. Raises `JoinFailed` if no
        state has come.
        """
        member, donor = self._agreement.member, None
        if member in (*action.donors, *action.members):
            self._probe.between_steps(action.step, FaultPoint.JOIN)
        if member in action.members:
            donor = self._fetch(action, head)
        else:
            self._offer(action.step, has_state)
        self._probe.between_steps(action.step, FaultPoint.JOIN_CONFIRM)
        return donor

    def _offer(self, step: int, has_state: bool) -> None:
        if not has_state:
            self._source.offer(step, {_DESCRIPTION: LengthFirst(b"")})
            return
        state = self._trainer.outgoing_state()
        tensors = _Probed(state.tensors, self._probe)
        self._source.offer(step, {_DESCRIPTION: LengthFirst(state.description), _TENSORS: tensors})

    def _fetch(self, action: AdmitGroups, head: int) -> Member:
        """Takes the state of the first donor that gives it to all ranks of the group: the vote names one donor."""
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
            del fetch  # memory has no room for a second state
            if self._agreement.is_lost(self._agreement.member, head):
                break
        raise JoinFailed(failure)

    def _fetch_from(self, donor: Member, step: int, head: int) -> "_Fetch":
        """Fetches from this donor, and gives up as soon as the log says that it is lost."""
        fetch = _Fetch(self._find_server(donor), step, self._trainer, self._timeout_s, self._probe)
        fetch.start()
        ask_log_at_s = 0.0
        # Until the thread has ended: it may still write where another donor's state is to go.
        while fetch.is_alive():
            fetch.join(_POLL_S)
            self._probe.progress()
            if not fetch.is_left and time.monotonic() >= ask_log_at_s:
                fetch.is_left = self._agreement.is_lost(donor, head)
                ask_log_at_s = time.monotonic() + _LOG_POLL_S
        return fetch


class _Fetch(threading.Thread):
    """Fetches another rank's state into this one's tensors, beside the main thread.

    `state` is None until it is all here; `failure` says why not. The main thread sets `is_left` when the donor is lost.
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
                with state.tensors.writing() as writer:
                    pieces = pieces_of(state.tensors.num_bytes)
                    for piece in client.fetch_each(_TENSORS, self._step, pieces, writer.room):
                        self._require_donor()
                        writer.write(piece)
                        if not piece.start:
                            self._probe(FaultPoint.JOIN_TRANSFER)
                self.state = state
        except Exception as error:  # noqa: BLE001  (its text is the reason if no other donor gives the state)
            self.failure = "it is lost" if self.is_left else str(error) or type(error).__name__

    def _description(self, client: PieceClient) -> bytes:
        """All but the tensors, as soon as the donor has reached the step."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                length = self._piece(client, LengthFirst.PIECE)
                break
            except (NotOffered, WrongStep) as error:
                is_too_late = isinstance(error, WrongStep) and error.present > self._step
                if is_too_late or time.monotonic() > end_s:
                    raise
            time.sleep(_POLL_S)
        pieces = LengthFirst.pieces(length)
        return b"".join(self._piece(client, piece) for piece in pieces)

    def _piece(self, client: PieceClient, piece: Piece) -> memoryview:
        self._require_donor()
        return client.fetch(_DESCRIPTION, self._step, piece)

    def _require_donor(self) -> None:
        if self.is_left:
            raise TransferBroken("it is lost")


class _Probed:
    """Content that calls a probe before its first piece is read."""

    def __init__(self, content: Content, probe: Callable[[FaultPoint], None]) -> None:
        self._content = content
        self._probe = probe
        self.num_bytes = content.num_bytes

    def read(self, piece: Piece) -> bytes | memoryview:
        if not piece.start:
            self._probe(FaultPoint.JOIN_TRANSFER)
        return self._content.read(piece)


class LengthFirst:
    """Bytes with their length in front, for readers that do not know it.

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
        """The pieces of the content, given the bytes that hold its length."""
        for piece in pieces_of(int.from_bytes(length)):
            yield Piece(piece.start + cls.PIECE.stop, piece.stop + cls.PIECE.stop)
