"""Audits: which injected faults they find, whether they name the right ranks, false alarms, and what audits cost.

A case draws layout, victim, kind, size and moment of a fault, and runs one step with audits to its commit. Calm steps
have no faults, but groups that are lost in the middle of audits and come back, and starts anew.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.audit_groups import NUM_GROUPS, Case, PlayedGroups
from benchmarks.origin import origin
from spare_megatron.config.schema import AuditConfig, LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.core.audits.audits import default_every_steps
from spare_megatron.mcore.audited_passes import digest64
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration.mcore_group import CPU, run_ranks

MICROBATCHES = 2
STEPS_PER_START = 25
PART_TIMEOUT_S = 600.0
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "two stages": {"pipeline_parallel": 2},
    "two tensor-parallel ranks": {"tensor_parallel": 2},
}
KINDS = ("drift", "stuck_bit", "activation", "activation_gradient", "weight_gradient", "weight", "data")


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


def draw_case(random: Random, step: int, num_ranks: int) -> Case:
    kind = random.choice(KINDS)
    rank = 0 if kind == "data" else random.randrange(num_ranks)
    bit = random.randrange(16) if kind == "data" else random.randrange(5, 31)
    return Case(step=step, group=random.randrange(NUM_GROUPS), rank=rank, kind=kind, bit=bit)


def play_cases(config: RunConfig, num_cases: int, seed: int) -> list[Outcome]:
    """Runs on every rank."""
    groups, random = PlayedGroups(config, seed), Random(seed)
    outcomes: list[Outcome] = []
    for number in range(num_cases):
        case = draw_case(random, number % config.train.steps, dist.get_world_size())
        groups.spoiler.start(None)
        [calm] = groups.step(case.step, None).sums
        played = groups.step(case.step, case)
        spoiled = torch.tensor([int(not np.array_equal(calm, one)) for one in (played.sums[0], played.sums[-1])])
        dist.all_reduce(spoiled)
        outcomes.append(
            Outcome(
                case=case,
                is_spoiled=bool(spoiled[0]),
                fenced=[int(fence.group) for fence in played.fences],
                reason=played.fences[0].reason if played.fences else "",
                is_bitwise=not spoiled[1],
            )
        )
    return outcomes


def play_calm(config: RunConfig, num_steps: int, seed: int) -> Counter[str]:
    """Runs on every rank. Steps without faults, which start anew every `STEPS_PER_START` steps."""
    groups, random = PlayedGroups(config, seed), Random(seed)
    found: Counter[str] = Counter()
    while found["steps"] < num_steps:
        first_step = random.randrange(config.train.steps)
        played = groups.through_losses(first_step, min(STEPS_PER_START, num_steps - found["steps"]), random)
        found["steps"] += played.num_steps
        found["audits"] += played.num_compared
        found["losses"] += played.num_losses
        found["starts"] += 1
        found["false_alarms"] += played.num_disputes + len(played.fences)
    return found


def is_right_rank(outcome: Outcome, layout: dict[str, int]) -> bool:
    """Whether the fence names the victim's ranks: those of its stage, and itself alone where no sum hides that."""
    case, num_tensor = outcome.case, layout.get("tensor_parallel", 1)
    stage = case.rank // num_tensor
    ranks = [case.rank] if case.kind == "weight_gradient" else list(range(stage * num_tensor, (stage + 1) * num_tensor))
    named = outcome.reason.rpartition("rank")[2].removeprefix("s").strip()
    named_ranks = [int(rank) for rank in named.split(", ")] if named.replace(", ", "").isdigit() else []
    return outcome.fenced == [case.group] and case.rank in named_ranks and set(named_ranks) <= set(ranks)


def measure(config: RunConfig, num_pairs: int) -> tuple[list[float], float]:
    """Steps with an audit over steps without, by turns, and the digests' share of the steps from one audit to the next.

    In processor time, which is that of a rank that waits for no other.
    """
    trainer, m = GroupTrainer(config, CPU), config.spare.microbatches_per_shard
    own = [Microbatch(0, index) for index in range(m)]  # type: ignore[arg-type]
    other = Microbatch(1, 0)  # type: ignore[arg-type]

    def step_s(step: int, *, has_audit: bool) -> float:
        began_s = time.process_time()
        trainer.begin_step(step)
        trainer.compute(own, audited=own[:1] if has_audit else (), audits=[other] if has_audit else ())
        if has_audit:
            trainer.passes.boundaries(own[0])
            trainer.passes.boundaries(other)
        return time.process_time() - began_s

    step_s(0, has_audit=True)
    ratios, plain = [], []
    for number in range(num_pairs):
        order = (True, False) if number % 2 else (False, True)
        times = {has_audit: step_s(number % config.train.steps, has_audit=has_audit) for has_audit in order}
        ratios.append(times[True] / times[False])
        plain.append(times[False])
    parameters = [flat.parameter.detach() for flat in trainer.passes._parameters]
    began_s = time.process_time()
    for _ in range(10):
        for parameter in parameters:
            digest64(parameter)
    digests_s = 2 * (time.process_time() - began_s) / 10
    return ratios, digests_s / (default_every_steps(m) * statistics.median(plain))


