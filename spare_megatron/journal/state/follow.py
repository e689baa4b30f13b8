"""Reads a journal as it grows: every line once."""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from spare_megatron.journal.files import Journal, Line, decode_line, require_known_format
from spare_megatron.journal.state.run_state import PARAMS, UNREAD, RunState

_HEAD = re.compile(rb'\{"record":"([a-z]+)",')

_READ_BYTES = 4 << 20

_MOST_DAMAGE = 20


class JournalTail:
    """Follows all files of a journal, later ones too; keeps no file open and no line in memory.

    `run_dir` may lack a journal for now; the kinds named in `without` are not read. `sources` are the writers found;
    `damage` has the first unreadable lines.
    """

    def __init__(self, run_dir: Path, without: Collection[str] = ()) -> None:
        self._folder = run_dir / "journal"
        self._without = frozenset(name.encode() for name in without)
        self._read: dict[str, int] = {}
        self.sources: set[str] = set()
        self.damage: list[str] = []

    def poll(self) -> Iterator[Line]:
        """Yields the new lines, file after file, ranks last; a last line without an end waits for the next call."""
        if not self._folder.is_dir():
            return
        with os.scandir(self._folder) as found:
            files = [file for file in found if file.name.endswith(".jsonl")]
        if len(files) > len(self.sources):
            self.sources.update(file.name.removesuffix(".jsonl") for file in files)
        for is_of_rank in (False, True):  # ranks last: complete once the end record is read
            some = [file for file in files if file.name.startswith("group-") is is_of_rank]
            for name in sorted(file.name for file in some if file.stat().st_size > self._read.get(file.name, 0)):
                yield from self._rest_of(name)

    def _rest_of(self, name: str) -> Iterator[Line]:
        offset = self._read.get(name, 0)
        with (self._folder / name).open("rb") as opened:
            opened.seek(offset)
            torn = b""
            while block := opened.read(_READ_BYTES):
                *texts, torn = (torn + block).split(b"\n")
                for text in texts:
                    line = self._decode(name, text)
                    if line is not None:
                        yield line
                self._read[name] = opened.tell() - len(torn)

    def _decode(self, name: str, text: bytes) -> Line | None:
        head = _HEAD.match(text)
        if head is not None and head[1] in self._without:
            return None
        try:
            return decode_line(text.decode())
        except ValueError as error:
            if len(self.damage) < _MOST_DAMAGE:
                self.damage.append(f"{name}: {error}")
            return None


class Follower:
    """Follows the state of a run, `with_params` also digests; raises ValueError for a later journal format."""

    def __init__(self, run_dir: Path, *, with_params: bool = False) -> None:
        require_known_format(run_dir)
        self._tail = JournalTail(run_dir, without=UNREAD if with_params else (*UNREAD, PARAMS))
        self.run_state = RunState()

    def poll(self) -> RunState:
        run_state = self.run_state
        for line in self._tail.poll():
            run_state.add_line(line)
        run_state.add_sources(self._tail.sources)
        run_state.settle(is_whole=run_state.end is not None)
        return run_state

    @property
    def damage(self) -> tuple[str, ...]:
        """What could not be read or interpreted."""
        return (*self._tail.damage, *self.run_state.damage)


def run_state_of(journal: Journal) -> RunState:
    """State of a run by a journal in memory."""
    run_state = RunState()
    for line in journal.lines:
        run_state.add_line(line)
    run_state.settle(is_whole=True)
    return run_state


def read_run_state(run_dir: Path, *, with_params: bool = False) -> RunState:
    """State of a run by its whole journal. FileNotFoundError: there is none; ValueError: it has a later format."""
    if not any((run_dir / "journal").glob("*.jsonl")):
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    follower = Follower(run_dir, with_params=with_params)
    follower.poll().settle(is_whole=True)
    follower.run_state.damage[:] = follower.damage
    return follower.run_state
