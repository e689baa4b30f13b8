"""Simulations in parallel processes, their results kept as they come."""

import multiprocessing
import os
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spare_megatron.config.own_code import start_in_safe_path_mode
from spare_megatron.journal.quantities import format_duration
from spare_megatron.process.interrupts import never_in_children
from spare_megatron.simulator.sweep import (
    Case,
    CaseResult,
    decode_results,
    encode_result,
    pending,
    run_case,
    variant_name,
)

_PLAIN_INTERVAL_S = 2.0
"""Without a terminal, seconds between lines about finished cases."""
_ENDING_S = 5.0
"""Longest wait for processes that were told to end."""


class ResultFile:
    """Finished cases, one JSON line each. What it holds already is not simulated again.

    Raises:
        ValueError: The file is there and holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        try:
            self.found = decode_results(text)
        except ValueError as error:
            raise ValueError(f"--out {path}: {error}") from error
        if text and not text.endswith("\n"):
            # The last line was cut off in the middle: without this the next one would be appended to it.
            os.truncate(path, len(text[: text.rfind("\n") + 1].encode()))
        path.open("a").close()

    def append(self, result: CaseResult) -> None:
        """Hands the line to the operating system before the next case is waited for."""
        with self._path.open("a") as file:
            file.write(encode_result(result) + "\n")


class CaseProgress:
    """A bar over all cases on a terminal, plain lines elsewhere. Use as a context manager."""

    def __init__(self, num_cases: int, num_done: int, console: Console) -> None:
        self._console = console
        self._num_cases, self._num_done = num_cases, num_done
        self._next_line_at_s = 0.0
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        last = TextColumn("{task.description}")
        self._bar = Progress(*columns, TimeRemainingColumn(), last, console=console, transient=True)
        self._task = self._bar.add_task("", total=num_cases, completed=num_done)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        elif self._num_done:
            self._console.print(f"{self._num_done} of {self._num_cases} cases were done before", highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def take(self, result: CaseResult) -> None:
        """Shows that a case is done."""
        self._num_done += 1
        found = "given up" if result.stalled else f"{result.time_to_train_ratio:.3f} x"
        text = (
            f"{result.name}, {variant_name(result.policy, result.granularity)}, r = {result.redundancy}, "
            f"seed {result.seed}: {found} in {format_duration(result.wall_s)}"
        )
        self._bar.update(self._task, completed=self._num_done, description=text)
        is_last = self._num_done == self._num_cases
        if not self._console.is_terminal and (time.monotonic() >= self._next_line_at_s or is_last):
            self._next_line_at_s = time.monotonic() + _PLAIN_INTERVAL_S
            self._console.print(f"case {self._num_done}/{self._num_cases}  {text}", highlight=False, soft_wrap=True)


def simulate_all(
    cases: Sequence[Case], *, num_jobs: int, console: Console, out: ResultFile | None = None
) -> dict[str, CaseResult]:
    """Digest -> result of all cases.

    Args:
        cases: What to simulate.
        num_jobs: Processes; 1 simulates in this one.
        console: Where progress is shown.
        out: Results of earlier calls, and where new ones are kept.

    Raises:
        KeyboardInterrupt: After the processes have been told to end; they end, too, if this one is killed. Finished
            cases are kept.
    """
    results = dict(out.found) if out is not None else {}
    left = pending(cases, results)
    with (
        CaseProgress(len(cases), len(cases) - len(left), console) as progress,
        closing(_simulated(left, min(num_jobs, len(left)))) as finished,  # an interrupt here ends the processes, too
    ):
        for result in finished:
            results[result.digest] = result
            if out is not None:
                out.append(result)
            progress.take(result)
    return {case.digest: results[case.digest] for case in cases}


def default_jobs() -> int:
    """One process for each processor that this one may use."""
    return len(os.sched_getaffinity(0))


def _simulated(cases: Sequence[Case], num_jobs: int) -> Generator[CaseResult]:
    if num_jobs <= 1:
        yield from map(_simulate_one, cases)
        return
    # Fresh processes: a fork of one with threads (progress, solvers) may hang.
    start_in_safe_path_mode()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_follow_the_first_process) as pool:
        try:
            with never_in_children():  # processes are started with the first case
                futures = [pool.submit(_simulate_one, case) for case in cases]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # The pool's own thread ends with them, and is waited for: the end of the program would write to a pipe that
            # it is about to close.
            _end(multiprocessing.active_children())
            raise


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ends them all; kills those that do not end by themselves, as those that are stopped."""
    for process in processes:
        process.terminate()
    end_s = time.monotonic() + _ENDING_S
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
        if process.is_alive():
            process.kill()


def _simulate_one(case: Case) -> CaseResult:
    return run_case(case, time.perf_counter)


def _follow_the_first_process() -> None:
    """The first process may be killed without a chance to end this one, which would wait for work for ever."""
    first = multiprocessing.parent_process()
    assert first is not None
    threading.Thread(target=_end_with, args=(first,), daemon=True).start()


def _end_with(process: BaseProcess) -> None:
    process.join()
    os._exit(1)
