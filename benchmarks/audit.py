"""Audits: which injected faults they find, whether they name the right ranks, false alarms, and what audits cost.

Real ranks of one group compute the step of every group in turn with the same parameters, so that one small world can
play many groups: the controller that plans and judges is that of every run, and so are the trainer, its schedule and
the digests. A case draws layout, victim, kind, size and moment of a fault, and runs one step with audits to its commit.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor

from benchmarks.origin import origin
from spare_megatron.config.corpus_writer import write_corpus
from spare_megatron.config.schema import LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_data import DataConfig
from spare_megatron.core.actions import AppendEntry, AttemptReduce, ComputeAudits, ComputeStep, UpdateModel
from spare_megatron.core.audits import AuditPolicy, AuditWord, default_every_steps, word_of
from spare_megatron.core.controller import Controller
from spare_megatron.core.controller_setup import ControllerSetup
from spare_megatron.core.entries import Fence
from spare_megatron.core.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.votes import Vote
from spare_megatron.mcore.audited_passes import digest64
from spare_megatron.mcore.corruption import DRIFT, flip_bit
from spare_megatron.mcore.data import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch
from tests.integration.mcore_group import CPU, run_ranks, staged

NUM_GROUPS, MICROBATCHES = 4, 2
PART_TIMEOUT_S = 600.0
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "two stages": {"pipeline_parallel": 2},
    "two tensor-parallel ranks": {"tensor_parallel": 2},
}
KINDS = ("drift", "stuck_bit", "activation", "activation_gradient", "weight_gradient", "weight", "data")
LASTING = ("drift", "stuck_bit", "weight")
"""The others spoil the audited microbatch of their victim alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault: `bit` of a value is inverted, or the layer drifts."""

    step: int
    group: int
    rank: int
    kind: str
    bit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case: the groups fenced, and the first reason.

    `is_spoiled`: the sum before the verdict differs from that without the fault; `is_bitwise`: the committed one equals
    it.
    """

    case: Case
    is_spoiled: bool
    fenced: list[int]
    reason: str
    is_bitwise: bool


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


