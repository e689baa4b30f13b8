"""Why a rank ended, for people and for the fence."""

import contextlib
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.failure_detector import Pulse
from spare_megatron.faults.injection import InjectedFault
from spare_megatron.faults.trace import Fault
from spare_megatron.journal.records import LOST_A_PEER
from spare_megatron.process.heartbeats import HeartbeatPage, new_page, read_page
from spare_megatron.process.processes import (
    Child,
    describe_exit,
    die_with,
    end_child,
    leave,
    log_to_file,
    rank_context,
    say,
    start_child,
)
from spare_megatron.process.reports import ExitCode, RankKey, RankRaised
from spare_megatron.process.specs import NodeSpec, RankMain, RankSpec
from spare_megatron.process.starvation import Starvation
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.snapshot.snapshot_server import NodeSnapshotServer

LOSSLESS_EXITS = (ExitCode.FINISHED, ExitCode.WIPE_OUT, ExitCode.HALTED)
"""Ends that all groups come to by themselves: no reason to fence anybody."""


_CAUSES: dict[int, str] = {
    ExitCode.GROUP_BROKEN: LOST_A_PEER,
    ExitCode.JOIN_FAILED: "could not take the state over; its log says why",
    ExitCode.FENCED: "found itself fenced; the log entry says why",
    ExitCode.STORE_LOST: "lost the control store",
}
"""What the exit codes of lost groups mean."""


INJECTED = f"{InjectedFault.__module__}.{InjectedFault.__qualname__}"
"""How the last line of the traceback of an injected fault begins."""


_OF_A_DEVICE = ("ECC error", "NVLink", "hardware stack error")
"""In what CUDA says of a device that has failed, which no other group meets by computing the same."""


def cause_of_end(code: int, traceback: str = "") -> tuple[str, str]:
    """Why the rank ended, and the exception behind it where other groups may meet the same; else empty.

    Args:
        code: The exit code of its process.
        traceback: Of the exception that ended it, if one did.
    """
    error = _error_in(traceback)
    cause = error or _CAUSES.get(code) or describe_exit(code)
    is_its_own = error.startswith(INJECTED) or any(word in error for word in _OF_A_DEVICE)
    return cause, "" if is_its_own else error


class Raised:
    """What ranks of a node have raised, until it is told with the loss of their groups."""

    def __init__(self) -> None:
        self._reports: dict[RankKey, RankRaised] = {}

    def note(self, report: RankRaised) -> None:
        """A rank has raised."""
        self._reports[report.group, report.rank] = report

    def first_rank(self, group: GroupId, ended: int) -> int:
        """The first rank of the group that has raised; the one that has ended, if none has."""
        return min((rank for of, rank in self._reports if of == group), default=ended)

    def cause_of_end(self, key: RankKey, code: int) -> tuple[str, str]:
        """Why the rank ended, as `cause_of_end` has it."""
        report = self._reports.get(key)
        return cause_of_end(code, report.traceback if report else "")

    def take(self, group: GroupId, rank: int) -> RankRaised | None:
        """What the rank has raised, to be told now."""
        return self._reports.pop((group, rank), None)

    def forget(self, group: GroupId) -> None:
        """The group begins its next life."""
        self._reports = {key: report for key, report in self._reports.items() if key[0] != group}


def _error_in(traceback: str) -> str:
    """The last line, where a text of several lines has what others may meet too. CUDA ends with advice instead."""
    lines = traceback.strip().splitlines()
    return next((line for line in reversed(lines) if "CUDA error" in line), lines[-1] if lines else "")


_FAREWELL_S = 5.0
"""How long a rank that has raised waits to be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process that is a rank, or is to be one.

    Attributes:
        child: The process, and the pipe to it.
        page: Memory shared with it, where its beacon beats.
        starvation: What it has lacked of processors.
    """

    child: Child
    page: HeartbeatPage
    starvation: Starvation

    def become(self, spec: RankSpec) -> None:
        """Tells it which rank it is. Where it has died, its end says so."""
        with contextlib.suppress(OSError):
            self.child.reports.send(spec)


class Spares:
    """Makes the processes of a node's ranks, and keeps some that wait.

    Args:
        context: What they are started from.
        rank_main: What they run as soon as they are told who they are.
        num_kept: How many are to wait.
    """

    def __init__(self, context: BaseContext, rank_main: RankMain, num_kept: int) -> None:
        self._context = context
        self._rank_main = rank_main
        self._num_kept = num_kept
        self._waiting: deque[RankProcess] = deque()

    def warm(self) -> None:
        """Starts those that are missing."""
        self._bury()
        self._waiting += [self.new() for _ in range(self._num_kept - len(self._waiting))]

    def take(self, num_wanted: int) -> list[RankProcess]:
        """Those that have waited longest, as many as there are."""
        self._bury()
        return [self._waiting.popleft() for _ in range(min(num_wanted, len(self._waiting)))]

    def new(self) -> RankProcess:
        """A process that nobody has waited for."""
        page = new_page(self._context)
        child = start_child(self._context, "rank", _wait_for_place, self._rank_main, page, os.getpid())
        return RankProcess(child=child, page=page, starvation=Starvation(child.pid))

    def end(self) -> None:
        """Kills and reaps all that wait."""
        while self._waiting:
            end_child(self._waiting.pop().child)

    def _bury(self) -> None:
        """Lets go of those that have died waiting."""
        for process in [process for process in self._waiting if not process.child.process.is_alive()]:
            end_child(process.child)
            self._waiting.remove(process)


