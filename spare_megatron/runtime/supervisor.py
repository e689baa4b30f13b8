"""Starts the ranks of this machine, reaps them, fences the group of one that dies, and ends the run cleanly."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.open_store import open_store
from spare_megatron.control.spec import StoreSpec
from spare_megatron.control.store import StoreLost
from spare_megatron.core.topology import GroupId
from spare_megatron.faults.injection import InjectedFault
from spare_megatron.faults.trace import Fault
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EndRecord, LossRecord, Outcome
from spare_megatron.runtime.detect import fence
from spare_megatron.runtime.processes import (
    Child,
    describe_exit,
    end_child,
    fork_server,
    start_child,
    start_store,
)
from spare_megatron.runtime.reports import ExitCode, RankRaised, Report, RunStopped, StepCommitted
from spare_megatron.runtime.spec import ALL_GROUPS_READY, RankSpec

_LOSSLESS_EXITS = (ExitCode.FINISHED, ExitCode.WIPE_OUT, ExitCode.HALTED)
"""Ends that all groups come to by themselves: no reason to fence anybody."""


INJECTED = f"{InjectedFault.__module__}.{InjectedFault.__qualname__}"
"""How the last line of the traceback of an injected fault begins."""


class RunFailed(Exception):
    """The run could not start or go on, for a reason that no redundancy masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """A stage of the start, for people."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost:
    """A group has been found lost and is fenced."""

    group: GroupId
    rank: int
    cause: str
    traceback: str


SupervisorEvent = Report | Starting | GroupLost
RankMain = Callable[[RankSpec, Connection], None]


class Supervisor:
    """One run on this machine.

    Args:
        config: The resolved configuration, without problems.
        run_dir: The run's directory; it exists.
        faults: The faults to inject.
        journal: The supervisor's journal.
        on_event: Told of everything that happens, in the supervisor's thread.
        rank_main: What a rank's process runs.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run_dir: Path,
        faults: tuple[Fault, ...],
        journal: JournalWriter,
        on_event: Callable[[SupervisorEvent], None],
        rank_main: RankMain,
    ) -> None:
        self._rank_main = rank_main
        self._config = config
        self._run_dir = run_dir
        self._faults = faults
        self._journal = journal
        self._on_event = on_event
        self._context = fork_server()
        self._ranks: dict[tuple[GroupId, int], Child] = {}
        self._lost: set[GroupId] = set()
        self._tracebacks: dict[tuple[GroupId, int], str] = {}
        self._exits: dict[tuple[GroupId, int], int] = {}
        self._stop_reason = ""
        self._head_hint = 0
        self._num_committed = 0
        self._last_cause = ""
        self._last_raised = ("", 0)

    def run(self) -> EndRecord:
        """Runs to the end, whatever that is; leaves no process behind.

        Returns:
            How it ended; the same record closes the journal.

        Raises:
            KeyboardInterrupt: After everything has been ended.
        """
        end = EndRecord(outcome="interrupted", reason="the supervisor was told to stop")
        store: Child | None = None
        try:
            self._on_event(Starting(what="control store"))
            store, spec = start_store(self._context, self._config)
            self._store = open_store(spec)
            self._store.put("name", self._config.name)  # whoever looks into the store sees whose keys these are
            self._log = DecisionLog(self._store)
            self._start_ranks(spec)
            self._watch(store)
            end = self._end()
            with contextlib.suppress(StoreLost):
                self._store.clear()
        except (RunFailed, StoreLost, RuntimeError, ValueError) as error:
            end = EndRecord(outcome="failed", reason=str(error))
        finally:
            # The store first: without it, ranks that see others being ended can fence nobody. etcd stays, so then all
            # ranks at once.
            for child in [store, *self._ranks.values()]:
                if child is not None and child.process.is_alive():
                    child.process.kill()
            for child in [store, *self._ranks.values()]:
                if child is not None:
                    end_child(child)
            self._journal.write(end)
        return end

    # ----------------------------------------------------------------------------------------------------- start

    def _start_ranks(self, store: StoreSpec) -> None:
        layout = self._config.parallel
        self._on_event(Starting(what=f"{layout.num_ranks} ranks in {layout.num_groups} groups"))
        for group in range(layout.num_groups):
            for rank in range(layout.ranks_per_group):
                spec = RankSpec(
                    config=self._config,
                    run_dir=self._run_dir,
                    group=GroupId(group),
                    rank=rank,
                    device=choose_device(self._config, group * layout.ranks_per_group + rank),
                    store=store,
                    faults=tuple(f for f in self._faults if (f.group, f.rank) == (group, rank)),
                )
                self._ranks[spec.group, rank] = start_child(self._context, spec.name, self._rank_main, spec)

    # ----------------------------------------------------------------------------------------------------- watch

    def _watch(self, store: Child | None) -> None:
        """Serves reports and deaths until no rank is left."""
        pipes: dict[Connection, tuple[GroupId, int]] = {child.reports: key for key, child in self._ranks.items()}
        sentinels = {child.process.sentinel: key for key, child in self._ranks.items()}
        store_sentinel = [store.process.sentinel] if store is not None else []
        while sentinels:
            ready = wait([*pipes, *sentinels, *store_sentinel])
            # Deaths first: a fence is urgent, a report is not.
            for key in [sentinels.pop(item) for item in ready if item in sentinels]:
                self._reap(key)
            for pipe in [item for item in ready if item in pipes]:
                self._serve(pipe, pipes)
            if store is not None and store.process.sentinel in ready:
                raise RunFailed(f"the control store died: {describe_exit(store.process.exitcode)}")
        for pipe in list(pipes):
            while pipe in pipes and pipe.poll():
                self._serve(pipe, pipes)

    def _serve(self, pipe: Connection, pipes: dict[Connection, tuple[GroupId, int]]) -> None:
        try:
            report = pipe.recv()
        except (EOFError, OSError):  # OSError: its writer was killed in the middle of a report
            del pipes[pipe]
            return
        self._take(report)

    def _take(self, report: Report) -> None:
        match report:
            case StepCommitted(head=head, step=step):
                self._head_hint = max(self._head_hint, head)
                self._num_committed = max(self._num_committed, step + 1)
            case RankRaised(group=group, rank=rank, traceback=text):
                self._tracebacks[group, rank] = text
            case RunStopped(reason=reason):
                self._stop_reason = reason
        self._on_event(report)

    def _reap(self, key: tuple[GroupId, int]) -> None:
        group, rank = key
        child = self._ranks[key]
        child.process.join()
        code = child.process.exitcode
        assert code is not None, "a process whose sentinel is ready has ended"
        self._exits[key] = code
        if code in _LOSSLESS_EXITS or group in self._lost:
            return
        self._lost.add(group)
        cause = describe_exit(code) if code != ExitCode.GROUP_BROKEN else "lost a peer in its group"
        index = fence(self._log, group, f"rank {rank}: {cause}", self._head_hint)
        self._journal.write(LossRecord(group=group, rank=rank, cause=cause, entry_index=index))
        self._end_group(group)
        cause = self._last_cause = self._report_loss(group, rank, cause)
        self._stop_if_not_a_loss(group, rank)
        if not self._store.exists(ALL_GROUPS_READY):
            raise RunFailed(f"group {group} was lost before training began: rank {rank}: {cause}")

    def _stop_if_not_a_loss(self, group: GroupId, rank: int) -> None:
        """Two groups that raise the same in the same step have met a fault of the program or the data.

        Whoever computes that microbatch next would meet it, too, until no group is left.

        Raises:
            RunFailed: It is such a fault.
        """
        text = self._tracebacks.get((group, rank), "").strip()
        line = text.splitlines()[-1] if text else ""
        if not line or line.startswith(INJECTED):
            return
        if self._last_raised == (line, self._num_committed):
            raise RunFailed(f"two groups raised the same in one step, which no redundancy masks: {line}")
        self._last_raised = (line, self._num_committed)

    def _end_group(self, group: GroupId) -> None:
        """The rest of a fenced group is of no use, and must not linger."""
        for (other, _), child in self._ranks.items():
            if other == group and child.process.is_alive():
                child.process.kill()

    def _report_loss(self, group: GroupId, rank: int, cause: str) -> str:
        """Tells of the loss with the traceback that the rank sent before it ended; returns the cause in a line."""
        pipe = self._ranks[group, rank].reports
        while pipe.poll():
            try:
                self._take(pipe.recv())
            except (EOFError, OSError):
                break
        text = self._tracebacks.get((group, rank), "")
        if text:
            cause = text.strip().splitlines()[-1]
        self._on_event(GroupLost(group=group, rank=rank, cause=cause, traceback=text))
        return cause

    # ------------------------------------------------------------------------------------------------------- end

    def _end(self) -> EndRecord:
        codes = {code for (group, _), code in self._exits.items() if group not in self._lost}
        outcome: Outcome = "failed"
        if ExitCode.HALTED in codes:
            outcome = "halted"
        elif ExitCode.WIPE_OUT in codes or (not codes and not self._last_raised[0]):
            outcome = "wipe_out"
        elif codes == {ExitCode.FINISHED}:
            outcome = "finished"
        reason = self._stop_reason or (
            f"no group is left, the last was lost by {self._last_cause}" if not codes else f"exit codes {sorted(codes)}"
        )
        return EndRecord(outcome=outcome, reason="" if outcome == "finished" else reason)


def choose_device(config: RunConfig, local_rank: int) -> str:
    """The device of the rank with this index on this machine."""
    return f"cuda:{local_rank}" if config.cluster.device == "gpu" else "cpu"


def rank_main(spec: RankSpec, reports: Connection) -> None:
    """Imported in the child, where the fork server has it already; the supervisor needs no Megatron."""
    from spare_megatron.runtime.rank import run_rank

    run_rank(spec, reports)
