"""Rounds with other sites in a history: one group speaks with them, and what it brings is applied by all or by none."""

from dataclasses import replace
from random import Random

from spare_megatron.core.log.actions import ApplySync, AttemptSync
from spare_megatron.core.log.votes import RoundResult, Vote
from spare_megatron.stacking.layout import Member
from tests.protocol.scene import Scene
from tests.protocol.surroundings import Steps, Surroundings, Until
from tests.protocol.violation import Violation

NUM_MOVES = 6
"""Until a round has ended: enough for others to change."""


def draw_rounds(random: Random) -> Scene:
    """One of any kind without state partitions, in which rounds are often due."""
    scene = random.choice((Scene.draw, Scene.draw, Scene.draw_wipe_outs, Scene.draw_returns))(random)
    every = random.choice((0, 0, 1, 2))
    return replace(
        scene, partition_redundancy=0, sync_every=random.randint(1, 2), eval_every_steps=every, num_lanes=1, row_size=1
    )


class RoundWork:
    """What one group has of the round after its last step."""

    def __init__(self, member: Member, world: Surroundings) -> None:
        self._member, self._world = member, world
        self.put_aside: dict[int, tuple[RoundResult, str]] = {}
        """By attempt: what it came to, and the parameters that result."""
        self.synced_step = -1

    def take_part(self, action: AttemptSync, head: int, params: str) -> Steps:
        """Speaks with other sites, or waits for the group that does, until an entry makes that void."""
        world, attempt = self._world, action.attempt
        for _ in range(NUM_MOVES):
            yield None
        if action.voters[0] == self._member:
            came_about = world.choose("result", "result", "none") == "result"
            world.rounds[attempt] = RoundResult(attempt, (0,), f"{attempt}") if came_about else RoundResult()
        yield Until(lambda: attempt in world.rounds or world.is_written(head) or world.is_reported_broken(head))
        if attempt in world.rounds:
            yield None
            result = world.rounds[attempt]
            self.put_aside[attempt] = result, f"{params}|round {result.digest}" if result.round else params

    def vote(self, action: AttemptSync, vote: Vote) -> Vote:
        """As complete if the group has the result."""
        if action.attempt not in self.put_aside:
            return replace(vote, is_complete=False, params_digest="", state_digest="")
        result, params = self.put_aside[action.attempt]
        return replace(vote, params_digest=params if result.round else "", state_digest="", synced=result)

    def apply(self, action: ApplySync) -> str:
        """The parameters from here on."""
        entry = action.entry
        result, params = self.put_aside.get(entry.attempt, (None, ""))
        if result != (entry.round, entry.sites, entry.digest):
            raise Violation(f"{self._member} applies {entry}, and has put {result} aside")
        self.synced_step = entry.step
        return params
