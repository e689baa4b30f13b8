"""Runs one simulation from a scenario and a seed: of the policy replication here, of others by `spare_run`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from spare_megatron.core.log.actions import AttemptEvaluation, AttemptReduce
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart, Resume
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import BoolArray
from spare_megatron.tools.simulate.compute_fit import finish_times
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.simulated_journal import LineSink, SimulatedJournal
from spare_megatron.tools.simulate.spare_run import Clock, SpareRun
from spare_megatron.tools.simulate.world import Result, World


def simulate(scenario: Scenario, seed: int, journal: LineSink | None = None, clock: Clock | None = None) -> Result:
    """Trains in virtual time; the same arguments give the same result and the same journal, byte for byte.

    `seed` seeds separate streams for jitter, losses and repair times. `journal` receives the lines that a real run of
    this history would journal; slow, O(N^2) per attempt. `clock`: real seconds, for `Result.decision_s`. Raises
    `Stalled`, and ValueError if a journal is requested under replication, which has no decision log.
    """
    world = World(scenario, seed)
    if scenario.policy == "replication":
        if journal is not None:
            raise ValueError("the policy replication keeps no decision log, so that there is nothing to journal")
        run_replication(world, disjoint_sets(scenario))
        return world.result(decision_s=0.0)
    run = SpareRun(world, SimulatedJournal(scenario, world, journal) if journal else None, clock)
    run.run()
    return world.result(run.decision_s)


IsWhole = Callable[[BoolArray], bool]
"""Whether every shard has a group that is up, given which groups are up."""


def disjoint_sets(scenario: Scenario) -> IsWhole:
    """Disjoint sets of `redundancy` groups with the same shards; groups left over join sets at no cost in time."""
    num_sets = scenario.num_sets
    set_of = np.arange(scenario.num_groups) % num_sets
    return lambda is_up: bool(np.bincount(set_of[is_up], minlength=num_sets).all())


def run_replication(world: World, is_whole: IsWhole) -> None:
    """Trains to the end; every step takes `redundancy` shards of compute. While its shards have another group a loss
    costs nothing; otherwise survivors finish their compute, detect it as under the policy spare, and all groups
    restart.
    """
    scenario = world.scenario
    cadence_s, last_save_s, step = scenario.save_cadence_s(), 0.0, 0
    while step < scenario.num_steps:
        m = scenario.microbatches_per_shard
        loads = np.full(int(world.fleet.is_up.sum()), scenario.redundancy * m)
        world.compute(step, float(finish_times(loads, m, scenario.costs).max(initial=0.0)))
        world.lost_meanwhile()
        if is_whole(world.fleet.is_up) and _reduce(world, is_whole):
            step += 1
            world.update(int(world.fleet.is_up.sum()))
            if world.now_s - last_save_s >= cadence_s:
                last_save_s = world.now_s
                world.save(step)
            if (ready := world.fleet.ready(world.now_s)) and step < scenario.num_steps:
                world.take_in(ready)
        else:
            world.notice(())
            world.restart()
            step, last_save_s = world.saved_step, world.now_s
    world.ledger.mark_saved()


def _reduce(world: World, is_whole: IsWhole) -> bool:
    """Whether every shard kept a group until the reduction was complete."""
    groups = [GroupId(group) for group in np.flatnonzero(world.fleet.is_up).tolist()]
    end_s = world.now_s + world.reduce_s(groups)
    while world.wait((("reduce", end_s - world.now_s),)):
        if not is_whole(world.fleet.is_up):
            return False
    return True


What = Literal["commit", "save", "join", "loss", "restart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An entry of the decision log."""

    at_s: float
    """When the entry is folded."""
    what: What
    """A commit that orders a save or admits groups is named for that; a restart is recorded when training resumes."""
    num_alive: int
    """Groups that take part after the entry, before any join."""
    num_steps: int
    """Steps committed by then and not rolled back."""


def timeline_of(scenario: Scenario, seed: int) -> tuple[Moment, ...]:
    """The moments of one run, ascending; for replication, which has no log, of the policy spare. Raises `Stalled`."""
    if scenario.policy == "replication":
        scenario = replace(scenario, policy="spare")
    world = World(scenario, seed)
    recorder = _Recorder(scenario, world)
    SpareRun(world, recorder, None).run()
    return tuple(recorder.moments)


class _Recorder(SimulatedJournal):
    """Keeps only the log's entries; most of a journal is the contributions to attempts."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.moments: list[Moment] = []
        super().__init__(scenario, world, lambda _: None)
        self._num_steps = 0

    def on_entry(self, index: int, entry: Entry) -> None:  # noqa: ARG002 - the base class's signature
        match entry:
            case Commit(step=step, save=save, admit=admit):
                self._num_steps = step + 1
                self._add("save" if save else "join" if admit else "commit")
            case Restart(step=step):
                self._num_steps = step
                self._add("restart")
            case Resume():
                self._add("join")
            case Fence():
                self._add("loss")

    def _add(self, what: What) -> None:
        alive = int(self._world.fleet.is_up.sum())
        self.moments.append(Moment(at_s=self._world.now_s, what=what, num_alive=alive, num_steps=self._num_steps))

    def on_attempt(self, action: AttemptReduce, voters: Sequence[GroupId], *, is_complete: bool) -> None:
        pass

    def on_evaluation(self, action: AttemptEvaluation, voters: Sequence[GroupId]) -> None:
        pass

    def on_update(self, step: int, attempt: int, members: Sequence[GroupId]) -> None:
        pass
