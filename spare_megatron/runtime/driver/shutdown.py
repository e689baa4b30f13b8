"""How the processes of a run are ended: first the ranks, then what they stand on."""

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from types import FrameType

from spare_megatron.control.etcd_store import EtcdControlStore
from spare_megatron.control.spec import EtcdStoreSpec
from spare_megatron.control.store import StoreLost
from spare_megatron.runtime.process.processes import Child, end_child, stop_children

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


@contextlib.contextmanager
def interrupts_call(act: Callable[[], None]) -> Iterator[None]:
    """Until the block is over, Ctrl-C and SIGTERM only call this. What they did before they do after it, if anything.

    Somebody who presses it again wants it over at once, and is not to leave half of the processes behind.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return
    came: list[int] = []

    def come(number: int, frame: FrameType | None) -> None:
        came.append(number)
        act()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = {number: handler for number, handler in before.items() if handler not in (signal.SIG_DFL, None)}
    for number in handled:
        signal.signal(number, come)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    for first in came[:1]:
        handler = handled[signal.Signals(first)]
        if callable(handler):
            handler(first, None)
