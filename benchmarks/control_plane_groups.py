"""The groups of a benchmark of the control plane in a few processes: as threads, or most of them in event loops."""

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

from benchmarks.control_plane_crowd import Crowd
from benchmarks.control_plane_leader import LOST, TIMEOUT_S, EpochChange, Leader, Roster
from spare_megatron.core.log.entries import Fence, encode_entry
from spare_megatron.store.decision_log import DecisionLog, ask_interval_s
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec

T = TypeVar("T")

STACK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a store.

    Attributes:
        num_groups: Groups, which all vote.
        num_steps: Decisions that are timed.
        num_processes: Processes that the groups are spread over.
        fan_in: Most groups of a block; 1 if all vote directly.
        has_threads: Every group is a thread. Else only relays are, and the others share event loops.
    """

    num_groups: int
    num_steps: int
    num_processes: int
    fan_in: int
    has_threads: bool

    @property
    def num_descriptors(self) -> int:
        """That one process needs at most: the embedded store's server, or one with groups in it."""
        num_shares = self.num_processes if self.has_threads else max(self.num_processes // 2, 1)
        # To the store, to the relay, and those of a relay; one for each other of a block.
        return 500 + max(self.num_groups, self.num_groups * (6 if self.has_threads else 3) // num_shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """What some groups in one process have taken.

    Attributes:
        decide_s: Of every group and decision, from its vote until it read it.
        client_s: Processor time of the process from the first of the commits to the last.
        server_s: Processor time of the store meanwhile.
    """

    decide_s: list[float]
    client_s: float
    server_s: float


def run_groups(spec: StoreSpec, groups: Sequence[int], load: Load, servers: Sequence[int], parent: Connection) -> None:
    """Some of the groups as threads of this process; says first that they are up, and waits until all are."""
    threading.stack_size(STACK_BYTES)
    roster = Roster(load.num_groups, load.fan_in)
    leaders = [Leader(spec, roster.all[group], roster, uses_relays=True) for group in groups]
    parent.send(None)
    parent.recv()
    began_s: list[float] = []
    ended_s: list[float] = []
    start = threading.Barrier(len(groups), lambda: began_s.extend(_processor_s(servers)))
    end = threading.Barrier(len(groups), lambda: ended_s.extend(_processor_s(servers)))

    def commit(leader: Leader) -> list[float]:
        leader.decide()  # opens the connections
        start.wait(TIMEOUT_S)
        decide_s = [leader.decide() for _ in range(load.num_steps)]
        end.wait(TIMEOUT_S)
        return decide_s

    decide_s = [value for some in _in_threads(commit, leaders) for value in some]
    client_s, server_s = (end - began for began, end in zip(began_s, ended_s, strict=True))
    parent.send(Commits(decide_s=decide_s, client_s=client_s, server_s=server_s))
    parent.recv()
    for leader in leaders:
        if leader.member == LOST:
            leader.die()
    parent.send(_in_threads(Leader.change_epoch, [leader for leader in leaders if leader.member != LOST]))
    _await_end(parent)


def _in_threads(call: Callable[[Leader], T], leaders: Sequence[Leader]) -> list[T]:
    """What each of them returns, each in a thread of its own."""
    found: list[T] = []

    def run(leader: Leader) -> None:
        try:
            found.append(call(leader))
        except Exception:  # noqa: BLE001  (whatever it is, no group can go on without this one)
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=run, args=(leader,)) for leader in leaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def run_loop(spec: StoreSpec, groups: Sequence[int], load: Load, parent: Connection) -> None:
    """Groups that vote by way of others, in this process; says first that they are up, and waits until all are."""
    threading.stack_size(STACK_BYTES)
    roster = Roster(load.num_groups, load.fan_in)
    crowd = Crowd(spec, [roster.all[group] for group in groups], roster)
    parent.send(None)
    parent.recv()
    began_s = time.process_time()
    decide_s = [value for some in crowd.commit(load.num_steps + 1) for value in some[1:]]  # the first opens connections
    parent.send(Commits(decide_s=decide_s, client_s=time.process_time() - began_s, server_s=0.0))
    parent.recv()
    parent.send(crowd.change_epoch())
    _await_end(parent)


def _await_end(parent: Connection) -> None:
    """Stays until it is killed, or the parent is gone: others may still listen to what is here."""
    with contextlib.suppress(EOFError):
        parent.recv()
    os._exit(0)


def measure(spec: StoreSpec, load: Load, servers: Sequence[int]) -> dict[str, object]:
    """All groups against one store, whose servers have these process ids."""
    roster = Roster(load.num_groups, load.fan_in)
    relays = set(roster.blocks(roster.all).relays)
    relayed = [] if load.has_threads else [int(one.group) for one in roster.all if one not in relays]
    leaders = sorted({int(one.group) for one in roster.all} - set(relayed))
    num_shares = load.num_processes if load.has_threads else max(load.num_processes // 2, 1)
    with _Children() as children:
        for i in range(num_shares):
            children.start(run_groups, spec, leaders[i::num_shares], load, servers)
        children.receive()
        for i in range(num_shares if relayed else 0):
            children.start(run_loop, spec, relayed[i::num_shares], load)
        children.receive(num_shares)
        children.let_go()
        commits: list[Commits] = children.receive()
        children.let_go()
        time.sleep(1.0 + 2 * ask_interval_s(load.num_groups))  # all are in a reduction by then
        began_s, fenced_at_s = _processor_s(servers)[1], time.monotonic()
        fence = encode_entry(Fence(group=LOST.group, reason="killed"))
        DecisionLog(open_store(spec)).append(load.num_steps + 1, fence)
        changes: list[EpochChange] = [change for some in children.receive() for change in some]
        change_s = _processor_s(servers)[1] - began_s
    return {
        "clients": "threads" if load.has_threads else "loops",
        "commit_ms": quantiles([value for some in commits for value in some.decide_s]),
        "fence_ms": quantiles([change.known_at_s - fenced_at_s for change in changes]),
        "epoch_change_ms": quantiles([change.ended_at_s - fenced_at_s for change in changes]),
        "epoch_change_casts": sum(change.num_casts for change in changes),
        "epoch_change_reads": sum(change.num_reads for change in changes),
        "epoch_change_server_processor_ms": change_s * 1e3,
        **_processor_ms(commits, num_shares, load.num_steps),
    }


def _processor_ms(commits: Sequence[Commits], num_shares: int, num_steps: int) -> dict[str, float]:
    """Of a round, of whom; relays are in the first processes."""
    of_relays = commits[:num_shares]
    return {
        "server_processor_ms_per_round": statistics.median(some.server_s for some in of_relays) * 1e3 / num_steps,
        "client_processor_ms_per_round": sum(some.client_s for some in commits) * 1e3 / num_steps,
        "relay_processor_ms_per_round": sum(some.client_s for some in of_relays) * 1e3 / num_steps,
    }


class _Children:
    """Processes that each send something, now and then."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "_Children":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def start(self, target: Callable[..., None], *what: object) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*what, theirs))
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def let_go(self) -> None:
        """Ends the wait of all that are up."""
        for pipe in self._pipes:
            pipe.send(None)

    def receive(self, first: int = 0) -> list[Any]:
        """The next that each of them sends, from this one on, in the order in which they were started."""
        return [pipe.recv() for pipe in self._pipes[first:]]


def quantiles(values_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    values_s = values_s if len(values_s) > 1 else [*values_s] * 2
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3}


def _processor_s(servers: Sequence[int]) -> tuple[float, float]:
    """Of this process and of the servers, so far."""
    times = [psutil.Process(pid).cpu_times() for pid in servers]
    return time.process_time(), sum(some.user + some.system for some in times)
