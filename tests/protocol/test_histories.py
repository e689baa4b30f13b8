"""The protocol in random histories: crashes, false suspicions, late and repeated fences, pauses, store outages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.core.log.entries import Commit, Finish
from tests.protocol.lanes import draw_lanes
from tests.protocol.mutations import CORRECT, MUTATIONS
from tests.protocol.rounds import draw_rounds
from tests.protocol.sample import run_histories
from tests.protocol.scene import FAULTS, MAX_BREAKS, Scene
from tests.protocol.slabs import draw_shapes
from tests.protocol.undoing import draw_undos
from tests.protocol.world import World


@dataclass(frozen=True, slots=True)
class Kind:
    """Histories of certain scenes, and how often what they are drawn for happens in them at the least."""

    num_histories: int
    draw: Callable[[Random], Scene]
    least: dict[str, int]
    most: dict[str, int] = field(default_factory=dict)


EVERYTHING = {
    "Commit": 600,
    "Retry": 300,
    "StopWipeOut": 50,
    "FinishRun": 500,
    "save": 100,
    "fence of a fenced group": 50,
    "fence of an earlier incarnation": 3,
    "fence of a waiting group": 20,
    "admission": 80,
    "void admission": 5,
    "fenced while alive": 100,
    "vote of a fenced group": 100,
    "commit with the sum of a fenced group": 15,
    "discard": 20,
    "refused checkpoint": 1,  # most wrong state is found before it is saved
    "superseded checkpoint": 10,
    "vote of a block": 60,
    "vote without its relay": 100,
    "votes left to a relay": 25,
    "votes not read yet": 300,
    "retry that keeps buckets": 25,
    "step with buckets of several attempts": 8,
    "Finish": 50,
    "gather": 500,
    "broken gather": 50,
    "restored": 100,
    "released": 10,
    "proven": 10,
    "piece too late": 1,
    "state wipe-out": 100,
    "gather anew": 10,
    "Halt": 10,
    **dict.fromkeys(FAULTS, 100),
}
HISTORIES = {
    "all": Kind(550, Scene.draw, EVERYTHING),
    "wipe-outs": Kind(
        150,
        Scene.draw_wipe_outs,
        {
            "Restart": 100,
            "GiveUp": 3,
            "StopWipeOut": 50,
            "FinishRun": 200,
            "save": 100,
            "state wipe-out": 50,
            "superseded checkpoint": 15,
        },
    ),
    "lanes": Kind(60, draw_lanes, {"Commit": 60, "Retry": 30, "FinishRun": 50}),
    "groups with fewer stages": Kind(
        150,
        draw_shapes,
        {
            "attempt with fewer stages": 1000,
            "Resume": 20,
            "Restart": 10,
            "retry that keeps buckets": 40,
            "step with buckets of several attempts": 20,
            "ChangePaces": 25,
            "admission": 100,
            "drained": 25,
            "FinishRun": 150,
        },
    ),
    "pauses": Kind(
        200,
        Scene.draw_pauses,
        {
            "Resume": 50,
            "resume of an evaluation": 5,
            "resume with state partitions": 10,
            "GiveUp": 1,
            "Restart": 20,
            "FinishRun": 200,
        },
    ),
    "corruptions": Kind(
        100,
        Scene.draw_corruptions,
        {
            "corrupt": 100,
            "discard": 50,
            "gather anew": 50,
            "restored": 100,
            "FinishRun": 100,
            "state wipe-out": 10,
        },
    ),
    "unsound gradients": Kind(
        150,
        Scene.draw_unsound,
        {
            "unsound": 200,
            "sum with an unsound part": 200,
            "raises for its gradients": 100,
            "FinishRun": 200,
            "retry that keeps buckets": 30,
            "step with buckets of several attempts": 30,
            "admission": 20,
        },
        {"Halt": 0},
    ),
    "wrong sums": Kind(
        100, Scene.draw_flips, {"flip": 150, "wrong sum": 150, "fence for wrong sums": 1, "FinishRun": 150}, {"Halt": 0}
    ),
    "returns with wrong state": Kind(
        300, Scene.draw_returns, {"corrupt": 250, "admission": 400, "discard": 120, "Halt": 20, "FinishRun": 800}
    ),
    "drains": Kind(
        60,
        Scene.draw_drains,
        {"drained": 30, "handed over": 20, "admission": 20, "Restart": 2, "save": 60, "FinishRun": 100},
    ),
    "slow groups": Kind(
        60, Scene.draw_slow, {"ChangePaces": 60, "Retry": 40, "admission": 15, "drained": 20, "FinishRun": 60}
    ),
    "growth": Kind(
        40, Scene.draw_growth, {"drained": 15, "admission": 40, "admission of a further group": 15, "FinishRun": 100}
    ),
    "evaluations": Kind(
        150,
        Scene.draw_evaluations,
        {"Evaluated": 200, "evaluation after a loss": 10, "Restart": 5, "FinishRun": 100, "discard": 5},
    ),
    "shared data": Kind(
        100, Scene.draw_shared, {"cold microbatch": 300, "Retry": 50, "admission": 10, "FinishRun": 60}
    ),
    "audits": Kind(
        120,
        Scene.draw_audits,
        {
            "dispute": 60,
            "saved dispute": 60,
            "outvoted": 40,
            "commit with audits": 200,
            "halt over an audit": 1,
            "FinishRun": 100,
        },
    ),
    "suspects": Kind(
        120,
        Scene.draw_suspects,
        {
            "question about suspects": 100,
            "commit with agreed suspects": 60,
            "dispute over a loss": 15,
            "outvoted": 20,
            "FinishRun": 100,
        },
    ),
    "groups that find themselves wrong": Kind(
        150,
        Scene.draw_own_findings,
        {
            "fence for own wrong numbers": 50,
            "halt for own wrong numbers": 2,
            "StopHalted": 5,
            "FinishRun": 100,
            "sum of a group lost since it found itself wrong": 1,
            "retry that keeps buckets": 5,
        },
    ),
    "rounds of sites": Kind(
        160, draw_rounds, {"Synced": 200, "round after a loss": 4, "Restart": 10, "FinishRun": 100}
    ),
    "undos": Kind(
        160, draw_undos, {"Undo": 30, "drift": 120, "outvoted": 60, "refused checkpoint": 10, "FinishRun": 300}
    ),
}
NUM_SHORTAGE_HISTORIES, NUM_SHORTAGE_AT_NIGHT = 250, 1000


@pytest.mark.parametrize("name", HISTORIES)
def test_no_history_violates_an_invariant_and_together_they_reach_what_they_are_drawn_for(name: str) -> None:
    kind = HISTORIES[name]
    sample = run_histories(range(kind.num_histories), draw=kind.draw)
    assert sample.violations == {}
    assert sample.num_histories == kind.num_histories
    assert {what: sample.counts[what] for what in kind.least if sample.counts[what] < kind.least[what]} == {}
    assert {what: sample.counts[what] for what in kind.most if sample.counts[what] > kind.most[what]} == {}
    if name == "all":  # leaders that see the same votes decide alike, and one of their entries stands
        assert sample.counts["decisions"] > 1.2 * (sample.counts["Commit"] + sample.counts["Retry"])


@pytest.mark.parametrize("num_histories", [NUM_SHORTAGE_HISTORIES, NUM_SHORTAGE_AT_NIGHT])
def test_no_history_of_shortages_violates_an_invariant(num_histories: int) -> None:
    """A group that lacks a resource twice costs itself alone, and none halts the run unless all lack one."""
    sample = run_histories(range(num_histories), draw=Scene.draw_shortages)
    assert sample.violations == {}
    least = {"lack": 1800, "lack everywhere": 200, "fence for lack of a resource": 300, "FinishRun": 1000}
    least |= {"halt for lack of a resource": 60, "broken gather": 60, "retry that keeps buckets": 30}
    share = num_histories / NUM_SHORTAGE_AT_NIGHT
    assert {what: sample.counts[what] for what in least if sample.counts[what] < share * least[what]} == {}
    assert sample.counts["Halt"] == sample.counts["halt for lack of a resource"]


@st.composite
def scenes(draw: st.DrawFn, most_fan_in: int = 3, most_groups: int = 7, most_steps: int = 6) -> Scene:
    """Scenes that shrink to few groups, few steps and few faults."""
    num_groups = draw(st.integers(2, most_groups))
    num_steps = draw(st.integers(1, most_steps))
    return Scene(
        num_groups=num_groups,
        redundancy=draw(st.integers(1, min(num_groups, 4))),
        microbatches_per_shard=draw(st.integers(1, 3)),
        num_steps=num_steps,
        granularity=draw(st.sampled_from(("microbatch", "stack"))),
        save_interval_s=draw(st.sampled_from((None, 100.0))),
        fault_moves=draw(st.integers(1, 40 * num_groups * num_steps)),
        fault_budget={fault: draw(st.integers(0, MAX_BREAKS)) for fault in FAULTS},
        partition_redundancy=draw(st.integers(0, min(num_groups, 3))),
        max_restarts=draw(st.integers(0, 2)),
        pauses=draw(st.booleans()),
        num_buckets=draw(st.integers(1, 5)),
        fan_in=draw(st.integers(1, most_fan_in)),
        eval_every_steps=draw(st.integers(0, 2)),
        ramp_steps=draw(st.integers(0, num_steps)),
    )


@given(scene=scenes(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_no_scene_leads_to_a_violation(scene: Scene, seed: int) -> None:
    world = World(scene, Random(seed), CORRECT)
    world.run()
    committed = {entry.step for entry in world.invariants.entries if isinstance(entry, Commit)}
    is_finished = any(isinstance(entry, Finish) for entry in world.invariants.entries)
    assert committed == set(range(scene.num_steps if is_finished else len(committed)))


def test_the_same_seed_gives_the_same_history() -> None:
    logs = []
    for _ in range(2):
        random = Random(5)
        world = World(Scene.draw(random), random, CORRECT)
        world.run()
        logs.append((world.num_moves, world.invariants.entries))
    assert logs[0] == logs[1]
    assert len(logs[0][1]) > 1


def test_the_mutations_are_no_part_of_the_protocol_under_test() -> None:
    assert CORRECT not in MUTATIONS.values()
