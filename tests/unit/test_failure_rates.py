"""Long-run rates of the failure processes against renewal theory, and nodes against a model in SimPy."""

import heapq
from collections.abc import Generator
from math import gamma
from typing import Any

import numpy as np
import pytest
import simpy

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.failures import FailureSpec, Loss, make_process

Process = Generator[Any, Any, Any]


def losses_of(spec: FailureSpec, num_groups: int, back_after_s: float, until_s: float, seed: int = 0) -> list[Loss]:
    """The losses of groups that each come back a fixed time after their loss."""
    process = make_process(spec, num_groups, np.random.default_rng(seed))
    is_up = np.ones(num_groups, dtype=np.bool_)
    back: list[tuple[float, GroupId]] = []
    losses = []
    while (now_s := min(process.next_s(), back[0][0] if back else until_s)) < until_s:
        if back and back[0][0] == now_s:
            _, group = heapq.heappop(back)
            is_up[group] = True
            process.came_back(now_s, (group,), is_up)
            continue
        loss = process.strike(is_up)
        losses.append(loss)
        for group in loss.groups:
            is_up[group] = False
            heapq.heappush(back, (loss.at_s + back_after_s, group))
    return losses


F, R = 100.0, 40.0
"""Mean time of a clock; seconds from a loss until the group is back."""


@pytest.mark.parametrize("shape", [0.78, 1.0, 2.0])
@pytest.mark.parametrize(
    ("spec", "expected_per_s"),
    [
        # Operating time passes at the share of groups that are up, 1 - L R / N by Little's law; L = share / F.
        ({"kind": "system", "mean_s": F / 10}, 1 / (F / 10 + R / 20)),
        ({"kind": "group", "mean_s": F}, 20 / (F + R)),
        # 5 nodes lose a group 5 / F times in a second that it is up.
        ({"kind": "node", "mean_s": 5 * F, "nodes_per_group": 5}, 20 / (F + R)),
        ({"kind": "node", "mean_s": F, "nodes_per_group": 5}, 20 / (F / 5 + R)),
    ],
    ids=["system", "group", "node", "busy_node"],
)
def test_groups_are_lost_at_the_rate_of_renewal_theory(
    shape: float, spec: dict[str, Any], expected_per_s: float
) -> None:
    until_s = 6000 / expected_per_s
    losses = losses_of(FailureSpec(shape=shape, **spec), 20, R, until_s)
    # Clocks that are all new at first are early (shape < 1) or late; cut that beginning off.
    late = [loss for loss in losses if loss.at_s > until_s / 6]
    assert len(late) / (until_s * 5 / 6) == pytest.approx(expected_per_s, rel=0.04)
    assert all(len(loss.groups) == 1 for loss in losses)


@pytest.mark.parametrize("shape", [0.78, 1.0, 2.0])
def test_domain_faults_strike_groups_that_are_down_and_lose_those_that_are_up(shape: float) -> None:
    spec = FailureSpec(kind="domain", mean_s=F, shape=shape, groups_per_domain=4)
    until_s = 1200 * F
    losses = losses_of(spec, 20, R, until_s)
    assert len(losses) / until_s == pytest.approx(5 / F, rel=0.04)
    num_lost = sum(len(loss.groups) for loss in losses)
    assert {len(loss.groups) for loss in losses} == {0, 4}
    if shape == 1.0:  # without memory the time from coming back to the next strike is F again
        assert num_lost / until_s == pytest.approx(20 / (F + R), rel=0.04)


def test_the_rates_that_cadences_are_computed_from_are_those_of_the_processes() -> None:
    for spec in (
        FailureSpec(mean_s=3.0),
        FailureSpec(kind="group", mean_s=60.0),
        FailureSpec(kind="node", mean_s=300.0, nodes_per_group=5),
        FailureSpec(kind="domain", mean_s=60.0, groups_per_domain=4),
    ):
        losses = losses_of(spec, 20, 1e-6, 15_000.0)
        num_lost = sum(len(loss.groups) for loss in losses)
        assert 15_000.0 / num_lost == pytest.approx(spec.mean_interval_s(20), rel=0.07)


