"""The rank processes of one node: started, told apart by their lives, reaped."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.liveness import Pulse
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.faults.trace import Fault
from spare_megatron.runtime.process.beacon import Page, read_page
from spare_megatron.runtime.process.processes import Child, end_child, rank_context
from spare_megatron.runtime.process.reports import ExitCode, RankKey
from spare_megatron.runtime.process.spec import NodeSpec, RankSpec
from spare_megatron.runtime.snapshot.node_keeper import NodeKeeper
from spare_megatron.runtime.supervisor.spares import RankProcess, Spares


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
        self.keeper = NodeKeeper(spec, self._context) if spec.config.snapshot.every_steps else None
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

    def page(self, key: RankKey) -> Page | None:
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
