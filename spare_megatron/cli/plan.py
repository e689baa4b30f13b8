"""`spare plan`: which redundancy and cadence to train with on a cluster."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.plan_answer import Answer, as_figures
from spare_megatron.cli.quantities import parse_bytes, parse_duration_s

if TYPE_CHECKING:
    from spare_megatron.planner.plan import ClusterFacts, HoldingLimits, Policy

ASSUMED_STEP = "64s"
ASSUMED_REDUCE_S_PER_GROUP = 0.01
ASSUMED_MICROBATCHES = 16
SECONDS_PER_DAY = 86400.0


class LossRate(NamedTuple):
    """How often groups are lost: the first, or the others."""

    mtbf: str | None
    failures_per_node_day: float | None
    gpus_per_node: int | None
    gpus_per_group: int | None


class Holding(NamedTuple):
    """What a stack costs and may cost."""

    shard_size: str | None
    memory: str | None
    read_rate: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the user asked: the options as they were written, None where absent."""

    groups: int
    losses: LossRate
    restart: str
    save: str
    step: str | None
    reduce: str | None
    repair: str | None
    microbatches: int | None
    policy: str | None
    redundancy: int | None
    holding: Holding


_Groups = Annotated[int, typer.Option(help="Data-parallel groups; as many shards of every batch.")]
_Restart = Annotated[str, typer.Option(help="From a wipe-out to training again, as in 60m.")]
_Save = Annotated[str, typer.Option(help="How long training stands still for one save, as in 60s.")]
_Mtbf = Annotated[str | None, typer.Option(help="Mean time between two losses of any group, as in 300s, 5m or 2h.")]
_Rate = Annotated[float | None, typer.Option(help="In place of --mtbf; with --gpus-per-node and --gpus-per-group.")]
_Gpus = Annotated[int | None, typer.Option(help="For --failures-per-node-day.")]
_Step = Annotated[str | None, typer.Option(help="Compute of one shard on one group.", show_default=ASSUMED_STEP)]
_Reduce = Annotated[
    str | None, typer.Option(help="Rest of a step, the reduction above all.", show_default="10ms per group")
]
_Microbatches = Annotated[
    int | None, typer.Option(help="Microbatches per shard.", show_default=str(ASSUMED_MICROBATCHES))
]
_Repair = Annotated[str | None, typer.Option(help="From the loss of a group until it takes part again.")]
_PolicyName = Annotated[
    str | None,
    typer.Option(
        help="stack (whole shards), microbatch, or rejoin (microbatch, and lost groups come back).",
        show_default="rejoin with --repair, else microbatch with --microbatches, else stack",
    ),
]
_Redundancy = Annotated[int | None, typer.Option(help="Hosts per shard; the best when absent.")]
_ShardSize = Annotated[str | None, typer.Option(help="Memory of one shard, as in 64MiB.")]
_Memory = Annotated[str | None, typer.Option(help="Memory a group may use for its shards, as in 2GB.")]
_ReadRate = Annotated[str | None, typer.Option(help="At which a group can read shards, as in 1GB/s.")]


