"""What a training reads of a corpus: what phases of other sequence lengths have left of it, and places in the order of
samples that are left out (`data.skip`).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_PHASE = re.compile(r"([1-9]\d{0,14}):([1-9]\d{0,14})(:other)?")
OTHER = ":other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase that is over. `sequences`: those that the training had read at its end. `is_of_other`: what follows reads
    another corpus, or in the order of another seed, of which nothing has been read.
    """

    seq_length: int
    sequences: int
    is_of_other: bool


def phase_problems(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        if not _PHASE.fullmatch(text):
            yield f"data.phases: {text!r} is no SEQ_LENGTH:SEQUENCES; remove it, as it follows from checkpoint.load"


@lru_cache(maxsize=8)
def phases_in(texts: tuple[str, ...]) -> tuple[Phase, ...]:
    """ValueError: a text is no phase."""
    if problems := list(phase_problems(texts)):
        raise ValueError("; ".join(problems))
    parts = [text.split(":") for text in texts]
    return tuple(
        Phase(seq_length=int(length), sequences=int(sequences), is_of_other=bool(other))
        for length, sequences, *other in parts
    )


def tokens_read(texts: tuple[str, ...], seq_length: int, sequences: int) -> int:
    """Tokens of the first `sequences` of a training whose last phase has `seq_length`."""
    ended = phases_in(texts)
    bounds = [0, *(phase.sequences for phase in ended), sequences]
    lengths = [*(phase.seq_length for phase in ended), seq_length]
    return sum(length * (end - begin) for length, begin, end in zip(lengths, bounds, bounds[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a corpus of `num_tokens` stands at the begin of a phase: its epoch, and the length and number of the
    samples that each phase before has read of it.
    """

    num_tokens: int
    epoch: int = 0
    read: tuple[tuple[int, int], ...] = ()

    def num_left(self, seq_length: int) -> int:
        """Samples that are left of the epoch."""
        return (self.num_tokens - 1 - sum(length * number for length, number in self.read)) // seq_length

    def place(self, seq_length: int, number: int) -> tuple[int, int]:
        """Epoch and place in it, or in what is left of it, of the sample that the phase reads after `number` others."""
        after = number - self.num_left(seq_length)
        if after < 0:
            return self.epoch, number
        epochs, place = divmod(after, (self.num_tokens - 1) // seq_length)
        return self.epoch + 1 + epochs, place

    def after(self, seq_length: int, number: int) -> "Cursor":
        """Where the corpus stands after a phase of so many samples."""
        epoch, place = self.place(seq_length, number) if number else (self.epoch, 0)
        before = self.read if epoch == self.epoch else ()
        return Cursor(num_tokens=self.num_tokens, epoch=epoch, read=(*before, (seq_length, place)) if place else before)


Runs = npt.NDArray[np.int64]
"""Rows of (first token, number of tokens) in the text of an epoch, one document after another."""


def left_over(runs: Runs, seq_length: int, samples: npt.NDArray[Any]) -> Runs:
    """The parts of these runs, laid end to end and cut into samples, that none of `samples` has, with the last tokens,
    which are too few for a sample.
    """
    begins = np.cumsum(runs[:, 1]) - runs[:, 1]
    total = int(runs[:, 1].sum())
    is_left = np.ones(total // seq_length + 2, np.int8)
    is_left[samples] = is_left[-1] = 0
    is_left[-2] = total % seq_length > 0
    edges = np.diff(is_left, prepend=np.int8(0))
    firsts = np.flatnonzero(edges == 1) * seq_length
    ends = np.minimum(np.flatnonzero(edges == -1) * seq_length, total)
    cuts = np.union1d(firsts, begins)
    of_part = np.searchsorted(firsts, cuts, "right") - 1
    is_in = (of_part >= 0) & (cuts < ends[of_part]) if len(firsts) else np.zeros(len(cuts), bool)
    cuts, of_part = cuts[is_in], of_part[is_in]
    of_run = np.searchsorted(begins, cuts, "right") - 1
    counts = np.minimum(ends[of_part], begins[of_run] + runs[of_run, 1]) - cuts
    return np.stack([runs[of_run, 0] + cuts - begins[of_run], counts], axis=1)


_INTERVAL = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")


def skip_problems(texts: Sequence[str]) -> Iterator[str]:
    """Why these are no places; empty if they are."""
    for text in texts:
        found = _INTERVAL.fullmatch(text)
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            yield (
                f"data.skip: {text!r} is no place in the order of samples, as in 4096, and no first and last place, as "
                f"in 4096-4159; `spare data` prints those of a step"
            )


class SkippedPlaces:
    """The places left out, in intervals that neither touch nor overlap. ValueError: a text is none."""

    def __init__(self, texts: Sequence[str]) -> None:
        if problems := list(skip_problems(texts)):
            raise ValueError("; ".join(problems))
        self.intervals: list[tuple[int, int]] = []
        for first, last in sorted(_ends(text) for text in texts):
            if self.intervals and first <= self.intervals[-1][1] + 1:
                first, last = self.intervals[-1][0], max(last, self.intervals.pop()[1])
            self.intervals.append((first, last))
        self._skipped, self._read = [0], []  # before each interval: places left out, and samples read
        for first, last in self.intervals:
            self._read.append(first - self._skipped[-1])
            self._skipped.append(self._skipped[-1] + last - first + 1)

    def place(self, number: int) -> int:
        """The place of the sample that is read after `number` others."""
        return number + self._skipped[bisect_right(self._read, number)]

    def before(self, number: int) -> list[tuple[int, int]]:
        """The intervals below the last of the first `number` samples that are read."""
        return self.intervals[: bisect_left(self._read, number)]

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.intervals)


def _ends(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


@lru_cache(maxsize=8)
def skipped_places(texts: tuple[str, ...]) -> SkippedPlaces:
    return SkippedPlaces(texts)


def skip_differences(theirs: str, ours: tuple[str, ...], num_read: int) -> list[str]:
    """Why a run cannot go on after `num_read` samples of a training that left out the places `theirs`; empty if it can.

    What is behind the last sample read may change.
    """
    trained = SkippedPlaces([text for text in theirs.split(",") if text])
    before, wanted = trained.before(num_read), skipped_places(ours).before(num_read)
    if before == wanted:
        return []
    last = trained.place(num_read - 1)
    return [
        (
            f"data.skip = {str(skipped_places(ours)) or 'empty':.80} leaves out other places below {last}, the last "
            f"that the checkpoint has read, than its training did ({_shown(before)}); keep those, and add higher ones"
        )
    ]


def _shown(intervals: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{first}-{last}" for first, last in intervals) or "none"
