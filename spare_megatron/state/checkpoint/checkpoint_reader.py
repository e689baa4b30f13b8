"""Verifies files of checkpoints in threads beside all else: large ones take minutes."""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from spare_megatron.core.log.actions import CheckpointCandidate, Reading
from spare_megatron.state.checkpoint.checkpoint_folder import Checkpoint
from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, verify_file

_NUM_THREADS = 4
"""Files read at a time: one thread hashes less than storage delivers."""


class _Stopped(Exception):
    """The reader was stopped."""


@dataclass(slots=True)
class _Found:
    asked: set[int] = field(default_factory=set)  # read, being read or waiting
    whole: set[int] = field(default_factory=set)
    damaged: dict[int, str] = field(default_factory=dict)
    num_bytes: int = 0


class CheckpointReader:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._found: dict[CheckpointCandidate, _Found] = {}
        self._is_stopped = False

    def read(self, candidate: CheckpointCandidate, checkpoint: Checkpoint, numbers: Collection[int]) -> None:
        """Starts to verify files of the checkpoint that `candidate` names, by their numbers in the order of names."""
        with self._lock:
            found = self._found.setdefault(candidate, _Found())
            new = sorted(set(numbers) - found.asked)
            found.asked.update(new)
        if not new:
            return
        self._is_stopped = False
        self._threads = self._threads or ThreadPoolExecutor(max_workers=_NUM_THREADS)
        names = sorted(checkpoint.manifest.files)
        for number in new:
            self._threads.submit(self._read, found, checkpoint, number, names[number])

    def readings(self) -> tuple[Reading, ...]:
        """What has been read so far."""
        with self._lock:
            return tuple(
                Reading(
                    candidate=candidate,
                    whole=tuple(sorted(found.whole)),
                    damaged=tuple(sorted(found.damaged)),
                    reason=found.damaged[min(found.damaged)] if found.damaged else "",
                    num_bytes=found.num_bytes,
                )
                for candidate, found in sorted(self._found.items())
            )

    @property
    def is_reading(self) -> bool:
        with self._lock:
            return any(len(found.asked) > len(found.whole) + len(found.damaged) for found in self._found.values())

    def stop(self) -> None:
        """Cancels reads and forgets their results: files may change before they are needed again."""
        with self._lock:
            self._is_stopped = True
            self._found = {}
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _read(self, found: _Found, checkpoint: Checkpoint, number: int, name: str) -> None:
        def on_read(num_bytes: int) -> None:
            if self._is_stopped:
                raise _Stopped
            with self._lock:
                found.num_bytes += num_bytes

        reason = ""
        try:
            verify_file(checkpoint.path, name, checkpoint.manifest.files[name], on_read)
        except _Stopped:
            return
        except DamagedCheckpoint as error:
            reason = str(error)
        with self._lock:
            if reason:
                found.damaged[number] = reason
            else:
                found.whole.add(number)