# --------------------------------------------------------------------------------------------------------- nodes


def test_only_the_node_that_failed_is_replaced() -> None:
    """Three nodes that each work for 100 s, nearly to the second: all fail before a replacement does."""
    spec = FailureSpec(kind="node", mean_s=100.0, shape=2000.0, nodes_per_group=3)
    at_s = [loss.at_s for loss in losses_of(spec, 1, 10.0, 400.0)]
    assert at_s == pytest.approx([100, 110, 120, 230, 240, 250, 360, 370, 380], abs=1.5)


def test_nodes_keep_their_age_through_a_restart() -> None:
    spec = FailureSpec(kind="node", mean_s=100.0, shape=2000.0, nodes_per_group=2)
    process = make_process(spec, 2, np.random.default_rng(0))
    all_groups = np.ones(2, dtype=np.bool_)
    first = process.strike(all_groups)
    process.restarted(100.0, 600.0, first.groups)
    rest = [process.strike(all_groups) for _ in range(2)]
    assert [loss.at_s for loss in rest] == pytest.approx([600.0, 600.0], abs=1.5)
    assert process.next_s() == np.inf  # both groups are down now
    process.came_back(900.0, (GroupId(0), GroupId(1)), all_groups)
    last = [process.strike(all_groups) for _ in range(2)]
    # The first group to be lost has two new nodes by now; the other one has an old one left.
    assert (last[0].groups, last[0].at_s) == ((1 - first.groups[0],), pytest.approx(900.0, abs=1.5))
    assert (last[1].groups, last[1].at_s) == (first.groups, pytest.approx(1000.0, abs=1.5))


class Nodes:
    """Nodes as processes of SimPy: each works through its time, and is interrupted while its group is down."""

    def __init__(self, spec: FailureSpec, num_groups: int, back_after_s: float, seed: int) -> None:
        self.env, self.spec, self.back_after_s = simpy.Environment(), spec, back_after_s
        self.rng = np.random.default_rng(seed)
        self.back: dict[int, simpy.Event] = {}
        self.losses: list[tuple[float, int]] = []
        times_s = [[self.draw() for _ in range(spec.nodes_per_group)] for _ in range(num_groups)]
        self.nodes = [[self.env.process(self.node(g, s)) for s in row] for g, row in enumerate(times_s)]

    def draw(self) -> float:
        scale = self.spec.mean_s / gamma(1 + 1 / self.spec.shape)
        return float(scale * self.rng.weibull(self.spec.shape))

    def node(self, group: int, left_s: float) -> Process:
        while True:
            began_s, has_failed = self.env.now, False
            try:
                yield self.env.timeout(left_s)
                has_failed = True
                self.lose(group)
            except simpy.Interrupt:
                left_s -= self.env.now - began_s
            yield self.back[group]
            if has_failed:
                left_s = self.draw()

    def lose(self, group: int) -> None:
        self.losses.append((self.env.now, group))
        self.back[group] = self.env.timeout(self.back_after_s)
        for node in self.nodes[group]:
            if node is not self.env.active_process:
                node.interrupt()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("shape", "nodes_per_group"), [(0.78, 4), (1.0, 1), (3.0, 7)])
def test_simpy_loses_the_same_groups_at_the_same_times(seed: int, shape: float, nodes_per_group: int) -> None:
    spec = FailureSpec(kind="node", mean_s=200.0, shape=shape, nodes_per_group=nodes_per_group)
    model = Nodes(spec, num_groups=6, back_after_s=15.0, seed=seed)
    model.env.run(until=3000.0)
    losses = losses_of(spec, 6, 15.0, 3000.0, seed)
    assert [loss.groups for loss in losses] == [(group,) for _, group in model.losses]
    assert [loss.at_s for loss in losses] == pytest.approx([at_s for at_s, _ in model.losses], abs=1e-6)
    assert len(losses) > 40
