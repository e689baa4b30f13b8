"""Starts and ends the processes of a run on this machine: they are forked in milliseconds from a server that has
imported torch and Megatron, has no threads and has not touched a GPU.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

from spare_megatron.config.schema import ControlConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.formats.output import printable, real_paths
from spare_megatron.journal.files import BytesLost, OnHeld
from spare_megatron.machine import end_signal
from spare_megatron.machine.gpus import maker, restore_shown
from spare_megatron.machine.interrupts import never_in_children
from spare_megatron.machine.network import HUB_ADDRESS, run_in_network_of, serve_hub
from spare_megatron.machine.standard_streams import outlast
from spare_megatron.process.reports import ProcessRaised, RecordsHeld, RecordsLost, StopProcess
from spare_megatron.stacking.layout import Layout
from spare_megatron.store.open_store import etcd_spec
from spare_megatron.store.spec import StoreSpec, TcpStoreSpec
from spare_megatron.store.tcp_store import serve
from spare_megatron.version import start_in_safe_path_mode

_IMPORTED: tuple[str, ...] = ("spare_megatron.driver.run", "spare_megatron.rank.rank")
"""Modules that the fork server imports for its children."""

NO_MAIN_GUARD = 96
"""Exit code of a process that would start a run while it imports its parent's script, which has no `__main__` guard."""

Wait = Callable[[list[Any], float], list[Any]]
"""As `multiprocessing.connection.wait`."""


_PR_SET_PDEATHSIG = 1

_REAP_TIMEOUT_S = 10.0
_EXIT_S = 5.0
"""Longest wait for a killed process that is no child: it may have much memory to free."""

_STORE_START_TIMEOUT_S = 120.0


