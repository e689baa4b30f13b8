"""The processes of one run with a peer: a server that the groups need, and a process for each group.

All are forked from one process, which has imported torch and Megatron once and started nothing else, as ours are.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_group import OUR_FAULT
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.planned_faults import resolve_trace

_START_TIMEOUT_S = 60.0
_TRAIN_TIMEOUT_S = 300.0
_REAP_TIMEOUT_S = 10.0
_FORK = multiprocessing.get_context("fork")


@contextmanager
def forked_server(serve: Callable[[Connection], None], folder: Path) -> Iterator[Any]:
    """A server in a process of its own, killed at the end; what it sends first is where it is.

    Raises:
        RuntimeError: It was not up in time.
    """
    ours, its = _FORK.Pipe()
    process = _FORK.Process(target=serve, args=(its,))
    process.start()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"{serve} was not up after {_START_TIMEOUT_S} s: see {folder}")
        yield ours.recv()
    finally:
        process.kill()
        process.join(_REAP_TIMEOUT_S)


def run_groups(config: RunConfig, train: Callable[..., None], folder: Path, *, restarts: bool = False) -> None:
    """Trains to the last step, up to which each group calls `train` with its number and a barrier of all groups.

    Args:
        config: Its trace says which groups are hit; at least one is not.
        train: What a group's process does; called without a barrier in one that takes a lost group's place.
        folder: Where the logs are.
        restarts: Whether a group that ends early is started again at once.

    Raises:
        RuntimeError: A group that no fault hits did not come to the end; or what failed is ours.
    """
    groups = range(config.layout.num_groups)
    up = _FORK.Barrier(len(groups))
    processes = {group: _FORK.Process(target=train, args=(group, up)) for group in groups}
    try:
        for process in processes.values():
            process.start()
        hit = {int(fault.group) for fault in resolve_trace(config)}
        running, left = set(groups), set(groups) - hit
        end_s = time.monotonic() + _TRAIN_TIMEOUT_S
        while left:
            group = _next_to_end({processes[group].sentinel: group for group in running}, end_s)
            if group is None:
                raise RuntimeError(f"groups {sorted(left)} still train after {_TRAIN_TIMEOUT_S} s: see {folder}")
            running.remove(group)
            process = processes[group]
            process.join()
            if process.exitcode == 0:
                left.discard(group)
            elif group in left or process.exitcode == OUR_FAULT:
                raise RuntimeError(f"group {group} ended with {process.exitcode}: see {folder}")
            elif restarts:
                processes[group] = _FORK.Process(target=train, args=(group, None))
                processes[group].start()
                running.add(group)
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join(_REAP_TIMEOUT_S)


def _next_to_end(groups: dict[int, int], end_s: float) -> int | None:
    """The group of the first sentinel that is ready; None if none is by then."""
    ready = wait(list(groups), max(0.0, end_s - time.monotonic()))
    return next((group for sentinel, group in groups.items() if sentinel in ready), None)
