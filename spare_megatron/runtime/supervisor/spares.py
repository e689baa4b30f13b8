"""The processes that ranks run in: each waits to be told which rank it is, some of them until another is lost."""

import contextlib
import os
import signal
import traceback
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import NoReturn

from spare_megatron.runtime.process.beacon import Page, new_page
from spare_megatron.runtime.process.processes import Child, die_with, end_child, leave, log_to_file, say, start_child
from spare_megatron.runtime.process.reports import ExitCode, RankRaised
from spare_megatron.runtime.process.spec import RankMain, RankSpec
from spare_megatron.runtime.process.starvation import Starvation

_FAREWELL_S = 5.0
"""How long a rank that has raised waits to be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process that is a rank, or is to be one.

    Attributes:
        child: The process, and the pipe to it.
        page: Memory shared with it, where its beacon beats.
        starvation: What it has lacked of processors.
    """

    child: Child
    page: Page
    starvation: Starvation

    def become(self, spec: RankSpec) -> None:
        """Tells it which rank it is. Where it has died, its end says so."""
        with contextlib.suppress(OSError):
            self.child.reports.send(spec)


class Spares:
    """Makes the processes of a node's ranks, and keeps some that wait.

    Args:
        context: What they are started from.
        rank_main: What they run as soon as they are told who they are.
        num_kept: How many are to wait.
    """

    def __init__(self, context: BaseContext, rank_main: RankMain, num_kept: int) -> None:
        self._context = context
        self._rank_main = rank_main
        self._num_kept = num_kept
        self._waiting: deque[RankProcess] = deque()

    def warm(self) -> None:
        """Starts those that are missing."""
        self._bury()
        self._waiting += [self.new() for _ in range(self._num_kept - len(self._waiting))]

    def take(self, num_wanted: int) -> list[RankProcess]:
        """Those that have waited longest, as many as there are."""
        self._bury()
        return [self._waiting.popleft() for _ in range(min(num_wanted, len(self._waiting)))]

    def new(self) -> RankProcess:
        """A process that nobody has waited for."""
        page = new_page(self._context)
        child = start_child(self._context, "rank", _wait_for_place, self._rank_main, page, os.getpid())
        return RankProcess(child=child, page=page, starvation=Starvation(child.pid))

    def end(self) -> None:
        """Kills and reaps all that wait."""
        while self._waiting:
            end_child(self._waiting.pop().child)

    def _bury(self) -> None:
        """Lets go of those that have died waiting."""
        for process in [process for process in self._waiting if not process.child.process.is_alive()]:
            end_child(process.child)
            self._waiting.remove(process)


def _wait_for_place(rank_main: RankMain, page: Page, supervisor_pid: int, reports: Connection) -> None:
    die_with(supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's affair
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _be_rank(rank_main, replace(reports.recv(), page=page), reports)


def _be_rank(rank_main: RankMain, spec: RankSpec, reports: Connection) -> NoReturn:
    """The rank from its first line on: what it imports may fail as well as what it does.

    The process is left without running destructors: those of communicators that were abandoned would wait for
    transfers that cannot end. Until then the exception holds them.
    """
    try:
        log_to_file(spec.run_dir, spec.name)
        rank_main(spec, reports)
    except BaseException as error:  # noqa: BLE001  (whatever it is, it ends this rank and is told)
        text = traceback.format_exc()
        try:
            say(text.rstrip())
            concerns_all = isinstance(error, ValueError)
            reports.send(RankRaised(group=spec.group, rank=spec.rank, traceback=text, concerns_all=concerns_all))
            # The supervisor ends the whole group for it. A peer that missed it first would fence it without a cause.
            reports.poll(_FAREWELL_S)
        finally:
            leave(ExitCode.RAISED)
    leave(ExitCode.FINISHED)