def fork_server() -> ForkServerContext:
    """The context that forks all processes of a run. Main thread only: the server ends with its starter's thread."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # it is importing its parent's main module
        leave(NO_MAIN_GUARD)
    set_environment_of_ranks()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spare_megatron.process.fork_server", *_IMPORTED])
    # Only the driver acts on Ctrl-C, which reaches every process of the terminal.
    with never_in_children(), end_signal.blocked_in_children():
        forkserver.ensure_running()
    return context


def set_environment_of_ranks() -> None:
    """Sets the environment for Megatron's import and new processes; what the user has set stays."""
    start_in_safe_path_mode()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Megatron looks for GPUs when it is imported, and CUDA cannot be used in a fork of a process that has used it:
    # with this `is_available` of torch only queries the driver.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def end_fork_server() -> None:
    """Kills the fork server, if there is one, and its children. The next process is forked from a new one."""
    if (pid := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def rank_context(device: str, forking: BaseContext) -> BaseContext:
    """The context of ranks: `forking` or, on device "gpu", one that spawns: transformer-engine uses a GPU at its
    import.
    """
    return multiprocessing.get_context("spawn") if device == "gpu" else forking


def set_gpu_environment(layout: Layout) -> None:
    """Sets the environment of NCCL and CUDA for ranks of this layout, in the process that spawns them."""
    # A broken reduction would reach the monitors of all groups through the shared store and end their processes.
    os.environ.update(TORCH_NCCL_DUMP_ON_TIMEOUT="0", TORCH_NCCL_ENABLE_MONITORING="0")
    if layout.most_peers_on_node > 1 or (layout.num_groups > 1 and maker().is_in_domain()):
        # Multicast groups of NVLink belong to all members: one that is killed leaves those of the others undefined.
        # NCCL reads this once for all communicators of a process. It uses two GPUs of a node or more, of nodes of an
        # NVLink domain as of one (nvls.cc, 2.30).
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    if layout.tensor_parallel > 1 or layout.context_parallel > 1:
        # Megatron's layers rely on it to start a transfer before the kernels that it overlaps with. Elsewhere it would
        # only let a sum over the groups hold up the backward pass.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@dataclass(slots=True)
class Child:
    """A started process, and this end of the pipe to it."""

    process: BaseProcess
    reports: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "a child has been started"
        return self.process.pid


def start_child(context: BaseContext, name: str, target: Callable[..., None], *args: Any) -> Child:
    """Starts `target(*args, pipe)` in a new process, which ends with this one, and with its thread unless it is a child
    of the fork server.
    """
    ours, theirs = context.Pipe(duplex=True)
    started: contextlib.AbstractContextManager[None] = end_signal.blocked_in_children()
    if isinstance(context, ForkServerContext):
        args = (forkserver._forkserver._forkserver_pid, target, *args)  # type: ignore[attr-defined]
        target = _with_fork_server
        started = contextlib.nullcontext()  # they are blocked in the server, whose imports a signal must not wait for
    else:
        args = (os.getpid(), target, *args)
        target = _with_parent
    process: BaseProcess = context.Process(target=target, name=name, args=(*args, theirs))  # type: ignore[attr-defined]
    with started:
        process.start()
    theirs.close()
    return Child(process=process, reports=ours)


def _with_fork_server(server_pid: int, target: Callable[..., None], *args: Any) -> None:
    """Runs the target in a child of the fork server, which dies with the server. That ends when no process holds the
    other end of its pipe, which every child inherits: each closes it, so that only the driver holds it.
    """
    from spare_megatron.process.fork_server import VISIBLE_TO_CHILDREN  # which only the server itself imports

    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    restore_shown(VISIBLE_TO_CHILDREN)
    # A collection would examine all that the server has imported, for 0.2 s, and copy their shared pages.
    gc.freeze()
    gc.enable()
    _with_parent(server_pid, target, *args)


def _with_parent(parent_pid: int, target: Callable[..., None], *args: Any) -> None:
    die_with(parent_pid)
    target(*args)


def _reporting(target: Callable[..., None], *args: Any) -> None:
    """Runs the target in a process without a log; reports an exception that ends it, in place of a traceback."""
    try:
        target(*args)
    except Exception as error:  # noqa: BLE001  (any exception ends the process and is reported)
        with contextlib.suppress(OSError):
            args[-1].send(ProcessRaised(text=describe_error(error)))
        leave(1)


def describe_error(error: BaseException) -> str:
    """The exception in a line, as a traceback ends."""
    return real_paths(" ".join(traceback.format_exception_only(error)[-1].splitlines()))


def why_ended(child: Child) -> str:
    """Why a process has ended, which it has: its exception, if it has reported one, or its exit code."""
    child.process.join(_REAP_TIMEOUT_S)
    with contextlib.suppress(EOFError, OSError):
        while child.reports.poll():
            if isinstance(report := child.reports.recv(), ProcessRaised):
                return report.text
    return describe_exit(child.process.exitcode)


def start_hub(context: ForkServerContext, wait: Wait) -> Child:
    """The process that holds the bridge between the nodes' networks. Raises RuntimeError if it does not come up."""
    child = start_child(context, "network-hub", _reporting, serve_hub)
    _first_report(child, wait, "the network of the nodes", "; set cluster.isolate_nodes=false to do without")
    return child


def start_store(
    context: ForkServerContext, control: ControlConfig, run_name: str, hub: Child | None, wait: Wait
) -> tuple[Child | None, StoreSpec]:
    """The control store of a new run, and its process if it is the embedded one. Raises RuntimeError if it does not
    come up, and ValueError for unusable credentials for etcd.
    """
    if control.store == "etcd":
        return None, etcd_spec(control, run_name, os.environ)
    return start_embedded_store(context, control.listen_address, hub, wait)


def start_embedded_store(
    context: ForkServerContext, address: str, hub: Child | None = None, wait: Wait = connection.wait
) -> tuple[Child, TcpStoreSpec]:
    """A server on this address, or on the hub's in its network. Raises RuntimeError if it does not come up."""
    if hub is not None:
        address = HUB_ADDRESS
        child = start_child(context, "control-store", _reporting, run_in_network_of, hub.pid, serve, address, 0)
    else:
        child = start_child(context, "control-store", _reporting, serve, address, 0)
    return child, TcpStoreSpec(host=address, port=_first_report(child, wait, "the control store"))


def start_outer_store(context: ForkServerContext, sites: SitesConfig, wait: Wait) -> Child | None:
    """A server of the outer store where `sites.endpoints` says, if that is here: at site 0, without etcd. RuntimeError:
    it does not come up.
    """
    url = urlsplit(sites.endpoints[0]) if sites.is_used else None
    if url is None or url.scheme != "tcp" or sites.site:
        return None
    child = start_child(context, "outer-store", _reporting, serve, url.hostname, url.port)
    _first_report(child, wait, f"the outer store at {url.netloc}")
    return child


def _first_report(child: Child, wait: Wait, name: str, remedy: str = "") -> Any:
    """The first report of a process; ends it if none comes. RuntimeError: it is late or has died. KeyboardInterrupt: a
    signal came; see `Deferral.wait`.
    """
    try:
        if not wait([child.reports], _STORE_START_TIMEOUT_S):
            raise RuntimeError(f"{name} did not start within {_STORE_START_TIMEOUT_S:g} s{remedy}")
        try:
            report = child.reports.recv()
        except EOFError:
            raise RuntimeError(f"{name} died at start: {why_ended(child)}{remedy}") from None
        if isinstance(report, ProcessRaised):
            raise RuntimeError(f"{name} died at start: {report.text}{remedy}")
        return report
    except BaseException:
        end_child(child)
        raise


def end_child(child: Child) -> None:
    """Kills the process if it is alive, and reaps it."""
    if child.process.is_alive():
        child.process.kill()
    child.process.join(_REAP_TIMEOUT_S)
    child.reports.close()


def stop_children(children: Collection[Child]) -> None:
    """Asks all processes to stop, then kills those that are late, and reaps all, in parallel."""
    for child in children:
        with contextlib.suppress(OSError):
            child.reports.send(StopProcess())
    end_s = time.monotonic() + _REAP_TIMEOUT_S
    for child in children:
        child.process.join(max(0.0, end_s - time.monotonic()))
    kill(children)
    for child in children:
        end_child(child)


def end_processes(
    *, supervisors: Collection[Child], lost: Collection[Child], stores: Collection[Child | None], hub: Child | None
) -> None:
    """Ends and reaps all processes, ranks before the control stores: without them they would begin to save their state.
    `supervisors`, some of them proxies of remote ones, are asked to end; `lost` ones are killed at once.
    """
    for child in lost:
        end_child(child)
    stop_children(supervisors)
    for last in (*stores, hub):
        if last is not None:
            end_child(last)


def await_exit(pids: Collection[int], limit_s: float = _EXIT_S) -> None:
    """Waits for processes that are no children of this one, so long for each. What dies may write to the store."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                connection.wait([process], limit_s)
            finally:
                os.close(process)


def kill(children: Collection[Child]) -> None:
    """Kills those that still run, and their ranks with them, without reaping them."""
    for child in children:
        if child.process.is_alive():
            child.process.kill()


def describe_exit(code: int | None) -> str:
    """The exit code, or the signal that ended the process.

    >>> describe_exit(3), describe_exit(-9), describe_exit(-40)
    ('exit code 3', 'SIGKILL', 'signal 40')
    """
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):  # most real-time signals have no name
        return signal.Signals(-code).name
    return f"signal {-code}"


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before this call
        os.kill(os.getpid(), signal.SIGKILL)


def log_to_file(run_dir: Path, name: str) -> None:
    """Redirects all output of this process, also from C++, to RUN_DIR/logs/NAME.log; drops what a full disk refuses."""
    log = run_dir / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout, sys.stderr = outlast(sys.stdout), outlast(sys.stderr)


def leave(code: int) -> NoReturn:
    """Ends this process without running destructors; a full disk does not prevent it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def say(text: object, *, err: bool = False) -> None:
    """Prints to the log; does nothing if a full disk does not take it."""
    with contextlib.suppress(OSError):
        print(printable(str(text), keep="\n\t"), file=sys.stderr if err else sys.stdout, flush=True)


class _Closable(Protocol):
    def close(self) -> None:
        """Raises BytesLost if the disk has not taken everything."""


def report_held(report: Callable[[RecordsHeld], None]) -> OnHeld:
    """The callback of an `AppendingFile`, for storage that stops taking it or takes it again."""
    return lambda path, reason: report(RecordsHeld(path=real_paths(str(path)), reason=reason))


def close_or_report(records: _Closable, report: Callable[[RecordsLost], None]) -> None:
    """Closes the records; reports bytes that a full disk did not take, which affect the verdict but cost no group."""
    try:
        records.close()
    except BytesLost as error:
        report(RecordsLost(paths=(str(error.filename),), num_bytes=error.num_bytes, reason=error.reason))
