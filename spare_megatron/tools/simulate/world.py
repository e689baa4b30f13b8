"""Virtual time of a simulated run, and an account of what it is spent on."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.compute_fit import finish_times, stretch
from spare_megatron.tools.simulate.failures import FailureProcess, Loss, SlowGroups, WithDomains, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.scenario import Scenario

CAUSES = (
    "compute",
    "extra_compute",
    "jitter",
    "evaluate",
    "reduce",
    "detect",
    "agree",
    "rebuild",
    "patch",
    "fetch",
    "save",
    "restart",
    "rework",
    "pause",
    "join",
)
"""compute and jitter are the steps' compute without losses, extra_compute its excess for losses and slow groups, which
is below 0 where lost groups free processors; evaluate is all of evaluations; rebuild is what reducing again takes
beyond reduce_s; pause is the wait for a host of each shard.
"""


class Ledger:
    """Accounts virtual time by cause; a restart turns unsaved time into rework. `now_s`: virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._kept = dict.fromkeys(CAUSES, 0.0)
        self._unsaved = dict.fromkeys(CAUSES, 0.0)

    def spend(self, cause: str, seconds: float) -> None:
        self.now_s += float(seconds)  # what NumPy draws is a type of its own, which no entry of the log has
        self._unsaved[cause] += seconds

    def spend_until(self, at_s: float, phases: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
        """Spends the phases in order up to `at_s`, and returns the rest of them."""
        for index, (cause, seconds) in enumerate(phases):
            if self.now_s + seconds >= at_s:
                passed_s = max(at_s - self.now_s, 0.0)
                self.spend(cause, passed_s)
                return [(cause, max(seconds - passed_s, 0.0)), *phases[index + 1 :]]
            self.spend(cause, seconds)
        return []

    def mark_saved(self) -> None:
        """Marks all time so far as saved; also at the end of a run."""
        for cause, seconds in self._unsaved.items():
            self._kept[cause] += seconds
            self._unsaved[cause] = 0.0

    def mark_rework(self) -> None:
        """Turns all time since the last save into rework."""
        rework_s = sum(self._unsaved.values())
        self._unsaved = dict.fromkeys(CAUSES, 0.0)
        self._kept["rework"] += rework_s

    def terms(self) -> dict[str, float]:
        """Seconds by cause, which add up to `now_s`."""
        return {cause: self._kept[cause] + self._unsaved[cause] for cause in CAUSES}


MAX_RATIO = 1000.0
"""A run that takes this many times as long as without failures is given up."""
_LEAST_JITTER = 1e-3
_JITTER_STREAM, _FAILURE_STREAM, _REPAIR_STREAM, _SLOW_STREAM, _LINK_STREAM = range(5)


class Stalled(ValueError):
    """The run makes next to no progress: failures come faster than steps or saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    end_s: float
    """Virtual time at the last commit."""
    failure_free_s: float
    """T_0: the same steps with the same jitter, one shard per group, without failures or saves."""
    evaluations_s: float
    """The part of that in evaluations."""
    num_steps: int
    restarts: int
    state_wipe_outs: int
    """Restarts for state partitions without a host."""
    pauses: int
    """Times that training waited for hosts of shards."""
    losses: int
    """Groups lost, counting each loss."""
    losses_by_cause: dict[str, int]
    drains: int
    """Groups that left before they were lost."""
    saves: int
    mean_down: float
    """Mean number of groups down, over the time outside restarts."""
    max_down: int
    goodput: float
    """Compute of committed steps over the time of all machines, spares and those in repair included."""
    terms: dict[str, float]
    """Seconds by cause, which add up to `end_s`. Rework is all time between the last save and a wipe-out, for any
    cause; the other terms count only what was kept."""
    decision_s: float
    """Real seconds spent in the controller; 0 without a clock."""

    @property
    def time_to_train_ratio(self) -> float:
        return self.end_s / self.failure_free_s

    @property
    def availability(self) -> float:
        """The share of time spent on steps that count: 1 - (save + restart + rework + pause) / end_s."""
        return 1 - sum(self.terms[cause] for cause in ("save", "restart", "rework", "pause")) / self.end_s

    def excess(self) -> dict[str, float]:
        """What each cause adds to the ratio; the sum is time_to_train_ratio - 1. Of reduce only the excess counts."""
        needed = {"compute": self.terms["compute"], "jitter": self.terms["jitter"], "evaluate": self.evaluations_s}
        needed["reduce"] = self.failure_free_s - sum(needed.values())
        return {
            cause: (seconds - needed.get(cause, 0.0)) / self.failure_free_s for cause, seconds in self.terms.items()
        }


class World:
    """Virtual time and the groups of one run. `process` says when groups are lost; None takes the scenario's.
    `num_state_wipe_outs`: wipe-outs of state partitions. `num_pauses`: waits for hosts of shards. `fenced_at_s`: when
    the survivors learned of the last loss that they agreed on.
    """

    def __init__(self, scenario: Scenario, seed: int, process: FailureProcess | None = None) -> None:
        self.scenario = scenario
        self.ledger = Ledger()
        failure_rng = np.random.default_rng([seed, _FAILURE_STREAM])
        process = process or make_process(scenario.failures, scenario.num_groups, failure_rng)
        if domains := scenario.failures.domains:
            process = WithDomains(process, domains, scenario.num_machines, failure_rng.spawn(1)[0])
        self.slow = SlowGroups(scenario.slow, scenario.max_groups, np.random.default_rng([seed, _SLOW_STREAM]))
        self._links = SlowGroups(scenario.slow_links, scenario.max_groups, np.random.default_rng([seed, _LINK_STREAM]))
        self.fleet = Fleet(scenario, process, np.random.default_rng([seed, _REPAIR_STREAM]))
        noise = np.random.default_rng([seed, _JITTER_STREAM]).standard_normal(scenario.num_steps)
        factors = np.maximum(1.0 + scenario.costs.jitter * noise, _LEAST_JITTER)
        # One factor per step, so that a repeated step takes as long as before.
        self._factors: list[float] = factors.tolist()
        costs, n, m = scenario.costs, scenario.num_groups, scenario.microbatches_per_shard
        # Of a step without losses, in units of compute_s: above 1 where groups share processors.
        self._first_stacks = float(finish_times(np.full(n, m), m, costs).max())
        policy, num_steps = scenario.evaluations, scenario.num_steps
        due = [policy.is_due(step, is_last=step == num_steps) for step in range(1, num_steps + 1)] if policy else []
        self._evaluations_s = sum(due) * costs.evaluate_s * self._first_stacks
        self.failure_free_s = float(factors.sum() * costs.compute_s) * self._first_stacks + (
            num_steps * ((costs.reduce_s + costs.update_s) * stretch(n, costs)) + self._evaluations_s
        )
        self._unnoticed: list[GroupId] = []
        self.lost_at_s: dict[GroupId, float] = {}
        self._last_loss_s = 0.0
        self.fenced_at_s = 0.0
        self.num_restarts = 0
        self.num_state_wipe_outs = self.num_pauses = 0
        self.num_saves = 0
        self.saved_step = 0

    @property
    def now_s(self) -> float:
        return self.ledger.now_s

    def compute(self, step: int, stacks: float) -> None:
        """All groups compute; the last one ends after `stacks` times compute_s."""
        factor, compute_s, first = self._factors[step], self.scenario.costs.compute_s, self._first_stacks
        self.ledger.spend("compute", compute_s * first)
        self.ledger.spend("jitter", compute_s * first * (factor - 1))
        if stacks != first:
            self.ledger.spend("extra_compute", compute_s * factor * (stacks - first))

    def reduce_s(self, groups: Sequence[GroupId]) -> float:
        """Seconds of a sum over these groups that starts now: all wait for the one with the slowest link."""
        seconds = self.scenario.costs.reduce_s * stretch(len(groups), self.scenario.costs)
        if self.scenario.slow_links.group_interval_s is None:
            return seconds
        return seconds * float(self._links.factors(self.now_s)[list(groups)].max(initial=1.0))

    def update(self, num_groups: int) -> None:
        """This many groups take the optimizer step; losses meanwhile are found in the next step."""
        self.ledger.spend("reduce", self.scenario.costs.update_s * stretch(num_groups, self.scenario.costs))

    def lost_meanwhile(self) -> list[GroupId]:
        """Groups lost up to now that no earlier call returned."""
        lost = [*self._unnoticed, *self._groups_of(self.fleet.lose_until(self.now_s))]
        self._unnoticed = []
        return lost

    def _groups_of(self, losses: Iterable[Loss]) -> list[GroupId]:
        return [group for loss in losses for group in self._noted(loss)]

    def _noted(self, loss: Loss) -> tuple[GroupId, ...]:
        if loss.groups:
            self._last_loss_s = loss.at_s
            self.lost_at_s |= dict.fromkeys(loss.groups, loss.at_s)
        return loss.groups

    def wait(self, phases: Sequence[tuple[str, float]]) -> tuple[GroupId, ...]:
        """Spends the phases until their end or the next loss of groups, which are returned."""
        left = list(phases)
        while left := self.ledger.spend_until(self.fleet.next_loss_s, left):
            groups = self._noted(self.fleet.lose())
            if groups:
                return groups
        return ()

    def notice(self, lost: Sequence[GroupId]) -> tuple[GroupId, ...]:
        """The survivors agree on losses; further losses start that over. Returns all groups lost by then, in order."""
        costs, noticed = self.scenario.costs, list(lost)
        while more := self.wait((("detect", self._until_fenced_s()), ("agree", costs.agree_s))):
            noticed += more
        self.fenced_at_s = self.now_s - costs.agree_s
        return tuple(noticed)

    def _until_fenced_s(self) -> float:
        return max(self._last_loss_s + self.scenario.costs.detect_s - self.now_s, 0.0)

    def hosts_back_s(self, hosts_of: Iterable[Collection[GroupId]]) -> float | None:
        """When each of these shards has one of its hosts back; None if a restart would be over earlier."""
        restarted_s = self.now_s + self.scenario.costs.restart_s
        ready_s = self.fleet.ready_by(restarted_s)
        back_s = max(min(ready_s.get(host, inf) for host in hosts) for hosts in hosts_of)
        return back_s if back_s <= restarted_s else None

    def save(self, step: int) -> None:
        """Saves the state after `step` steps; losses meanwhile are found in the next step."""
        self.ledger.spend("save", self.scenario.costs.save_s)
        self.ledger.mark_saved()
        self.saved_step, self.num_saves = step, self.num_saves + 1

    def drain(self, groups: tuple[GroupId, ...]) -> None:
        """These groups leave, and the others build a communicator without them."""
        self.fleet.drain(self.now_s, groups)
        self.ledger.spend("rebuild", self.scenario.costs.rebuild_s)

    def take_in(self, groups: tuple[GroupId, ...]) -> None:
        """All groups wait while these are admitted."""
        self._unnoticed += self._groups_of(self.fleet.take_in(self.now_s, groups))
        self.ledger.spend("join", self.scenario.costs.join_s)

    def restart(self) -> None:
        """All groups start again from the last save; raises `Stalled` if the run has exceeded MAX_RATIO."""
        if self.now_s > MAX_RATIO * self.failure_free_s:
            raise Stalled(
                f"{self.scenario.name}: after {MAX_RATIO:g} times the time without failures only {self.saved_step} of "
                f"{self.scenario.num_steps} steps are saved; save more often, or mask more losses"
            )
        began_s = self.now_s
        self.ledger.mark_rework()
        self.ledger.spend("restart", self.scenario.costs.restart_s)
        self.ledger.mark_saved()  # so that no later rollback turns the restart into rework
        self.fleet.restart(began_s, self.now_s)
        self.num_restarts += 1

    def result(self, decision_s: float) -> Result:
        terms = self.ledger.terms()
        num_computing = self.scenario.num_groups * self.scenario.group_machines
        return Result(
            end_s=self.now_s,
            failure_free_s=self.failure_free_s,
            evaluations_s=self._evaluations_s,
            num_steps=self.scenario.num_steps,
            restarts=self.num_restarts,
            state_wipe_outs=self.num_state_wipe_outs,
            pauses=self.num_pauses,
            losses=self.fleet.num_lost,
            losses_by_cause=dict(self.fleet.losses_by_cause),
            drains=self.fleet.num_drained,
            saves=self.num_saves,
            mean_down=self.fleet.mean_down(self.now_s, terms["restart"]),
            max_down=self.fleet.max_down,
            goodput=terms["compute"] / self.now_s * num_computing / self.scenario.num_machines,
            terms=terms,
            decision_s=decision_s,
        )
