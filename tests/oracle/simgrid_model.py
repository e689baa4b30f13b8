"""A run as a model in SimGrid: a host and a link for each group, and SimGrid's engine says how long everything takes.

The makespan of a step is the end of the last of its executions, one for each group. A reduction is a ring of transfers
between the members. A lost group's link is switched off, so that transfers over it fail.
"""

import ctypes
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.order import Order, initial_order
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Work
from spare_megatron.tools.simulate.scenario import Scenario

SPEED = 10**9
"""Operations per second of a host and bytes per second of a link."""
OPTIONS = ("network/model:CM02", "network/crosstraffic:0")
"""Transfers have no protocol: they take their bytes over the bandwidth."""


def load_simgrid() -> Any:
    """SimGrid's module. It does not find the library that lies beside it, so that has to be loaded before it."""
    spec = find_spec("simgrid")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("simgrid is not installed")
    ctypes.CDLL(str(Path(spec.origin).with_name("libsimgrid.so")), mode=ctypes.RTLD_GLOBAL)
    import simgrid

    return simgrid


@dataclass(kw_only=True)
class Run:
    """What a run came to; SimGrid's clock at its last commit."""

    end_s: float = 0.0
    restarts: int = 0
    pauses: int = 0
    losses: int = 0
    broken_reductions: int = 0
    joined: int = 0


def run_in_simgrid(scenario: Scenario, factors: list[float]) -> Run:
    """Trains to the end. Once in a process: SimGrid has a single engine.

    Args:
        scenario: With losses of single groups from a trace.
        factors: What the compute of each step is multiplied by.
    """
    model = Model(load_simgrid(), scenario, factors)
    model.engine.run()
    return model.run


