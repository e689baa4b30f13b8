"""The controller deals work by the paces that votes report and commits carry."""

from dataclasses import replace

import pytest

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import AppendEntry, ChangePaces, ComputePatch
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart, Retry, decode_entry, encode_entry
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import GroupId, Member, Slabs
from spare_megatron.stacking.order import Granularity
from spare_megatron.stacking.pace_evidence import PROBE_STEPS, PaceException
from spare_megatron.stacking.paces import Rounds
from spare_megatron.stacking.placement import make_placement

SETUP = ControllerSetup(
    placement=make_placement("golomb", 8, 3), microbatches_per_shard=16, num_steps=1000, rounds=Rounds()
)


class Run:
    """A controller, and a second one that folds the same log without reading a vote."""

    def __init__(self, setup: ControllerSetup = SETUP) -> None:
        self.controller, self.other = Controller(setup), Controller(setup)
        self.actions = self.controller.handle(RunStarted(), now_s=0.0)
        self.other.handle(RunStarted(), now_s=0.0)
        self.paces = dict.fromkeys(self.controller.members, 1_000_000)

    def step(self) -> Commit:
        """Commits a step at these paces."""
        controller = self.controller
        digest, loads = controller._plans[-1].digest, self.loads
        votes = {
            group: Vote(is_complete=True, plan_digest=digest, pace_ns=self.paces[group] if group in loads else 0)
            for group in controller.members
        }
        decided = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
        [entry] = [action.entry for action in decided if isinstance(action, AppendEntry)]
        assert isinstance(entry, Commit)
        self.fold(entry)
        return entry

    def fold(self, entry: Entry) -> None:
        read = EntryRead(index=self.controller.head, entry=decode_entry(encode_entry(entry)))
        self.actions = self.controller.handle(read, now_s=0.0)
        self.other.handle(read, now_s=5.0)
        assert self.other._plans[-1].digest == self.controller._plans[-1].digest, "all that matters is in the log"

    @property
    def loads(self) -> dict[int, int]:
        plan = self.controller._plans[-1]
        return {group: len(plan.work.of(group)) for group in self.controller.members if plan.work.of(group)}

    def make_slow(self, factor: float, group: int = 2) -> None:
        for _ in range(20):
            self.step()
        self.paces[GroupId(group)] = round(1_000_000 * factor)
        for _ in range(3):
            self.step()


def test_a_slow_group_is_dealt_less_work_in_the_step_after_the_third_slow_one() -> None:
    run = Run()
    for _ in range(20):
        assert run.step().paces == ()
    run.paces[GroupId(2)] = 2_000_000
    assert run.step().paces == (PaceException(GroupId(2), 2000),)
    run.step()
    assert run.loads[2] == 16
    run.step()
    assert [action for action in run.actions if isinstance(action, ChangePaces)] == [
        ChangePaces(step=23, permille={GroupId(2): 2000})
    ]
    assert (run.loads[2], max(run.loads.values())) == (9, 18)
    assert run.step().paces == (), "it keeps its pace, which is known"
    run.paces[GroupId(2)] = 1_000_000
    for _ in range(12):
        run.step()
    assert set(run.loads.values()) == {16}


@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_without_rounds_every_group_is_dealt_the_same(granularity: Granularity) -> None:
    run = Run(replace(SETUP, rounds=None, granularity=granularity))
    run.make_slow(3.0)
    assert run.step().paces == ()
    assert set(run.loads.values()) == {16}


def test_whole_shards_move_only_where_that_saves_time() -> None:
    run = Run(replace(SETUP, granularity="stack"))
    run.make_slow(1.7)
    assert set(run.loads.values()) == {16}, "another group would need twice the time for two shards"
    run = Run(replace(SETUP, granularity="stack"))
    run.make_slow(2.5)
    assert 2 not in run.loads


def test_a_patch_respects_the_paces() -> None:
    run = Run()
    run.make_slow(4.0, group=0)
    run.fold(Fence(group=GroupId(3)))
    run.fold(Retry(step=run.controller.step, attempt=run.controller.attempt))
    [patch] = [action for action in run.actions if isinstance(action, ComputePatch)]
    loads = patch.plan.work.loads
    hosts = {
        host for shard in range(8) for host in SETUP.placement.hosts[shard] if patch.plan.work.owners[shard, 0] >= 0
    }
    assert 0 in hosts, "it could have been asked"
    assert loads[0] < max(loads)


