"""The processes of one run with a peer: a server that the groups need, and a process for each group.

All are forked from one process, which has imported torch and Megatron once and started nothing else, as ours are.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.trace import resolve_trace

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


def run_groups(config: RunConfig, train: Callable[..., None], folder: Path) -> None:
    """Trains to the last step: each group calls `train` with its number and a barrier of all groups.

    Raises:
        RuntimeError: A group that no fault hits did not come to the end.
    """
    groups = range(config.layout.num_groups)
    up = _FORK.Barrier(len(groups))
    processes = [_FORK.Process(target=train, args=(group, up)) for group in groups]
    try:
        for process in processes:
            process.start()
        hit = {fault.group for fault in resolve_trace(config)}
        end_s = time.monotonic() + _TRAIN_TIMEOUT_S
        for group in sorted(set(groups) - hit):
            processes[group].join(max(0.0, end_s - time.monotonic()))
            if processes[group].exitcode != 0:
                raise RuntimeError(f"group {group} ended with {processes[group].exitcode}: see {folder}")
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(_REAP_TIMEOUT_S)
