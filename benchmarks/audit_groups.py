"""Ranks of one group that play all groups of a run in turn, with the same parameters: the controller that plans and
judges is that of every run, and so are the trainer, its schedule and the digests. A fault can be put into one of them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch.distributed as dist

import spare_megatron.mcore  # noqa: F401 before megatron-core, which may need an adaptation to be imported

# isort: split
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.audits.audits import AuditPolicy, MicrobatchDigest, combined_digest
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import (
    Action,
    AppendEntry,
    AttemptReduce,
    ComputeAudits,
    ComputePatch,
    ComputeStep,
    UpdateModel,
)
from spare_megatron.core.log.entries import Commit, Fence, Retry
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.mcore.corruption import DRIFT, flip_bit
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch, StepPlan
from tests.integration.mcore_group import CPU, staged

NUM_GROUPS = 4
LASTING = ("drift", "stuck_bit", "weight")
"""Faults that stay; others spoil the audited microbatch of their victim alone."""
LOSS_RATE, RETURN_RATE = 0.1, 0.3
"""Chance of a loss in each attempt of calm steps, and of the return of a lost group in one."""
LEAST_GROUPS = 2
"""So many always host all shards, with three hosts of each among four groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault: `bit` of a value is inverted, or the layer drifts."""

    step: int
    group: int
    rank: int
    kind: str
    bit: int


class Spoiler:
    """Spoils what this rank's last layer computes while `is_on`."""

    def __init__(self, trainer: GroupTrainer) -> None:
        modules = (module for chunk in trainer.chunks for module in chunk.module.modules())
        *_, self._layer = (module for module in modules if isinstance(module, BaseTransformerLayer))
        self.weight = next(p for name, p in self._layer.named_parameters() if name.endswith("linear_fc1.weight"))
        self._case: Case | None = None
        self.is_on = False
        self._layer.register_forward_hook(self._on_output)

    def start(self, case: Case | None) -> None:
        self._case, self.is_on = case, case is not None

    def _on_output(self, _layer: object, _inputs: object, outputs: Any) -> Any:
        case = self._case
        if case is None or not self.is_on:
            return None
        output, *rest = outputs
        if case.kind == "activation_gradient":
            output.register_hook(self._spoiled)
            return None
        if case.kind not in ("drift", "stuck_bit", "activation"):
            return None
        output = output.clone()
        if case.kind == "drift":
            output.data.mul_(1 + DRIFT)
        else:
            flip_bit([output.data], case.bit)
        return (output, *rest)

    def _spoiled(self, gradient: Tensor) -> Tensor:
        assert self._case is not None, "a hook of this case"
        changed = gradient.clone()
        flip_bit([changed], self._case.bit)
        return changed


@dataclass(slots=True)
class Played:
    """What has become of some steps.

    Attributes:
        sums: Over all groups, of each time that a step was computed; the last one is committed. None through losses.
        fences: Those that the controller has decided.
        num_disputes: Microbatches that groups have computed to different digests.
        num_compared: Digests of committed steps that were compared with that of another group.
        num_losses: Groups that were lost and came back.
    """

    sums: list[np.ndarray] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    num_steps: int = 0
    num_disputes: int = 0
    num_compared: int = 0
    num_losses: int = 0


