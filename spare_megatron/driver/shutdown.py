"""How the processes of a run are ended: first the ranks, then what they stand on."""

import contextlib
from collections.abc import Collection
from dataclasses import replace

from spare_megatron.process.processes import Child, end_child, stop_children
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.spec import EtcdStoreSpec

_ANSWER_S = 5.0
"""Longest wait for etcd at the end of a run."""


def end_processes(
    *, supervisors: Collection[Child], lost: Collection[Child], store: Child | None, hub: Child | None
) -> None:
    """Ends and reaps them.

    The ranks go before the control store. Without it they would take it for gone for good, begin to save their state by
    themselves and be killed in that.

    Args:
        supervisors: Those that are told to end their ranks and themselves, or what stands for them.
        lost: Those that may be stopped, and cannot be told.
        store: The control store, where it is the run's own.
        hub: Holds the network of the nodes, where they have one.
    """
    for child in lost:
        end_child(child)
    stop_children(supervisors)
    for last in (store, hub):
        if last is not None:
            end_child(last)


def remove_keys(spec: EtcdStoreSpec) -> None:
    """Removes what the run has written into etcd, once nobody writes any more. They stay if etcd does not answer.

    However the run ended: the journal has all that stood in the log, and runs that fail one after another would fill
    etcd.
    """
    store = EtcdControlStore(replace(spec, timeout_s=_ANSWER_S))
    with contextlib.suppress(StoreLost), contextlib.closing(store):
        store.clear()


def kill(children: Collection[Child]) -> None:
    """Kills those that have not ended, and their ranks with them. They are yet to be reaped."""
    for child in children:
        if child.process.is_alive():
            child.process.kill()
