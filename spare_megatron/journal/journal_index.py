"""Journal files read in parts: memory is bounded by one part, the log and the rare records.

One pass finds the log, the rare records, and the range of steps and attempts in each block; a part is read from the
blocks that overlap it. docs/decisions.md compares this with SQLite.
"""

import dataclasses
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from spare_megatron.formats.codec import decode, encode
from spare_megatron.journal.files import KINDS, Line, decode_line, journal_files, origin_field
from spare_megatron.journal.journal_view import FREQUENT, Place, Placed, Stretch, is_rare
from spare_megatron.journal.records import EntryRecord, Record

STRETCH_BYTES = 16 << 20
"""Frequent records of a part, as bytes in the files; they take several times as much memory."""
BLOCK_BYTES = 64 << 10
"""Read at once."""
_MOST = 10**15
"""Above every valid step and attempt."""

_NUMBER = rb"(0|[1-9][0-9]{0,14})"
_HEAD = re.compile(
    rb'\{"record":"([a-z]+)","source":"[^"\\]*","at_s":([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?),(?:"group":[0-9]+,'
    rb'(?:"step":' + _NUMBER + rb',(?:"attempt":' + _NUMBER + rb',)?|"index":' + _NUMBER + rb',"entry":(.*)\}$))?'
)
_KINDS = frozenset(name.encode() for name in KINDS)
_FREQUENT = {name.encode(): kind for name, kind in KINDS.items() if kind in FREQUENT}


@dataclasses.dataclass(slots=True)
class _Block:
    """Consecutive lines of a file, and the range of steps and attempts of their frequent records."""

    file: int
    offset: int
    size: int
    first_number: int
    first_step: int = 1 << 62
    last_step: int = -1
    first_attempt: int = 1 << 62
    last_attempt: int = -1

    def has(self, step: int, attempt: int | None) -> None:
        self.first_step, self.last_step = min(self.first_step, step), max(self.last_step, step)
        if attempt is not None:
            self.first_attempt, self.last_attempt = min(self.first_attempt, attempt), max(self.last_attempt, attempt)


