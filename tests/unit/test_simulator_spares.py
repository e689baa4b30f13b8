"""Spares and repair: the fleet against a queue in SimPy, and what happens at its edges."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import simpy

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

Process = Generator[Any, Any, Any]
NUM_GROUPS, TRANSFER_S = 60, 0.25


def fleet_of(*losses: Loss, **changes: Any) -> Fleet:
    settings: dict[str, Any] = {
        "name": "spares",
        "num_groups": NUM_GROUPS,
        "redundancy": 3,
        "costs": CostModel(compute_s=1.0, state_transfer_s=TRANSFER_S),
        "failures": FailureSpec(kind="trace", trace=losses),
    }
    scenario = Scenario(**{**settings, **changes})
    process = make_process(scenario.failures, NUM_GROUPS, np.random.default_rng(0))
    return Fleet(scenario, process, np.random.default_rng(0))


def loss_of(at_s: float, *groups: int, repair_s: float | None = None) -> Loss:
    return Loss(at_s=at_s, groups=tuple(map(GroupId, groups)), repair_s=repair_s)


class Pool:
    """Hardware as items of a SimPy store: first come, first served. Repair puts an item back."""

    def __init__(self, losses: list[Loss], num_spares: int) -> None:
        self.env = simpy.Environment()
        self.store = simpy.Store(self.env)
        self.store.items += ["spare"] * num_spares
        self.losses, self.down = losses, set[int]()
        self.lost: list[tuple[float, int]] = []
        self.back: list[tuple[float, int]] = []
        self.env.process(self.lose())
        self.env.run()

    def lose(self) -> Process:
        for loss in self.losses:
            yield self.env.timeout(loss.at_s - self.env.now)
            for group in set(loss.groups) - self.down:
                self.down.add(group)
                self.lost.append((self.env.now, group))
                self.env.process(self.repair(loss))
            for at_s, group in sorted(self.lost):
                if at_s == self.env.now:
                    self.env.process(self.come_back(group))

    def repair(self, loss: Loss) -> Process:
        assert loss.repair_s is not None
        yield self.env.timeout(loss.repair_s)
        yield self.store.put("repaired")

    def come_back(self, group: int) -> Process:
        yield self.store.get()
        yield self.env.timeout(TRANSFER_S)
        self.down.remove(group)
        self.back.append((self.env.now, group))


def random_losses(seed: int, *, is_repair_random: bool, groups: list[list[int]]) -> list[Loss]:
    """Times end in .5, so that with transfers of 0.25 s nothing coincides by chance."""
    rng = np.random.default_rng(seed)
    at_s = np.sort(rng.choice(np.arange(2000), len(groups), replace=False)) + 0.5
    repair_s = rng.integers(10, 400, len(groups)) if is_repair_random else np.full(len(groups), 150)
    return [loss_of(float(t), *g, repair_s=float(s)) for t, g, s in zip(at_s, groups, repair_s, strict=True)]


@pytest.mark.parametrize("num_spares", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_groups_come_back_as_from_a_queue_for_hardware(seed: int, num_spares: int) -> None:
    rng = np.random.default_rng([seed, 1])
    groups = [rng.choice(NUM_GROUPS, rng.integers(1, 5), replace=False).tolist() for _ in range(150)]
    losses = random_losses(seed, is_repair_random=False, groups=groups)
    pool = Pool(losses, num_spares)
    fleet = fleet_of(*losses, num_spares=num_spares)
    lost: list[tuple[float, int]] = []
    for back_s, group in pool.back:
        lost += [(loss.at_s, g) for loss in fleet.lose_until(back_s) for g in loss.groups]
        assert group not in fleet.ready(back_s - 0.125)
        assert group in fleet.ready(back_s)
        fleet.take_in(back_s, (GroupId(group),))
    assert lost == sorted(pool.lost)
    assert fleet.num_lost == len(pool.back) > 200
    assert fleet.is_up.all()


@pytest.mark.parametrize("num_spares", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_hardware_is_never_idle_while_a_group_waits_whatever_repairs_take(seed: int, num_spares: int) -> None:
    """Groups reserve hardware at their loss: who comes back may differ from the queue, never when one does."""
    groups = [[group] for group in np.random.default_rng([seed, 1]).permutation(NUM_GROUPS).tolist()]
    losses = random_losses(seed, is_repair_random=True, groups=groups)
    pool = Pool(losses, num_spares)
    fleet = fleet_of(*losses, num_spares=num_spares)
    fleet.lose_until(2001.0)
    for num_back, (back_s, _) in enumerate(pool.back, start=1):
        assert len(fleet.ready(back_s - 0.125)) < num_back <= len(fleet.ready(back_s))
    assert len(pool.back) == NUM_GROUPS


def test_spares_that_are_used_up_come_back_only_by_repair_or_a_restart() -> None:
    fleet = fleet_of(loss_of(1.0, 0, 1, 2), loss_of(2.0, 3, 4), loss_of(60.0, 5, 6), num_spares=2)
    fleet.lose_until(10.0)
    assert fleet.ready(1e9) == (0, 1)  # in the order of ids; nothing is repaired
    fleet.take_in(10.0, (GroupId(0), GroupId(1)))
    assert (fleet.num_lost, fleet.max_down, int(fleet.is_up.sum())) == (5, 5, NUM_GROUPS - 3)
    fleet.restart(20.0, 50.0)
    assert fleet.is_up.all()
    assert fleet.ready(1e9) == ()
    fleet.lose_until(70.0)
    assert fleet.ready(60.0 + TRANSFER_S) == (5, 6)  # spares are spare again
    assert fleet.num_lost == 7


def test_a_group_that_fetches_the_state_or_waits_cannot_be_lost_again() -> None:
    fleet = fleet_of(loss_of(1.0, 0, 1), loss_of(1.1, 0, 1, 2), loss_of(5.0, 0), num_spares=9)
    assert [fleet.lose().groups for _ in range(3)] == [(0, 1), (2,), ()]
    assert fleet.num_lost == 3
    assert fleet.ready(1.25) == (0, 1)
    assert fleet.ready(1.5) == (0, 1, 2)


def test_a_loss_of_a_group_that_was_admitted_counts_again() -> None:
    fleet = fleet_of(loss_of(1.0, 0), loss_of(5.0, 0), num_spares=1, repair_s=100.0)
    fleet.lose_until(2.0)
    fleet.take_in(2.0, (GroupId(0),))
    fleet.lose_until(6.0)
    assert fleet.num_lost == 2
    assert fleet.ready(101.0) == ()  # the spare is in use: the group waits for the hardware that broke first
    assert fleet.ready(101.25) == (0,)


@pytest.mark.parametrize("num_spares", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("is_random", [False, True])
def test_the_expected_absence_of_a_group_is_that_of_the_queue(num_spares: int, is_random: bool) -> None:
    scenario = Scenario(
        name="x", num_groups=400, redundancy=3, repair_s=300.0, repair_is_random=is_random, num_spares=num_spares,
        costs=CostModel(compute_s=1.0, state_transfer_s=2.0), failures=FailureSpec(mean_s=100.0),
    )  # fmt: skip
    process = make_process(scenario.failures, 400, np.random.default_rng(1))
    fleet = Fleet(scenario, process, np.random.default_rng(2))
    until_s, step_s = 600_000.0, 5.0
    for now_s in np.arange(0.0, until_s, step_s):
        fleet.lose_until(now_s)
        if ready := fleet.ready(now_s):
            fleet.take_in(now_s, ready)
    absence_s = fleet.mean_down(until_s, 0.0) * until_s / fleet.num_lost - step_s / 2  # until the next step begins
    expected_s = scenario.mean_absence_s()
    print(f"{num_spares} spares: away for {absence_s:.2f} s, expected {expected_s:.2f} s")
    assert absence_s == pytest.approx(
        expected_s, rel=0.1, abs=0.2
    )  # the rate falls with groups down, which is left out


def test_spares_keep_more_groups_up() -> None:
    def mean_down(num_spares: int) -> float:
        scenario = Scenario(
            name="x", num_groups=20, redundancy=3, num_steps=3000, num_spares=num_spares, repair_s=300.0,
            costs=CostModel(compute_s=1.0, state_transfer_s=2.0), failures=FailureSpec(mean_s=100.0),
        )  # fmt: skip
        return simulate(scenario, seed=0).mean_down

    down = [mean_down(num_spares) for num_spares in (0, 2, 20)]
    assert down[0] > down[1] > down[2]
    assert down[2] == pytest.approx(2.5 / 100, abs=0.02)  # state transfer and half a step of waiting, every 100 s
