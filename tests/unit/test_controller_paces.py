"""The controller deals work by the paces that votes report and commits carry."""

from dataclasses import replace

import pytest

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import AppendEntry, ChangePaces, ComputePatch
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart, Retry, decode_entry, encode_entry
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import GroupId, Member
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


def test_the_pipeline_fill_counts() -> None:
    """Of 8 groups one takes twice as long: (7 + 3) x 2 and (18 + 3) x 1, where 9 and 17 would take 24."""
    run = Run(replace(SETUP, rounds=Rounds(fill=3)))
    run.make_slow(2.0)
    assert (run.loads[2], max(run.loads.values())) == (7, 18)
