"""The simulation finds planted bugs, so that its silence about the real protocol means something."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st

from tests.protocol.lanes import draw_lanes
from tests.protocol.mutations import (
    CORRECT,
    MUTATIONS,
    MUTATIONS_OF_COMPARISONS,
    MUTATIONS_OF_EVALUATIONS,
    MUTATIONS_OF_GRADIENTS,
    MUTATIONS_OF_LANES,
    MUTATIONS_OF_RESTARTS,
    MUTATIONS_OF_SHAPES,
    MUTATIONS_OF_SHARED_DATA,
    MUTATIONS_OF_SUMS,
    MUTATIONS_OF_UNSOUND_SHAPES,
    Protocol,
)
from tests.protocol.mutations_of_audits import (
    MUTATIONS_OF_AUDITS,
    MUTATIONS_OF_OWN_FINDINGS,
    MUTATIONS_OF_SHORTAGES,
    MUTATIONS_OF_SUSPECTS,
)
from tests.protocol.mutations_of_membership import (
    MUTATIONS_OF_DRAINS,
    MUTATIONS_OF_PAUSES,
    MUTATIONS_OF_THE_FOLD,
)
from tests.protocol.mutations_of_paces import MUTATIONS_OF_PACES
from tests.protocol.mutations_of_rounds import MUTATIONS_OF_ROUNDS
from tests.protocol.mutations_of_undos import MUTATIONS_OF_UNDOS
from tests.protocol.rounds import draw_rounds
from tests.protocol.sample import run_histories
from tests.protocol.scene import Scene
from tests.protocol.slabs import draw_shapes, draw_unsound_shapes
from tests.protocol.test_histories import scenes
from tests.protocol.undoing import draw_undos
from tests.protocol.violation import Violation
from tests.protocol.world import World

MAX_SEEDS = 2000

FOUND_AS = {
    "commits without all votes": "without the votes of groups|whose parameters are right|have different parameters",
    "reuses the names of communicators": "is built (twice|for)|meet in one collective",
    "keeps the batch of the first step": "which counts",
    "restarts with the larger batch": "which counts",
    "counts a patch twice": "times|named twice",
    "ignores fences": "but the log says|no progress|is fenced|no end",
    "commits what was discarded": "the sum of a fenced group|though the members hold",
    "goes on with different parameters": "have different parameters|though the members hold",
    "goes on with copies that differ": "have different parameters|whose parameters are right",
    "counts a copy and its donor as two": "whose parameters are right|halts the run",
    "lets a fence hit a later incarnation": "but the log says|no progress|is fenced|without the votes",
    "admits a group that was fenced while it waited": "but the log says|no progress|without the votes|without a host",
    "plans by a fetch time of its own": "groups have different plans",
    "loses shards that others can read": "ends with StopWipeOut|in no pause",
    "restarts with incarnations that took part": "with incarnations that took part",
    "restarts without hosts": "without a host",
    "restarts though all state is there": "ends with StopWipeOut|have all state",
    "resumes without hosts": "without a host",
    "resumes with kept buckets": "is to keep",
    "counts kept buckets twice": "which counts",
    "counts votes on an earlier attempt": "without the votes|different plans|though the members voted|are right",
    "gathers parameters from lost owners": "gathers parameters without partition",
    "counts copies that are not finished": "counts as a host of partition|without partition|in no pause",
    "releases state partitions before they are copied": "as a host of partition|gathers parameters|and has it not",
    "releases state partitions before copies are compared": "releases partition",
    "ends before all parameters are whole": "ends with FinishRun|without all parameters",
    "compares nothing of its last checkpoint": "after the last step is wrong, and is not reported",
    "trusts any report of a copy": "is proven, and compared by",
    "goes on without gathering parameters": "ends with StopHalted",
    "keeps buckets by rank": "is to keep|which counts|no progress|no end",
    "adds the norm by rank": "has other parameters",
    "posts slabs in another order in smaller groups": "no progress|no end",
    "sums no slab after an unsound sum": "no progress|no end",
    "remembers the stages of the lost": "takes the stages of groups to be",
    "admits all groups as whole": "takes the stages of groups to be",
    "deals by the pipeline of its own group": "groups have different plans",
    "keeps buckets that only some hold": "though the members hold|is to keep",
    "patches a step that was discarded": "has lost its local sum",
    "writes sums over local sums at once": "has lost its local sum",
    "casts votes on an earlier attempt for a block": "without the votes|though the members|different plans|are right",
    "passes entries to groups whose votes it has not cast": "no progress|no end",
    "waits for votes of the lost": "no progress|no end",
    "reads no votes after a loss": "no progress|no end",
    "leaves votes to lost relays": "no progress|no end",
    "applies sums with unsound parts": "which counts",
    "keeps sums with unsound parts": "which counts",
    "commits a wrong sum": "which counts",
    "keeps buckets of a wrong sum": "though the members hold",
    "counts half a row": "which counts",
    "counts an audit into a sum": "which counts",
    "votes with digests of another attempt": "that is none of step",
    "judges by one digest against one": "which computes right",
    "commits what is disputed": "the sum of a fenced group|have computed microbatches differently|the members voted",
    "commits sums of a group that found itself wrong": "have found themselves wrong",
    "keeps buckets of a sum that was found wrong": "keeps sums that",
    "fences without discarding": "keeps sums that it has found wrong",
    "commits suspects unconfirmed": "have other losses of a suspect|have not computed|microbatches differently",
    "asks about all suspects": "holds the run up",
    "votes without the patch of a lane": "which counts",
    "counts an evaluation into a gradient": "which counts|named twice",
    "keeps the value of a retried evaluation": "learns",
    "evaluates without what the lost have computed": "though the members voted",
    "compares parameters alone": "whose parameters are right|have different parameters|though the members hold",
    "keeps what was gathered from a wrong owner": "has not gathered anew|ends with StopHalted",
    "does not report what has failed": "no progress|no end",
    "fences a group at its first failure": "for lack of a resource",
    "fences groups that wait for one that fails": "for lack of a resource|lack a resource|halts the run",
    "lets a group fail again and again": "lack a resource again",
    "waits for groups that have failed": "no progress|no end",
    "installs pieces of an earlier step": "counts as a host of partition|other parameters",
    "copies state partitions in the step of the loss": "whose sums have not come to it",
    "publishes checkpoints without reading the log": "before it was fenced is wrong, and is used",
    "compares what it has saved in one step alone": "before it was fenced is wrong, and is used",
    "removes what is right for what may be wrong": "refuses all that is left",
    "deals work to a drained group": "which counts",
    "keeps a drained group": "but the log says",
    "takes back who has left": "but the log says",
    "forgets the fence of a later incarnation": "but the log says",
    "retries in the same attempt": "but the log says|in no pause",
    "admits before a round": "would take the state before the round",
    "decides a round by one vote": "without the votes|though the members voted|the members have",
    "forgets a round after a loss": "is a round due|though the members|without the votes|no progress|no end",
    "drains the last host": "leaves shards without a host",
    "drains before copies are compared": "are drained, and partition",
    "drains the writer of a checkpoint": "is drained too soon",
    "counts the paces that it has read itself": "groups have different plans",
    "deals the step under way by new paces": "named twice|which counts|different plans",
    "deals work to a group drained as slow": "which counts|takes no part",
    "undoes twice": "no group was found wrong since",
    "undoes past a save": "is undone, and is used",
    "undoes while a newcomer copies": "without the votes of groups",
    "goes back to a state that is not audited": "steps, which hold",
    "goes on without going back": "goes on without going back",
}


def draw_discards(random: Random) -> Scene:
    """One in which sums of several buckets are discarded."""
    scene = Scene.draw(random)
    faults = {**scene.fault_budget, "corrupt": 2, "break": 2}
    return replace(scene, num_buckets=5, partition_redundancy=0, fault_budget=faults)


def draw_copies(random: Random) -> Scene:
    """One in which state partitions are copied."""
    scene = Scene.draw(random)
    faults = {**scene.fault_budget, "crash": 2, "replace": 3}
    return replace(scene, partition_redundancy=min(scene.num_groups, 3), fault_budget=faults)


def draw_breaks(random: Random) -> Scene:
    """One in which parameters are gathered, and connections break while no group is lost."""
    scene = Scene.draw(random)
    faults = {**dict.fromkeys(scene.fault_budget, 0), "break": 3}
    return replace(scene, partition_redundancy=min(scene.num_groups, 2), fault_budget=faults)


def draw_late_copies(random: Random) -> Scene:
    """One in which state partitions are copied, and some groups have the parameters they report later than others."""
    faults = {**dict.fromkeys(Scene.draw(random).fault_budget, 0), "replace": 2, "suspect": 1, "break": 4}
    return replace(
        Scene.draw(random),
        num_groups=3,
        redundancy=3,
        num_steps=6,
        partition_redundancy=3,
        num_buckets=1,
        fault_moves=450,
        fault_budget=faults,
    )


def draw_last_saves(random: Random) -> Scene:
    """One of a step or two, the last of which is saved, in which parameters change."""
    scene = Scene.draw(random)
    faults = {**dict.fromkeys(scene.fault_budget, 0), "corrupt": 1}
    num_steps = random.randint(1, 2)
    moves = 20 * scene.num_groups * num_steps
    return replace(
        scene, num_steps=num_steps, save_interval_s=1e9, partition_redundancy=0, fault_moves=moves, fault_budget=faults
    )


def draw_saves(random: Random) -> Scene:
    """One in which every step is saved, and state changes."""
    scene = Scene.draw(random)
    num_groups, num_steps = 3, random.randint(3, 4)
    return replace(
        scene,
        num_groups=num_groups,
        redundancy=2,
        num_steps=num_steps,
        save_interval_s=1.0,
        keep_last=9,
        partition_redundancy=0,
        fault_moves=20 * num_groups * num_steps,
        fault_budget={**dict.fromkeys(scene.fault_budget, 0), "corrupt": 1, "pause": 1},
    )


def draw_few_kept(random: Random) -> Scene:
    """One of these in which the newest alone is kept."""
    return replace(draw_saves(random), keep_last=1)


def draw_wrong_returns(random: Random) -> Scene:
    """One in which groups come back again and again, and some may take over what is wrong."""
    num_groups, num_steps = 3, random.randint(4, 8)
    return replace(
        Scene.draw_returns(random),
        num_groups=num_groups,
        redundancy=num_groups,
        num_steps=num_steps,
        save_interval_s=None,
        fault_moves=60 * num_groups * num_steps,
        fault_budget={"corrupt": 1, "replace": 6},
    )


def draw_lost_relays(random: Random) -> Scene:
    """One in which relays are lost in the attempt in which others were."""
    scene = Scene.draw(random)
    num_groups = random.randint(3, 4)
    faults = {**dict.fromkeys(scene.fault_budget, 0), "crash": num_groups - 1, "suspect": 1, "pause": 1}
    return replace(
        scene, num_groups=num_groups, redundancy=num_groups, partition_redundancy=0, fan_in=2, fault_budget=faults
    )


RARE = {
    "goes on with copies that differ": Scene.draw_returns,
    "counts a copy and its donor as two": draw_wrong_returns,
    "leaves votes to lost relays": draw_lost_relays,
    "compares nothing of its last checkpoint": draw_last_saves,
    "trusts any report of a copy": draw_late_copies,
    "does not report what has failed": draw_breaks,
    "patches a step that was discarded": draw_discards,
    "installs pieces of an earlier step": draw_copies,
    "copies state partitions in the step of the loss": draw_copies,
    "publishes checkpoints without reading the log": draw_saves,
    "compares what it has saved in one step alone": draw_saves,
    "removes what is right for what may be wrong": draw_few_kept,
}


FIRST_SEEDS = {
    "publishes checkpoints without reading the log": 950,
    "restarts with the larger batch": 1380,
    "forgets the fence of a later incarnation": 160,
}
"""Seeds before these take long, and find nothing."""

PROTOCOLS_BY_SCENES = {
    mutation: (protocol, draw)
    for mutations, draw in (
        (MUTATIONS_OF_AUDITS, Scene.draw_audits),
        (MUTATIONS_OF_COMPARISONS, Scene.draw_corruptions),
        (MUTATIONS_OF_DRAINS, Scene.draw_drains),
        (MUTATIONS_OF_EVALUATIONS, Scene.draw_evaluations),
        (MUTATIONS_OF_GRADIENTS, Scene.draw_unsound),
        (MUTATIONS_OF_LANES, draw_lanes),
        (MUTATIONS_OF_OWN_FINDINGS, Scene.draw_own_findings),
        (MUTATIONS_OF_PACES, Scene.draw_slow),
        (MUTATIONS_OF_PAUSES, Scene.draw_pauses),
        (MUTATIONS_OF_RESTARTS, Scene.draw_wipe_outs),
        (MUTATIONS_OF_SHAPES, draw_shapes),
        (MUTATIONS_OF_SHARED_DATA, Scene.draw_shared),
        (MUTATIONS_OF_SHORTAGES, Scene.draw_shortages),
        (MUTATIONS_OF_SUMS, Scene.draw_flips),
        (MUTATIONS_OF_SUSPECTS, Scene.draw_suspects),
        (MUTATIONS_OF_THE_FOLD, Scene.draw),
        (MUTATIONS_OF_ROUNDS, draw_rounds),
        (MUTATIONS_OF_UNDOS, draw_undos),
        (MUTATIONS_OF_UNSOUND_SHAPES, draw_unsound_shapes),
    )
    for mutation, protocol in mutations.items()
}


@cache
def is_right(seed: int, draw: Callable[[Random], Scene]) -> bool:
    """Whether the real protocol violates nothing in this history, which many mutations ask for."""
    return run_histories([seed], draw=draw).violations == {}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_simulation_finds_a_protocol_that(mutation: str) -> None:
    draw = RARE.get(mutation, Scene.draw)
    seeds = range(FIRST_SEEDS.get(mutation, 0), MAX_SEEDS)
    found = run_histories(seeds, MUTATIONS[mutation], until_found=True, draw=draw)
    [(seed, violation)] = found.violations.items()
    with pytest.raises(Violation, match=FOUND_AS[mutation]):
        raise Violation(violation)
    assert [other for other in range(seeds.start, seed + 1) if not is_right(other, draw)] == []


@pytest.mark.parametrize("mutation", PROTOCOLS_BY_SCENES)
def test_the_simulation_of_certain_scenes_finds_a_protocol_that(mutation: str) -> None:
    protocol, draw = PROTOCOLS_BY_SCENES[mutation]
    seeds = range(FIRST_SEEDS.get(mutation, 0), MAX_SEEDS)
    found = run_histories(seeds, protocol, until_found=True, draw=draw)
    [violation] = found.violations.values()
    with pytest.raises(Violation, match=FOUND_AS[mutation]):
        raise Violation(violation)


def violates(scene: Scene, seed: int, protocol: Protocol) -> bool:
    """Whether the scene, in the order of this seed, violates an invariant."""
    try:
        World(scene, Random(seed), protocol).run()
    except Violation:
        return True
    return False


@pytest.mark.slow
def test_a_violation_shrinks_to_a_scene_for_people() -> None:
    protocol = MUTATIONS["counts a patch twice"]
    few = settings(max_examples=1000)
    orders = st.tuples(scenes(most_fan_in=1, most_groups=5, most_steps=2), st.integers(0, 99))
    scene, seed = find(orders, lambda order: violates(*order, protocol), settings=few)
    assert scene.num_steps == 1
    assert scene.num_groups <= 4
    assert sum(scene.fault_budget.values()) <= 4
    assert not violates(scene, seed, CORRECT)
