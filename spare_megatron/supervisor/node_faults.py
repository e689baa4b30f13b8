"""Injects the faults of a trace that strike a rank or a node from outside, and asks groups to leave or to join."""

import contextlib
import os
import signal
from collections.abc import Callable, Collection

from spare_megatron.machine.network import NodeNetwork
from spare_megatron.machine.processor_quota import ProcessorQuota
from spare_megatron.machine.timers import Timers
from spare_megatron.process.processes import say
from spare_megatron.process.reports import FaultWanted, GoOn
from spare_megatron.process.requests import asked_to_leave, request
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId
from spare_megatron.supervisor.rank_processes import RankProcesses

_LEAVING_S = 0.5
"""How often a group that is asked to leave is looked at."""


class NodeFaults:
    """The faults of one node. `pass_on` takes those that the driver has to inject."""

    def __init__(
        self,
        spec: NodeSpec,
        ranks: RankProcesses,
        timers: Timers,
        network: NodeNetwork | None,
        pass_on: Callable[[FaultWanted], None],
    ) -> None:
        self._run_dir = spec.run_dir
        self._further = spec.config.parallel.further_groups
        self._ranks = ranks
        self._timers = timers
        self._network = network
        self._pass_on = pass_on
        self._quota: ProcessorQuota | None = None
        self._num_slowed = 0

    def inflict(self, wanted: FaultWanted) -> None:
        if wanted.fault.kind not in HANDLERS:
            self._pass_on(wanted)
            return
        HANDLERS[wanted.fault.kind](self, wanted)
        if wanted.fault.kind != "stop":
            self.let_go_on(wanted)

    def limit(self, pids: Collection[int]) -> None:
        """Limits these processes as the ranks are, if their host is slow."""
        if self._quota is not None:
            self._quota.limit(pids)

    def close(self) -> None:
        """Removes what would outlive the node's processes."""
        if self._quota is not None:
            say(f"the ranks' processors were limited, and they waited in {self._quota.num_throttled} periods of 0.1 s")
            self._quota.close()
            self._quota = None

    def stop(self, wanted: FaultWanted) -> None:
        if self._ranks.is_there((wanted.fault.group, wanted.fault.rank), wanted.pid):
            os.kill(wanted.pid, signal.SIGSTOP)
        self._after(wanted, lambda: self.let_go_on(wanted))

    def cut(self, wanted: FaultWanted) -> None:
        assert self._network is not None, "validation refuses it otherwise"
        self._network.cut()
        self._after(wanted, self._network.mend)

    def slow_link(self, wanted: FaultWanted) -> None:
        assert self._network is not None, "validation refuses it otherwise"
        self._network.slow(wanted.fault.factor or 1.0)
        self._num_slowed = number = self._num_slowed + 1
        self._after(wanted, lambda: self._restore_link(number))

    def _restore_link(self, number: int) -> None:
        if self._network is not None and number == self._num_slowed:  # no later fault has slowed it
            self._network.restore()

    def slow_host(self, wanted: FaultWanted) -> None:
        self.close()
        self._quota = quota = ProcessorQuota(os.getpid(), len(os.sched_getaffinity(0)) / (wanted.fault.factor or 1.0))
        quota.limit(self._ranks.pids.values())
        self._after(wanted, lambda: self.close() if self._quota is quota else None)

    def drain(self, wanted: FaultWanted) -> None:
        request(self._run_dir, [wanted.fault.group], "drain")
        self._after(wanted, lambda: self._ask_back(wanted.fault.group))

    def resize(self, _: FaultWanted) -> None:
        are_away = asked_to_leave(self._run_dir, self._further) >= self._further
        request(self._run_dir, self._further, "grow" if are_away else "drain")

    def _after(self, wanted: FaultWanted, action: Callable[[], None]) -> None:
        if wanted.fault.seconds is not None:
            self._timers.after(wanted.fault.seconds, action)

    def _ask_back(self, group: GroupId) -> None:
        """Asks the group to take part again, once its ranks here have ended."""
        if self._ranks.have_ended(group):
            request(self._run_dir, [group], "grow")
        else:
            self._timers.after(_LEAVING_S, lambda: self._ask_back(group))

    def let_go_on(self, wanted: FaultWanted) -> None:
        """Resumes the rank that wanted the fault, if it is still there."""
        key = (wanted.fault.group, wanted.fault.rank)
        if self._ranks.is_there(key, wanted.pid):
            os.kill(wanted.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):  # it was killed meanwhile
                self._ranks.child(key).reports.send(GoOn(wanted=wanted))


HANDLERS: dict[str, Callable[[NodeFaults, FaultWanted], None]] = {
    "stop": NodeFaults.stop,
    "cut": NodeFaults.cut,
    "slow_link": NodeFaults.slow_link,
    "slow_host": NodeFaults.slow_host,
    "drain": NodeFaults.drain,
    "resize": NodeFaults.resize,
    "kill_supervisor": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
}
"""What a supervisor does to its ranks and its machine. The driver has the other kinds."""
