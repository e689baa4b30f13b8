"""What a supervisor does about requests: to end the run, and to have groups leave it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path

from spare_megatron.machine import end_signal
from spare_megatron.machine.timers import Timers
from spare_megatron.process.processes import say
from spare_megatron.process.reports import EndAsked
from spare_megatron.process.requests import asked_to_leave, request
from spare_megatron.stacking.layout import GroupId

SHARE_OF_STEP = 0.6
"""Share of the grace period after which ranks give the step under way up and save alone."""


@dataclass
class EndRequests:
    """Requests by signals, by the driver, and of others. The first time limit holds; most signals set `grace_s`.
    `ask_ranks` has the ranks end with the step under way, also in a signal handler; `cut_off` is called after a share
    of the limit, `end_at_once` after all of it. `report` gets requests of which the driver may not know.
    """

    timers: Timers
    grace_s: float
    ask_ranks: Callable[[], None]
    cut_off: Callable[[], None]
    end_at_once: Callable[[], None]
    report: Callable[[EndAsked], None]
    _signals: list[signal.Signals] = field(default_factory=list)  # not handled yet
    _asked: EndAsked | None = None

    def on_signal(self, number: signal.Signals) -> None:
        """Notes the signal; safe in its handler, which may break into anything."""
        self.ask_ranks()
        self._signals.append(number)

    def poll(self) -> EndAsked | None:
        """Handles the signals noted since the last call. Returns the request that holds, if there is any."""
        while self._signals:
            number = self._signals.pop(0)
            self.request(number.name, is_limited=number != end_signal.WITHOUT_LIMIT)
        return self._asked

    def request(self, by: str, *, is_limited: bool = True) -> None:
        """Ends the run as this machine is asked to, and reports that."""
        asked = EndAsked(by=by, limit_s=self.grace_s if is_limited else None)
        self.on_asked(asked)
        self.report(asked)

    def on_asked(self, asked: EndAsked) -> None:
        """Ends the run after the step under way, within the time limit of the request if it has one."""
        self.ask_ranks()
        is_first_limit = asked.limit_s is not None and (self._asked is None or self._asked.limit_s is None)
        if asked.limit_s is not None and is_first_limit:
            self.timers.after(SHARE_OF_STEP * asked.limit_s, self.cut_off)
            self.timers.after(asked.limit_s, self.end_at_once)
        if self._asked is None or is_first_limit:
            self._asked = asked


_PAUSE_S = 0.5
"""Seconds between looks; a file system of a network may show changes later."""


class RequestWatch:
    """Sends to `inbox` all groups that are asked to leave whenever they have changed; the `further` ones of the run are
    at first. Once `notice_file` exists, which says that this machine is about to go, it requests that of the `groups`
    here.
    """

    def __init__(
        self, run_dir: Path, groups: Sequence[GroupId], notice_file: str, further: frozenset[GroupId] = frozenset()
    ) -> None:
        self._run_dir = run_dir
        self._groups = groups
        self._notice = Path(notice_file) if notice_file else None
        self._further = self._last = further
        self._failure = ""  # to follow the notice
        self._is_ended = threading.Event()
        self.inbox, self._outbox = Pipe(duplex=False)

    def start(self) -> None:
        threading.Thread(target=self._run, name="request-watch", daemon=True).start()

    def stop(self) -> None:
        """Has the thread end, now or once the storage answers; for a machine that takes another place."""
        self._is_ended.set()

    def receive(self) -> frozenset[GroupId]:
        """The groups that are asked to leave; call it once `inbox` is ready."""
        asked: frozenset[GroupId] = self.inbox.recv()
        return asked

    def poll(self) -> None:
        """Looks once. OSError: the storage does not answer."""
        try:
            if self._notice is not None and self._notice.exists():
                request(self._run_dir, self._groups, "drain")
                self._notice = None  # the groups may be asked for again, wherever they then run
        except OSError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                say(f"warning: cluster.notice_file={self._notice} cannot be followed: {error}")
        asked = asked_to_leave(self._run_dir, self._further)
        if asked != self._last:
            self._last = asked
            self._outbox.send(asked)

    def _run(self) -> None:
        while not self._is_ended.is_set():
            with contextlib.suppress(OSError):
                self.poll()
            self._is_ended.wait(_PAUSE_S)
