"""What a log of months costs: reading and folding it from its first entry, and the memory of who serves it."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from spare_megatron.config.schema import LayoutConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.core.log.actions import FinishRun
from spare_megatron.core.log.entries import Commit, encode_entry
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec
from spare_megatron.voting.log_follower import LogFollower, controller_setup

NUM_GROUPS = 64
NUM_WRITERS = 16


def measure_log(spec: StoreSpec, num_entries: int, servers: Sequence[int]) -> dict[str, object]:
    """Fills a log with commits and reads it as a group that has no part in it, or comes back to it, does."""
    before_bytes = sum(psutil.Process(pid).memory_info().rss for pid in servers)

    def write(first: int) -> None:
        log = DecisionLog(open_store(spec))
        for step in range(first, num_entries, NUM_WRITERS):
            log.append(step, encode_entry(Commit(step=step, attempt=step, at_s=float(step))))

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, range(NUM_WRITERS)))
    grown_bytes = sum(psutil.Process(pid).memory_info().rss for pid in servers) - before_bytes
    log, head, num_bytes = DecisionLog(open_store(spec)), 0, 0
    began_s = time.monotonic()
    while texts := log.read(head, 512):
        head, num_bytes = head + len(texts), num_bytes + sum(map(len, texts))
    read_s = time.monotonic() - began_s
    config = RunConfig(
        layout=LayoutConfig(num_groups=NUM_GROUPS),
        spare=SpareConfig(redundancy=3),
        train=TrainConfig(steps=num_entries),
    )
    follower = LogFollower(log, controller_setup(config))
    began_s = time.monotonic()
    stop = follower.stop()
    if head != num_entries or stop != FinishRun(step=num_entries):
        raise RuntimeError(f"the log of {num_entries} entries reads as {head}, and ends with {stop}")
    return {
        "entries": num_entries,
        "read_s": read_s,
        "read_and_folded_s": time.monotonic() - began_s,
        "bytes_per_entry": num_bytes / num_entries,
        "server_bytes_per_entry": grown_bytes / len(servers) / num_entries,
    }
