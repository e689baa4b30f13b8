"""One simulated run from a scenario and a seed."""

from spare_megatron.simulator.chronicle import Chronicle, Sink
from spare_megatron.simulator.replication import disjoint_sets, run_replication
from spare_megatron.simulator.scenario import Scenario
from spare_megatron.simulator.spare_run import Clock, SpareRun
from spare_megatron.simulator.world import Result, World


def simulate(scenario: Scenario, seed: int, journal: Sink | None = None, clock: Clock | None = None) -> Result:
    """Trains in virtual time. The same arguments give the same result and the same journal, byte for byte.

    Args:
        scenario: What to simulate. The policy checkpoint_only is that of spare with one host per shard.
        seed: Seed of jitter, losses and repair times, which draw from streams of their own.
        journal: Takes the lines a real run of this history would have journaled; slow, O(N^2) for each attempt.
        clock: Real seconds, for `Result.decision_s`.

    Raises:
        Stalled: The run makes next to no progress.
        ValueError: A journal is asked for under replication, which has no decision log.
    """
    world = World(scenario, seed)
    if scenario.policy == "replication":
        if journal is not None:
            raise ValueError("the policy replication keeps no decision log, so that there is nothing to journal")
        run_replication(world, disjoint_sets(scenario))
        return world.result(decision_s=0.0)
    run = SpareRun(world, Chronicle(scenario, world, journal) if journal else None, clock)
    run.run()
    return world.result(run.decision_s)
