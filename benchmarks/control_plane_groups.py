"""The groups of a benchmark of the control plane: each a thread made of what a real leader is made of."""

import multiprocessing
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch.distributed as dist

from benchmarks.control_plane_crowd import run_crowd
from spare_megatron.config.schema import ControlConfig, LayoutConfig, RunConfig
from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.open_store import open_store
from spare_megatron.control.spec import StoreSpec
from spare_megatron.core.messages import Commit, Entry, Fence, Retry, decode_entry
from spare_megatron.core.relays import Blocks
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.core.votes import Vote
from spare_megatron.runtime.vote.agreement import GroupAgreement
from spare_megatron.runtime.vote.voting import Voting, open_relay

TIMEOUT_S = 300.0
STACK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a store.

    Attributes:
        num_groups: Groups, which all vote.
        num_steps: Decisions that are timed.
        num_processes: Processes that the groups are spread over.
        fan_in: Most groups of a block; 1 if all vote directly.
        has_threads: Every group is a thread, and an epoch change follows the commits. Else only relays are, and the
            others share event loops.
    """

    num_groups: int
    num_steps: int
    num_processes: int
    fan_in: int
    has_threads: bool

    @property
    def members(self) -> tuple[Member, ...]:
        """All voters."""
        return tuple(Member(GroupId(group)) for group in range(self.num_groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChange:
    """Seconds as one group sees them.

    Attributes:
        fence_s: From the write of a fence until the group hears of it.
        epoch_s: From that write until the step is committed: a failed attempt, a retry, a vote, a commit.
    """

    fence_s: float
    epoch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What some groups in one process have taken.

    Attributes:
        decide_s: Of every group and decision, from its vote until it heard.
        changes: Of every group.
        client_s: Processor time of the process from the first of the commits to the last.
        server_s: Processor time of the store meanwhile.
    """

    decide_s: list[float]
    changes: list[EpochChange]
    client_s: float
    server_s: float


class _LoneAgreement(GroupAgreement):
    """Of a group of one rank: nobody else needs to be told."""

    def read_entry(self, index: int, told: str = "") -> Entry:
        self.head = index + 1
        return decode_entry(told or self.await_entry(index))


class _Group:
    """One group's leader, made of what a real one is made of."""

    def __init__(self, spec: StoreSpec, group: int, load: Load) -> None:
        self._group = group
        self._load = load
        self._voters = load.members
        member, store = self._voters[group], open_store(spec)
        self._log = DecisionLog(store)
        rank = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda: 0))
        self._agreement = _LoneAgreement(member, rank, self._log, TIMEOUT_S, fan_in=load.fan_in)
        control = ControlConfig(vote_fan_in=load.fan_in, heartbeat_interval_s=TIMEOUT_S)  # nobody is given up
        config = RunConfig(control=control, layout=LayoutConfig(num_groups=load.num_groups))
        self._voting = Voting(self._agreement, open_relay(member, store, config))
        self._index = 0
        self._attempt = 0

    def commit(self, num_steps: int) -> list[float]:
        """Seconds from vote to decision, of the next steps."""
        return [self._decide(Commit(step=self._attempt, attempt=self._attempt)) for _ in range(num_steps)]

    def change_epoch(self) -> EpochChange:
        """A loss that the whole sum does not survive."""
        fence_s, fenced_at_s = self._fence()
        step = self._attempt
        self._decide(Retry(step=step, attempt=self._attempt))
        self._decide(Commit(step=step, attempt=self._attempt))
        return EpochChange(fence_s=fence_s, epoch_s=time.monotonic() - fenced_at_s)

    def _decide(self, entry: Entry) -> float:
        """One attempt: every group votes, one of the last writes the entry, all hear of it."""
        began_s = time.monotonic()
        vote = Vote(is_complete=isinstance(entry, Commit), plan_digest="0" * 64)
        for votes in (self._voting.vote(self._attempt, vote, self._voters), self._voting.confirm()):
            if votes is not None and len(votes.votes) == self._load.num_groups:
                self._agreement.append(self._index, entry)
        self._voting.read_entry(self._index)
        self._index += 1
        self._attempt += 1
        return time.monotonic() - began_s

    def _fence(self) -> tuple[float, float]:
        """Group 0 writes a fence for which all others wait; when it began is in the entry."""
        if self._group == 0:
            time.sleep(0.5)  # the others wait by then
            self._agreement.append(self._index, Fence(group=GroupId(1), reason=repr(time.monotonic())))
        entry = self._voting.read_entry(self._index)
        assert isinstance(entry, Fence)
        began_s = float(entry.reason)
        self._index += 1
        return time.monotonic() - began_s, began_s


