"""Many histories by their seeds."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from tests.protocol.mutations import CORRECT, Protocol
from tests.protocol.outer_sites import run_outer_histories
from tests.protocol.scene import Scene
from tests.protocol.violation import Violation
from tests.protocol.world import World


@dataclass(slots=True)
class Sample:
    """What some histories came to.

    Attributes:
        num_histories: How many there were.
        counts: What happened in them, faults included.
        violations: Seed -> what was violated, and in which scene.
        longest: Most moves of one.
    """

    num_histories: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    longest: int = 0

    def add(self, other: "Sample") -> None:
        self.num_histories += other.num_histories
        self.counts += other.counts
        self.violations |= other.violations
        self.longest = max(self.longest, other.longest)


def run_histories(
    seeds: Iterable[int],
    protocol: Protocol = CORRECT,
    *,
    until_found: bool = False,
    draw: Callable[[Random], Scene] = Scene.draw,
) -> Sample:
    """Runs the history of every seed, or up to the first violation."""
    sample = Sample()
    for seed in seeds:
        random = Random(seed)
        scene = draw(random)
        world = World(scene, random, protocol)
        try:
            world.run()
        except Violation as violation:
            sample.violations[seed] = f"{violation} ({scene})"
        counts = world.num_faults + world.invariants.counts + world.invariants.partitions.counts
        sample.add(Sample(1, counts, {}, world.num_moves))
        if until_found and sample.violations:
            break
    return sample


def run_both(seeds: range) -> Sample:
    """The histories of these seeds, and as many of sites."""
    sample = run_histories(seeds)
    for seed in seeds:
        counts, violations = run_outer_histories([seed])
        sample.counts.update({f"sites: {what}": times for what, times in counts.items()})
        sample.violations |= {seed: f"sites: {text}" for seed, text in violations.items()}
    return sample