class PlayedGroups:
    """One rank that plays its position in every group."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self._config = config
        self.trainer = GroupTrainer(config, CPU)
        self.spoiler = Spoiler(self.trainer)
        self.rank = dist.get_rank()
        self._boundaries: dict[tuple[GroupId, Microbatch], list[Any]] = {}
        placement = make_placement("golomb", NUM_GROUPS, 3)
        self._setup = ControllerSetup(
            placement=placement,
            microbatches_per_shard=MICROBATCHES,
            num_steps=10**6,
            audits=AuditPolicy(every_steps=1, seed=seed),
        )
        self.num_audits = 0

    def step(self, step: int, case: Case | None) -> tuple[list[Fence], list[np.ndarray]]:
        """Runs a step from its plan to the commit. Returns the fences, and the sums over all groups of each time that
        the step was computed, the last of which is committed.
        """
        controller = Controller(replace(self._setup, first_step=step))
        pending = list(controller.handle(RunStarted(), now_s=0.0))
        fences: list[Fence] = []
        sums: list[np.ndarray] = []
        self._boundaries.clear()
        while pending:
            match action := pending.pop(0):
                case ComputeStep():
                    self._boundaries.clear()
                    sums.append(self._compute(action, controller.members, case))
                case ComputeAudits():
                    for group in controller.members:
                        asked = action.asked_of(group)
                        if asked:
                            with self._spoiling(case, group, asked):
                                self.trainer.audit(asked)
                            self._take(group, asked)
                case AttemptReduce():
                    votes = self._votes(controller, action)
                    decided = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
                    while decided and isinstance(decided[0], AppendEntry):
                        entry = decided[0].entry
                        if isinstance(entry, Fence):
                            fences.append(entry)
                        read = controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)
                        if isinstance(entry, Fence):
                            left = {group: votes[group] for group in controller.members}
                            decided = controller.handle(VotesRead(attempt=controller.attempt, votes=left), now_s=0.0)
                        else:
                            pending, decided = list(read), ()
                case UpdateModel():
                    return fences, sums
                case _:
                    pass
        raise RuntimeError(f"step {step} ends without a commit: {controller.head} entries")

    def _compute(self, action: ComputeStep, members: Sequence[GroupId], case: Case | None) -> np.ndarray:
        plan, total = action.plan, 0
        for group in members:
            audited, audits = plan.audited_of(group), plan.audited_by(group)
            self.trainer.begin_step(plan.step)
            with self._spoiling(case, group, audited):
                self.trainer.compute(plan.work.of(group), audited=audited, audits=audits)
            self._take(group, sorted({*audited, *audits}))
            total = total + staged(self.trainer).numpy()
        self.num_audits += len(plan.audits)
        return np.asarray(total)

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
            words = tuple(
                AuditWord(*microbatch, word_of(found), tuple(found) if microbatch in action.disputed else ())
                for (of, microbatch), found in sorted(self._boundaries.items(), key=lambda item: item[0])
                if of == group
            )
            votes[group] = Vote(is_complete=True, plan_digest=action.plan_digest, audits=words)
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

            def on_batch(chunk: Any, number: int) -> Any:
                values = {key: value.clone() for key, value in batch(chunk, number).items()}
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
            if now is None or self._played.trainer.gradients.is_counting is False:
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


def draw_case(random: Random, step: int, num_ranks: int) -> Case:
    kind = random.choice(KINDS)
    rank = 0 if kind == "data" else random.randrange(num_ranks)
    bit = random.randrange(16) if kind == "data" else random.randrange(5, 31)
    return Case(step=step, group=random.randrange(NUM_GROUPS), rank=rank, kind=kind, bit=bit)


def play_cases(config: RunConfig, num_cases: int, num_calm: int, seed: int) -> tuple[list[Outcome], int, int]:
    """Runs on every rank. Returns the outcomes, the audits without faults, and the fences among those."""
    played, random = PlayedGroups(config, seed), Random(seed)
    outcomes: list[Outcome] = []
    for number in range(num_cases):
        case = draw_case(random, number % config.train.steps, dist.get_world_size())
        played.spoiler.start(None)
        _, [calm] = played.step(case.step, None)
        fences, sums = played.step(case.step, case)
        spoiled = torch.tensor([int(not np.array_equal(calm, one)) for one in (sums[0], sums[-1])])
        dist.all_reduce(spoiled)
        outcomes.append(
            Outcome(
                case=case,
                is_spoiled=bool(spoiled[0]),
                fenced=[int(fence.group) for fence in fences],
                reason=fences[0].reason if fences else "",
                is_bitwise=not spoiled[1],
            )
        )
    played.num_audits, alarms = 0, 0
    for number in range(num_calm):
        fences, _ = played.step(number % config.train.steps, None)
        alarms += len(fences)
    return outcomes, played.num_audits, alarms


def is_right_rank(outcome: Outcome, layout: dict[str, int]) -> bool:
    """Whether the fence names the victim's ranks: those of its stage, and itself alone where no sum hides that."""
    case, num_tensor = outcome.case, layout.get("tensor_parallel", 1)
    stage = case.rank // num_tensor
    ranks = [case.rank] if case.kind == "weight_gradient" else list(range(stage * num_tensor, (stage + 1) * num_tensor))
    named = outcome.reason.rpartition("rank")[2].removeprefix("s").strip()
    told = [int(rank) for rank in named.split(", ")] if named.replace(", ", "").isdigit() else []
    return outcome.fenced == [case.group] and case.rank in told and set(told) <= set(ranks)


def measure(config: RunConfig, num_blocks: int) -> tuple[list[float], float]:
    """Ratios of blocks of as many steps as one audit has, with one and without, and the digests' share of a step.

    In processor time, which is that of a rank that waits for nobody.
    """
    trainer, m = GroupTrainer(config, CPU), config.spare.microbatches_per_shard
    every = default_every_steps(m)
    own = [Microbatch(0, index) for index in range(m)]  # type: ignore[arg-type]
    other = Microbatch(1, 0)  # type: ignore[arg-type]

    def block(step: int, *, has_audit: bool) -> float:
        began_s = time.process_time()
        for number in range(every):
            trainer.begin_step(step)
            is_audited = has_audit and number == every - 1
            trainer.compute(own, audited=own[:1] if is_audited else (), audits=[other] if is_audited else ())
            if is_audited:
                trainer.passes.boundaries(own[0])
                trainer.passes.boundaries(other)
        return time.process_time() - began_s

    block(0, has_audit=True)
    ratios, plain = [], []
    for number in range(num_blocks):
        order = (True, False) if number % 2 else (False, True)
        times = {has_audit: block(number % config.train.steps, has_audit=has_audit) for has_audit in order}
        ratios.append(times[True] / times[False])
        plain.append(times[False])
    parameters = [flat.parameter.detach() for flat in trainer.passes._parameters]
    began_s = time.process_time()
    for _ in range(10):
        for parameter in parameters:
            digest64(parameter)
    digests_s = 2 * (time.process_time() - began_s) / 10
    return ratios, digests_s / statistics.median(plain)


