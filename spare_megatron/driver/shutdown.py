"""Ends the processes of a run: first the ranks, then the store and the network that they use."""

import contextlib
import os
from collections.abc import Collection
from dataclasses import replace
from multiprocessing import connection

from spare_megatron.process.processes import Child, end_child, stop_children
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.spec import EtcdStoreSpec

_ANSWER_S = 5.0
"""Longest wait for etcd at the end of a run."""
_EXIT_S = 5.0
"""Longest wait for a killed process: it may have much memory to free."""


def end_processes(
    *, supervisors: Collection[Child], lost: Collection[Child], store: Child | None, hub: Child | None
) -> None:
    """Ends and reaps all processes, ranks before the control store: without it they would begin to save their state.
    `supervisors`, some of them proxies of remote ones, are asked to end; `lost` ones are killed at once.
    """
    for child in lost:
        end_child(child)
    stop_children(supervisors)
    for last in (store, hub):
        if last is not None:
            end_child(last)


def remove_keys(spec: EtcdStoreSpec) -> None:
    """Removes the run's keys from etcd after the last writer has ended. They stay if etcd does not answer. The journal
    holds all that was in the log, and failed runs would fill etcd one after another.
    """
    store = EtcdControlStore(replace(spec, timeout_s=_ANSWER_S))
    with contextlib.suppress(StoreLost), contextlib.closing(store):
        store.clear()


def await_exit(pids: Collection[int]) -> None:
    """Waits for processes that are no children of this one and are dying; until then they may write to the store."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                connection.wait([process], _EXIT_S)
            finally:
                os.close(process)


def kill(children: Collection[Child]) -> None:
    """Kills those that still run, and their ranks with them, without reaping them."""
    for child in children:
        if child.process.is_alive():
            child.process.kill()