def _wait_for_place(rank_main: RankMain, page: HeartbeatPage, supervisor_pid: int, reports: Connection) -> None:
    die_with(supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's affair
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _be_rank(rank_main, replace(reports.recv(), page=page), reports)


def _be_rank(rank_main: RankMain, spec: RankSpec, reports: Connection) -> NoReturn:
    """The rank from its first line on: what it imports may fail as well as what it does.

    The process is left without running destructors: those of communicators that were abandoned would wait for
    transfers that cannot end. Until then the exception holds them.
    """
    try:
        log_to_file(spec.run_dir, spec.name)
        rank_main(spec, reports)
    except BaseException as error:  # noqa: BLE001  (whatever it is, it ends this rank and is told)
        text = traceback.format_exc()
        try:
            say(text.rstrip())
            concerns_all = isinstance(error, ValueError)
            reports.send(RankRaised(group=spec.group, rank=spec.rank, traceback=text, concerns_all=concerns_all))
            # The supervisor ends the whole group for it. A peer that missed it first would fence it without a cause.
            reports.poll(_FAREWELL_S)
        finally:
            leave(ExitCode.RAISED)
    leave(ExitCode.FINISHED)


class RankProcesses:
    """The processes and what belongs to each.

    Attributes:
        keeper: Holds the node's snapshots; None where none are taken.
        pipes: Where reports come from, by the rank that writes them.
        sentinels: What becomes ready when a process ends, by its rank.
        exits: How the last process of each rank ended.
        foreign: Groups whose last life was elsewhere, under a supervisor that is lost; which one is not known yet.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._context = rank_context(spec.config.cluster.device)
        minutes = spec.config.train.max_minutes
        self._ends_at_s = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._keys = spec.config.parallel.ranks_on(spec.node)
        most_ranks = max(len(self.of(group)) for group in spec.config.parallel.groups_on(spec.node))
        self._spares = Spares(self._context, spec.rank_main, spec.config.spare.spares * most_ranks)
        self._processes: dict[RankKey, RankProcess] = {}
        self._faults = set(spec.faults)  # that have yet to strike
        self._incarnations = dict.fromkeys(spec.config.parallel.groups_on(spec.node), 0)
        self.keeper = NodeSnapshotServer(spec, self._context) if spec.config.snapshot.every_steps else None
        self._is_end_asked = False
        self.pipes: dict[Connection, RankKey] = {}
        self.sentinels: dict[int, RankKey] = {}
        self.exits: dict[RankKey, int] = {}
        self.foreign = set(self._incarnations) if spec.life else set()

    def start_all(self) -> None:
        """Starts every rank of the node for the first time, and the keeper of what they copy."""
        self.look_at_keeper()
        for key in self._keys:
            self._start(key, self._spares.new())

    def warm_spares(self) -> None:
        """Starts the spares that are missing."""
        self._spares.warm()

    def start_again(self, group: GroupId, wiped_out_at_s: float | None, *, takes_spares: bool) -> int:
        """Starts the node's ranks of a group whose processes are of no use any more, as its next incarnation.

        Args:
            group: The group.
            wiped_out_at_s: When the whole run was wiped out, if that is why.
            takes_spares: Whether processes that wait take the place of those that were lost, as far as there are any.

        Returns:
            How many have.
        """
        self._incarnations[group] += 1
        keys = self.of(group)
        former = [self._processes[key].child for key in keys if key in self._processes]
        for child in former:
            self.pipes.pop(child.reports, None)
            self.sentinels.pop(child.process.sentinel, None)
        if self._spec.config.cluster.device == "gpu":  # which has no room for two
            _end_all(former)
        spares = self._spares.take(len(keys)) if takes_spares else []
        new = [self._spares.new() for _ in keys[len(spares) :]]
        for key, process in zip(keys, [*spares, *new], strict=True):
            self._start(key, process, wiped_out_at_s)
        _end_all(former)  # a process that is being killed takes as long to end as others to start
        return len(spares)

    def _start(self, key: RankKey, process: RankProcess, wiped_out_at_s: float | None = None) -> None:
        group, rank = key
        process.page.end_asked = self._is_end_asked
        spec = RankSpec(
            config=self._spec.config,
            run_dir=self._spec.run_dir,
            group=group,
            incarnation=self._incarnations[group],
            rank=rank,
            device=_choose_device(self._spec.config, self._spec.node, key),
            store=self._spec.store,
            faults=tuple(f for f in self._spec.faults if (f.group, f.rank) == key and f in self._faults),
            seconds_left=None if self._ends_at_s is None else self._ends_at_s - time.monotonic(),
            wiped_out_at_s=wiped_out_at_s,
            keeper=None if self.keeper is None else self.keeper.address,
            code=self._spec.code,
        )
        process.become(spec)
        self._processes[key] = process
        self.pipes[process.child.reports] = key
        self.sentinels[process.child.process.sentinel] = key

    def ask_to_end(self) -> None:
        """Has the run end with the step under way. Safe in a signal handler."""
        self._is_end_asked = True
        for process in self._processes.values():
            process.page.end_asked = True

    def adopt(self, member: Member) -> None:
        """The last life of a foreign group was this one; the next is here."""
        self.foreign.discard(member.group)
        self._incarnations[member.group] = member.incarnation

    def forget_fault(self, fault: Fault) -> None:
        """It has struck, and no later life of the group meets it."""
        self._faults.discard(fault)

    def of(self, group: GroupId) -> list[RankKey]:
        """The node's ranks of a group."""
        return [key for key in self._keys if key[0] == group]

    def have_ended(self, group: GroupId) -> bool:
        """Whether all processes of the group here have been reaped."""
        return group not in {key[0] for key in self.sentinels.values()}

    def member(self, group: GroupId) -> Member:
        """The group in its present life."""
        return Member(group, self._incarnations[group])

    def next_member(self, group: GroupId) -> Member:
        """The group in the life that would follow."""
        return Member(group, self._incarnations[group] + 1)

    @property
    def groups(self) -> frozenset[GroupId]:
        """The groups that have ranks on the node."""
        return frozenset(self._incarnations)

    @property
    def whole_groups(self) -> frozenset[GroupId]:
        """Of these, those that have no ranks elsewhere."""
        num_ranks = self._spec.config.parallel.ranks_per_group
        return frozenset(group for group in self.groups if len(self.of(group)) == num_ranks)

    @property
    def pids(self) -> Mapping[RankKey, int]:
        return {key: process.child.pid for key, process in self._processes.items()}

    def child(self, key: RankKey) -> Child:
        """The rank's present process."""
        return self._processes[key].child

    def is_there(self, key: RankKey, pid: int) -> bool:
        """Whether this process is the rank's present one and has not ended."""
        child = self._processes[key].child
        return child.pid == pid and child.process.is_alive()

    def pulse(self, key: RankKey) -> Pulse:
        """What the rank shows of itself now."""
        process = self._processes[key]
        return read_page(process.page, process.starvation.seconds(process.page.beats, time.monotonic()))

    def page(self, key: RankKey) -> HeartbeatPage | None:
        """The memory shared with the rank's present process; None if it has had none here."""
        return self._processes[key].page if key in self._processes else None

    def pending(self, group: GroupId) -> list[dict[str, Any]]:
        """What each of the group's ranks here is about, as the journal has it."""
        started = [key for key in self.of(group) if key in self._processes]
        pulses = {rank: self.pulse((group, rank)) for _, rank in started}
        return [{"rank": rank, "operation": str(pulse.operation), "step": pulse.step} for rank, pulse in pulses.items()]

    def reap(self, sentinels: Sequence[int]) -> list[RankKey]:
        """The ranks whose processes have ended, and whose exits are known from now on: who lost a peer after the peer.

        Args:
            sentinels: That are ready. They are of no use any more.
        """
        ended = [self.sentinels.pop(sentinel) for sentinel in sentinels]
        for key in ended:
            process = self._processes[key].child.process
            process.join()
            assert process.exitcode is not None, "a process whose sentinel is ready has ended"
            self.exits[key] = process.exitcode
        return sorted(ended, key=lambda key: self.exits[key] == ExitCode.GROUP_BROKEN)

    def kill(self, group: GroupId) -> None:
        """Kills what is left of a group here."""
        for key in self.of(group):
            if key in self._processes and (process := self._processes[key].child.process).is_alive():
                process.kill()

    def look_at_keeper(self) -> None:
        """Sees to it that there is one, where snapshots are taken."""
        if self.keeper is not None:
            self.keeper.look()

    def end(self) -> None:
        """Kills and reaps all that are left. They stand still first: who saw a peer end would have the group fenced."""
        children = [process.child for process in self._processes.values()]
        for child in children:
            if child.process.is_alive():
                os.kill(child.pid, signal.SIGSTOP)
        if self.keeper is not None:
            self.keeper.end()
        self._spares.end()
        _end_all(children)


def _end_all(children: Sequence[Child]) -> None:
    """Kills and reaps these, at the same time."""
    for child in children:
        if child.process.is_alive():
            child.process.kill()
    for child in children:
        end_child(child)


def _choose_device(config: RunConfig, node: int, key: RankKey) -> str:
    """The rank's device. Nodes that are rehearsed on one machine share its GPUs."""
    layout = config.parallel
    first = node * layout.ranks_per_node if config.cluster.launcher == "local" else 0
    index = first + layout.ranks_on(node).index(key)
    return f"cuda:{index}" if config.cluster.device == "gpu" else "cpu"
