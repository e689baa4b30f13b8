"""How often partitioned optimizer state is wiped out, and what that costs: simulated, with the paper's parameters.

For every number of groups N and of hosts of a partition r_o, with copies made anew and without: the restarts of one run
with microbatches and groups that come back, those of them for lost state, the mean time to a state wipe-out that
`tools.plan.partition_redundancy` expects, and the time to train over that without failures. `ratio` is the time to
train with the most hosts and copies over that with every group holding all of the state, for the first N.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.tools.plan.partition_redundancy import state_time_to_wipe_out_s
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.scenario_presets import load_scenario
from spare_megatron.tools.simulate.world import Stalled

REJOIN_S = 600.0
"""From a loss until the group can be admitted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One simulated run.

    Attributes:
        num_groups: N.
        partition_redundancy: r_o; 0 if every group holds all of the state.
        copy_s: Seconds for one copy; None without copies.
        losses: Groups lost.
        restarts: Of the run.
        state_wipe_outs: Those for lost state.
        expected_wipe_out_s: Mean seconds to a state wipe-out by the formula; None where every group holds all.
        time_to_train_ratio: None if the run was given up.
    """

    num_groups: int
    partition_redundancy: int
    copy_s: float | None
    losses: int
    restarts: int
    state_wipe_outs: int
    expected_wipe_out_s: float | None
    time_to_train_ratio: float | None


def main() -> None:
    """Simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 600, 1000], help="N, of the paper's presets")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 3], help="r_o")
    parser.add_argument("--copy", type=float, default=60.0, help="seconds in which one partition is copied")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows: list[Row] = []
    for num_groups in args.groups:
        base = replace(
            load_scenario(f"paper_n{num_groups}"),
            redundancy=4,
            granularity="microbatch",
            repair_s=REJOIN_S,
            num_steps=args.steps,
        )
        rows.append(_run(base, args.seed))
        for hosts, copy_s in product(args.hosts, (None, args.copy)):
            rows.append(_run(replace(base, partition_redundancy=hosts, partition_copy_s=copy_s), args.seed))
            print(f"\r{len(rows)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ratio": _ratio(rows), **origin()}))
        return
    print("    N  r_o  copies  losses  restarts  for state   expected    time")
    for row in rows:
        copies = "-" if not row.partition_redundancy else "no" if row.copy_s is None else f"{row.copy_s:g} s"
        expected = "-" if row.expected_wipe_out_s is None else f"{row.expected_wipe_out_s / 3600:.3g} h"
        ratio = "stalled" if row.time_to_train_ratio is None else f"{row.time_to_train_ratio:.2f}"
        print(
            f"{row.num_groups:5} {row.partition_redundancy or '-':>4} {copies:>7} {row.losses:7} {row.restarts:9} "
            f"{row.state_wipe_outs:10} {expected:>10} {ratio:>7}"
        )


def _run(scenario: Scenario, seed: int) -> Row:
    costs, n = scenario.costs, scenario.num_groups
    expected_s = None
    if scenario.partition_redundancy:
        step_s = costs.compute_s + costs.reduce_s + costs.update_s
        back_s = None if scenario.partition_copy_s is None else scenario.partition_copy_s + step_s
        interval_s = n * scenario.failures.mean_interval_s(n)
        expected_s = state_time_to_wipe_out_s(n, scenario.partition_redundancy, interval_s, back_s)
    try:
        result = simulate(scenario, seed)
    except Stalled:
        result = None
    return Row(
        num_groups=n,
        partition_redundancy=scenario.partition_redundancy,
        copy_s=scenario.partition_copy_s,
        losses=0 if result is None else result.losses,
        restarts=0 if result is None else result.restarts,
        state_wipe_outs=0 if result is None else result.state_wipe_outs,
        expected_wipe_out_s=expected_s,
        time_to_train_ratio=None if result is None else result.time_to_train_ratio,
    )


def _ratio(rows: list[Row]) -> float | None:
    first = [row for row in rows if row.num_groups == rows[0].num_groups]
    partitioned = [row for row in first if row.copy_s is not None]
    if not partitioned or partitioned[-1].time_to_train_ratio is None or first[0].time_to_train_ratio is None:
        return None
    return partitioned[-1].time_to_train_ratio / first[0].time_to_train_ratio


if __name__ == "__main__":
    main()
