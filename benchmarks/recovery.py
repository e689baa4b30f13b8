"""How long a loss keeps the survivors from their next commit, and where that time goes, with real SIGKILLs."""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.state.recoveries import Recovery

PHASES = ("forward", "in_reduce", "after_reduce")
STAGES = ("detect_s", "agree_s", "rebuild_s", "patch_s", "reduce_s", "total_s")
KILL_STEP, NUM_STEPS = 4, 7


def recover_once(config_file: Path, overrides: list[str], phase: str, seed: int, folder: Path) -> Recovery:
    """One run with one kill; who is hit follows from the seed."""
    trace = f'faults.trace=[{{phase="{phase}", step={KILL_STEP}}}]'
    settings = [f"train.steps={NUM_STEPS}", f"faults.seed={seed}", trace, *overrides]
    summary = start_run(load_run_config(config_file, settings).config, folder, lambda _: None)
    if summary.verdict != "valid" or len(summary.recoveries) != 1:
        raise RuntimeError(f"{phase}, seed {seed}: {summary.verdict}, {summary.reasons}, {summary.recoveries}")
    return summary.recoveries[0]


def measure(config_file: Path, overrides: list[str], num_kills: int) -> dict[str, object]:
    phases: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for phase in PHASES:
            recoveries = [
                recover_once(config_file, overrides, phase, seed, Path(scratch) / f"{phase}-{seed}")
                for seed in range(num_kills)
            ]
            rebuilt = [r.detect_s + r.agree_s + r.rebuild_s for r in recoveries]
            phases[phase] = {
                "detect_agree_rebuild_s": {"median": statistics.median(rebuilt), "max": max(rebuilt)},
                "medians": {stage: statistics.median(getattr(r, stage) for r in recoveries) for stage in STAGES},
                "num_without_patch": sum(recovery.num_patched == 0 for recovery in recoveries),
                "recoveries": [asdict(recovery) for recovery in recoveries],
            }
            print(f"{phase}: {num_kills} kills measured", file=sys.stderr)
    return {"kills_per_phase": num_kills, "phases": phases, **origin()}


def print_table(result: dict) -> None:
    print(f"{'phase':14}{'median d+a+r':>14}{'max':>8}  " + "".join(f"{stage[:-2]:>9}" for stage in STAGES) + "   ms")
    for phase, figures in result["phases"].items():
        sums = figures["detect_agree_rebuild_s"]
        medians = "".join(f"{figures['medians'][stage] * 1e3:9.0f}" for stage in STAGES)
        print(f"{phase:14}{sums['median'] * 1e3:14.0f}{sums['max'] * 1e3:8.0f}  {medians}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--kills", type=int, default=10, help="kills in each phase")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.kills)
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
