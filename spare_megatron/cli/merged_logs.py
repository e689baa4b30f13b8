"""The logs of a run merged by time, as glog, torch, NCCL and Python's logging stamp the lines that they print."""

import contextlib
import heapq
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path

SEVERITIES = ("info", "warning", "error")
_STAMP = re.compile(r"\b(?:([DIWEFC])|(\d{4})-)(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?", re.ASCII)
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*(?:Error|Exception))\b")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|Warning\b")
_OF_LETTER = {"W": 1, "E": 2, "F": 2, "C": 2}
_HEAD, _BLOCK_BYTES, _DAY_S = 120, 1 << 16, 86400.0


LogLine = tuple[float, str, int, str]
"""When a line was printed, in seconds since the epoch, the name of its log, its place in `SEVERITIES`, and its text."""


def chosen(run_dir: Path, files: Sequence[Path], least: str, steps: str | None) -> Iterator[LogLine]:
    """Lines of at least this severity, printed in these steps, in the order of their times. Holds one block of each
    file in memory. ValueError: there is no such severity, or no such step.
    """
    if least not in SEVERITIES:
        raise ValueError(f"--severity {least}: there are {', '.join(SEVERITIES)}; name one")
    is_wanted = None if steps is None else _is_in(run_dir, steps)
    for line in heapq.merge(*map(_lines_of, files), key=itemgetter(0)):
        if line[2] >= SEVERITIES.index(least) and (is_wanted is None or is_wanted(line[0])):
            yield line


def _is_in(run_dir: Path, text: str) -> Callable[[float], bool]:
    """Whether one of the steps was under way at a time. Each is until its commit, also one that a restart undid."""
    import numpy as np

    from spare_megatron.journal.state.follow import read_run_state

    match = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", text)
    if match is None:
        raise ValueError(f"--steps {text}: name a step, as in 12, or several, as in 12..15")
    wanted, state = range(int(match[1]), int(match[2] or match[1]) + 1), read_run_state(run_dir)
    commits = state.folding.commits if state.folding else []
    times_s = state.entry_times(np.array([commit.index for commit in commits], np.intp))
    steps = [commit.step for commit, at_s in zip(commits, times_s, strict=True) if at_s == at_s]  # not NaN
    steps.append(state.folding.step if state.folding else 0)  # the one under way
    ends_s = np.maximum.accumulate(times_s[~np.isnan(times_s)]).tolist()
    if not any(step in wanted for step in steps):
        raise ValueError(f"--steps {text}: the run has steps {min(steps)} to {max(steps)} so far; name one of them")
    return lambda at_s: steps[bisect_left(ends_s, at_s)] in wanted


def _lines_of(file: Path) -> Iterator[LogLine]:
    """A line without a stamp has time and severity of the one before. Before any stamp the time is that of the first,
    without any that of the last write.
    """
    written_s, severity = file.stat().st_mtime, 0
    at_s = next(filter(None, (_stamp(text, written_s) for text in _texts(file))), (written_s, 0))[0]
    for text in _texts(file):
        if stamp := _stamp(text, written_s):
            at_s, severity = max(at_s, stamp[0]), stamp[1]
        severity = max(severity, 2 if _ERROR.search(text) else 1 if _WARNING.search(text) else 0)
        yield at_s, file.stem, severity, text


def _texts(file: Path) -> Iterator[str]:
    """The file is open for one block at a time: a run may have more logs than a process may open files."""
    offset = 0
    while True:
        with file.open("rb") as opened:
            opened.seek(offset)
            lines = opened.readlines(_BLOCK_BYTES)
            offset = opened.tell()
        if not lines:
            return
        yield from (line.decode(errors="replace").rstrip("\r\n") for line in lines)


def _stamp(text: str, written_s: float) -> tuple[float, int] | None:
    """Time and severity; None of a time after the last write of the file, which only a text names. Glog leaves the year
    out: it is the last one that is not after that.
    """
    match = _STAMP.search(text, 0, _HEAD)
    if match is None:
        return None
    letter, year, *clock, part = match.groups()
    month, day, hour, minute, second = map(int, clock)
    last = datetime.fromtimestamp(written_s).year
    for one in (int(year),) if year else (last, last - 1):
        with contextlib.suppress(ValueError):  # figures that are no date
            at_s = datetime(one, month, day, hour, minute, second).timestamp() + float(f"0.{part or 0}")
            if at_s <= written_s + _DAY_S:
                return at_s, _OF_LETTER.get(letter, 0)
    return None
