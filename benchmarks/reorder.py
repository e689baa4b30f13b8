"""How often a reorder reaches the least load, and how long it takes.

    OMP_NUM_THREADS=1 python benchmarks/reorder.py [--json] [--states 2000] [--sequences 3] [--most-groups 10000]

Coverage: independent random failure states (a random order of losses, cut at a random point before its wipe-out).
Times: whole reorders, once per loss in random sequences until wipe-out, which for whole shards begin with the state
before. Processor time of the one thread that does it, so that neighbours on the machine do not count.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.stacking.golomb import difference_counts
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import IntArray, Placement, PlacementKind, make_placement
from spare_megatron.stacking.reorder import Reorder, even_owners, reorder_microbatches
from spare_megatron.stacking.stack_reorder import StackReorder, initial_order, reorder_stacks

NUM_MICROBATCHES = 16
SHAPES = tuple((num_groups, redundancy) for num_groups in (200, 600, 1000) for redundancy in (8, 9, 10))
TIMED = ((1000, 9, 10.0), (10_000, 14, 150.0))
"""Groups, redundancy, and the limit of the 99th percentile in ms."""

Row = dict[str, str | int | float]


def least_load(num_groups: int, num_alive: int, num_microbatches: int) -> int:
    """Lower bound on the makespan of any placement: ceil(N m / alive), with m microbatches per shard."""
    return -(-num_groups * num_microbatches // num_alive)


def loss_order(placement: Placement, rng: np.random.Generator) -> tuple[IntArray, int]:
    """A random order of losses and the number of them that the placement endures."""
    order = rng.permutation(placement.num_groups)
    lost_at = np.empty(placement.num_groups, dtype=np.int64)
    lost_at[order] = np.arange(placement.num_groups)
    return order, int(lost_at[placement.host_array].max(axis=1).min())


def survivors_of(order: IntArray, num_lost: int) -> frozenset[GroupId]:
    return frozenset(map(GroupId, order[num_lost:].tolist()))


def sole_host_load(placement: Placement, alive: frozenset[GroupId]) -> int:
    """Microbatches of the group that is the last host of most shards: no choice of owners can relieve it."""
    is_alive = placement.alive_mask(alive)[placement.host_array]
    sole_hosts = placement.host_array[is_alive & (is_alive.sum(axis=1) == 1)[:, None]]
    return NUM_MICROBATCHES * int(np.bincount(sole_hosts, minlength=1).max())


def coverage(kind: PlacementKind, num_groups: int, redundancy: int, num_states: int, seed: int) -> Row:
    """Share of random states whose makespan (and whose depth in stack granularity) is the least possible."""
    placement = make_placement(kind, num_groups, redundancy)
    rng = np.random.default_rng([seed, num_groups, redundancy])
    stacks = initial_order(placement)
    num_least = num_explained = num_least_depth = 0
    excess = 0.0
    for _ in range(num_states):
        order, endured = loss_order(placement, rng)
        alive = survivors_of(order, int(rng.integers(0, endured + 1)))
        makespan = reorder(placement, alive).makespan
        least = least_load(num_groups, len(alive), NUM_MICROBATCHES)
        num_least += makespan == least
        num_explained += makespan == max(least, sole_host_load(placement, alive))
        excess += makespan / least - 1
        num_least_depth += reorder_stacks(placement, alive, stacks).order.depth == least_load(num_groups, len(alive), 1)
    return {
        "placement": kind,
        "num_groups": num_groups,
        "redundancy": redundancy,
        "max_shared_hosts": int(difference_counts(num_groups, tuple(-placement.host_array[0] % num_groups)).max()),
        "states": num_states,
        "share_least_makespan": num_least / num_states,
        "share_least_or_sole_host": num_explained / num_states,
        "mean_excess": excess / num_states,
        "share_least_depth": num_least_depth / num_states,
    }


def reorder(placement: Placement, alive: frozenset[GroupId]) -> Reorder:
    """The owners of a step with these groups, as `stacking.order` deals them."""
    return reorder_microbatches(placement, alive, even_owners(placement, NUM_MICROBATCHES, alive))


def sequence_times(placement: Placement, rng: np.random.Generator) -> tuple[list[float], list[str]]:
    """Milliseconds and paths of one reorder per loss, until wipe-out."""
    order, endured = loss_order(placement, rng)
    times_ms: list[float] = []
    paths: list[str] = []
    for num_lost in range(1, endured + 1):
        start_s = time.thread_time()
        result = reorder(placement, survivors_of(order, num_lost))
        times_ms.append((time.thread_time() - start_s) * 1e3)
        paths.append(result.path)
    return times_ms, paths


def stack_times(placement: Placement, rng: np.random.Generator) -> tuple[list[float], list[str]]:
    """Milliseconds and phases of one stack reorder per loss, until wipe-out."""
    order, endured = loss_order(placement, rng)
    stacks = initial_order(placement)
    times_ms: list[float] = []
    phases: list[str] = []
    for num_lost in range(1, endured + 1):
        start_s = time.thread_time()
        result: StackReorder = reorder_stacks(placement, survivors_of(order, num_lost), stacks)
        times_ms.append((time.thread_time() - start_s) * 1e3)
        phases.append(f"phase {result.phase}")
        stacks = result.order
    return times_ms, phases


def time_row(case: str, placement: Placement, measured: tuple[list[float], list[str]], limit_ms: float) -> Row:
    times_ms, paths = measured
    return {
        "case": case,
        "num_groups": placement.num_groups,
        "redundancy": placement.redundancy,
        "reorders": len(times_ms),
        "min_ms": min(times_ms),
        "median_ms": float(np.median(times_ms)),
        "p99_ms": float(np.percentile(times_ms, 99)),
        "max_ms": max(times_ms),
        "p99_limit_ms": limit_ms,
        "paths": ", ".join(f"{path} {paths.count(path)}" for path in sorted(set(paths))),
    }


def time_rows(num_groups: int, redundancy: int, limit_ms: float, num_sequences: int, seed: int) -> list[Row]:
    placement = make_placement("golomb", num_groups, redundancy)
    rng = np.random.default_rng([seed, num_groups, redundancy])
    reorder(placement, survivors_of(np.arange(num_groups), 1))  # warms up
    sequences = [sequence_times(placement, rng) for _ in range(num_sequences)]
    together = [t for times, _ in sequences for t in times], [p for _, paths in sequences for p in paths]
    return [
        time_row("one loss at a time", placement, together, limit_ms),
        time_row("stacks, one loss at a time", placement, stack_times(placement, rng), limit_ms),
    ]


def print_table(rows: list[Row]) -> None:
    names = list(rows[0])
    cells = [names] + [[f"{v:.5g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    states: Annotated[int, typer.Option(help="Random failure states per number of groups and redundancy.")] = 2000,
    sequences: Annotated[int, typer.Option(help="Timed sequences of losses per size.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of all random states.")] = 0,
    most_groups: Annotated[int, typer.Option(help="Leave out what has more groups.")] = 10_000,
) -> None:
    """Measure the coverage and the speed of reorders."""
    came_from = origin()  # at the start: the checkout may change while this runs
    cases: list[tuple[PlacementKind, int, int]] = [("golomb", *shape) for shape in SHAPES]
    cases += [("consecutive", 200, 9), ("consecutive", 1000, 9)]
    covered = [coverage(*case, states, seed) for case in cases if case[1] <= most_groups]
    times = [row for shape in TIMED if shape[0] <= most_groups for row in time_rows(*shape, sequences, seed)]
    if as_json:
        print(json.dumps({**came_from, "coverage": covered, "times": times}, indent=2))
        return
    print(f"{came_from['machine']}, one used; commit {came_from['commit']}")
    print(f"{NUM_MICROBATCHES} microbatches per shard\n")
    print_table(covered)
    print_table(times)


if __name__ == "__main__":
    typer.run(main)