def plan(
    groups: _Groups,
    restart: _Restart,
    save: _Save,
    mtbf: _Mtbf = None,
    failures_per_node_day: _Rate = None,
    gpus_per_node: _Gpus = None,
    gpus_per_group: _Gpus = None,
    step: _Step = None,
    reduce: _Reduce = None,
    microbatches: _Microbatches = None,
    repair: _Repair = None,
    policy: _PolicyName = None,
    redundancy: _Redundancy = None,
    shard_size: _ShardSize = None,
    memory: _Memory = None,
    read_rate: _ReadRate = None,
    plot: Annotated[Path | None, typer.Option(help="Write three curves to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say which redundancy and cadence train fastest, and what to expect of them.

    Estimates, not measurements: losses come independently and at a constant rate. Exit code 2: bad input.
    """
    question = Question(
        groups=groups,
        losses=LossRate(mtbf, failures_per_node_day, gpus_per_node, gpus_per_group),
        restart=restart,
        save=save,
        step=step,
        reduce=reduce,
        repair=repair,
        microbatches=microbatches,
        policy=policy,
        redundancy=redundancy,
        holding=Holding(shard_size, memory, read_rate),
    )
    with explained_errors("plan"):
        answer = answer_to(question)
        _show(answer, plot, as_json)


def _show(answer: Answer, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        from spare_megatron.cli.plan_plot import write_plot

        write_plot(plot, answer.facts, answer.plan, answer.alternatives)
    if as_json:
        typer.echo(json.dumps(as_figures(answer)))
        return
    from spare_megatron.cli.plan_table import print_answer

    print_answer(answer)
    if plot is not None:
        typer.echo(f"curves in {plot}")


def answer_to(question: Question) -> Answer:
    """The plan for what was asked, and the best of every policy.

    Raises:
        ValueError: Something asked is out of range or contradicts itself.
    """
    from spare_megatron.planner.plan import optimize, predict

    facts = facts_of(question)
    limits = _limits(question.holding)
    chosen = _policy(question)
    _check_redundancy(question, facts, limits)
    fixed = question.redundancy
    best = optimize(facts, chosen, limits) if fixed is None else predict(facts, chosen, fixed)
    if not math.isfinite(best.time_to_train_ratio) or best.time_to_wipe_out_s < facts.times.step_s:
        raise ValueError(
            f"no training at redundancy {best.redundancy}: with a loss every {facts.times.loss_interval_s:g} s a step "
            f"of {facts.times.step_s:g} s is hardly ever done; check --mtbf (or the failure rate) and --step"
        )
    allowed: tuple[Policy, ...] = ("stack", "microbatch", "rejoin") if question.repair else ("stack", "microbatch")
    names = {"step": question.step, "reduce": question.reduce, "microbatches": question.microbatches}
    return Answer(
        facts=facts,
        plan=best,
        alternatives=tuple(optimize(facts, policy, limits) for policy in allowed),
        limits=limits,
        assumed=frozenset(name for name, value in names.items() if value is None),
    )


def facts_of(question: Question) -> "ClusterFacts":
    """The cluster that was described.

    Raises:
        ValueError: A value is out of range, or it is not clear how often groups are lost.
    """
    from spare_megatron.planner.optimum import CheckpointTimes
    from spare_megatron.planner.overhead import StepTimes
    from spare_megatron.planner.plan import ClusterFacts

    for option, value in (("--groups", question.groups), ("--microbatches", question.microbatches)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} is below 1")
    reduce_s = (
        ASSUMED_REDUCE_S_PER_GROUP * question.groups
        if question.reduce is None
        else parse_duration_s("--reduce", question.reduce, is_zero_fine=True)
    )
    return ClusterFacts(
        num_groups=question.groups,
        times=StepTimes(
            shard_s=parse_duration_s("--step", question.step or ASSUMED_STEP),
            reduce_s=reduce_s,
            loss_interval_s=_loss_interval_s(question.losses, question.groups),
        ),
        checkpoint=CheckpointTimes(
            save_s=parse_duration_s("--save", question.save),
            restart_s=parse_duration_s("--restart", question.restart, is_zero_fine=True),
        ),
        num_microbatches=question.microbatches or ASSUMED_MICROBATCHES,
        repair_s=None if question.repair is None else parse_duration_s("--repair", question.repair),
    )


def _loss_interval_s(losses: LossRate, num_groups: int) -> float:
    """Mean seconds between losses of groups, from either way to say it."""
    rate = losses.failures_per_node_day
    if losses.mtbf is not None and rate is not None:
        raise ValueError(
            f"--mtbf {losses.mtbf} and --failures-per-node-day {rate} both say how often groups are lost; give one"
        )
    if losses.mtbf is not None:
        return parse_duration_s("--mtbf", losses.mtbf)
    if rate is None:
        raise ValueError("how often are groups lost? give --mtbf, as in 300s, or --failures-per-node-day")
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"--failures-per-node-day {rate} has to be above 0")
    per_node = _gpus("--gpus-per-node", losses.gpus_per_node)
    num_nodes = num_groups * _gpus("--gpus-per-group", losses.gpus_per_group) / per_node
    return SECONDS_PER_DAY / (rate * num_nodes)


def _gpus(option: str, count: int | None) -> int:
    if count is None or count < 1:
        said = "is missing" if count is None else f"{count} is below 1"
        raise ValueError(f"{option} {said}; --failures-per-node-day needs it to count the nodes of a group")
    return count


def _policy(question: Question) -> "Policy":
    if question.policy is None:
        return "rejoin" if question.repair else "microbatch" if question.microbatches else "stack"
    match question.policy:
        case "stack" | "microbatch":
            return question.policy
        case "rejoin":
            if question.repair is None:
                raise ValueError("--policy rejoin needs --repair: after which time is a lost group back, as in 10m?")
            return question.policy
        case _:
            raise ValueError(f"--policy {question.policy} is unknown; known: stack, microbatch, rejoin")


def _limits(holding: Holding) -> "HoldingLimits | None":
    from spare_megatron.planner.plan import HoldingLimits

    if holding.shard_size is None:
        for option, value in (("--memory", holding.memory), ("--read-rate", holding.read_rate)):
            if value is not None:
                raise ValueError(f"{option} {value} limits nothing without --shard-size, as in 64MiB")
        return None
    return HoldingLimits(
        shard_bytes=parse_bytes("--shard-size", holding.shard_size),
        memory_bytes=None if holding.memory is None else parse_bytes("--memory", holding.memory),
        read_bytes_per_s=None if holding.read_rate is None else parse_bytes("--read-rate", holding.read_rate),
    )


def _check_redundancy(question: Question, facts: "ClusterFacts", limits: "HoldingLimits | None") -> None:
    """The redundancy asked for against groups and limits; with none asked for, whether one shard can be held."""
    wanted, num_groups, holding = question.redundancy, question.groups, question.holding
    if wanted is not None and not 1 <= wanted <= num_groups:
        raise ValueError(
            f"--redundancy {wanted} has to be from 1 to {num_groups} (--groups): hosts are different groups"
        )
    largest = num_groups if limits is None else limits.largest_redundancy(num_groups, facts.times)
    if largest < (wanted or 1):
        raise ValueError(
            f"--redundancy {wanted or 1}: shards of {holding.shard_size} allow at most {largest} with "
            f"--memory {holding.memory or 'unlimited'} and --read-rate {holding.read_rate or 'unlimited'}"
        )
