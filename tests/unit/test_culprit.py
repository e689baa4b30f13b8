"""What holds a run back: cases drawn from a seed, whose culprit is known."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from spare_megatron.core.slow_machines.culprit import (
    Cause,
    Culprit,
    CulpritWatch,
    MachineSigns,
    RankTimes,
    Window,
    find_culprit,
)
from spare_megatron.stacking.layout import GroupId, MachineId

NUM_GROUPS, NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 6, 2, 8, 10
PASS_S, DATA_S, TRANSFER_S, UPDATE_S, SUM_S = 0.010, 0.0003, 0.001, 0.004, 0.006
QUIET = MachineSigns(answer_s=0.002, retransmitted_per_s=0.2, swapped_per_s=0.0, busy=0.6)


def drawn_window(
    rng: np.random.Generator,
    *,
    compute: dict[tuple[int, int], float] | None = None,
    data: dict[int, float] | None = None,
    kept: dict[int, float] | None = None,
    sum_factor: float = 1.0,
    answers: dict[int, float] | None = None,
    scatter: float = 0.05,
) -> Window:
    """A window of groups with a machine each, whose stages wait for each other and whose groups wait for the last.

    `compute`: (group, rank) -> factor of its passes; `data`: group -> factor of its reading; `kept`: group -> share of
    its passes that its processors are withheld for, besides; `answers`: group -> factor of its store's answers.
    """
    compute, data, kept, answers = compute or {}, data or {}, kept or {}, answers or {}

    def noise(spread: float) -> float:
        return float(rng.lognormal(0.0, spread))

    work: dict[tuple[int, int], tuple[float, float, float]] = {}
    for group in range(NUM_GROUPS):
        for rank in range(NUM_STAGES):
            own_s = NUM_MICROBATCHES * PASS_S * compute.get((group, rank), 1.0) * noise(scatter)
            starved_s = (kept.get(group, 0.0) + 0.03 * noise(0.5)) * own_s
            read_s = NUM_MICROBATCHES * DATA_S * data.get(group, 1.0) * noise(4 * scatter)
            work[group, rank] = own_s + starved_s, read_s, starved_s
    of_group = {g: max(sum(work[g, r][:2]) for r in range(NUM_STAGES)) for g in range(NUM_GROUPS)}
    last_s = max(of_group.values())
    sum_s = SUM_S * sum_factor * noise(scatter)
    ranks = []
    for (group, rank), (pass_s, read_s, starved_s) in work.items():
        transfer_s = of_group[group] - pass_s - read_s + TRANSFER_S * noise(scatter)
        ranks.append(
            RankTimes(
                machine=MachineId(group),
                group=GroupId(group),
                rank=rank,
                num_steps=NUM_STEPS,
                num_passes=NUM_STEPS * NUM_MICROBATCHES,
                pass_s=NUM_STEPS * pass_s,
                data_s=NUM_STEPS * read_s,
                transfer_s=NUM_STEPS * transfer_s,
                reduce_s=NUM_STEPS * (last_s - of_group[group] + sum_s),
                wait_s=NUM_STEPS * 0.001 * noise(scatter),
                starved_s=NUM_STEPS * starved_s,
            )
        )
    machines = {
        MachineId(group): replace(QUIET, answer_s=QUIET.answer_s * answers.get(group, 1.0) * noise(0.3))
        for group in range(NUM_GROUPS)
    }
    return Window(step_s=last_s + sum_s + TRANSFER_S + 0.001 + UPDATE_S, ranks=ranks, machines=machines)


def named_in(cause: Cause, seed: int) -> tuple[Culprit | None, tuple[int, int | None]]:
    """What is named after four windows with such a culprit, and who it is: machine, and rank if it is a rank's."""
    rng = np.random.default_rng([seed, list(Cause).index(cause)])
    group, rank = int(rng.integers(NUM_GROUPS)), int(rng.integers(NUM_STAGES))
    factor = float(rng.uniform(1.5, 4.0))
    watch = CulpritWatch()
    for _ in range(3):
        watch.add(drawn_window(rng))
    assert watch.named is None
    for _ in range(4):
        match cause:
            case Cause.COMPUTE:
                window = drawn_window(rng, compute={(group, rank): factor})
            case Cause.DATA:
                window = drawn_window(rng, data={group: 30 * factor})
            case Cause.HOST:
                window = drawn_window(rng, kept={group: factor - 1.0})
            case Cause.LINK:
                window = drawn_window(rng, sum_factor=5 * factor, answers={group: 10 * factor})
        watch.add(window)
    return watch.named, (group, rank if cause is Cause.COMPUTE else None)


def test_the_culprit_is_right_in_19_of_20_drawn_cases() -> None:
    right: Counter[Cause] = Counter()
    for cause in Cause:
        for seed in range(5):
            named, (group, rank) = named_in(cause, seed)
            is_right = named is not None and (named.machine, named.cause) == (group, cause)
            if rank is not None:
                is_right = is_right and named is not None and (named.group, named.rank) == (group, rank)
            right[cause] += is_right
    assert right.total() >= 19, right


def test_quiet_steps_name_no_machine() -> None:
    """Whatever a single window finds, no machine is found in three of four."""
    for seed in range(20):
        rng, watch = np.random.default_rng([seed, 77]), CulpritWatch()
        for _ in range(50):
            watch.add(drawn_window(rng))
            assert watch.named is None, seed