def measure_products(config: RunConfig, num_pairs: int, shares: Sequence[float]) -> dict[str, Any]:
    """Steps in which these shares of the passes are checked over steps in which none is, by turns, in processor time.
    What is found after a step is a part of it, and has to be nothing.
    """
    settings: list[dict[str, Any]] = [{"products": share} for share in (0.0, *shares)]
    trainers = [GroupTrainer(replace(config, audit=replace(config.audit, **one)), CPU) for one in settings]
    own = [Microbatch(0, index) for index in range(config.spare.microbatches_per_shard)]  # type: ignore[arg-type]

    def step_s(trainer: Any, step: int) -> float:
        began_s = time.process_time()
        trainer.begin_step(step)
        trainer.compute(own)
        if found := trainer.checks.found():
            raise RuntimeError(f"false alarm: {found}")
        return time.process_time() - began_s

    for trainer in trainers:
        step_s(trainer, 0)
    times: list[list[float]] = [[] for _ in trainers]
    for number in range(num_pairs):
        order = range(len(trainers)) if number % 2 else reversed(range(len(trainers)))
        for index in order:
            times[index].append(step_s(trainers[index], number % config.train.steps))
    plain, *others = times
    return {
        f"products_{share:g}": price([one / without for one, without in zip(of_it, plain, strict=True)], 1)
        for share, of_it in zip(shares, others, strict=True)
    }


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
    parser.add_argument("--calm-steps", type=int, default=900, help="steps without faults; each has up to 4 audits")
    parser.add_argument("--pairs", type=int, default=200, help="steps with an audit, each beside one without")
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch of these steps")
    parser.add_argument("--products", type=float, nargs="*", default=[], help="audit.products of steps to measure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.products and not hasattr(AuditConfig, "products"):
        parser.error("this version has no audit.products")
    outcomes: list[tuple[dict[str, int], Outcome]] = []
    calm: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        prefix, generator = Path(folder) / "text", np.random.default_rng(3)
        write_corpus((generator.integers(0, 256, 400, dtype=np.uint8).tobytes() for _ in range(200)), prefix)
        counts = zip(
            LAYOUTS.values(), shares(arguments.cases, 3), shares(arguments.calm_steps, 3), range(3), strict=True
        )
        for layout, num_cases, num_calm, number in counts:
            seed = arguments.seed + number
            found = in_parts(play_cases, config_of(prefix, MICROBATCHES, layout), num_cases, 50, seed)
            outcomes += [(layout, outcome) for part in found for outcome in part]
            for counted in in_parts(play_calm, config_of(prefix, 1, layout), num_calm, 500, seed):
                calm += counted
                print(dict(calm), file=sys.stderr)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        large = config_of(prefix, 16, {}, hidden_size=64, num_attention_heads=4, seq_length=arguments.tokens)
        ratios, digest_share = measure(large, arguments.pairs)
        products = measure_products(large, arguments.pairs, arguments.products) if arguments.products else {}
        dist.destroy_process_group()
    result = (
        findings(outcomes)
        | {key: calm[key] for key in ("audits", "false_alarms", "losses", "starts")}
        | price(ratios, default_every_steps(16))
        | {"digest_share": digest_share, **products}
    )
    print(json.dumps(result | origin() if arguments.json else result, indent=None if arguments.json else 2))


def in_parts(play: Callable[..., Any], config: RunConfig, number: int, most: int, seed: int) -> Iterator[Any]:
    """What rank 0 finds, in parts of at most `most`, since the ranks of a world answer within a time."""
    while number:
        now = min(number, most)
        yield run_ranks(config.parallel.ranks_per_group, play, config, now, seed, timeout_s=PART_TIMEOUT_S)[0]
        number, seed = number - now, seed + 1000


def findings(outcomes: Sequence[tuple[dict[str, int], Outcome]]) -> dict[str, Any]:
    struck = [(layout, one) for layout, one in outcomes if one.is_spoiled]
    return {
        "cases": len(struck),
        "found": sum(one.case.group in one.fenced for _, one in struck),
        "right_rank": sum(is_right_rank(one, layout) for layout, one in struck),
        "bitwise": sum(one.is_bitwise for _, one in struck),
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


def price(ratios: Sequence[float], every: int) -> dict[str, Any]:
    """Of steps with one audit in `every` of them, over steps without: those between have no part in the difference."""
    over = [1 + (ratio - 1) / every for ratio in ratios]
    return {
        "ratio": statistics.median(over),
        "ratio_mean": statistics.mean(over),
        "ratio_error_of_mean": statistics.stdev(over) / math.sqrt(len(over)),
        "ratio_quartiles": statistics.quantiles(over, n=4),
    }


if __name__ == "__main__":
    main()
