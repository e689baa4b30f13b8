"""Copies state to groups that are admitted, and has it confirmed by the other groups."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from spare_megatron.core.controller.comparison import NO_DIGEST, majority_holds
from spare_megatron.core.log.actions import AdmitGroups
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.machines.group_starts import in_order_to_give
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.frames import Address, ConnectionBroken, NotOffered, WrongStep
from spare_megatron.formats.pieces import Piece, pieces_of
from spare_megatron.mcore.state import IncomingState
from spare_megatron.process.processes import say
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import Member
from spare_megatron.state.optimizer_state import Content
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.state_digests import StateDigests

_POLL_S = 0.005
_LOG_POLL_S = 0.010


def _names(position: int) -> tuple[str, str]:
    """Names of the description and the tensors of the state at a position, as they are offered."""
    return f"description {position}", f"tensors {position}"


class JoinFailed(Exception):
    """The group could not get the state with which it was to take part."""


def admit(ctx: RankContext, transfer: "StateTransfer", digests: StateDigests, action: AdmitGroups) -> None:
    """Admits groups; the next vote compares all. Collective over: all ranks of the group. Raises `JoinFailed` if this
    group is one of them and cannot get the state.
    """
    progress = ctx.progress
    with ctx.probe.during(Operation.JOIN):
        donor = transfer.run(action)
    if progress.lacks_params:
        ctx.agreement.publish_digest(ctx.controller.head - 1, NO_DIGEST)
        return
    digests.compute()
    digests.compute_rest(copied_from=None if donor is None else donor.group)
    if donor is not None:
        with ctx.probe.during(Operation.JOIN):
            confirm(ctx, digests.value.params, action)
        ctx.send(GroupRejoined(member=ctx.member, step=action.step, stages=ctx.spec.stages))
    else:
        ctx.agreement.publish_digest(ctx.controller.head - 1, digests.value.params)
    # Only now: a group whose state was refused does not take part, and its digest must not be journaled.
    digests.write(action.step)
    progress.num_steps = action.step


def confirm(ctx: RankContext, digest: str, action: AdmitGroups) -> None:
    """Checks that more than half of the earlier groups that are not lost hold the copied parameters (`digest`): copies
    of a wrong state could outvote the right ones. Raises JoinFailed if not, or not within `reduce.timeout_s`.
    """
    timeout_s = ctx.config.reduce.timeout_s
    end_s = time.monotonic() + timeout_s
    while (verdict := majority_holds(digest, _published_digests(ctx, action))) is None:
        if time.monotonic() > end_s:
            raise JoinFailed(f"too few groups published digests of their parameters within {timeout_s:g} s")
        time.sleep(_POLL_S)
        ctx.probe.progress()
    if not verdict:
        raise JoinFailed("the copied state differs from that of the other groups")
    ctx.probe(FaultPoint.JOIN_DONE)


def _published_digests(ctx: RankContext, action: AdmitGroups) -> list[str | None]:
    """The digests published so far by groups that took part before and still do."""
    head = ctx.controller.head
    left = [member.group for member in action.earlier if not ctx.agreement.is_lost(member, head)]
    return ctx.agreement.digests(head - 1, left)


class StateSource:
    """The state of one rank between two updates; a `piece_server.Source`. `always` is readable after every update."""

    def __init__(self, always: Mapping[str, Content] | None = None) -> None:
        self._always = always or {}
        self._lock = threading.Lock()
        self._step = 0
        self._offered: dict[str, Content] = {}

    def offer(self, step: int, contents: Mapping[str, Content]) -> None:
        """Offers these contents, the state after `step` committed steps, until it changes."""
        with self._lock:
            self._step = step
            self._offered = dict(contents)

    @contextlib.contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """Blocks readers inside the block, after which the state is that after `step` committed steps. Waits for pieces
        that are being read, and withdraws what was offered.
        """
        with self._lock:
            self._offered = {}
            yield
            self._step = step

    def read(self, name: str, step: int, piece: Piece) -> bytes | memoryview:
        with self._lock:
            if step != self._step:
                raise WrongStep(self._step)
            content = self._offered.get(name) or self._always.get(name)
            if content is None or piece.stop > content.num_bytes:
                raise NotOffered(f"{name}: {piece}")
            return content.read(piece)


class StateTransfer:
    """One rank's part in admitting groups: a rank of a donor gives the state of its slabs, ranks of the newcomer that
    hold these take it. All earlier groups offer their state until the next update, in case a donor is lost. A donor has
    `reduce.timeout_s` for each piece.
    """

    def __init__(self, ctx: RankContext, source: StateSource) -> None:
        self._ctx = ctx
        self._source = source
        self._timeout_s = ctx.config.reduce.timeout_s

    def run(self, action: AdmitGroups) -> Member | None:
        """Offers the state to the admitted groups or takes it; returns the donor then. Collective over: all ranks of
        the group. Raises `JoinFailed` if no state has come.
        """
        member, donor = self._ctx.member, None
        if member in (*action.donors, *action.members):
            self._ctx.probe.between_steps(action.step, FaultPoint.JOIN)
        if member in action.members:
            donor = self._fetch(action)
        else:
            self._offer(action.step)
        self._ctx.probe.between_steps(action.step, FaultPoint.JOIN_CONFIRM)
        return donor

    def _offer(self, step: int) -> None:
        offered: dict[str, Content] = {}
        for index, slab in enumerate(self._ctx.trainer.slabs):
            description, tensors = _names(slab.position)
            if self._ctx.progress.lacks_params:
                offered[description] = LengthFirst(b"")
            else:
                state = self._ctx.trainer.outgoing_state(index)
                offered[description] = LengthFirst(state.description)
                offered[tensors] = _Probed(state.tensors, self._ctx.probe)
        self._source.offer(step, offered)

    def _fetch(self, action: AdmitGroups) -> Member:
        """Takes the state of the first donor that gives it to all ranks of the group: the vote names one donor."""
        failure = ""
        for donor in in_order_to_give(action, self._ctx.member):
            fetch = self._fetch_from(donor, action.step)
            with self._ctx.probe.during(Operation.SETTLE):
                [is_everywhere] = self._ctx.agreement.shared([not fetch.failure])
            if not fetch.failure and is_everywhere:
                with self._ctx.probe.during(Operation.CHECK), self._source.changing(action.step):
                    for state in fetch.states:
                        state.install()
                return donor
            why = fetch.failure or "another rank of this group could not take it"
            failure = f"group {donor.group} has not given its state: {why}"
            say(failure)
            del fetch  # memory has no room for a second state
            if self._is_lost(self._ctx.member):
                break
        raise JoinFailed(failure)

    def _is_lost(self, member: Member) -> bool:
        return self._ctx.agreement.is_lost(member, self._ctx.controller.head)

    def _fetch_from(self, donor: Member, step: int) -> "_Fetch":
        """Fetches from this donor, and gives up as soon as the log says that it is lost."""
        servers = [self._ctx.find_server(donor, index) for index in range(len(self._ctx.trainer.slabs))]
        fetch = _Fetch(self._ctx, servers, step)
        fetch.start()
        ask_log_at_s = 0.0
        # Until the thread has ended: it may still write where another donor's state is to go.
        while fetch.is_alive():
            fetch.join(_POLL_S)
            self._ctx.probe.progress()
            if not fetch.is_left and time.monotonic() >= ask_log_at_s:
                fetch.is_left = self._is_lost(donor)
                ask_log_at_s = time.monotonic() + _LOG_POLL_S
        return fetch


class _Fetch(threading.Thread):
    """Fetches the state of each slab, from the server of a rank that has it, into this rank's tensors, beside the main
    thread. `failure` says why not; it is empty once all is here. The main thread sets `is_left` when the donor is lost.
    """

    def __init__(self, ctx: RankContext, servers: Sequence[Address], step: int) -> None:
        super().__init__(name="fetch-state", daemon=True)
        self._ctx = ctx
        self._servers = servers
        self._step = step
        self._timeout_s = ctx.config.reduce.timeout_s
        self.states: list[IncomingState] = []
        self.failure = "it ended early"
        self.is_left = False

    def run(self) -> None:
        try:
            for index, server in enumerate(self._servers):
                with contextlib.closing(PieceClient(server, self._timeout_s, is_over=lambda: self.is_left)) as client:
                    self._fetch(client, index)
            self.failure = ""
        except Exception as error:  # noqa: BLE001  (its text is the reason if no other donor gives the state)
            self.failure = "it is lost" if self.is_left else str(error) or type(error).__name__

    def _fetch(self, client: PieceClient, index: int) -> None:
        described, named = _names(self._ctx.trainer.slabs[index].position)
        description = self._description(client, described)
        if not description:
            raise JoinFailed("it lacks parameters itself")
        state = self._ctx.trainer.incoming_state(description, index)
        with state.tensors.writing() as writer:
            pieces = pieces_of(state.tensors.num_bytes)
            for piece in client.fetch_each(named, self._step, pieces, writer.room):
                self._require_donor()
                writer.write(piece)
                if not piece.start:
                    self._ctx.probe(FaultPoint.JOIN_TRANSFER)
        self.states.append(state)

    def _description(self, client: PieceClient, name: str) -> bytes:
        """All but the tensors, as soon as the donor has reached the step."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                length = self._piece(client, name, LengthFirst.PIECE)
                break
            except (NotOffered, WrongStep) as error:
                is_too_late = isinstance(error, WrongStep) and error.present > self._step
                if is_too_late or time.monotonic() > end_s:
                    raise
            time.sleep(_POLL_S)
        pieces = LengthFirst.pieces(length)
        return b"".join(self._piece(client, name, piece) for piece in pieces)

    def _piece(self, client: PieceClient, name: str, piece: Piece) -> memoryview:
        self._require_donor()
        return client.fetch(name, self._step, piece)

    def _require_donor(self) -> None:
        if self.is_left:
            raise ConnectionBroken("it is lost")


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
