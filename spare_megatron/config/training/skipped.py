"""Places in the order of samples that a training leaves out (`data.skip`), and which a later run may leave out."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache

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