def config_of(prefix: Path, num_microbatches: int, layout: dict[str, int], **model: int) -> RunConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32} | model
    config = RunConfig(
        model=ModelConfig(**sizes),  # type: ignore[arg-type]
        layout=LayoutConfig(num_groups=NUM_GROUPS, **layout),
        spare=SpareConfig(redundancy=3, microbatches_per_shard=num_microbatches),
        data=DataConfig(corpus=str(prefix)),
        reduce=ReduceConfig(mode="reproducible"),
    )
    config = replace(config, train=replace(config.train, steps=20, micro_batch_size=1))
    prepare_index(config)
    return config


def shares(total: int, parts: int) -> Iterator[int]:
    return (total // parts + (number < total % parts) for number in range(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--calm-steps", type=int, default=900, help="steps without faults; each has 4 audits")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    outcomes: list[tuple[dict[str, int], Outcome]] = []
    num_audits = alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        prefix, generator = Path(folder) / "text", np.random.default_rng(3)
        write_corpus((generator.integers(0, 256, 400, dtype=np.uint8).tobytes() for _ in range(200)), prefix)
        counts = zip(
            LAYOUTS.values(), shares(arguments.cases, 3), shares(arguments.calm_steps, 3), range(3), strict=True
        )
        for layout, num_cases, num_calm, number in counts:
            config = config_of(prefix, MICROBATCHES, layout)
            found, audits, wrong = play(config, num_cases, num_calm, arguments.seed + number)
            outcomes += [(layout, outcome) for outcome in found]
            num_audits, alarms = num_audits + audits, alarms + wrong
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        large = config_of(prefix, 16, {}, hidden_size=64, num_attention_heads=4, seq_length=128)
        ratios, digest_share = measure(large, arguments.blocks)
        dist.destroy_process_group()
    struck = [(layout, one) for layout, one in outcomes if one.is_spoiled]
    result = {
        "cases": len(struck),
        "found": sum(one.case.group in one.fenced for _, one in struck),
        "right_rank": sum(is_right_rank(one, layout) for layout, one in struck),
        "bitwise": sum(one.is_bitwise for _, one in struck),
        "audits": num_audits,
        "false_alarms": alarms,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "digest_share": digest_share,
        "without_effect": dict(Counter(one.case.kind for _, one in outcomes if not one.is_spoiled)),
        "by_kind": {
            kind: [sum(one.case.group in one.fenced for _, one in struck if one.case.kind == kind), count]
            for kind, count in sorted(Counter(one.case.kind for _, one in struck).items())
        },
        "missed": [
            {**{key: getattr(one.case, key) for key in ("step", "group", "rank", "kind", "bit")}, "reason": one.reason}
            for layout, one in struck
            if not (is_right_rank(one, layout) and one.is_bitwise)
        ][:20],
    }
    print(json.dumps(result | origin() if arguments.json else result, indent=None if arguments.json else 2))


def play(config: RunConfig, num_cases: int, num_calm: int, seed: int) -> tuple[list[Outcome], int, int]:
    """In parts, since the ranks of a world answer within a time."""
    outcomes: list[Outcome] = []
    num_audits = alarms = 0
    while num_cases or num_calm:
        now = min(num_cases, 50), min(num_calm, 500)
        num_ranks = config.parallel.ranks_per_group
        found, audits, wrong = run_ranks(num_ranks, play_cases, config, *now, seed, timeout_s=PART_TIMEOUT_S)[0]
        outcomes += found
        num_audits, alarms = num_audits + audits, alarms + wrong
        num_cases, num_calm, seed = num_cases - now[0], num_calm - now[1], seed + 1000
        print(f"{num_audits} audits, {alarms} false alarms, {len(outcomes)} cases", file=sys.stderr)
    return outcomes, num_audits, alarms


if __name__ == "__main__":
    main()
