"""A journal read as it grows: every line once, however long the journal is."""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from spare_megatron.journal.lines import KINDS, Line, decode_line, require_known_format
from spare_megatron.journal.run_state import PARAMS, UNREAD, RunState

_HEAD = re.compile(rb'\{"record":"([a-z]+)","source":"([^"\\]*)","at_s":([0-9][0-9.e+]*),')

_READ_BYTES = 4 << 20

_MOST_DAMAGE = 20

_DECODERS: dict[bytes, msgspec.json.Decoder[Any]] = {
    name.encode(): msgspec.json.Decoder(kind) for name, kind in KINDS.items()
}


class JournalTail:
    """Follows all files of a journal, those that come later too. Holds no file open, and nothing of what it has read.

    Args:
        run_dir: The directory of the run; it may be without a journal for now.
        without: Kinds of records, by their names in the files, that are passed over unread.

    Attributes:
        sources: The writers whose files have been found.
        damage: What could not be read, the first of it.
    """

    def __init__(self, run_dir: Path, without: Collection[str] = ()) -> None:
        self._folder = run_dir / "journal"
        self._without = frozenset(name.encode() for name in without)
        self._read: dict[str, int] = {}
        self.sources: set[str] = set()
        self.damage: list[str] = []

    def poll(self) -> Iterator[Line]:
        """The lines that are new, each file's in their order, file after file; those of no rank come first.

        A last line without an end stays for the next time: its writer may be at it, or was killed.
        """
        if not self._folder.is_dir():
            return
        with os.scandir(self._folder) as found:
            files = [file for file in found if file.name.endswith(".jsonl")]
        if len(files) > len(self.sources):
            self.sources.update(file.name.removesuffix(".jsonl") for file in files)
        for is_of_rank in (False, True):  # who has read that the run has ended looks at the ranks' files after that
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
        try:
            if head is None:
                return decode_line(text.decode())
            kind, source, at_s = head.groups()
            if kind in self._without:
                return None
            try:
                return Line(source=source.decode(), at_s=float(at_s), record=_DECODERS[kind].decode(text))
            except (KeyError, msgspec.MsgspecError):  # of a kind that nobody knows, or with numbers that are none
                return decode_line(text.decode())
        except ValueError as error:
            if len(self.damage) < _MOST_DAMAGE:
                self.damage.append(f"{name}: {error}")
            return None


class Follower:
    """Reads of a run's journal what is new, each time.

    Args:
        run_dir: The directory of the run.
        with_params: Reads digests of parameters, too.

    Raises:
        ValueError: It is of a later format.

    Attributes:
        run_state: How the run stood the last time.
    """

    def __init__(self, run_dir: Path, *, with_params: bool = False) -> None:
        require_known_format(run_dir)
        self._tail = JournalTail(run_dir, without=UNREAD if with_params else (*UNREAD, PARAMS))
        self.run_state = RunState()

    def poll(self) -> RunState:
        """How the run stands now."""
        run_state = self.run_state
        for line in self._tail.poll():
            run_state.take(line)
        run_state.begun(self._tail.sources)
        run_state.settle(is_whole=run_state.end is not None)
        return run_state

    @property
    def damage(self) -> tuple[str, ...]:
        """What could not be read, or made sense of."""
        return (*self._tail.damage, *self.run_state.damage)


def read_run_state(run_dir: Path, *, with_params: bool = False) -> RunState:
    """How the run stands by everything that is in its journal now. The arguments are those of `Follower`.

    Raises:
        FileNotFoundError: The run directory has no journal.
        ValueError: It is of a later format.
    """
    if not any((run_dir / "journal").glob("*.jsonl")):
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    follower = Follower(run_dir, with_params=with_params)
    follower.poll().settle(is_whole=True)
    follower.run_state.damage[:] = follower.damage
    return follower.run_state
