"""What agreement costs: votes, commits and an epoch change of many simulated groups, with each control store.

Every group is a thread with connections of its own, a few processes of them. All groups vote at once, which is the
worst they can do; clients and servers share this machine, and the time of its processors that each took is printed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.schema import ControlConfig, LayoutConfig, RunConfig
from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.open_store import open_store
from spare_megatron.control.spec import EtcdStoreSpec, StoreSpec, TcpStoreSpec
from spare_megatron.control.tcp_store import serve
from spare_megatron.core.messages import Commit, Entry, Fence, Retry, decode_entry
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.core.votes import Vote
from spare_megatron.runtime.agreement import GroupAgreement
from spare_megatron.runtime.voting import Voting, open_relay
from tests.integration.etcd_cluster import running_cluster

STORES = ("embedded", "etcd")
TIMEOUT_S = 300.0
NUM_WRITES = 200
STACK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a store."""

    num_groups: int
    num_steps: int
    num_processes: int
    fan_in: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds as one group sees them."""

    decide_s: list[float]
    """By step: from its vote until it hears the decision."""
    fence_s: float
    """From the write of a fence until the group hears of it."""
    client_s: float
    """Processor time of this group's process from the first of the commits to the last."""
    server_s: float
    """Processor time of the store meanwhile."""
    epoch_s: float
    """From that write until the step is committed: a failed attempt, a retry, a vote, a commit."""


class _LoneAgreement(GroupAgreement):
    """Of a group of one rank: nobody else needs to be told."""

    def read_entry(self, index: int, told: str = "") -> Entry:
        self.head = index + 1
        return decode_entry(told or self.await_entry(index))


class _Group:
    """One group's leader, made of what a real one is made of."""

    def __init__(self, spec: StoreSpec, group: int, load: Load, servers: Sequence[int]) -> None:
        self._servers = servers
        self._group = group
        self._load = load
        self._voters = tuple(Member(GroupId(voter)) for voter in range(load.num_groups))
        member, store = self._voters[group], open_store(spec)
        self._log = DecisionLog(store)
        rank = cast(dist.ProcessGroup, SimpleNamespace(rank=lambda: 0))
        self._agreement = _LoneAgreement(member, rank, self._log, TIMEOUT_S, fan_in=load.fan_in)
        control = ControlConfig(vote_fan_in=load.fan_in, heartbeat_interval_s=TIMEOUT_S)  # nobody is given up
        config = RunConfig(control=control, layout=LayoutConfig(num_groups=load.num_groups))
        self._voting = Voting(self._agreement, open_relay(member, store, config))
        self._index = 0
        self._attempt = 0

    def run(self, start: threading.Barrier) -> Times:
        self._decide(Commit(step=0, attempt=0))  # opens the connections
        start.wait(TIMEOUT_S)
        began_s = [time.process_time(), sum(map(processor_s, self._servers))]
        decide_s = [self._decide(Commit(step=step, attempt=step)) for step in range(1, self._load.num_steps + 1)]
        ended_s = [time.process_time(), sum(map(processor_s, self._servers))]
        fence_s, fenced_at_s = self._fence()
        self._decide(Retry(step=self._load.num_steps + 1, attempt=self._attempt))
        self._decide(Commit(step=self._load.num_steps + 1, attempt=self._attempt))
        return Times(
            decide_s=decide_s,
            fence_s=fence_s,
            epoch_s=time.monotonic() - fenced_at_s,
            client_s=ended_s[0] - began_s[0],
            server_s=ended_s[1] - began_s[1],
        )

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
    """Some of the groups, in this process."""
    threading.stack_size(STACK_BYTES)
    start = threading.Barrier(len(groups))
    times: list[Times] = []

    def run(group: int) -> None:
        try:
            times.append(_Group(spec, group, load, servers).run(start))
        except Exception:  # noqa: BLE001  (whatever it is, no group can go on without this one)
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer.send(times)
    os._exit(0)


def measure(spec: StoreSpec, load: Load, servers: Sequence[int]) -> dict[str, object]:
    """All groups against one store."""
    context = multiprocessing.get_context("forkserver")
    children = []
    for share in range(load.num_processes):
        ours, theirs = context.Pipe()
        groups = range(share, load.num_groups, load.num_processes)
        process = context.Process(target=run_groups, args=(spec, groups, load, servers, theirs))
        process.start()
        theirs.close()
        children.append((process, ours))
    try:
        answers = [pipe.recv() for _, pipe in children]
    finally:
        for process, _ in children:
            process.kill()
            process.join()
    times = [item for some in answers for item in some]
    clients_s = sum(statistics.median(item.client_s for item in some) for some in answers)
    server_s = statistics.median(item.server_s for item in times)
    return {
        "commit_ms": quantiles([value for item in times for value in item.decide_s]),
        "fence_ms": quantiles([item.fence_s for item in times]),
        "epoch_change_ms": quantiles([item.epoch_s for item in times]),
        "server_processor_ms_per_round": server_s * 1e3 / load.num_steps,
        "client_processor_ms_per_round": clients_s * 1e3 / load.num_steps,
    }


