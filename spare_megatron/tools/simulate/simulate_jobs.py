"""Runs simulations in parallel processes and saves each result as it arrives."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path

from spare_megatron.cli.console import RunConsole
from spare_megatron.formats.quantities import format_duration
from spare_megatron.machine.interrupts import never_in_children
from spare_megatron.tools.simulate.sweep import Case, CaseResult, decode_results, encode_result, run_case, variant_name
from spare_megatron.version import start_in_safe_path_mode

_PLAIN_INTERVAL_S = 2.0
"""Seconds between lines about finished cases, without a terminal."""
_ENDING_S = 5.0
"""Longest wait for terminated processes before they are killed."""


class ResultFile:
    """Finished cases, one JSON line each, which are not simulated again; raises ValueError for any other file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        try:
            self.found = decode_results(text)
        except ValueError as error:
            raise ValueError(f"--out {path}: {error}") from error
        if text and not text.endswith("\n"):
            # Drop a last line that was cut off, or the next one would be appended to it.
            os.truncate(path, len(text[: text.rfind("\n") + 1].encode()))
        path.open("a").close()

    def append(self, result: CaseResult) -> None:
        """Appends a result and closes the file, so that the line survives this process."""
        with self._path.open("a") as file:
            file.write(encode_result(result) + "\n")


class CaseProgress:
    """Progress over all cases: a bar on a terminal, which `update` sets, plain lines elsewhere."""

    def __init__(self, num_cases: int, num_done: int, console: RunConsole, update: Callable[[int, str], None]) -> None:
        self._num_cases, self._num_done = num_cases, num_done
        self._console, self._update = console, update
        self._next_line_at_s = 0.0
        if num_done and not console.is_terminal:
            console.line(f"{num_done} of {num_cases} cases were done before")

    def report(self, result: CaseResult) -> None:
        self._num_done += 1
        found = "given up" if result.stalled else f"{result.time_to_train_ratio:.3f} x"
        text = (
            f"case {self._num_done}/{self._num_cases}  {result.name}, "
            f"{variant_name(result.policy, result.granularity)}, r = {result.redundancy}, "
            f"seed {result.seed}: {found} in {format_duration(result.wall_s)}"
        )
        self._update(self._num_done, text)
        is_last = self._num_done == self._num_cases
        if not self._console.is_terminal and (time.monotonic() >= self._next_line_at_s or is_last):
            self._next_line_at_s = time.monotonic() + _PLAIN_INTERVAL_S
            self._console.line(text)


def simulate_all(
    cases: Sequence[Case], *, num_jobs: int, console: RunConsole, out: ResultFile | None = None
) -> dict[str, CaseResult]:
    """Simulates the cases that `out` does not have; returns the results of all by digest. `num_jobs` is the number of
    processes; 1 simulates in this one. They end if this process is interrupted or killed; finished cases stay in `out`.
    """
    results = dict(out.found) if out is not None else {}
    left = [case for case in cases if case.digest not in results]
    num_done = len(cases) - len(left)
    with (
        console.bar("simulating", len(cases), num_done) as update,
        closing(_simulated(left, min(num_jobs, len(left)))) as finished,  # ends the processes on an interrupt
    ):
        progress = CaseProgress(len(cases), num_done, console, update)
        for result in finished:
            results[result.digest] = result
            if out is not None:
                out.append(result)
            progress.report(result)
    return {case.digest: results[case.digest] for case in cases}


def default_jobs() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _simulated(cases: Sequence[Case], num_jobs: int) -> Generator[CaseResult]:
    if num_jobs <= 1:
        yield from (run_case(case, time.perf_counter) for case in cases)
        return
    # Spawn: forking a process with threads (progress, solvers) may hang.
    start_in_safe_path_mode()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_follow_the_first_process) as pool:
        try:
            with never_in_children():  # the first case starts the processes
                futures = [pool.submit(run_case, case, time.perf_counter) for case in cases]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # The pool's thread ends with its processes and is joined here. Otherwise the interpreter would write at
            # exit to a pipe that this thread is about to close.
            _end(multiprocessing.active_children())
            raise


def _end(processes: Sequence[BaseProcess]) -> None:
    """Terminates the processes, and kills those that do not end in time, such as stopped ones."""
    for process in processes:
        process.terminate()
    end_s = time.monotonic() + _ENDING_S
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
        if process.is_alive():
            process.kill()


def _follow_the_first_process() -> None:
    """Ends this process when its parent is killed; it would otherwise wait for work forever."""
    first = multiprocessing.parent_process()
    assert first is not None
    threading.Thread(target=_end_with, args=(first,), daemon=True).start()


def _end_with(process: BaseProcess) -> None:
    process.join()
    os._exit(1)
