"""The mean time to a wipe-out from the present on, against events drawn one by one."""

from collections import Counter

import numpy as np
import pytest

from spare_megatron.core.saves.survival import time_to_wipe_out_s
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import Placement, make_placement

F_S = 1000.0


def drawn_times_s(
    placement: Placement,
    lost: set[int],
    absence_s: float | None,
    num_runs: int,
    rng: np.random.Generator,
    wait_s: float = 0.0,
) -> np.ndarray:
    """Training until shards have no host and no group comes back for wait_s; each group has exponential times."""
    hosts = [set(map(int, row)) for row in placement.hosts]
    times_s = []
    for _ in range(num_runs):
        up, now_s, pause_s = set(range(placement.num_groups)) - lost, 0.0, 0.0
        while (is_covered := all(row & up for row in hosts)) or pause_s < wait_s:
            num_down = placement.num_groups - len(up)
            back_per_s = 0.0 if absence_s is None else num_down / absence_s
            total_per_s = len(up) / F_S + back_per_s
            passed_s = rng.exponential(1 / total_per_s)
            now_s, pause_s = (now_s + passed_s, 0.0) if is_covered else (now_s, pause_s + passed_s)
            if pause_s > wait_s:
                break
            pool = sorted(up) if rng.random() < len(up) / F_S / total_per_s else None
            if pool is not None:
                up.remove(pool[rng.integers(len(pool))])
            else:
                down = sorted(set(range(placement.num_groups)) - up)
                up.add(down[rng.integers(len(down))])
                pause_s = 0.0
        times_s.append(now_s)
    return np.array(times_s)


def hosts_left(placement: Placement, lost: set[int]) -> Counter[int]:
    alive = frozenset(GroupId(group) for group in range(placement.num_groups) if group not in lost)
    return Counter(placement.alive_mask(alive)[placement.host_array].sum(axis=1).tolist())


@pytest.mark.parametrize(
    ("num_groups", "redundancy", "lost", "absence_s"),
    [
        (13, 3, set(), None),
        (13, 3, {0, 5}, None),
        (13, 3, {0, 1, 2, 3}, None),
        (13, 3, set(), 50.0),
        (13, 3, {0, 5}, 200.0),
        (31, 2, {4}, 20.0),
    ],
)
def test_the_formula_is_near_what_events_come_to(
    num_groups: int, redundancy: int, lost: set[int], absence_s: float | None
) -> None:
    placement = make_placement("golomb", num_groups, redundancy)
    counts = hosts_left(placement, lost)
    assert 0 not in counts
    formula_s = time_to_wipe_out_s(counts, redundancy, F_S, absence_s)
    drawn_s = drawn_times_s(placement, lost, absence_s, 600, np.random.default_rng(1))
    noise = drawn_s.std() / np.sqrt(len(drawn_s)) / drawn_s.mean()
    assert -0.15 - 3 * noise < formula_s / drawn_s.mean() - 1 < 0.02 + 3 * noise


@pytest.mark.parametrize(
    ("num_groups", "redundancy", "lost", "wait_s"), [(13, 2, set(), 20.0), (13, 3, {0, 5}, 20.0), (7, 1, set(), 60.0)]
)
def test_only_wipe_outs_that_no_host_ends_in_time_count(
    num_groups: int, redundancy: int, lost: set[int], wait_s: float
) -> None:
    placement = make_placement("golomb", num_groups, redundancy)
    formula_s = time_to_wipe_out_s(hosts_left(placement, lost), redundancy, F_S, 50.0, wait_s)
    drawn_s = drawn_times_s(placement, lost, 50.0, 100, np.random.default_rng(1), wait_s)
    without_s = time_to_wipe_out_s(hosts_left(placement, lost), redundancy, F_S, 50.0)
    assert formula_s > 1.3 * without_s
    noise = drawn_s.std() / np.sqrt(len(drawn_s)) / drawn_s.mean()
    assert -0.2 - 3 * noise < formula_s / drawn_s.mean() - 1 < 0.1 + 3 * noise


def test_fewer_survivors_leave_less_time() -> None:
    placement = make_placement("golomb", 31, 5)
    times_s = [time_to_wipe_out_s(hosts_left(placement, set(range(k))), 5, F_S, None) for k in range(4)]
    assert times_s == sorted(times_s, reverse=True)
    assert len(set(times_s)) == 4