class JournalIndex:
    """A `JournalView` of journal files, as they are now.

    `stretch_bytes` grows with the number of files by default; `until_s` is a deadline on the monotonic clock;
    `settings` are the run's terms by the settings beside the journal. Raises FileNotFoundError without a journal,
    ValueError for a later format, and TimeoutError after the deadline, as methods do.
    """

    def __init__(
        self,
        run_dir: Path,
        stretch_bytes: int | None = None,
        until_s: float = math.inf,
        settings: Mapping[str, Any] = MappingProxyType({}),
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._files = journal_files(run_dir)
        self.origin_code = origin_field(run_dir, "code")
        self._until_s = until_s
        self._block_bytes = block_bytes
        self.settings = settings
        self._damage: dict[tuple[int, int], str] = {}  # by file and number of the line
        self._rare: list[tuple[Place, Line]] = []
        self._first_read: dict[int, tuple[Place, bytes]] = {}
        self._disputed: set[int] = set()
        blocks, num_bytes = [], 0
        for block, texts in self._all_blocks():
            for number, text in enumerate(texts, block.first_number):
                num_bytes += len(text) if self._survey(block, number, text) else 0
            blocks.append(dataclasses.astuple(block))
        self._blocks: npt.NDArray[np.int64] = np.array(blocks, np.int64).reshape(-1, 8)
        self.rare = [line for _, line in sorted(self._rare, key=lambda placed: placed[0])]
        self.entries = {index: decode(self._first_read.pop(index)[1], dict) for index in sorted(self._first_read)}
        del self._rare
        # Every part takes some of each file: the smaller the parts, the more often a block is read.
        part_bytes = stretch_bytes or max(STRETCH_BYTES, 2 * block_bytes * len(self._files))
        self.num_stretches = max(math.ceil(num_bytes / part_bytes), 1)

    def _all_blocks(self) -> Iterator[tuple[_Block, list[bytes]]]:
        """All lines of all files, without the torn last line of a killed writer, which does not count."""
        for number, path in enumerate(self._files):
            with path.open("rb") as file:
                offset, first_number = 0, 1
                while read := file.read(self._block_bytes):
                    read += b"" if read.endswith(b"\n") else file.readline()
                    *texts, torn = read.split(b"\n")
                    size = len(read) - len(torn)
                    self._keep_time()
                    yield _Block(number, offset, size, first_number), texts
                    offset, first_number = offset + size, first_number + len(texts)

    def _keep_time(self) -> None:
        if time.monotonic() > self._until_s:
            raise TimeoutError("the time for reading the journal is over")

    def _survey(self, block: _Block, number: int, text: bytes) -> bool:
        """Indexes a line; returns whether it is of a frequent kind."""
        head, place = _HEAD.match(text), (block.file, number)
        if _tells_place(head):
            block.has(int(head[3]), None if head[4] is None else int(head[4]))
            return True
        if head is not None and head[1] == b"entry" and head[6] is not None:
            index, at = int(head[5]), (float(head[2]), *place)
            if self._first_read.get(index, (at, b""))[1] == head[6] and b'"admit":[[' not in head[6]:
                self._read_at(index, at, head[6])
                return False
        line = self._decode(place, text)
        if line is None:
            return False
        record, at = line.record, (line.at_s, *place)
        if isinstance(record, EntryRecord):
            self._read_at(record.index, at, encode(record.entry).encode())
        if is_rare(record):
            self._rare.append((at, line))
        if isinstance(record, FREQUENT):
            block.has(record.step, getattr(record, "attempt", None))
        return isinstance(record, FREQUENT)

    def _read_at(self, index: int, at: Place, entry: bytes) -> None:
        """Keeps the earliest read of an entry; notes whether reads differ."""
        first, known = self._first_read.get(index, (at, entry))
        if known != entry:
            self._disputed.add(index)
        self._first_read[index] = (at, entry) if at <= first else (first, known)

    @property
    def damage(self) -> list[str]:
        return [f"{self._files[file].name}:{number}: {error}" for (file, number), error in sorted(self._damage.items())]

    def disputed(self) -> list[Placed]:
        found: list[Placed] = []
        for block in self._blocks if self._disputed else ():
            for place, text in self._lines(block):
                line = self._decode(place, text)
                if line is None or not isinstance(record := line.record, EntryRecord):
                    continue
                if record.entry != self.entries[record.index]:
                    found.append(((line.at_s, *place), record))
        return sorted(found, key=lambda placed: placed[0])

    def select(self, kinds: Collection[type[Record]], stretch: Stretch) -> dict[type[Record], list[Placed]]:
        found: dict[type[Record], list[Placed]] = {kind: [] for kind in kinds}
        wanted = {name for name, kind in _FREQUENT.items() if kind in found}
        is_by_step = stretch.key == "step"
        first, last = self._blocks[:, 4:6].T if is_by_step else self._blocks[:, 6:8].T
        for block in self._blocks[(first < stretch.end) & (last >= stretch.first)]:
            for place, text in self._lines(block):
                head = _HEAD.match(text)
                if head is not None and head[1] in _KINDS and head[1] not in wanted:
                    continue
                if _tells_place(head) and not stretch.first <= int(head[3 if is_by_step else 4]) < stretch.end:
                    continue
                line = self._decode(place, text)
                if line is not None and type(line.record) in found and getattr(line.record, stretch.key) in stretch:
                    found[type(line.record)].append(((line.at_s, *place), line.record))
        for placed in found.values():
            placed.sort(key=lambda one: one[0])
        return found

    def _lines(self, block: npt.NDArray[np.int64]) -> Iterator[tuple[tuple[int, int], bytes]]:
        """Lines of a block, each with (file, line number)."""
        self._keep_time()
        file, offset, size, first_number = block[:4].tolist()
        with self._files[file].open("rb") as opened:
            opened.seek(offset)
            texts = opened.read(size).split(b"\n")[:-1]
        for number, text in enumerate(texts, first_number):
            yield (file, number), text

    def _decode(self, place: tuple[int, int], text: bytes) -> Line | None:
        """The line; None if it is damaged, which is noted."""
        try:
            line = decode_line(text.decode())
            for name in ("group", "step", "attempt", "index"):
                if abs(number := getattr(line.record, name, 0)) > _MOST:
                    raise ValueError(f"damaged record: {name}={number} is above {_MOST}: {text[:80]!r}")
        except ValueError as error:
            self._damage[place] = str(error)
            return None
        return line


def _tells_place(head: re.Match[bytes] | None) -> TypeGuard[re.Match[bytes]]:
    """Whether this is the head of a frequent record, with its step and attempt."""
    return head is not None and head[1] in _FREQUENT and (head[4] is not None or head[1] == b"params")
