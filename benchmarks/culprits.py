"""Names what holds real runs back: cases drawn from a seed, in each of which one of four machines is slow.

Each machine has a group of one rank and a network of its own. One case after the other slows a machine's passes, its
reading of data, its processors or its link; a case is right if the machine and the cause that the run names first are
those. Needs root.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.slow_machines.culprit import Cause
from spare_megatron.driver.preflight import preflight
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultKind
from spare_megatron.journal.records import CulpritRecord
from spare_megatron.process.reports import RunEvent

ROOT = Path(__file__).parents[1]
NUM_MACHINES = 4
HIT_STEP = 10
KINDS: dict[Cause, tuple[FaultKind, float, float]] = {
    Cause.COMPUTE: (FaultKind("slow"), 2.0, 4.0),
    Cause.DATA: (FaultKind("slow_data"), 100.0, 200.0),
    Cause.HOST: (FaultKind("slow_host"), 16.0, 32.0),
    Cause.LINK: (FaultKind("slow_link"), 20.0, 40.0),
}
"""The fault of each cause, and between which factors it is drawn."""


def configure(options: argparse.Namespace, case: int) -> tuple[RunConfig, Cause, int]:
    """The case's configuration, its cause and its machine."""
    rng = np.random.default_rng([options.seed, case])
    cause, machine = list(KINDS)[case % len(KINDS)], int(rng.integers(NUM_MACHINES))
    kind, least, most = KINDS[cause]
    fault = (
        f'{{phase="forward", kind="{kind}", step={HIT_STEP}, group={machine}, factor={rng.uniform(least, most):.2f}}}'
    )
    settings = [
        "layout.pipeline_parallel=1",
        "model.hidden_size=64",
        "model.seq_length=64",
        *options.set,
        f"layout.num_groups={NUM_MACHINES}",
        f"cluster.num_nodes={NUM_MACHINES}",
        "cluster.isolate_nodes=true",
        "train.steps=100000",
        f"train.max_minutes={options.minutes}",
        f"faults.trace=[{fault}]",
    ]
    return load_run_config(options.config, settings).config, cause, machine


def run_case(options: argparse.Namespace, case: int, run_dir: Path) -> dict[str, Any]:
    """Trains, and returns what was drawn and what the run named first."""
    config, cause, machine = configure(options, case)
    preflight(config)
    named: list[CulpritRecord] = []

    def on_event(event: RunEvent) -> None:
        if isinstance(event, CulpritRecord):
            named.append(event)

    summary = start_run(config, run_dir, on_event)
    first = named[0] if named else None
    return {
        "cause": str(cause),
        "machine": machine,
        "named_cause": first.cause if first else "",
        "named_machine": first.machine if first else None,
        "excess_s": first.excess_s if first else 0.0,
        "factor": first.factor if first else 0.0,
        "is_right": first is not None and (first.cause, first.machine) == (str(cause), machine),
        "groups_lost": summary.groups_lost,
        "verdict": summary.verdict,
        "steps": summary.steps_committed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(20)), help="numbers of the cases to run")
    parser.add_argument("--seed", type=int, default=0, help="draws machines and factors")
    parser.add_argument("--minutes", type=float, default=1.0, help="of training in each case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in options.cases:
            cases.append(run_case(options, case, Path(scratch) / f"case-{case}"))
            print(f"case {case}: {cases[-1]}", file=sys.stderr)
    num_right = sum(case["is_right"] for case in cases)
    result = {"num_right": num_right, "num_cases": len(cases), "cases": cases, **origin()}
    print(json.dumps(result)) if options.json else print(f"{num_right} of {len(cases)} culprits are right")


if __name__ == "__main__":
    main()