class Losses:
    """Draws groups that are lost in an attempt, before or after they vote, and when they come back."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._away: dict[GroupId, int] = {}

    def draw(self, voters: Sequence[Member]) -> Member | None:
        if len(voters) <= LEAST_GROUPS or self._random.random() >= LOSS_RATE:
            return None
        lost = self._random.choice(voters)
        self._away[lost.group] = lost.incarnation + 1
        return lost

    def is_before_vote(self) -> bool:
        return self._random.random() < 0.5

    def back(self, voters: Sequence[Member]) -> tuple[Member, ...]:
        """Those of the lost groups that ask to be admitted now."""
        away = {group: number for group, number in self._away.items() if Member(group, number) not in voters}
        members = {voter.group for voter in voters}
        return tuple(
            Member(group, number)
            for group, number in sorted(away.items())
            if group not in members and self._random.random() < RETURN_RATE
        )


class PlayedGroups:
    """One rank that plays its position in every group, for the controller of a run."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self.trainer = GroupTrainer(config, CPU)
        self.spoiler = Spoiler(self.trainer)
        self.rank = dist.get_rank()
        self._boundaries: dict[tuple[GroupId, Microbatch], list[Any]] = {}
        self._setup = ControllerSetup(
            placement=make_placement("golomb", NUM_GROUPS, 3),
            microbatches_per_shard=config.spare.microbatches_per_shard,
            num_steps=10**6,
            audits=AuditPolicy(every_steps=1, seed=seed),
        )

    def step(self, step: int, case: Case | None) -> Played:
        """Runs a step from its plan to the commit."""
        return self._run(step, 1, case, None)

    def through_losses(self, first_step: int, num_steps: int, random: Random, case: Case | None = None) -> Played:
        """Runs steps from a start at `first_step`, in which groups are lost and come back."""
        return self._run(first_step, num_steps, case, Losses(random))

    def _run(self, first_step: int, num_steps: int, case: Case | None, losses: Losses | None) -> Played:
        controller = Controller(replace(self._setup, first_step=first_step))
        pending = list(controller.handle(RunStarted(), now_s=0.0))
        played = Played()
        while pending:
            match action := pending.pop(0):
                case ComputeStep(plan=plan):
                    self._boundaries.clear()
                    total = self._compute(plan, controller.members, case, is_summed=losses is None)
                    played.sums += [] if losses else [total]
                case ComputePatch(plan=plan):
                    self._compute(plan, controller.members, case, is_summed=False)
                case ComputeAudits():
                    self._compute_audits(action, controller.members, case)
                case AttemptReduce():
                    pending = self._attempt(controller, action, losses, played)
                case UpdateModel():
                    played.num_steps += 1
                    if played.num_steps == num_steps:
                        return played
        raise RuntimeError(f"step {controller.step} ends without a commit: {controller.head} entries")

    def _attempt(
        self, controller: Controller, action: AttemptReduce, losses: Losses | None, played: Played
    ) -> list[Action]:
        """From the votes to the entry that ends the attempt, and what follows from it."""
        votes = self._votes(controller, action)
        back = losses.back(controller.voters) if losses else ()
        if losses and (lost := losses.draw(controller.voters)) is not None:
            played.num_losses += 1
            votes = {group: replace(vote, is_complete=False) for group, vote in votes.items()}
            if losses.is_before_vote():
                del votes[lost.group]
            fence = Fence(group=lost.group, incarnation=lost.incarnation)
            controller.handle(EntryRead(index=controller.head, entry=fence), now_s=0.0)
        while True:
            read = VotesRead(attempt=controller.attempt, votes=votes, waiting=back)
            decided = controller.handle(read, now_s=0.0)
            if not decided or not isinstance(decided[0], AppendEntry):
                raise RuntimeError(f"step {controller.step}: all have voted, and nothing is decided")
            entry = decided[0].entry
            followed = controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)
            if not isinstance(entry, Fence):
                break
            played.fences.append(entry)
            votes = {group: votes[group] for group in controller.members}
        if isinstance(entry, Retry):
            played.num_disputes += len(entry.disputes)
        if isinstance(entry, Commit):
            voted = Counter(item.microbatch for vote in votes.values() for item in vote.audits)
            played.num_compared += sum(number - 1 for number in voted.values())
        return list(followed)

    def _compute(self, plan: StepPlan, members: Sequence[GroupId], case: Case | None, *, is_summed: bool) -> np.ndarray:
        total = np.zeros(())
        for group in members:
            audited, audits = plan.audited_of(group), plan.audited_by(group)
            self.trainer.begin_step(plan.step)
            with self._spoiling(case, group, audited):
                self.trainer.compute(plan.work.of(group), audited=audited, audits=audits)
            self._take(group, sorted({*audited, *audits}))
            if is_summed:
                total = total + staged(self.trainer).numpy()
        return np.asarray(total)

    def _compute_audits(self, action: ComputeAudits, members: Sequence[GroupId], case: Case | None) -> None:
        for group in members:
            asked = action.asked_of(group)
            if asked:
                with self._spoiling(case, group, asked):
                    self.trainer.audit(asked)
                self._take(group, asked)

    def _spoiling(self, case: Case | None, group: GroupId, audited: Collection[Microbatch]) -> "Spoiling":
        is_victim = case is not None and (case.group, case.rank) == (group, self.rank)
        return Spoiling(self, case if is_victim else None, frozenset(audited))

    def _take(self, group: GroupId, microbatches: Sequence[Microbatch]) -> None:
        mine = [self.trainer.passes.boundaries(one) for one in microbatches]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        for number, microbatch in enumerate(microbatches):
            self._boundaries[group, microbatch] = [one for of_rank in of_ranks for one in of_rank[number]]

    def _votes(self, controller: Controller, action: AttemptReduce) -> dict[GroupId, Vote]:
        votes = {}
        for group in controller.members:
            digests = tuple(
                MicrobatchDigest(
                    *microbatch, combined_digest(found), tuple(found) if microbatch in action.disputed else ()
                )
                for (of, microbatch), found in sorted(self._boundaries.items(), key=lambda item: item[0])
                if of == group
            )
            votes[group] = Vote(is_complete=True, plan_digest=action.plan_digest, audits=digests)
        return votes


