"""A process on the driver's machine for each supervisor on another one: launches it, relays messages, replaces it."""

import contextlib
import dataclasses
import math
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn, Protocol

from spare_megatron.core.machines.group_starts import restart_delay_s
from spare_megatron.formats.output import real_paths
from spare_megatron.machine import end_signal
from spare_megatron.process import reports
from spare_megatron.process.node_connection import Listener
from spare_megatron.process.processes import describe_exit, log_to_file, say
from spare_megatron.process.specs import NodeSpec
from spare_megatron.store.open_store import open_store, without_credentials

_RETRY_S, _LONGEST_RETRY_S = 2.0, 60.0
"""First and longest pause between launches while no node is free. It doubles each time, because all remote supervisors
of a run ask the same server."""
_LONG_LIVED_S = 30.0
"""A supervisor that has lasted this long is replaced without the longer pause that follows quick losses."""
_END_S = 5.0
"""How long the process that launched a supervisor may outlast it."""
_TERMINATE_S = 2.0
"""How long that process may take to end after a signal."""


class Launcher(Protocol):
    """Starts supervisors on other machines. Instances are pickled on their way to the process that uses them."""

    @property
    def replaces(self) -> bool:
        """Whether a lost supervisor is started again, on the same node or another one."""

    def lacks(self, node: int) -> bool:
        """Whether there is no machine for this node when the run begins: it begins without."""

    def start(self, run_dir: Path, node: int, incarnation: int) -> subprocess.Popen[bytes] | None:
        """Starts `spare supervise` for this node; None if a user is to do that, or no node is free now."""

    def release(self, run_dir: Path, node: int) -> None:
        """Releases the resources of the supervisor after it has ended or is lost."""


class ByHand:
    """For users who run `spare supervise` on every other node, and again on a node that is back after its loss."""

    replaces = True

    def lacks(self, node: int) -> bool:  # noqa: ARG002  (whoever is late is missed)
        return False

    def start(self, run_dir: Path, node: int, incarnation: int) -> None:
        """Leaves the start to the user."""

    def release(self, run_dir: Path, node: int) -> None:
        """Releases nothing."""


class _Over(Exception):
    """Nothing is left to do: the driver is gone, or ends the node."""


def run_remote_supervisor(launcher: Launcher, spec: NodeSpec, driver: Connection) -> None:
    log_to_file(spec.run_dir, f"node-{spec.node}")
    end_signal.disregard()
    try:
        _RemoteSupervisor(launcher, spec, driver).run()
    except _Over:
        pass


