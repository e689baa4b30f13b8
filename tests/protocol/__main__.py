"""Runs many histories on all cores: python -m tests.protocol --histories 10000."""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count

from tests.protocol.sample import Sample, run_both

_HISTORIES_AT_ONCE = 250


def main() -> int:
    """Prints what happened; returns 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000, help="how many; default 10000")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("--jobs", type=int, default=cpu_count(), help="processes; default: one on each core")
    arguments = parser.parse_args()
    first, end = arguments.first_seed, arguments.first_seed + arguments.histories
    parts = [range(seed, min(seed + _HISTORIES_AT_ONCE, end)) for seed in range(first, end, _HISTORIES_AT_ONCE)]
    total, began_s = Sample(), time.monotonic()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for sample in pool.map(run_both, parts):
            total.add(sample)
            print(f"\r{total.num_histories} histories", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for what, times in sorted(total.counts.items()):
        print(f"{times:9} {what}")
    for seed, violation in sorted(total.violations.items()):
        print(f"seed {seed}: {violation}")
    print(
        f"{total.num_histories} histories in {time.monotonic() - began_s:.0f} s, the longest of {total.longest} moves: "
        f"{len(total.violations)} violations"
    )
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