def test_a_culprit_is_named_by_three_windows_of_four_and_gone_after_four_without_it() -> None:
    rng, watch = np.random.default_rng(5), CulpritWatch()
    changes = [watch.add(drawn_window(rng, compute={(2, 0): 2.0} if at < 6 and at != 1 else {})) for at in range(12)]
    assert [at for at, has_changed in enumerate(changes) if has_changed] == [3, 9]
    assert watch.named is None


def test_another_culprit_replaces_the_one_that_is_named() -> None:
    rng, watch = np.random.default_rng(6), CulpritWatch()
    for at in range(8):
        watch.add(drawn_window(rng, compute={(2, 0) if at < 4 else (4, 1): 2.0}))
    assert watch.named is not None
    assert (watch.named.machine, watch.named.group, watch.named.rank) == (4, 4, 1)
    assert watch.named.factor == pytest.approx(2.0, rel=0.2)


def test_ranks_that_are_slow_together_are_not_distinguished() -> None:
    """As tensor-parallel peers, which wait for each other inside passes."""
    window = drawn_window(np.random.default_rng(7), compute={(3, 0): 2.0, (3, 1): 2.0})
    culprit = find_culprit(window)
    assert culprit is not None
    assert (culprit.machine, culprit.group, culprit.rank, culprit.cause) == (3, 3, None, Cause.COMPUTE)


def test_what_all_groups_of_a_machine_share_is_its_host() -> None:
    window = drawn_window(np.random.default_rng(8), compute={(g, r): 2.0 for g in (2, 3) for r in (0, 1)})
    pairs = [replace(one, machine=MachineId(one.group // 2)) for one in window.ranks]
    culprit = find_culprit(replace(window, ranks=pairs, machines={MachineId(n): QUIET for n in range(3)}))
    assert culprit is not None
    assert (culprit.machine, culprit.cause, culprit.group) == (1, Cause.HOST, None)
    assert "busy 60%" in culprit.detail


def test_a_machine_that_swaps_or_uses_up_its_quota_is_the_host_and_says_so() -> None:
    window = drawn_window(np.random.default_rng(9), compute={(1, 0): 3.0, (1, 1): 3.0})
    swapping = {**window.machines, MachineId(1): replace(QUIET, swapped_per_s=300.0)}
    culprit = find_culprit(replace(window, machines=swapping))
    assert culprit is not None
    assert (culprit.machine, culprit.cause) == (1, Cause.HOST)
    assert culprit.factor == pytest.approx(3.0, rel=0.2), "dealing mends it"
    assert "300 pages a second are swapped" in culprit.detail
    throttled = [replace(one, throttled_s=1.2 * one.pass_s if one.group == 1 else 0.0) for one in window.ranks]
    culprit = find_culprit(replace(window, ranks=throttled))
    assert culprit is not None
    assert (culprit.machine, culprit.cause) == (1, Cause.HOST)
    assert culprit.factor == 0.0
    assert "quota" in culprit.detail


def test_two_groups_are_compared_with_their_own_past() -> None:
    def pair(window: Window) -> Window:
        ranks = [one for one in window.ranks if one.group < 2]
        return replace(window, ranks=ranks, machines={MachineId(n): QUIET for n in range(2)})

    rng, watch = np.random.default_rng(10), CulpritWatch()
    for _ in range(10):
        watch.add(pair(drawn_window(rng)))
    assert watch.named is None
    for _ in range(60):
        watch.add(pair(drawn_window(rng, compute={(1, 0): 2.0})))
    assert watch.named is not None, "what stands out does not become usual"
    assert (watch.named.machine, watch.named.rank, watch.named.cause) == (1, 0, Cause.COMPUTE)


def test_a_link_inside_a_group_shows_in_its_transfers_alone() -> None:
    window = drawn_window(np.random.default_rng(11))
    slow = [
        replace(one, transfer_s=one.transfer_s + NUM_STEPS * (0.04 + 0.03 * one.rank)) if one.group == 4 else one
        for one in window.ranks
    ]
    culprit = find_culprit(replace(window, ranks=slow, step_s=window.step_s + 0.05))
    assert culprit is not None
    assert (culprit.machine, culprit.cause, culprit.group, culprit.rank) == (4, Cause.LINK, 4, 1)


def test_machines_that_share_processors_are_not_blamed_for_taking_them_from_each_other() -> None:
    """And a slow rank is named though most of each step goes by without a processor."""
    rng = np.random.default_rng(13)
    for compute in ({}, {(1, 0): 2.0}):
        window = drawn_window(rng, compute=compute)
        lacked_s = {one.group: NUM_STEPS * float(rng.uniform(0.5, 1.5)) for one in window.ranks}
        busy = [replace(one, starved_s=lacked_s[one.group]) for one in window.ranks]
        window = replace(window, ranks=busy, step_s=window.step_s + 1.5, shares_processors=True)
        waits = [replace(one, reduce_s=one.reduce_s + NUM_STEPS * 1.5 - one.starved_s) for one in busy]
        culprit = find_culprit(replace(window, ranks=waits))
        assert (culprit and culprit.cause) == (Cause.COMPUTE if compute else None)


def test_a_window_without_steps_or_with_one_group_says_nothing() -> None:
    window = drawn_window(np.random.default_rng(12), compute={(0, 0): 5.0})
    assert find_culprit(replace(window, ranks=[], machines={})) is None
    assert find_culprit(replace(window, ranks=[replace(one, num_steps=0) for one in window.ranks])) is None
    alone = [one for one in window.ranks if one.group == 0]
    assert find_culprit(replace(window, ranks=alone, machines={MachineId(0): QUIET})) is None
