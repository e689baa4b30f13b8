"""The simulator's virtual time against a model of processes and interrupts in SimPy, for the same losses.

The model knows neither controller nor log: a process loses groups at the times of the trace and interrupts training,
training restarts what was interrupted. Only the plans are those of `stacking.order`.
"""

from collections.abc import Generator
from math import inf
from typing import Any

import pytest
import simpy

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.scenario import Scenario
from tests.oracle.scenarios import WAYS, jitter_factors, random_scenario

Process = Generator[Any, Any, Any]


class Model:
    def __init__(self, scenario: Scenario, factors: list[float]) -> None:
        self.scenario, self.costs, self.factors = scenario, scenario.costs, factors
        self.env = simpy.Environment()
        self.placement = make_placement("golomb", scenario.num_groups, scenario.hosts_per_shard)
        self.up = set(range(scenario.num_groups))
        self.known = frozenset(self.up)  # whom the survivors believe to be there
        self.back_at: dict[int, float] = {}
        self.is_interruptible = self.is_restarting = False
        self.restarts = self.pauses = 0
        self.last_loss_s = 0.0
        self.training = self.env.process(self.train())
        self.env.process(self.lose())

    def run(self) -> float:
        self.env.run(until=self.training)
        return float(self.env.now)

    def lose(self) -> Process:
        for loss in self.scenario.failures.trace:
            yield self.env.timeout(loss.at_s - self.env.now)
            [group] = loss.groups
            if self.is_restarting or group not in self.up:
                continue
            self.up.remove(group)
            self.last_loss_s = self.env.now
            if self.scenario.repair_s is not None:
                self.back_at[group] = self.env.now + self.scenario.repair_s + self.costs.state_transfer_s
            if self.is_interruptible and self.training.is_alive:
                self.training.interrupt()

    def train(self) -> Process:
        step, saved, last_save = 0, 0, 0.0
        order = self.fresh_order()
        while step < self.scenario.num_steps:
            order = order.for_groups(self.known)
            if not (yield from self.one_step(step, order)):
                if (yield from self.pause()):
                    continue
                yield from self.restart()
                step, last_save, order = saved, self.env.now, self.fresh_order()
                continue
            step += 1
            back = self.back(self.env.now)
            if self.env.now - last_save >= self.scenario.save_cadence_s():
                last_save, saved = self.env.now, step
                yield self.env.timeout(self.costs.save_s)
            if back and step < self.scenario.num_steps:
                yield from self.join(back)

    def back(self, now_s: float) -> set[int]:
        return {group for group, at_s in self.back_at.items() if at_s <= now_s}

    def join(self, back: set[int]) -> Process:
        self.up |= back
        self.known |= back
        for group in back:
            del self.back_at[group]
        yield self.env.timeout(self.costs.join_s)

    def pause(self) -> Process:
        """Whether the hosts that are missing come back before a restart would be over, and then take part."""
        while self.known and self.scenario.policy == "spare":
            missing = self.placement.uncovered(frozenset(map(GroupId, self.known)))
            at_s = max(min(self.back_at.get(host, inf) for host in self.placement.hosts[shard]) for shard in missing)
            if at_s > self.env.now + self.costs.restart_s:
                return False
            if self.known <= self.up and (yield from self.uninterrupted(max(at_s - self.env.now, 0.0))):
                self.pauses += 1
                yield from self.join(self.back(max(at_s, self.env.now)))
                return True
            while not (yield from self.uninterrupted(self.until_fenced_s() + self.costs.agree_s)):
                pass
            self.known = frozenset(self.up)
        return False

    def one_step(self, step: int, order: Any) -> Process:
        """Whether the step was committed; False is a wipe-out."""
        m, computed = self.scenario.microbatches_per_shard, [order.work]
        yield self.env.timeout(order.work.makespan / m * self.costs.compute_s * self.factors[step])
        built_at_s, again_s = 0.0, 0.0
        while True:
            if self.known <= self.up:
                waits_s = max(built_at_s - self.env.now, 0.0) + again_s + self.costs.reduce_s
                if (yield from self.uninterrupted(waits_s)):
                    return True
            while not (yield from self.uninterrupted(self.until_fenced_s() + self.costs.agree_s)):
                pass
            built_at_s, again_s = self.env.now - self.costs.agree_s + self.costs.rebuild_s, self.costs.retry_s
            lost = sorted(self.known - self.up)
            self.known = frozenset(self.up)
            if self.placement.uncovered(frozenset(map(GroupId, self.known))):
                return False
            patch = order.patch(self.known, [item for work in computed for group in lost for item in work.of(group)])
            computed.append(patch)
            yield self.env.timeout(patch.makespan / m * self.costs.compute_s)

    def until_fenced_s(self) -> float:
        return max(self.last_loss_s + self.costs.detect_s - self.env.now, 0.0)

    def uninterrupted(self, seconds: float) -> Process:
        self.is_interruptible = True
        try:
            yield self.env.timeout(seconds)
        except simpy.Interrupt:
            return False
        finally:
            self.is_interruptible = False
        return True

    def restart(self) -> Process:
        self.restarts += 1
        self.is_restarting = True
        yield self.env.timeout(self.costs.restart_s)
        self.is_restarting = False
        self.up = set(range(self.scenario.num_groups))
        self.known = frozenset(self.up)
        self.back_at.clear()

    def fresh_order(self) -> Any:
        return initial_order(self.placement, self.scenario.microbatches_per_shard, self.scenario.granularity)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", WAYS)
def test_simpy_comes_to_the_same_end(way: str, seed: int) -> None:
    scenario = random_scenario(seed, **WAYS[way])
    model = Model(scenario, jitter_factors(scenario, seed))
    end_s = model.run()
    result = simulate(scenario, seed)
    assert result.end_s == pytest.approx(end_s, abs=1e-6)
    assert (result.restarts, result.pauses) == (model.restarts, model.pauses)
    assert result.losses > 10


def test_the_compared_runs_restart_join_and_are_interrupted() -> None:
    """The comparison would prove little if nothing ever happened in these runs."""
    stack = [simulate(random_scenario(seed), seed) for seed in range(8)]
    microbatch = [simulate(random_scenario(seed, granularity="microbatch"), seed) for seed in range(8)]
    for cause, least_s in (("detect", 0.0), ("rebuild", 100 * 3.0)):  # waited for, not only hidden
        assert sum(result.terms[cause] for result in microbatch) > least_s
    rejoin = [simulate(random_scenario(seed, repair_s=400.0), seed) for seed in range(8)]
    assert sum(result.restarts for result in stack) > 8
    assert sum(result.excess()["reduce"] > 0 for result in stack) > 4
    assert all(result.terms["join"] > 0 for result in rejoin)
    assert sum(result.pauses for result in rejoin) > 8
