"""The rank processes of one node: starts, replaces, kills and reaps them."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

from spare_megatron.core.machines.failure_detector import Pulse
from spare_megatron.faults.points import Fault
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.files import faults_struck
from spare_megatron.journal.records import StartRecord
from spare_megatron.machine.gpus import shown_to_children
from spare_megatron.machine.gpus.device_errors import code_of
from spare_megatron.machine.machine_signs import Starvation
from spare_megatron.process import processes
from spare_megatron.process.heartbeats import HeartbeatPage, new_page, read_page
from spare_megatron.process.reports import ExitCode, RankKey, RankRaised
from spare_megatron.process.specs import NodeSpec, RankMain, RankSpec, fault_record, gpu_of
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.snapshot.snapshot_server import NodeSnapshotServer

_FAREWELL_S = 5.0
"""How long a rank that has raised waits for its supervisor to kill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process that is a rank or waits to become one, its heartbeat page and its lack of processors."""

    child: processes.Child
    page: HeartbeatPage
    starvation: Starvation

    def become(self, spec: RankSpec) -> None:
        """Sends the process its spec. If it has died, its exit is reaped like that of any rank."""
        with contextlib.suppress(OSError):
            self.child.reports.send(spec)


class Spares:
    """Creates rank processes, and keeps idle ones as spares: so many for each GPU, or for the only key, None, on CPUs.
    A process sees one GPU from its start, as what it imports may use one.
    """

    def __init__(self, context: BaseContext, rank_main: RankMain, num_kept: Mapping[str | None, int]) -> None:
        self._context = context
        self._rank_main = rank_main
        self._num_kept = num_kept
        self._waiting: dict[str | None, deque[RankProcess]] = {gpu: deque() for gpu in num_kept}

    def warm(self) -> None:
        for gpu, waiting in self._waiting.items():
            self._drop_dead(waiting)
            try:
                while len(waiting) < self._num_kept[gpu]:
                    waiting.append(self.new(gpu))
            except OSError as error:  # such as a limit on processes: lost ranks start without a spare
                processes.say(f"warning: no spare of a rank can be started: {error}")

    def pop(self, gpu: str | None = None) -> RankProcess | None:
        """Takes the oldest spare, if there is one."""
        self._drop_dead(self._waiting[gpu])
        return self._waiting[gpu].popleft() if self._waiting[gpu] else None

    def new(self, gpu: str | None = None) -> RankProcess:
        """Starts a process that is not kept as a spare."""
        page = new_page(self._context)
        with shown_to_children(gpu):
            child = processes.start_child(self._context, "rank", _wait_for_place, self._rank_main, page)
        return RankProcess(child=child, page=page, starvation=Starvation(child.pid))

    def end_all(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                processes.end_child(waiting.pop().child)

    def _drop_dead(self, waiting: deque[RankProcess]) -> None:
        for process in [process for process in waiting if not process.child.process.is_alive()]:
            processes.end_child(process.child)
            waiting.remove(process)


def _wait_for_place(rank_main: RankMain, page: HeartbeatPage, reports: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _be_rank(rank_main, replace(reports.recv(), page=page), reports)


def _be_rank(rank_main: RankMain, spec: RankSpec, reports: Connection) -> NoReturn:
    """Runs the rank, reports an exception and ends the process without destructors: those of abandoned communicators
    would wait for transfers that cannot end.
    """
    try:
        processes.log_to_file(spec.run_dir, spec.name)
        rank_main(spec, reports)
    except BaseException as error:  # noqa: BLE001  (any exception ends this rank and is reported)
        text = real_paths(traceback.format_exc())
        try:
            processes.say(text.rstrip())
            reports.send(
                RankRaised(
                    group=spec.group,
                    rank=spec.rank,
                    traceback=text,
                    concerns_all=isinstance(error, ValueError),
                    device_code=code_of(error),
                )
            )
            # The supervisor ends the whole group with this cause; a peer that missed the rank first would give none.
            reports.poll(_FAREWELL_S)
        finally:
            processes.leave(ExitCode.RAISED)
    processes.leave(ExitCode.FINISHED)


class RankProcesses:
    """The present process of every rank of a node, with its pipe, sentinel, exit code and incarnation. `foreign`:
    groups last started by a lost supervisor, in an incarnation that is not known yet.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._context = processes.rank_context(spec.config.cluster.device, multiprocessing.get_context("fork"))
        if spec.config.cluster.device == "gpu":
            processes.set_gpu_environment(spec.config.parallel)
        self._ends_at_s = spec.ends_at_s
        self._keys = spec.config.parallel.ranks_on(spec.node)
        self._spares = Spares(self._context, spec.rank_main, self._num_spares())
        self._processes: dict[RankKey, RankProcess] = {}
        self._faults = set(spec.faults)  # those that have not struck yet
        if spec.incarnation:  # some have, while another machine had this place
            struck = {record for key in self._keys if spec.faults for record in faults_struck(spec.run_dir, *key)}
            self._faults = {fault for fault in spec.faults if fault_record(fault) not in struck}
        self._incarnations = dict.fromkeys(spec.config.parallel.groups_on(spec.node), 0)
        self.stages: dict[GroupId, int | None] = dict.fromkeys(self._incarnations)
        """With which groups start again, if fewer than usual."""
        self.snapshot_server = NodeSnapshotServer(spec, self._context) if spec.config.snapshot.every_steps else None
        self._end_asked = 0  # as on the heartbeat pages
        self._leave_asked: frozenset[GroupId] = frozenset()
        self.pipes: dict[Connection, RankKey] = {}
        self.sentinels: dict[int, RankKey] = {}
        self.exits: dict[RankKey, int] = {}
        self.foreign = set(self._incarnations) if spec.incarnation else set()

    def _num_spares(self) -> dict[str | None, int]:
        """For each GPU, or for all ranks on CPUs: enough to replace any `spare.spares` groups."""
        of_groups = [
            Counter(map(self._gpu_of, self.of(group)))
            for group in self._spec.config.parallel.groups_on(self._spec.node)
        ]
        num_groups = self._spec.config.spare.spares
        return {gpu: sum(nlargest(num_groups, (ranks[gpu] for ranks in of_groups))) for gpu in set().union(*of_groups)}

    def gpus_of(self, group: GroupId) -> frozenset[str]:
        """UUIDs of the GPUs of the group's ranks here."""
        return frozenset(filter(None, map(self._gpu_of, self.of(group))))

    def _gpu_of(self, key: RankKey) -> str | None:
        """UUID of the rank's GPU, empty if the machine has too few; None on CPUs."""
        number = gpu_of(self._spec.config, *key)
        return None if number is None else "".join(self._spec.gpus[number : number + 1])

    def start_all(self) -> None:
        """Starts the snapshot server and, for the first time, every rank of the node that the run begins with."""
        self.ensure_snapshot_server()
        for key in self._keys:
            if key[0] not in self.further_groups:
                self._start(key, self._spares.new(self._gpu_of(key)))

    def warm_spares(self) -> None:
        self._spares.warm()

    def start_again(
        self, group: GroupId, wiped_out_at_s: float | None, *, takes_spares: bool
    ) -> tuple[StartRecord, str]:
        """Starts the next incarnation of the group's ranks on this node; `wiped_out_at_s`: monotonic time of the
        wipe-out that caused it. With `takes_spares`, spares become ranks. Also returns why it has no processes, if so.
        """
        self._incarnations[group] += 1
        keys = self.of(group)
        former = [self._processes[key].child for key in keys if key in self._processes]
        for child in former:
            self.pipes.pop(child.reports, None)
            self.sentinels.pop(child.process.sentinel, None)
        if self._spec.config.cluster.device == "gpu":  # a GPU has no room for both
            _end_all(former)
        num_spares, failure = 0, ""
        starting: list[RankProcess] = []
        try:
            for gpu in map(self._gpu_of, keys):
                spare = self._spares.pop(gpu) if takes_spares else None
                num_spares += spare is not None
                starting.append(spare or self._spares.new(gpu))
        except OSError as error:  # such as a limit on processes
            failure = f"its processes cannot be started: {error}"
            _end_all([process.child for process in starting])
        else:
            for key, process in zip(keys, starting, strict=True):
                self._start(key, process, wiped_out_at_s)
        _end_all(former)  # last: they were killed before, and end while the new ones start
        started = StartRecord(
            group=group,
            incarnation=self._incarnations[group],
            num_ranks=len(keys),
            num_spares=num_spares,
            stages=self.stages[group],
        )
        return started, failure

    def _start(self, key: RankKey, process: RankProcess, wiped_out_at_s: float | None = None) -> None:
        group, rank = key
        process.page.end_asked, process.page.leave_asked = self._end_asked, group in self._leave_asked
        spec = RankSpec(
            config=self._spec.config,
            run_dir=self._spec.run_dir,
            group=group,
            incarnation=self._incarnations[group],
            rank=rank,
            gpu=self._gpu_of(key) or "",
            store=self._spec.store,
            faults=tuple(f for f in self._spec.faults if (f.group, f.rank) == key and f in self._faults),
            seconds_left=None if self._ends_at_s is None else self._ends_at_s - time.monotonic(),
            wiped_out_at_s=wiped_out_at_s,
            snapshot_server=None if self.snapshot_server is None else self.snapshot_server.address,
            code=self._spec.code,
            stages=self.stages[group],
        )
        process.become(spec)
        self._processes[key] = process
        self.pipes[process.child.reports] = key
        self.sentinels[process.child.process.sentinel] = key

    def device_index(self, key: RankKey) -> int | None:
        """Which of the machine's GPUs the rank computes on; None on CPUs."""
        return gpu_of(self._spec.config, *key)

    def first_page(self) -> HeartbeatPage | None:
        """The page of the first rank here, which uses the first device."""
        process = self._processes.get(self._keys[0])
        return None if process is None else process.page

    def ask_to_end(self, *, at_once: bool = False) -> None:
        """Ends the run after the current step; `at_once`: ranks give it up and save alone. Safe in a signal handler."""
        self._end_asked = max(self._end_asked, 2 if at_once else 1)
        for process in self._processes.values():
            process.page.end_asked = self._end_asked

    def ask_to_leave(self, groups: Collection[GroupId]) -> None:
        """Asks these groups, and no other, to leave the run at the end of a step."""
        self._leave_asked = frozenset(groups)
        for (group, _), process in self._processes.items():
            process.page.leave_asked = group in groups

    def adopt(self, member: Member) -> None:
        """Notes the last incarnation of a foreign group; the next one starts here."""
        self.foreign.discard(member.group)
        self._incarnations[member.group] = member.incarnation

    def forget_fault(self, fault: Fault) -> None:
        """Keeps later incarnations from meeting a fault that has struck."""
        self._faults.discard(fault)

    def of(self, group: GroupId) -> list[RankKey]:
        return [key for key in self._keys if key[0] == group]

    def have_ended(self, group: GroupId) -> bool:
        """Whether all processes of the group on this node are reaped."""
        return group not in {key[0] for key in self.sentinels.values()}

    def member(self, group: GroupId) -> Member:
        return Member(group, self._incarnations[group])

    def next_member(self, group: GroupId) -> Member:
        return Member(group, self._incarnations[group] + 1)

    @property
    def groups(self) -> frozenset[GroupId]:
        return frozenset(self._incarnations)

    @property
    def further_groups(self) -> frozenset[GroupId]:
        """The groups here that take part only once they are asked to."""
        return self.groups & self._spec.config.parallel.further_groups

    @property
    def whole_groups(self) -> frozenset[GroupId]:
        """The groups with all of their ranks on this node."""
        num_ranks = self._spec.config.parallel.ranks_per_group
        return frozenset(group for group in self.groups if len(self.of(group)) == num_ranks)

    @property
    def pids(self) -> Mapping[RankKey, int]:
        return {key: process.child.pid for key, process in self._processes.items()}

    def child(self, key: RankKey) -> processes.Child:
        return self._processes[key].child

    def is_there(self, key: RankKey, pid: int) -> bool:
        """Whether `pid` is the rank's present process and alive."""
        child = self._processes[key].child
        return child.pid == pid and child.process.is_alive()

    def pulse(self, key: RankKey) -> Pulse:
        process = self._processes[key]
        return read_page(process.page, process.starvation.seconds(process.page.beats, time.monotonic()))

    def page(self, key: RankKey) -> HeartbeatPage | None:
        """The heartbeat page of the rank's present process; None if it has had no process here."""
        return self._processes[key].page if key in self._processes else None

    def pending(self, group: GroupId) -> list[dict[str, Any]]:
        """The current operation of each of the group's ranks on this node, as the journal records it."""
        started = [key for key in self.of(group) if key in self._processes]
        pulses = {rank: self.pulse((group, rank)) for _, rank in started}
        return [{"rank": rank, "operation": str(pulse.operation), "step": pulse.step} for rank, pulse in pulses.items()]

    def reap(self, sentinels: Sequence[int]) -> list[RankKey]:
        """Reaps the processes with these ready sentinels and records their exit codes. Returns their ranks; those that
        ended because they lost a peer come last, so that the cause of a loss comes first.
        """
        ended = [self.sentinels.pop(sentinel) for sentinel in sentinels]
        for key in ended:
            process = self._processes[key].child.process
            process.join()
            assert process.exitcode is not None, "a process whose sentinel is ready has ended"
            self.exits[key] = process.exitcode
        return sorted(ended, key=lambda key: self.exits[key] == ExitCode.GROUP_BROKEN)

    def kill(self, group: GroupId) -> None:
        """Kills the group's ranks on this node, without reaping them."""
        for key in self.of(group):
            if key in self._processes and (process := self._processes[key].child.process).is_alive():
                process.kill()

    def ensure_snapshot_server(self) -> None:
        """Starts the snapshot server, if snapshots are taken and it is not alive."""
        if self.snapshot_server is not None:
            self.snapshot_server.ensure_running()

    def end_all(self) -> None:
        """Kills and reaps all processes. Suspends the ranks first, so that none sees a peer end and reports it."""
        children = [process.child for process in self._processes.values()]
        for child in children:
            if child.process.is_alive():
                os.kill(child.pid, signal.SIGSTOP)
        if self.snapshot_server is not None:
            self.snapshot_server.stop()
        self._spares.end_all()
        _end_all(children)


def _end_all(children: Sequence[processes.Child]) -> None:
    processes.kill(children)
    for child in children:
        processes.end_child(child)
