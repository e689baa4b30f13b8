"""Runs the whole fault matrix: python -m tests.matrix."""

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from spare_megatron.process.processes import fork_server
from tests.integration.text_corpus import write_text_corpus
from tests.integration.whole_run import Run
from tests.matrix import trial
from tests.matrix.cells import (
    CELLS,
    KINDS,
    MEMBERSHIP_CELLS,
    PAUSE_CELLS,
    REFORM_CELLS,
    Cell,
    MembershipCell,
    PauseCell,
)
from tests.matrix.membership import run_membership_cell
from tests.matrix.pauses import run_pause_cell
from tests.matrix.trial import Outcome, run_cell, run_without_faults, why_not_here
from tests.search_path import put_checkout_first

CELL_TIMEOUT_S = 180
_ALL = (*CELLS, *PAUSE_CELLS, *REFORM_CELLS, *MEMBERSHIP_CELLS)
AnyCell = Cell | PauseCell | MembershipCell


def main() -> int:
    """Prints the outcome of every cell; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("cells", nargs="*", help="names of cells as they are printed; default: all")
    parser.add_argument("--seed", type=int, default=0, help="decides which groups and ranks are hit; default 0")
    parser.add_argument("--overlap", action="store_true", help="in all runs, with small buckets")
    arguments = parser.parse_args()
    trial.reduction.update(trial.OVERLAPPING if arguments.overlap else {})
    chosen = [cell for cell in _ALL if not arguments.cells or str(cell) in arguments.cells]
    if unknown := set(arguments.cells) - {str(cell) for cell in chosen}:
        parser.error(f"no such cells: {', '.join(sorted(unknown))}")
    put_checkout_first()
    fork_server()
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="spare-matrix-"))
    write_text_corpus(folder / "corpus")
    expected = run_without_faults(folder / "corpus", folder / "none")
    outcomes: dict[AnyCell, Outcome | str] = {}
    for cell in chosen:
        outcomes[cell] = _try(cell, arguments.seed, folder, expected)
        print(_line(cell, outcomes[cell]), flush=True)
    num_failed = _print_summary(outcomes, time.monotonic() - began_s)
    if num_failed:
        print(f"the runs of the cells that failed are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if num_failed else 0


def _try(cell: AnyCell, seed: int, folder: Path, expected: Run) -> Outcome | str:
    """What the cell cost; or why it was not run, in brackets, or failed."""
    if isinstance(cell, Cell) and (reason := why_not_here(cell, folder / "corpus")):
        return f"({reason})"
    run_dir = folder / str(cell)
    try:
        with _time_limit(CELL_TIMEOUT_S):
            if isinstance(cell, PauseCell):
                outcome = run_pause_cell(cell, folder / "corpus", run_dir, expected)
            elif isinstance(cell, MembershipCell):
                outcome = run_membership_cell(cell, folder / "corpus", run_dir, expected)
            else:
                outcome = run_cell(cell, seed, folder / "corpus", run_dir, expected)
    except Exception as error:  # noqa: BLE001  (whatever it is, the other cells are run, too)
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    shutil.rmtree(run_dir)
    return outcome


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the cell has not ended in {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _line(cell: AnyCell, outcome: Outcome | str) -> str:
    if isinstance(outcome, str):
        return f"{cell!s:38} {'skipped' if outcome.startswith('(') else 'FAILED'} {outcome}"
    groups = ", ".join(map(str, outcome.fenced))
    return (
        f"{cell!s:38} valid, same bits; lost {groups:5} found after {1000 * outcome.found_s:5.0f} ms, "
        f"recovered in {1000 * outcome.recovery_s:5.0f} ms, {outcome.num_retries} retries"
    )


def _print_summary(outcomes: dict[AnyCell, Outcome | str], wall_s: float) -> int:
    """Returns how many cells failed."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for cell, outcome in outcomes.items():
        if isinstance(outcome, Outcome):
            by_kind[cell.kind].append(outcome)
    print(f"\n{'kind':6} {'cells':>5}  median (largest) ms until found    until recovered")
    for kind in [kind for kind in (*KINDS, "pause", "reform", "drain", "grow") if by_kind[kind]]:
        found, recovered = ([1000 * getattr(o, name) for o in by_kind[kind]] for name in ("found_s", "recovery_s"))
        print(f"{kind:6} {len(found):5}  {_middle(found):>32} {_middle(recovered):>18}")
    num_skipped = sum(isinstance(outcome, str) and outcome.startswith("(") for outcome in outcomes.values())
    num_masked = sum(map(len, by_kind.values()))
    num_failed = len(outcomes) - num_masked - num_skipped
    print(f"{len(outcomes)} of {len(_ALL)} cells in {wall_s:.0f} s; no one waits for a copy that hangs")
    print(f"{num_masked} masked, {num_failed} failed, {num_skipped} cannot be run on this machine")
    return num_failed


def _middle(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