def measure_failover(etcd: Path, num_kills: int) -> dict[str, object]:
    """One client alone: a compare-and-set, and from the kill of the leader until its next write is taken."""
    writes_s: list[float] = []
    gaps_s: list[float] = []
    for _ in range(num_kills):
        with tempfile.TemporaryDirectory() as folder, running_cluster(etcd, Path(folder)) as cluster:
            store = open_store(
                EtcdStoreSpec(endpoints=cluster.endpoints, prefix="/spare/benchmark", timeout_s=TIMEOUT_S)
            )
            for index in range(NUM_WRITES):
                began_s = time.monotonic()
                store.put_if_absent(f"log/{index}", "x" * 200)
                writes_s.append(time.monotonic() - began_s)
            cluster.kill(cluster.leader())
            began_s = time.monotonic()
            store.put_if_absent(f"log/{NUM_WRITES}", "x" * 200)
            gaps_s.append(time.monotonic() - began_s)
    return {
        "compare_and_set_ms": quantiles(writes_s),
        "leader_killed_to_next_write_s": {"median": statistics.median(gaps_s), "max": max(gaps_s)},
        "kills": num_kills,
    }


def quantiles(values_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3}


def processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def running(store: str, etcd: Path) -> Iterator[tuple[StoreSpec, list[int]]]:
    """A store with servers of its own, and their process ids."""
    if store == "etcd":
        with tempfile.TemporaryDirectory() as folder, running_cluster(etcd, Path(folder)) as cluster:
            spec = EtcdStoreSpec(endpoints=cluster.endpoints, prefix="/spare/benchmark", timeout_s=TIMEOUT_S)
            yield spec, [process.pid for process in cluster.members.values()]
        return
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=("127.0.0.1", theirs))
    process.start()
    try:
        assert process.pid is not None
        yield TcpStoreSpec(host="127.0.0.1", port=ours.recv()), [process.pid]
    finally:
        process.kill()
        process.join()


def print_table(result: dict) -> None:
    names = ("commit_ms", "fence_ms", "epoch_change_ms")
    print(f"{'groups':>7} {'store':10}" + "".join(f"{name[:-3] + ' p50':>18}{'p99':>8}" for name in names) + "   ms")
    for row in result["rows"]:
        cells = "".join(f"{row[name]['p50']:18.1f}{row[name]['p99']:8.1f}" for name in names)
        spent = [row[f"{who}_processor_ms_per_round"] for who in ("server", "client")]
        print(f"{row['groups']:7d} {row['store']:10}{cells}   servers {spent[0]:.0f}, clients {spent[1]:.0f} a round")
    if "failover" in result:
        writes, gaps = result["failover"]["compare_and_set_ms"], result["failover"]["leader_killed_to_next_write_s"]
        print(f"etcd, one client: compare-and-set p50 {writes['p50']:.2f} ms, p99 {writes['p99']:.2f} ms")
        print(f"etcd, leader killed to the next write: median {gaps['median']:.2f} s, longest {gaps['max']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4, help="processes that the groups are spread over")
    parser.add_argument("--fan-in", type=int, default=32, help="control.vote_fan_in; 1: every group votes directly")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--etcd", type=Path, default=Path("etcd"), help="the etcd binary")
    parser.add_argument(
        "--kills", type=int, default=0, help="kills of etcd's leader under one client, each in a new cluster"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for num_groups in options.groups:
        load = Load(
            num_groups=num_groups,
            num_steps=options.steps,
            num_processes=min(options.processes, num_groups),
            fan_in=options.fan_in,
        )
        for store in options.stores:
            with running(store, options.etcd) as (spec, servers):
                rows.append({"groups": num_groups, "store": store, **measure(spec, load, servers)})
            print(f"{store}: {num_groups} groups measured", file=sys.stderr)
    result: dict[str, object] = {
        "rows": rows,
        "steps": options.steps,
        "processes": options.processes,
        "fan_in": options.fan_in,
        **origin(),
    }
    if options.kills:
        result["failover"] = measure_failover(options.etcd, options.kills)
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