class Spoiling:
    """In this context a rank has the fault of a case; one that does not last strikes the audited microbatch alone."""

    def __init__(self, played: PlayedGroups, case: Case | None, audited: frozenset[Microbatch]) -> None:
        self._played, self._case, self._audited = played, case, audited
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        case, played = self._case, self._played
        if case is None:
            return
        spoiler = played.spoiler
        spoiler.start(case)
        if case.kind == "weight":
            before = spoiler.weight.detach().clone()
            flip_bit([spoiler.weight.detach()], case.bit)
            self._undo.append(lambda: spoiler.weight.detach().copy_(before))
        if case.kind in LASTING:
            return
        forward, batch = played.trainer._forward, played.trainer._batch

        def on_forward(chunk: Any, item: Any) -> Any:
            spoiler.is_on = item.is_digested and not item.is_audit and item.microbatch.unit in self._audited
            return forward(chunk, item)

        played.trainer._forward = on_forward  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(played.trainer, "_forward", forward))
        if case.kind == "data":

            def on_batch(number: int) -> Any:
                values = {key: value.clone() for key, value in batch(number).items()}
                if spoiler.is_on and "tokens" in values:
                    values["tokens"].view(-1)[case.bit] ^= 1
                    values["labels"].view(-1)[case.bit] ^= 1
                return values

            played.trainer._batch = on_batch  # type: ignore[method-assign]
            self._undo.append(lambda: setattr(played.trainer, "_batch", batch))
        if case.kind == "weight_gradient":
            self._spoil_weight_gradient(case)

    def _spoil_weight_gradient(self, case: Case) -> None:
        """Before any other hook has it: the hooks of a tensor run in order, so that this one has to come first."""
        spoiler = self._played.spoiler
        passes = self._played.trainer.passes

        def on_gradient(gradient: Tensor) -> Tensor | None:
            now = passes._now
            if now is None or self._played.trainer.slabs[0].gradients.is_counting is False:
                return None
            changed = gradient.clone()
            flip_bit([changed], case.bit)
            return changed

        handle = spoiler.weight.register_hook(on_gradient)
        hooks = spoiler.weight._backward_hooks
        assert hooks is not None, "one has just been registered"
        others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
        for key, _ in others:  # torch calls them in the order of insertion, whatever `move_to_end` says
            del hooks[key]
        hooks.update(others)
        self._undo.append(handle.remove)

    def __exit__(self, *_: object) -> None:
        self._played.spoiler.is_on = False
        for undo in self._undo:
            undo()
