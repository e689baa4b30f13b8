"""What a history begins with, and which faults may strike in it."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random
from typing import NamedTuple

from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.layout import Member, Slabs
from spare_megatron.stacking.order import Granularity

MAX_BREAKS = 4
"""Reductions that break between living groups; the controller halts a run at more than five in a row."""

NUM_LAYERS = 12

FAULTS = ("crash", "suspect", "fence again", "pause", "outage", "store restart", "replace", "break", "corrupt")
"""What may happen: a process dies; a living group is suspected; a suspected one is suspected by one more; a process
stands still; the store stops answering, or also forgets the answers on their way; a group starts again, whether it was
lost or not; a reduction breaks; the parameters of a process change, or a state partition of it.
"""


class SlowGroup(NamedTuple):
    """A group that takes `factor` times as long for a microbatch from the step `first` to before `end`."""

    group: int
    first: int
    end: int
    factor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a history begins with, and what may happen in it."""

    num_groups: int
    redundancy: int
    microbatches_per_shard: int
    num_steps: int
    granularity: Granularity
    save_interval_s: float | None
    fault_moves: int
    """Moves after which the faults stop."""
    fault_budget: dict[str, int] = field(hash=False)
    partition_redundancy: int = 0
    """Hosts of each state partition of the optimizer; 0 if each group has all of it."""
    num_buckets: int = 1
    """Of the gradients of a group."""
    max_restarts: int = 0
    """After a wipe-out."""
    pauses: bool = False
    """Whether groups wait for the hosts of a shard while they have all state; else only a restart follows."""
    fan_in: int = 1
    """Most groups whose votes one of them casts."""
    eval_every_steps: int = 0
    """Steps between evaluations; 0: none."""
    eval_microbatches_per_shard: int = 1
    sync_every: int = 0
    """Steps between rounds with other sites; 0: none."""
    keep_last: int = 9
    """Newest checkpoints that are kept. With 1 nothing else is left if that turns out to be wrong."""
    audit_every_steps: int = 0
    """Steps between audits; 0: none."""
    snapshot_every: int = 0
    """Steps between snapshots in the memory of nodes; 0: none."""
    suspect_every: int = 0
    """Of so many microbatches one has data with a suspect loss; 0: none, and no loss is suspect."""
    checks_itself: bool = False
    """Whether groups find by checks of their own whatever they compute wrongly."""
    num_further: int = 0
    """Groups beyond those of the beginning that may be admitted; they host no shard."""
    ramp_steps: int = 0
    """Steps over which shards grow from one microbatch; 0 if they have as many in every step."""
    fetch: int | None = None
    """Thousandths of a microbatch's time until a group has data that it does not host; None if it cannot read them."""

    slow: tuple["SlowGroup", ...] | None = None
    """Groups that compute slower for some steps; None deals the same work to all."""
    num_lanes: int = 1
    """Of every group."""
    row_size: int = 1
    """Microbatches of a unit of work, which lanes compute together."""
    lengths: tuple[int, ...] = (1,)
    """Stages that groups may have, most first, as in the beginning; a group that comes back has one of them."""

    @property
    def slabs(self) -> Slabs:
        return Slabs(NUM_LAYERS, self.lengths)

    def stages_of(self, member: Member) -> int:
        return self.lengths[(member.group + member.incarnation) % len(self.lengths) if member.incarnation else 0]

    def with_lanes(self, num_lanes: int, row_size: int) -> "Scene":
        return replace(self, num_lanes=num_lanes, row_size=row_size)

    @property
    def ramp(self) -> BatchRamp | None:
        if not self.ramp_steps:
            return None
        return BatchRamp(largest=self.microbatches_per_shard, start=1, steps=self.ramp_steps)

    @property
    def sizes(self) -> list[int]:
        """Units of work of a shard in each step, without the code under test."""
        most = self.microbatches_per_shard
        if not self.ramp_steps:
            return [most] * self.num_steps
        increases = [math.ceil(Fraction(k * self.ramp_steps, most - 1)) for k in range(1, most)]
        return [1 + sum(step >= increase for increase in increases) for step in range(self.num_steps)]

    @classmethod
    def draw(cls, random: Random) -> "Scene":
        num_groups = random.randint(2, 7)
        num_steps = random.randint(1, 6)
        return cls(
            num_groups=num_groups,
            redundancy=random.randint(min(num_groups, 2), min(num_groups, 4)),
            microbatches_per_shard=random.randint(1, 3),
            num_steps=num_steps,
            granularity=random.choice(("microbatch", "stack")),
            save_interval_s=random.choice((None, 100.0)),
            fault_moves=random.randint(1, 40 * num_groups * num_steps),
            fault_budget={
                "crash": min(random.randint(0, num_groups), random.randint(0, num_groups)),
                "suspect": random.choice((0, 0, 1, 2)),
                "fence again": random.choice((0, 2, 4)),
                "pause": random.choice((0, 1, 3)),
                "outage": random.choice((0, 1, 2)),
                "store restart": random.choice((0, 1, 2)),
                "replace": random.choice((0, 1, 3)),
                "break": random.choice((0, 1, MAX_BREAKS)),
                "corrupt": random.choice((0, 0, 1, 2)),
            },
            partition_redundancy=min(num_groups, random.choice((0, 0, 0, 1, 2, 3, 3))),
            num_buckets=random.choice((1, 1, 5)),
            fan_in=random.choice((1, 1, 2, 3)),
            keep_last=random.choice((1, 9)),
            ramp_steps=0 if num_steps % 2 else num_steps // 2,
            pauses=num_groups % 3 == 0,
        )

    @classmethod
    def draw_evaluations(cls, random: Random) -> "Scene":
        """One of any kind that is evaluated often."""
        kinds = (cls.draw, cls.draw, cls.draw_wipe_outs, cls.draw_corruptions, cls.draw_unsound, cls.draw_returns)
        scene = random.choice(kinds)(random)
        return replace(
            scene,
            eval_every_steps=random.randint(1, 2),
            eval_microbatches_per_shard=random.randint(1, scene.microbatches_per_shard),
        )

    @classmethod
    def draw_wipe_outs(cls, random: Random) -> "Scene":
        """One in which few losses leave a shard without a host, and training may start again."""
        num_groups = random.randint(2, 5)
        num_steps = random.randint(2, 6)
        return cls(
            num_groups=num_groups,
            redundancy=random.randint(1, 2),
            microbatches_per_shard=random.randint(1, 2),
            num_steps=num_steps,
            granularity=random.choice(("microbatch", "stack")),
            save_interval_s=random.choice((None, 20.0)),
            fault_moves=random.randint(1, 60 * num_groups * num_steps),
            fault_budget={
                "crash": random.randint(1, 3 * num_groups),
                "suspect": random.choice((0, 1, 2)),
                "fence again": random.choice((0, 2)),
                "pause": random.choice((0, 1, 3)),
                "outage": random.choice((0, 1)),
                "replace": random.choice((0, 1, 3)),
                "corrupt": random.choice((0, 0, 1)),
            },
            max_restarts=random.randint(1, 4),
            partition_redundancy=min(num_groups, random.choice((0, 0, 1, 2))),
            fan_in=random.choice((1, 1, 2)),
            keep_last=random.choice((1, 9)),
            ramp_steps=0 if num_steps % 2 else num_steps - 1,
        )

    @classmethod
    def draw_pauses(cls, random: Random) -> "Scene":
        """One in which losses leave shards without a host, and mostly not the state; those who are lost come back."""
        scene = cls.draw_wipe_outs(random)
        num_groups = max(scene.num_groups, 3)
        return replace(
            scene,
            num_groups=num_groups,
            pauses=True,
            fault_budget={**scene.fault_budget, "crash": random.randint(1, 2 * num_groups)},
            max_restarts=random.choice((0, 2)),
            partition_redundancy=random.choice((0, 0, 3, num_groups)),
            num_buckets=random.choice((1, 5)),
            eval_every_steps=random.choice((0, 0, 1)),
        )

    @classmethod
    def draw_corruptions(cls, random: Random) -> "Scene":
        """One with state partitions in which little else happens than that state changes, at any step."""
        num_groups = random.randint(4, 7)
        num_steps = random.randint(3, 8)
        return cls(
            num_groups=num_groups,
            redundancy=num_groups - 1,
            microbatches_per_shard=1,
            num_steps=num_steps,
            granularity="microbatch",
            save_interval_s=None,
            fault_moves=20 * num_groups * num_steps,
            fault_budget={
                "corrupt": random.randint(1, 2),
                "crash": random.choice((0, 1)),
                "replace": random.choice((0, 1)),
                "break": random.choice((0, 0, 1)),
            },
            partition_redundancy=random.choice((2, 3, 3, 4)),
        )

    @classmethod
    def _draw_hosted(cls, random: Random, groups: tuple[int, int], steps: tuple[int, int]) -> "Scene":
        """One without faults yet, in which every shard has two hosts or more."""
        num_groups, num_steps = random.randint(*groups), random.randint(*steps)
        return cls(
            num_groups=num_groups,
            redundancy=random.randint(2, num_groups),
            microbatches_per_shard=random.randint(1, 2),
            num_steps=num_steps,
            granularity=random.choice(("microbatch", "stack")),
            save_interval_s=None,
            fault_moves=0,
            fault_budget={},
        )

    @classmethod
    def draw_unsound(cls, random: Random) -> "Scene":
        """One in which gradients become unsound on their way, and little else happens.

        The fault `unsound` is none of `FAULTS`: a local sum of a bucket that is still to be posted is not finite.
        """
        scene = cls._draw_hosted(random, groups=(3, 6), steps=(1, 5))
        return replace(
            scene,
            fault_moves=30 * scene.num_groups * scene.num_steps,
            fault_budget={
                "unsound": random.randint(1, 3),
                "crash": random.choice((0, 0, 1)),
                "suspect": random.choice((0, 0, 1)),
                "replace": random.choice((0, 1, 2)),
                "break": random.choice((0, 0, 1)),
                "pause": random.choice((0, 1)),
            },
            partition_redundancy=min(scene.num_groups, random.choice((0, 0, 3))),
            num_buckets=random.choice((1, 5, 8)),
            fan_in=random.choice((1, 2)),
        )

    @classmethod
    def draw_flips(cls, random: Random) -> "Scene":
        """One in which sums change on their way, and little else happens.

        The fault `flip` is none of `FAULTS`: it strikes what a group sends or receives next. `flip always` strikes all
        that one receives, which names it where sums come to all groups.
        """
        scene = cls.draw_unsound(random)
        always = 0 if scene.partition_redundancy else random.choice((0, 0, 1))
        faults = {**scene.fault_budget, "unsound": 0, "flip": random.randint(1, 3), "flip always": always}
        return replace(scene, fault_budget=faults, save_interval_s=random.choice((None, 20.0)))

    @classmethod
    def draw_shortages(cls, random: Random) -> "Scene":
        """One in which groups lack what it takes to connect or to post, for a while, and little else happens.

        The faults `lack` and `lack everywhere` are none of `FAULTS`: so many such operations of a group, or of all,
        fail at once.
        """
        scene = cls._draw_hosted(random, groups=(2, 5), steps=(2, 3))
        return replace(
            scene,
            fault_moves=20 * scene.num_groups * scene.num_steps,
            fault_budget={
                "lack": random.randint(1, 4),
                "lack everywhere": random.choice((0, 0, 1)),
                "crash": random.choice((0, 1, 2)),
                "suspect": random.choice((0, 0, 1)),
                "replace": random.choice((0, 1, 2)),
                "break": random.choice((0, 0, 1)),
                "pause": random.choice((0, 1)),
            },
            partition_redundancy=min(scene.num_groups, random.choice((0, 0, 3))),
            num_buckets=random.choice((1, 5)),
            fan_in=random.choice((1, 2)),
            pauses=random.choice((False, True)),
            eval_every_steps=random.choice((0, 0, 2)),
        )

    @classmethod
    def draw_audits(cls, random: Random) -> "Scene":
        """One with audits, in which groups compute wrongly, and some are lost or come back meanwhile.

        The fault `miscompute` is none of `FAULTS`: a group computes wrongly, once or from now on.
        """
        scene = cls._draw_hosted(random, groups=(2, 6), steps=(2, 6))
        shared = random.choice((None, None, 0))
        return replace(
            scene,
            granularity=scene.granularity if shared is None else "microbatch",
            fetch=shared,
            fault_moves=25 * scene.num_groups * scene.num_steps,
            fault_budget={
                "miscompute": random.randint(1, 3),
                "crash": random.choice((0, 0, 1)),
                "suspect": random.choice((0, 0, 1)),
                "replace": random.choice((0, 1, 3)),
                "break": random.choice((0, 0, 1)),
                "pause": random.choice((0, 1)),
            },
            partition_redundancy=min(scene.num_groups, random.choice((0, 0, 3))),
            num_buckets=random.choice((1, 5)),
            fan_in=random.choice((1, 2)),
            pauses=random.choice((False, True)),
            audit_every_steps=random.choice((1, 1, 2)),
        )

    @classmethod
    def draw_suspects(cls, random: Random) -> "Scene":
        """One of these with unusual data, too, and mostly without audits by schedule; in some a group is slow, in some
        groups have lanes.
        """
        scene = cls.draw_audits(random)
        faults = {**scene.fault_budget, "miscompute": random.choice((0, 1, 1, 2))}
        if random.random() < 0.3:
            slow = SlowGroup(random.randrange(scene.num_groups), 0, 5, random.randint(8, 40))
            scene = replace(scene, num_steps=8, microbatches_per_shard=3, slow=(slow,))
        elif random.random() < 0.3:
            scene = scene.with_lanes(2, random.choice((1, 2)))
        return replace(
            scene,
            fault_budget=faults,
            suspect_every=random.choice((3, 6, 12)),
            audit_every_steps=random.choice((2, 99, 99)),
        )

    @classmethod
    def draw_own_findings(cls, random: Random) -> "Scene":
        """One of these in which groups find what they compute wrongly, and some are lost once they have said so."""
        scene = cls.draw_audits(random)
        faults = {
            "crash": random.choice((0, 1, 2)),
            "suspect": random.choice((0, 1, 2)),
            "miscompute": random.choice((1, 1, 2)),
        }
        return replace(
            scene,
            checks_itself=True,
            fault_budget=scene.fault_budget | faults,
            suspect_every=random.choice((0, 0, 4)),
            audit_every_steps=random.choice((1, 2, 99)),
        )

    @classmethod
    def draw_drains(cls, random: Random) -> "Scene":
        """One in which groups are asked to leave, and others come back, beside a few losses.

        The fault `drain` is none of `FAULTS`: a group is asked to leave, and now and then asked to stay before it has.
        """
        scene = cls._draw_hosted(random, groups=(3, 7), steps=(4, 8))
        return replace(
            scene,
            save_interval_s=random.choice((None, 60.0)),
            fault_moves=20 * scene.num_groups * scene.num_steps,
            fault_budget={
                "drain": random.randint(1, scene.num_groups),
                "crash": random.choice((0, 0, 1, 2)),
                "suspect": random.choice((0, 0, 1)),
                "corrupt": random.choice((0, 0, 0, 1)),
                "pause": random.choice((0, 1)),
                "replace": random.choice((0, 1, 3)),
                "break": random.choice((0, 0, 1)),
            },
            partition_redundancy=min(scene.num_groups, random.choice((0, 0, 1, 2, 3))),
            num_buckets=random.choice((1, 5)),
            fan_in=random.choice((1, 2)),
            max_restarts=random.choice((0, 0, 2)),
            eval_every_steps=random.choice((0, 0, 2)),
            pauses=random.choice((False, True)),
            keep_last=random.choice((1, 9)),
        )

    @classmethod
    def draw_slow(cls, random: Random) -> "Scene":
        """One of these in which some groups are slow for a while."""
        scene = replace(cls.draw_drains(random), num_steps=random.randint(6, 10), microbatches_per_shard=3)
        slow = []
        for group in random.sample(range(scene.num_groups), random.randint(1, 2)):
            first = random.randint(0, 3)
            slow.append(SlowGroup(group, first, first + random.randint(3, 8), random.randint(8, 40)))
        return replace(scene, slow=tuple(slow), fault_moves=20 * scene.num_groups * scene.num_steps)

    @classmethod
    def draw_growth(cls, random: Random) -> "Scene":
        """One of these in which further groups, which host nothing, come and go, too."""
        scene = cls.draw_drains(random)
        faults = {**scene.fault_budget, "replace": random.randint(3, 8)}
        num_further, fetch = random.randint(1, 3), random.choice((0, 300))
        return replace(scene, granularity="microbatch", num_further=num_further, fetch=fetch, fault_budget=faults)

    @classmethod
    def draw_shared(cls, random: Random) -> "Scene":
        """One in which all groups can read all data, so that shards are never lost, and many groups are."""
        scene = cls.draw(random)
        return replace(
            scene,
            redundancy=random.randint(1, 2),
            granularity="microbatch",
            fetch=random.choice((0, 0, 300, 1700)),
            fault_budget={**scene.fault_budget, "crash": random.randint(1, scene.num_groups - 1)},
        )

    @classmethod
    def draw_returns(cls, random: Random) -> "Scene":
        """One in which each group has all state, and little else happens than that it changes and groups come back."""
        num_groups, num_steps = random.randint(3, 5), random.randint(4, 6)
        return cls(
            num_groups=num_groups,
            redundancy=num_groups,
            microbatches_per_shard=1,
            num_steps=num_steps,
            granularity="microbatch",
            save_interval_s=random.choice((None, 100.0)),
            fault_moves=20 * num_groups * num_steps,
            fault_budget={"corrupt": 1, "replace": 2},
        )
