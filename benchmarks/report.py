"""What the page of a long run costs: the journal of a simulated one, and `spare report` on it."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.journal.records import Line, encode_line
from spare_megatron.simulator.costs import CostModel
from spare_megatron.simulator.engine import simulate
from spare_megatron.simulator.failures import FailureSpec
from spare_megatron.simulator.scenario import Scenario

ROOT = Path(__file__).parents[1]


def write_run(run_dir: Path, num_steps: int) -> None:
    """A run of 8 groups that lose one every 1000 steps or so, which comes back."""
    scenario = Scenario(
        name="long",
        num_groups=8,
        redundancy=3,
        microbatches_per_shard=4,
        num_steps=num_steps,
        costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.05, detect_s=2.0, join_s=4.0),
        failures=FailureSpec(kind="system", mean_s=66000.0, shape=0.78),
        repair_s=600.0,
    )
    (run_dir / "journal").mkdir(parents=True)
    with (run_dir / "journal" / "simulator.jsonl").open("w") as file:

        def write(line: Line) -> None:
            file.write(encode_line(line) + "\n")

        simulate(scenario, 1, journal=write)


def measure(run_dir: Path, page: Path) -> dict[str, float]:
    """What `spare report` takes on a run."""
    command = [sys.executable, "-m", "spare_megatron.cli.main", "report", str(run_dir), "--out", str(page)]
    began_s = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    wall_s, used = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "journal_bytes": sum(file.stat().st_size for file in (run_dir / "journal").iterdir()),
        "processor_s": used.ru_utime + used.ru_stime,
        "wall_s": wall_s,
        "memory_bytes": used.ru_maxrss * 1024,
        "page_bytes": page.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--run-dir", type=Path, help="a run that is there, instead of a simulated one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = options.run_dir or Path(scratch) / "run"
        if options.run_dir is None:
            write_run(run_dir, options.steps)
        figures = measure(run_dir.absolute(), Path(scratch) / "page.html")
    if options.json:
        print(json.dumps({**figures, "origin": origin()}))
        return
    for name, value in figures.items():
        print(f"{name:>14} {value:.6g}")


if __name__ == "__main__":
    main()