def run_groups(spec: StoreSpec, groups: Sequence[int], load: Load, servers: Sequence[int], answer: Connection) -> None:
    """Some of the groups, in this process; says first that they are up, and waits until all are."""
    threading.stack_size(STACK_BYTES)
    all_groups = [_Group(spec, group, load) for group in groups]
    answer.send(None)
    answer.recv()
    began_s: list[float] = []
    ended_s: list[float] = []
    start = threading.Barrier(len(groups), lambda: began_s.extend(_processor_s(servers)))
    end = threading.Barrier(len(groups), lambda: ended_s.extend(_processor_s(servers)))
    decide_s: list[float] = []
    changes: list[EpochChange] = []

    def run(group: _Group) -> None:
        try:
            group.commit(1)  # opens the connections
            start.wait(TIMEOUT_S)
            decide_s.extend(group.commit(load.num_steps))
            end.wait(TIMEOUT_S)
            if load.has_threads:
                changes.append(group.change_epoch())
        except Exception:  # noqa: BLE001  (whatever it is, no group can go on without this one)
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=run, args=(group,)) for group in all_groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client_s, server_s = (end - began for began, end in zip(began_s, ended_s, strict=True))
    answer.send(Times(decide_s=decide_s, changes=changes, client_s=client_s, server_s=server_s))
    os._exit(0)


def run_loop(spec: StoreSpec, members: Sequence[Member], blocks: Blocks, load: Load, answer: Connection) -> None:
    """Groups that vote by way of others, in this process."""
    began_s = time.process_time()
    times = run_crowd(spec, members, blocks, load.num_steps + 1)
    decide_s = [value for some in times for value in some[1:]]  # the first opens the connections
    answer.send(Times(decide_s=decide_s, changes=[], client_s=time.process_time() - began_s, server_s=0.0))
    os._exit(0)


def measure(spec: StoreSpec, load: Load, servers: Sequence[int]) -> dict[str, object]:
    """All groups against one store, whose servers have these process ids."""
    blocks = Blocks(load.members, load.fan_in)
    relayed = [] if load.has_threads else [member for member in load.members if blocks.relay_of(member) != member]
    leaders = [int(member.group) for member in load.members if member not in set(relayed)]
    num_shares = load.num_processes if load.has_threads else max(load.num_processes // 2, 1)
    with _Children() as children:
        for i in range(num_shares):
            children.start(run_groups, spec, leaders[i::num_shares], load, servers)
        children.receive()
        children.let_go()
        for i in range(num_shares if relayed else 0):
            children.start(run_loop, spec, relayed[i::num_shares], blocks, load)
        times: list[Times] = children.receive()
    of_leaders, changes = times[:num_shares], [change for some in times for change in some.changes]
    found: dict[str, object] = {
        "clients": "threads" if load.has_threads else "loops",
        "commit_ms": quantiles([value for some in times for value in some.decide_s]),
    }
    if changes:
        found["fence_ms"] = quantiles([change.fence_s for change in changes])
        found["epoch_change_ms"] = quantiles([change.epoch_s for change in changes])
    return found | {
        "server_processor_ms_per_round": statistics.median(some.server_s for some in of_leaders) * 1e3 / load.num_steps,
        "client_processor_ms_per_round": sum(some.client_s for some in times) * 1e3 / load.num_steps,
        "relay_processor_ms_per_round": sum(some.client_s for some in of_leaders) * 1e3 / load.num_steps,
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

    def receive(self) -> list[Any]:
        """The next that each of them sends, in the order in which they were started."""
        return [pipe.recv() for pipe in self._pipes]


def quantiles(values_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3}


def _processor_s(servers: Sequence[int]) -> tuple[float, float]:
    """Of this process and of the servers, so far."""
    times = [psutil.Process(pid).cpu_times() for pid in servers]
    return time.process_time(), sum(some.user + some.system for some in times)
