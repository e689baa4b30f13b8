"""What the page of a long run costs: the journal of a simulated one, `spare report` on it, and the page in a browser.

A page is interactive when every plot in view is drawn and the browser's main thread is free again, counted from the
start of the navigation by the browser's own clock; nothing is throttled.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.journal.files import Line, encode_line
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

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
    command = [sys.executable, "-m", "spare_megatron", "report", str(run_dir), "--out", str(page)]
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


WATCH = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.longTasks.push(task.duration);
}).observe({ type: "longtask", buffered: true });
"""
DRAWN = """() => new Promise((done) => {
  const look = () => {
    const plots = [...document.querySelectorAll(".plot")];
    const inView = plots.filter((plot) => plot.getBoundingClientRect().top < innerHeight);
    const isDrawn = inView.length && inView.every((plot) => plot.querySelector(".main-svg"));
    if (document.body.dataset.ready && isDrawn) requestAnimationFrame(() => setTimeout(() => done(performance.now())));
    else setTimeout(look, 2);
  };
  look();
})"""


def browse(page: Path, chromium: str, times: int) -> dict[str, Any]:
    """How long the page takes until it is interactive, each time in a browser that has never seen it."""
    from playwright.sync_api import sync_playwright

    interactive_s, blocked_s, num_drawn = [], [], 0
    with sync_playwright() as playwright:
        for _ in range(times):
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--disable-gpu", "--disable-dev-shm-usage"], chromium_sandbox=False
            )
            view = browser.new_page(viewport={"width": 1366, "height": 768})
            view.add_init_script(WATCH)
            view.goto(page.as_uri(), wait_until="commit")
            interactive_s.append(view.evaluate(DRAWN) / 1e3)
            blocked_s.append(view.evaluate("window.longTasks.reduce((sum, spent) => sum + spent, 0)") / 1e3)
            num_drawn = view.evaluate("document.querySelectorAll('.plot:has(.main-svg)').length")
            browser.close()
    return {
        "interactive_s": statistics.median(interactive_s),
        "interactive_s_each": [round(spent_s, 3) for spent_s in interactive_s],
        "long_tasks_s": statistics.median(blocked_s),
        "plots_drawn": num_drawn,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--run-dir", type=Path, help="a run that is there, instead of a simulated one")
    parser.add_argument(
        "--chromium", default=shutil.which("chromium"), help="a Chromium; without one no page is opened"
    )
    parser.add_argument("--times", type=int, default=5, help="times that the page is opened")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = options.run_dir or Path(scratch) / "run"
        if options.run_dir is None:
            write_run(run_dir, options.steps)
        page = Path(scratch) / "page.html"
        figures: dict[str, Any] = measure(run_dir.absolute(), page)
        if options.chromium:
            figures |= browse(page, options.chromium, options.times)
    if options.json:
        print(json.dumps({**figures, **origin()}))
        return
    for name, value in figures.items():
        print(f"{name:>18} {value if isinstance(value, list) else format(value, '.6g')}")


if __name__ == "__main__":
    main()
