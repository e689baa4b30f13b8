"""A supervisor's thread for what asks groups to leave: requests in the run directory, and the notice of its machine.

Storage may not answer, so the supervisor's main thread never waits for it.
"""

import contextlib
import threading
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from pathlib import Path

from spare_megatron.process.requests import asked_to_leave, request
from spare_megatron.stacking.layout import GroupId

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
        if self._notice is not None and self._notice.exists():
            request(self._run_dir, self._groups, "drain")
            self._notice = None  # the groups may be asked for again, wherever they then run
        asked = asked_to_leave(self._run_dir, self._further)
        if asked != self._last:
            self._last = asked
            self._outbox.send(asked)

    def _run(self) -> None:
        while not self._is_ended.is_set():
            with contextlib.suppress(OSError):
                self.poll()
            self._is_ended.wait(_PAUSE_S)