class _RemoteSupervisor:
    def __init__(self, launcher: Launcher, spec: NodeSpec, driver: Connection, retry_s: float = _RETRY_S) -> None:
        self._launcher = launcher
        self._spec = spec
        self._driver = driver
        self._retry_s = retry_s
        self._host = open_store(spec.store).local_host()
        self._incarnation = 0
        self._num_short_lived = 0
        self._has_begun = False
        self._step: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Runs one supervisor after another, until the run ends or the launcher does not replace a lost one."""
        try:
            while True:
                is_lacking = not self._incarnation and self._launcher.lacks(self._spec.node)
                supervisor, began_s = None if is_lacking else self._start_supervisor(), time.monotonic()
                if supervisor is not None and self._forward(supervisor):
                    self._end_step(_END_S)
                    return
                if not self._has_begun:
                    cause = self._why_missing(is_lacking=is_lacking, has_connected=supervisor is not None)
                    self._report(reports.NodeMissing(node=self._spec.node, cause=cause))
                self._end_step()
                if not self._launcher.replaces:
                    sys.exit(1)
                say(f"node {self._spec.node}: its supervisor is lost; another one takes its place")
                self._incarnation += 1
                self._pause(supervisor is not None and time.monotonic() - began_s > _LONG_LIVED_S)
        finally:
            self._end_step()

    def _pause(self, was_long_lived: bool) -> None:
        """Waits before the next supervisor, longer each time while supervisors are lost soon after they connect."""
        self._num_short_lived = 0 if was_long_lived else self._num_short_lived + 1
        end_s = time.monotonic() + (restart_delay_s(0, 1, self._num_short_lived, self._retry_s) or 0.0)
        while (left_s := end_s - time.monotonic()) > 0:
            if wait([self._driver], left_s):
                self._relay_order(None)

    def _start_supervisor(self) -> Connection | None:
        """Launches a supervisor and sends it its spec. Returns None if it does not connect."""
        spec = self._spec
        listener = Listener(spec.run_dir, spec.node, self._host)
        try:
            self._step = self._launch()
            # A replacement may have to wait until a node is free.
            end_s = math.inf if self._incarnation else time.monotonic() + spec.config.control.startup_timeout_s
            retry_s, retry_at_s = self._retry_s, time.monotonic() + self._retry_s
            while time.monotonic() < end_s:
                ready = wait([listener.fileno(), self._driver], self._retry_s)
                if self._driver in ready:
                    self._relay_order(None)
                if listener.fileno() in ready and (supervisor := listener.accept()) is not None:
                    store = without_credentials(spec.store)
                    with contextlib.suppress(OSError):  # it is lost already, which `_forward` notices
                        supervisor.send(
                            dataclasses.replace(spec, store=store, incarnation=self._incarnation, is_remote=True)
                        )
                    return supervisor
                if self._step is not None and self._step.poll() is not None:
                    break
                if self._step is None and self._incarnation and time.monotonic() >= retry_at_s:
                    self._step = self._launch()
                    retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                    retry_at_s = time.monotonic() + retry_s
        finally:
            listener.close()
        say(f"node {spec.node}: no supervisor has connected")
        return None

    def _why_missing(self, *, is_lacking: bool, has_connected: bool) -> str:
        node, step = self._spec.node, self._step
        if is_lacking:
            return f"node {node}: the job has fewer nodes than cluster.num_nodes={self._spec.config.cluster.num_nodes}"
        code = None if step is None else step.poll()
        if has_connected:
            reason = "its supervisor was lost before training began"
        elif code is not None:
            reason = f"its supervisor did not connect: the command that starts it ended with {describe_exit(code)}"
        else:
            timeout_s = self._spec.config.control.startup_timeout_s
            reason = f"its supervisor did not connect within control.startup_timeout_s={timeout_s:g}"
        return f"node {node}: {reason}; look at logs/node-{node}.log, and at the machine"

    def _launch(self) -> subprocess.Popen[bytes] | None:
        """Launches a supervisor; None if not possible now. OSError, ValueError: the first one cannot start."""
        spec = self._spec
        try:
            return self._launcher.start(Path(real_paths(str(spec.run_dir))), spec.node, self._incarnation)
        except (OSError, ValueError) as error:
            if self._incarnation == 0:
                raise
            say(f"node {spec.node}: its supervisor cannot be started now: {error}")
            self._launcher.release(spec.run_dir, spec.node)
            return None

    def _forward(self, supervisor: Connection) -> bool:
        """Relays reports and orders. Returns True when the supervisor has ended, False if it is lost."""
        with supervisor:
            while True:
                ready = wait([supervisor, self._driver])
                if self._driver in ready:
                    self._relay_order(supervisor)
                if supervisor in ready:
                    try:
                        report = supervisor.recv()
                    except (EOFError, OSError):
                        return False
                    self._has_begun = self._has_begun or isinstance(report, reports.RanksReady)
                    self._report(report)
                    if isinstance(report, reports.NodeEnded):
                        with contextlib.suppress(OSError):
                            supervisor.send(reports.LastReportAcknowledged())
                        return True

    def _report(self, report: reports.NodeReport) -> None:
        try:
            self._driver.send(report)
        except OSError:
            self._leave()

    def _leave(self) -> NoReturn:
        """The driver is gone: leaves the supervisor, and the process that launched it, running."""
        self._step = None
        raise _Over

    def _relay_order(self, supervisor: Connection | None) -> None:
        try:
            order: reports.DriverOrder = self._driver.recv()
        except (EOFError, OSError):
            self._leave()
        if supervisor is not None:
            with contextlib.suppress(OSError):
                supervisor.send(order)
        if isinstance(order, reports.StopProcess):
            raise _Over

    def _end_step(self, grace_s: float = 0.0) -> None:
        """Ends the process that launched the supervisor, if it is still there after `grace_s`."""
        self._launcher.release(self._spec.run_dir, self._spec.node)
        step, self._step = self._step, None
        if step is None:
            return
        for end, wait_s in ((lambda: None, grace_s), (step.terminate, _TERMINATE_S), (step.kill, _TERMINATE_S)):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(wait_s)
                return
