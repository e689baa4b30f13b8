"""The protocol in random interleavings: groups that fold one log, reduce and vote, and are lost at any moment."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from spare_megatron.core.controller import Controller, ControllerSetup
from spare_megatron.core.messages import (
    AppendEntry,
    AttemptReduce,
    ComputePatch,
    ComputeStep,
    Entry,
    EntryRead,
    Fence,
    FinishRun,
    ReadEntry,
    ReadVotes,
    RunStarted,
    StopHalted,
    StopWipeOut,
    UpdateModel,
    Vote,
    VotesRead,
)
from spare_megatron.core.order import Granularity
from spare_megatron.core.placement import make_placement
from spare_megatron.core.stepplan import Microbatch
from spare_megatron.core.topology import GroupId


def make_controller(num_groups: int, redundancy: int, m: int, steps: int, granularity: Granularity) -> Controller:
    setup = ControllerSetup(
        placement=make_placement("golomb", num_groups, redundancy),
        microbatches_per_shard=m,
        num_steps=steps,
        granularity=granularity,
    )
    return Controller(setup)


def fence(group: int) -> Fence:
    return Fence(group=GroupId(group))


class Simulation:
    """Groups that fold one log, compute, reduce and vote in a random interleaving, and are lost at random.

    It knows nothing of planning or deciding: it carries the controllers' actions out, as the runtime does. A sum is
    the multiset of contributed microbatches, so that what is counted can be compared with what should be.
    """

    def __init__(
        self, seed: int, *, num_groups: int, redundancy: int, granularity: Granularity, num_kills: int
    ) -> None:
        self.random = random.Random(seed)
        self.num_groups, self.m, self.steps = num_groups, 3, 3
        self.log: list[Entry] = []
        self.votes: dict[int, dict[GroupId, Vote]] = {}
        self.sums: dict[int, dict[GroupId, list[Microbatch]]] = {}
        self.applied: dict[GroupId, list[tuple[int, tuple[Microbatch, ...]]]] = {}
        self.stops: dict[GroupId, object] = {}
        self.num_kills = num_kills
        self.fenced_twice: list[GroupId] = []
        self.controllers = {
            GroupId(g): make_controller(num_groups, redundancy, self.m, self.steps, granularity)
            for g in range(num_groups)
        }
        self.local: dict[GroupId, list[Microbatch]] = {g: [] for g in self.controllers}
        self.runs = {g: self.group(g) for g in self.controllers}

    def run(self) -> None:
        while self.runs:
            group = self.random.choice(sorted(self.runs))
            if len(self.runs) > 1 and self.num_kills and self.random.random() < 0.02:
                self.num_kills -= 1
                del self.runs[group]
                self.log.append(fence(group))
                self.fenced_twice.append(group)
            elif self.fenced_twice and self.random.random() < 0.01:
                self.log.append(fence(self.fenced_twice.pop()))
            elif next(self.runs[group], None) == "done":
                del self.runs[group]

    def group(self, me: GroupId) -> Iterator[str]:
        controller = self.controllers[me]
        pending = list(controller.handle(RunStarted(), now_s=0.0))
        while pending:
            action, pending = pending[0], pending[1:]
            yield "step"
            match action:
                case ComputeStep(plan=plan):
                    self.local[me] = list(plan.work.of(me))
                case ComputePatch(plan=plan):
                    self.local[me] += plan.work.of(me)
                case AttemptReduce():
                    is_complete = yield from self.reduce(me, action, controller)
                    vote = Vote(is_complete=is_complete, plan_digest=action.plan_digest)
                    cast = self.votes.setdefault(action.attempt, {})
                    assert me not in cast, "a group votes once on an attempt"
                    cast[me] = vote
                    if len(cast) >= len(action.members):
                        pending = self.read_votes(controller, action.attempt) + pending
                case ReadVotes(attempt=attempt):
                    pending = self.read_votes(controller, attempt) + pending
                case AppendEntry(index=index, entry=entry):
                    if index == len(self.log):
                        self.log.append(entry)
                case ReadEntry(index=index):
                    while len(self.log) <= index:
                        yield "wait"
                    event = EntryRead(index=index, entry=self.log[index])
                    pending = list(controller.handle(event, now_s=0.0)) + pending
                case UpdateModel(step=step, attempt=attempt):
                    summed = [item for items in self.sums[attempt].values() for item in items]
                    self.applied.setdefault(me, []).append((step, tuple(sorted(summed))))
                case FinishRun() | StopWipeOut() | StopHalted():
                    self.stops[me] = action
        yield "done"

    def reduce(self, me: GroupId, action: AttemptReduce, controller: Controller) -> Iterator[str]:
        """Completes when every member has brought its part; gives up when the log has moved on."""
        self.sums.setdefault(action.attempt, {})[me] = list(self.local[me])
        while set(self.sums[action.attempt]) != set(action.members):
            if len(self.log) > controller.head:
                return False
            yield "wait"
        return self.random.random() < 0.9 or len(self.log) <= controller.head

    def read_votes(self, controller: Controller, attempt: int) -> list[object]:
        event = VotesRead(attempt=attempt, votes=dict(self.votes.get(attempt, {})))
        return list(controller.handle(event, now_s=0.0))


@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_lost_when_every_commit_counts_each_microbatch_once(seed: int, granularity: Granularity) -> None:
    simulation = Simulation(seed, num_groups=5, redundancy=3, granularity=granularity, num_kills=3)
    simulation.run()
    everything = {Microbatch(s, k) for s in range(5) for k in range(simulation.m)}
    lost = {entry.group for entry in simulation.log if isinstance(entry, Fence)}
    survivors = set(simulation.controllers) - lost
    stops = {simulation.stops[group] for group in survivors}
    assert len(stops) == 1, "the survivors end alike"
    applied = [simulation.applied.get(group, []) for group in survivors]
    assert all(history == applied[0] for history in applied)
    for _, counted in applied[0]:
        assert Counter(counted) == Counter(everything)
    if isinstance(stops.pop(), FinishRun):
        assert [step for step, _ in applied[0]] == list(range(simulation.steps))


def test_the_random_losses_reach_patches_and_wipe_outs() -> None:
    """The test above would prove nothing if no loss ever cost a sum."""
    kinds: Counter[str] = Counter()
    for seed in range(150):
        simulation = Simulation(seed, num_groups=5, redundancy=3, granularity="microbatch", num_kills=3)
        simulation.run()
        kinds.update(type(entry).__name__ for entry in simulation.log)
        kinds.update({type(stop).__name__ for stop in simulation.stops.values()})
    assert kinds["Retry"] > 20
    assert kinds["Fence"] > 100
    assert kinds["StopWipeOut"] > 3
    assert kinds["FinishRun"] > 50
