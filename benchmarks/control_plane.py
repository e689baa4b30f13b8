"""What agreement costs: votes, commits and an epoch change of many simulated groups, with each control store.

Every group has connections of its own, and votes as soon as it has read the last decision: all at once, which is the
worst they can do. Those that vote by way of relays share event loops (`loops`), the relays are threads; then all groups
are threads made of what a real leader is made of (`threads`). In an epoch change a group dies while all others are in a
reduction, look at the log now and then, and see its loss nowhere else; then they vote against the sum, read the retry,
vote again and read the commit. Clients and servers share this machine, and the time of its processors that each took is
printed.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.control_plane_groups import Load, measure, quantiles
from benchmarks.control_plane_leader import TIMEOUT_S
from benchmarks.control_plane_log import measure_log
from benchmarks.control_plane_steps import measure_steps
from benchmarks.origin import origin
from spare_megatron.store import keys
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import EtcdStoreSpec, StoreSpec, TcpStoreSpec
from spare_megatron.store.tcp_store import serve
from tests.integration.etcd_cluster import running_cluster

STORES = ("embedded", "etcd")
CLIENTS = ("loops", "threads")
NUM_WRITES = 200


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
                store.put_if_absent(keys.entry(index), "x" * 200)
                writes_s.append(time.monotonic() - began_s)
            cluster.kill(cluster.leader())
            began_s = time.monotonic()
            store.put_if_absent(keys.entry(NUM_WRITES), "x" * 200)
            gaps_s.append(time.monotonic() - began_s)
    return {
        "compare_and_set_ms": quantiles(writes_s),
        "leader_killed_to_next_write_s": {"median": statistics.median(gaps_s), "max": max(gaps_s)},
        "kills": num_kills,
    }


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
    process = context.Process(target=serve, args=("127.0.0.1", 0, theirs))
    process.start()
    try:
        assert process.pid is not None
        yield TcpStoreSpec(host="127.0.0.1", port=ours.recv()), [process.pid]
    finally:
        process.kill()
        process.join()


def print_table(result: dict) -> None:
    names = ("commit_ms", "fence_ms", "epoch_change_ms")
    heads = "".join(f"{name[:-3] + ' p50':>18}{'p99':>8}" for name in names)
    print(f"{'groups':>7} {'store':10}{'clients':8}{heads}   ms")
    for row in result["rows"]:
        cells = "".join(
            f"{row[name]['p50']:18.1f}{row[name]['p99']:8.1f}" if name in row else f"{'':26}" for name in names
        )
        spent = ", ".join(f"{who}s {row[f'{who}_processor_ms_per_round']:.0f}" for who in ("server", "client"))
        print(f"{row['groups']:7d} {row['store']:10}{row['clients']:8}{cells}   {spent} a round")
        change = f"servers {row['epoch_change_server_processor_ms']:.0f} ms"
        asked = f"votes cast {row['epoch_change_casts']} times and read {row['epoch_change_reads']} times"
        print(f"{'':25}an epoch change: {change}, {asked}")
    for row in result.get("logs", ()):
        times = f"read in {row['read_s']:.2f} s, read and folded in {row['read_and_folded_s']:.2f} s"
        held = f"{row['server_bytes_per_entry']:.0f} bytes of a server's memory each"
        print(f"{row['store']}: a log of {row['entries']} entries: {times}, {held}")
    for row in result.get("kept", ()):
        names = ("server_bytes_per_step", "database_bytes_per_step", "compacted_bytes_per_step")
        kept = ", ".join(f"{name[:-15]} {row[name]:.0f}" for name in names if name in row)
        print(f"{row['store']}: a step of {row['groups']} groups leaves, in bytes: {kept}")
    if "failover" in result:
        writes, gaps = result["failover"]["compare_and_set_ms"], result["failover"]["leader_killed_to_next_write_s"]
        print(f"etcd, one client: compare-and-set p50 {writes['p50']:.2f} ms, p99 {writes['p99']:.2f} ms")
        print(f"etcd, leader killed to the next write: median {gaps['median']:.2f} s, longest {gaps['max']:.2f} s")


def loads(options: argparse.Namespace, num_groups: int) -> Iterator[Load]:
    """What is measured with so many groups: event loops only where groups vote by way of others."""
    for clients in options.clients:
        has_threads = clients == "threads"
        if has_threads or 1 < options.fan_in < num_groups:
            yield Load(
                num_groups=num_groups,
                num_steps=options.steps,
                num_processes=min(options.processes, num_groups),
                fan_in=options.fan_in,
                has_threads=has_threads,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4, help="processes that the groups are spread over")
    parser.add_argument("--fan-in", type=int, default=32, help="control.vote_fan_in; 1: every group votes directly")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS, help="what the groups are made of")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--etcd", type=Path, default=Path("etcd"), help="the etcd binary")
    parser.add_argument(
        "--kills", type=int, default=0, help="kills of etcd's leader under one client, each in a new cluster"
    )
    parser.add_argument("--log", type=int, default=0, help="entries of a log that a process outside the run reads")
    parser.add_argument("--kept", type=int, default=0, help="steps of a few groups, of which something is left")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of the processes that are started here, too
    rows = []
    for num_groups in options.groups:
        for store, load in itertools.product(options.stores, loads(options, num_groups)):
            if most != resource.RLIM_INFINITY and load.num_descriptors > most:
                limits = f"a process needs some {load.num_descriptors} descriptors, and may have {most} (ulimit -Hn)"
                parser.error(f"{num_groups} groups as {load.num_processes} processes: {limits}")
            with running(store, options.etcd) as (spec, servers):
                rows.append({"groups": num_groups, "store": store, **measure(spec, load, servers)})
            print(f"{store}: {num_groups} groups as {rows[-1]['clients']} measured", file=sys.stderr)
    result: dict[str, object] = {
        "rows": rows,
        "steps": options.steps,
        "processes": options.processes,
        "fan_in": options.fan_in,
        **origin(),
    }
    if options.log:
        result["logs"] = logs = []
        for store in options.stores:
            with running(store, options.etcd) as (spec, servers):
                logs.append({"store": store, **measure_log(spec, options.log, servers)})
    if options.kept:
        result["kept"] = kept = []
        for store in options.stores:
            with running(store, options.etcd) as (spec, servers):
                kept.append({"store": store, **measure_steps(spec, options.kept, servers)})
    if options.kills:
        result["failover"] = measure_failover(options.etcd, options.kills)
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
