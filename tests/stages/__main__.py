"""Kills a rank in every stage of a save, of a load and of a rejoin: python -m tests.stages."""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from spare_megatron.process.processes import fork_server
from tests.integration.text_corpus import write_text_corpus
from tests.integration.whole_run import Run
from tests.search_path import put_checkout_first
from tests.stages.cells import CELLS, Cell
from tests.stages.trial import run_cell, run_without_faults


def main() -> int:
    """Prints the outcome of every cell; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stages", description=__doc__)
    parser.add_argument("cells", nargs="*", help="names of cells as they are printed, or of places; default: all")
    parser.add_argument("--seed", type=int, default=0, help="decides which groups are hit; default 0")
    arguments = parser.parse_args()
    chosen = [cell for cell in CELLS if not arguments.cells or {str(cell), cell.place} & set(arguments.cells)]
    if unknown := set(arguments.cells) - {name for cell in chosen for name in (str(cell), cell.place)}:
        parser.error(f"no such cells: {', '.join(sorted(unknown))}")
    put_checkout_first()
    fork_server()
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="spare-stages-"))
    write_text_corpus(folder / "corpus")
    expected = run_without_faults(folder / "corpus", folder / "none")
    failed = [cell for cell in chosen if not _is_masked(cell, arguments.seed, folder, expected)]
    print(f"{len(chosen)} of {len(CELLS)} cells in {time.monotonic() - began_s:.0f} s, {len(failed)} failed")
    if failed:
        print(f"their runs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _is_masked(cell: Cell, seed: int, folder: Path, expected: Run) -> bool:
    began_s = time.monotonic()
    try:
        run = run_cell(cell, seed, folder / "corpus", folder / str(cell), expected)
    except Exception as error:  # noqa: BLE001  (whatever it is, the other cells are run, too)
        traceback.print_exc(file=sys.stderr)
        print(f"{cell!s:44} FAILED {type(error).__name__}: {error}".splitlines()[0], flush=True)
        return False
    lost = sorted({group for recovery in run.summary.recoveries for group in recovery.lost})
    print(
        f"{cell!s:44} valid, same bits; lost {lost}, {run.summary.groups_rejoined} came back, "
        f"{time.monotonic() - began_s:.1f} s",
        flush=True,
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