def test_a_group_that_rejoins_or_restarts_has_no_known_pace() -> None:
    run = Run()
    run.make_slow(2.0)
    run.fold(Fence(group=GroupId(2)))
    controller = run.controller
    run.fold(Commit(step=controller.step, attempt=controller.attempt, admit=(Member(GroupId(2), 1),)))
    assert set(run.loads.values()) == {16}
    run = Run()
    run.make_slow(2.0)
    members = tuple(Member(GroupId(group), 1) for group in range(8))
    run.fold(Restart(step=0, members=members))
    assert set(run.loads.values()) == {16}


def test_a_group_without_work_is_probed_now_and_then() -> None:
    run = Run()
    run.make_slow(60.0)
    assert 2 not in run.loads
    found = []
    for step in range(4 * PROBE_STEPS):
        run.step()
        if 2 in run.loads:
            found.append((step, run.loads[2]))
    assert found == [(PROBE_STEPS - 1, 1), (3 * PROBE_STEPS, 1)], "less and less often"


SHAPED = replace(
    SETUP,
    placement=make_placement("golomb", 4, 3),
    rounds=Rounds(fill=3),
    num_stages=4,
    slabs=Slabs(12, (4, 3)),
)


def shaped(stages: tuple[int, ...] = (3,)) -> Run:
    """A run in which group 2 has come back with so many stages."""
    run = Run(SHAPED)
    run.fold(Fence(group=GroupId(2)))
    run.fold(Commit(step=0, attempt=0, admit=(Member(GroupId(2), 1),), stages=stages))
    return run


def test_a_group_with_fewer_stages_is_dealt_what_it_computes_in_the_time_of_the_others() -> None:
    """Of 64 microbatches whole groups compute 17 in 17 + 3 rounds, and the other one 13 in 13 + 2 of 4/3: 20 each."""
    run = shaped()
    assert run.controller.stages == {2: 3}
    assert run.loads == {0: 17, 1: 17, 2: 13, 3: 17}
    assert shaped(stages=()).loads == dict.fromkeys(range(4), 16)


def test_the_pace_of_fewer_stages_is_no_slowness() -> None:
    run = shaped()
    run.paces[GroupId(2)] = 1_333_000
    for _ in range(20):
        assert run.step().paces == ()
    assert run.loads[2] == 13
    run.paces[GroupId(2)] = 2 * 1_333_000
    assert run.step().paces == (PaceException(GroupId(2), 2000),), "over its like"
    for _ in range(2):
        run.step()
    assert (run.loads[2], max(run.loads.values())) == (6, 20), "(7 + 2) rounds of 8/3 take longer than 20 + 3"
    controller = run.controller
    assert controller._all_paces.permille == {2: 2666}
    run.fold(Fence(group=GroupId(2), incarnation=1))
    run.fold(Commit(step=controller.step, attempt=controller.attempt, admit=(Member(GroupId(2), 2),)))
    assert (controller.stages, run.loads) == ({}, dict.fromkeys(range(4), 16)), "it is whole, and as fast as its like"


def test_without_rounds_a_group_with_fewer_stages_is_dealt_the_same() -> None:
    run = Run(replace(SHAPED, rounds=None))
    run.fold(Fence(group=GroupId(2)))
    run.fold(Commit(step=0, attempt=0, admit=(Member(GroupId(2), 1),), stages=(3,)))
    assert set(run.loads.values()) == {16}


@pytest.mark.parametrize("layers", [12, 13])
def test_groups_that_all_have_fewer_stages_are_dealt_the_same(layers: int) -> None:
    run = Run(replace(SHAPED, slabs=Slabs(layers, (4, 3))))
    run.fold(Restart(step=0, members=tuple(Member(GroupId(group), 1) for group in range(4)), stages=(3,) * 4))
    assert run.loads == dict.fromkeys(range(4), 16)


def test_entries_carry_the_stages_of_those_that_wait() -> None:
    run = Run(SHAPED)
    controller, back = run.controller, Member(GroupId(2), 1)
    run.fold(Fence(group=GroupId(2)))
    for stages, carried in (({}, ()), ({GroupId(2): 3}, (3,)), ({GroupId(1): 3}, ())):
        votes = dict.fromkeys(controller.members, Vote(is_complete=True, plan_digest=controller._plans[-1].digest))
        event = VotesRead(attempt=0, votes=votes, waiting=(back,), stages=stages)
        [append] = controller.handle(event, now_s=0.0)
        assert isinstance(append, AppendEntry)
        assert append.entry == Commit(step=0, attempt=0, admit=(back,), stages=carried)


def test_the_pipeline_fill_counts() -> None:
    """Of 8 groups one takes twice as long: (7 + 3) x 2 and (18 + 3) x 1, where 9 and 17 would take 24."""
    run = Run(replace(SETUP, rounds=Rounds(fill=3)))
    run.make_slow(2.0)
    assert (run.loads[2], max(run.loads.values())) == (7, 18)