@dataclass
class Model:
    simgrid: Any
    scenario: Scenario
    factors: list[float]
    run: Run = field(default_factory=Run)
    is_restarting: bool = False
    last_loss_s: float = 0.0

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.placement = make_placement(scenario.placement, scenario.num_groups, scenario.hosts_per_shard)
        self.members = [GroupId(group) for group in range(scenario.num_groups)]
        self.engine = self.simgrid.Engine(["oracle", *(f"--cfg={option}" for option in OPTIONS)])
        zone = self.engine.netzone_root.add_netzone_star("groups")
        self.hosts = [zone.add_host(f"group {group}", SPEED) for group in self.members]
        self.links = [zone.add_split_duplex_link(f"link {group}", SPEED) for group in self.members]
        up = self.simgrid.LinkInRoute.Direction.UP
        for host, link in zip(self.hosts, self.links, strict=True):
            zone.add_route(host, None, [self.simgrid.LinkInRoute(link, up)], True)
        zone.seal()
        self.alarm = self.simgrid.Semaphore(0)
        self.repairs: dict[GroupId, Any] = {}
        self.back_at_s: dict[GroupId, float] = {}
        self.repaired: set[GroupId] = set()
        self.hosts[0].add_actor("training", self.train)
        self.hosts[0].add_actor("failures", self.lose).daemonize()

    # --------------------------------------------------------------------------------------------- losses, repairs

    def lose(self) -> None:
        for loss in self.scenario.failures.trace:
            self.simgrid.this_actor.sleep_until(loss.at_s)
            [group] = loss.groups
            if self.is_restarting or not self.is_up(group):
                continue
            self.links[group].turn_off()
            self.last_loss_s = self.engine.clock
            self.alarm.release()
            self.run.losses += 1
            if self.scenario.repair_s is not None:
                repair = self.hosts[group].add_actor(f"repair of {group}", lambda group=group: self.repair(group))
                repair.daemonize()
                self.repairs[group] = repair
                back_s = self.scenario.repair_s + self.scenario.costs.state_transfer_s
                self.back_at_s[group] = self.engine.clock + back_s

    def repair(self, group: GroupId) -> None:
        self.simgrid.this_actor.sleep_for(self.scenario.repair_s)
        self.simgrid.this_actor.sleep_for(self.scenario.costs.state_transfer_s)
        del self.repairs[group]
        self.repaired.add(group)

    def is_up(self, group: GroupId) -> bool:
        return bool(self.links[group].link_up.is_on())  # of the pair as a whole is_on() stays true

    def lost_members(self) -> list[GroupId]:
        return [group for group in self.members if not self.is_up(group)]

    # ---------------------------------------------------------------------------------------------------- training

    def train(self) -> None:
        scenario, sleep = self.scenario, self.simgrid.this_actor.sleep_for
        step = saved_step = 0
        saved_at_s, order = 0.0, self.first_order()
        while step < scenario.num_steps:
            order = order.for_groups(frozenset(self.members))
            if not self.step(step, order):
                if self.pause():
                    continue
                self.restart()
                step, saved_at_s, order = saved_step, self.engine.clock, self.first_order()
                continue
            step, now_s, ready = step + 1, self.engine.clock, sorted(self.repaired)
            if now_s - saved_at_s >= scenario.save_cadence_s():
                saved_step, saved_at_s = step, now_s
                sleep(scenario.costs.save_s)
            if ready and step < scenario.num_steps:
                self.take_in(ready)
                sleep(scenario.costs.join_s)
        self.run.end_s = self.engine.clock

    def pause(self) -> bool:
        """Whether the missing hosts are back before a restart would be over; those that are back then take part."""
        costs = self.scenario.costs
        while self.members and self.scenario.policy == "spare":
            shards = [hosts for hosts in self.placement.hosts if set(self.members).isdisjoint(hosts)]
            at_s = max(min(self.back_at_s.get(host, inf) for host in hosts) for hosts in shards)
            if at_s > self.engine.clock + costs.restart_s:
                return False
            if not self.lost_members() and self.passes(self.until_s(at_s)):
                self.run.pauses += 1
                self.take_in(sorted(group for group, back_s in self.back_at_s.items() if back_s <= at_s))
                self.simgrid.this_actor.sleep_for(costs.join_s)
                return True
            while not self.passes(self.until_s(self.last_loss_s + costs.detect_s) + costs.agree_s):
                pass
            self.members = [group for group in self.members if self.is_up(group)]
        return False

    def step(self, step: int, order: Order) -> bool:
        """Whether the step was committed; if not, some shard has no host."""
        done = [order.work]
        self.compute(order.work, self.factors[step])
        costs, built_at_s, retry_s = self.scenario.costs, 0.0, 0.0
        while self.lost_members() or not self.passes(self.until_s(built_at_s) + retry_s) or not self.reduces():
            while not self.passes(self.until_s(self.last_loss_s + costs.detect_s) + costs.agree_s):
                pass
            built_at_s, retry_s = self.engine.clock - costs.agree_s + costs.rebuild_s, costs.retry_s
            lost = self.lost_members()
            self.members = [group for group in self.members if group not in lost]
            if any(set(self.members).isdisjoint(hosts) for hosts in self.placement.host_array.tolist()):
                return False
            owed = [item for work in done for group in lost for item in work.of(group)]
            patch = order.patch(frozenset(self.members), owed)
            self.compute(patch, 1.0)
            done.append(patch)
        return True

    def compute(self, work: Work, factor: float) -> None:
        """Each group computes its microbatches; ends when the last of them is done."""
        microbatch_s = factor * self.scenario.costs.compute_s / self.scenario.microbatches_per_shard
        executions = []
        for group, load in enumerate(work.loads.tolist()):
            if load:
                execution = self.simgrid.this_actor.exec_init(load * microbatch_s * SPEED)
                execution.host = self.hosts[group]
                executions.append(execution.start())
        self.simgrid.ActivitySet(executions).wait_all()

    def until_s(self, at_s: float) -> float:
        """Seconds until this time; 0 if it has passed."""
        return max(at_s - self.engine.clock, 0.0)

    def passes(self, seconds: float) -> bool:
        """Time passes, until the next loss at most. Whether there was none."""
        self.alarm = self.simgrid.Semaphore(0)
        return seconds == 0 or self.alarm.acquire_timeout(seconds)

    def reduces(self) -> bool:
        """Whether every member's transfer to the next one went through."""
        hosts = [self.hosts[group] for group in self.members]
        size = round(self.scenario.costs.reduce_s * SPEED)
        ring = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
        transfers = [self.simgrid.Comm.sendto_async(sender, receiver, size) for sender, receiver in ring]
        left = self.simgrid.ActivitySet(transfers)
        try:
            while not left.empty():
                left.wait_any()
        except self.simgrid.NetworkFailureException:
            self.run.broken_reductions += 1
            for transfer in transfers:
                transfer.cancel()
            return False
        return True

    def take_in(self, groups: list[GroupId]) -> None:
        self.run.joined += len(groups)
        self.repaired.difference_update(groups)
        self.members = sorted([*self.members, *groups])
        for group in groups:
            del self.back_at_s[group]
            if group in self.repairs:  # it ends at this very moment
                self.repairs.pop(group).kill()
            self.links[group].turn_on()

    def restart(self) -> None:
        self.run.restarts += 1
        self.is_restarting = True
        self.simgrid.this_actor.sleep_for(self.scenario.costs.restart_s)
        self.is_restarting = False
        for repair in self.repairs.values():
            repair.kill()
        self.repairs.clear()
        self.back_at_s.clear()
        self.repaired.clear()
        self.members = [GroupId(group) for group in range(self.scenario.num_groups)]
        for link in self.links:
            link.turn_on()

    def first_order(self) -> Order:
        return initial_order(self.placement, self.scenario.microbatches_per_shard, self.scenario.granularity)
