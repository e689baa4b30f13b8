"""Problems of the faults to inject, both those of a trace and random ones."""

from collections.abc import Iterator

from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.core.controller.comparison import LEAST_HOSTS_TO_COMPARE
from spare_megatron.faults.kinds import KINDS
from spare_megatron.faults.points import (
    PHASES_BETWEEN_STEPS,
    PHASES_OF_A_JOIN,
    PHASES_OF_AN_EVALUATION,
    PHASES_WITH_SLICES,
    FaultKind,
    FaultPoint,
)

_AFTER_A_LOSS = (FaultPoint.PATCH, FaultPoint.REPAIR, FaultPoint.EVALUATION_PATCH)
_MOST_SECONDS = 1e6
_MOST_FACTOR = 1e6


def _lacks(config: RunConfig, kind: FaultKind) -> Iterator[tuple[str, str]]:
    """What a fault of this kind needs and the run has not, and the remedy."""
    needs, store = KINDS[kind].needs, config.control.store
    if "isolated_nodes" in needs and not config.cluster.isolate_nodes:
        yield "needs a network of the node's own", "set cluster.isolate_nodes=true"
    if "further_groups" in needs and not config.parallel.further_groups:
        yield "needs further groups", "set layout.max_groups above layout.num_groups"
    if "embedded_store" in needs and store != "embedded":
        yield f"needs the embedded control store, but control.store={store}", "set control.store=embedded"


def _why_not_survived(config: RunConfig, kind: FaultKind) -> Iterator[tuple[str, str]]:
    """Why random faults of this kind cannot strike the run, or would end it, and the remedy."""
    row, hosts = KINDS[kind], config.optimizer.redundancy
    yield from _lacks(config, kind)
    if row.costs == "node" and config.cluster.num_nodes == 1:
        yield "hits the only node", "raise cluster.num_nodes"
    if row.corrupts_state and config.optimizer.sharding == "stacked" and hosts < LEAST_HOSTS_TO_COMPARE:
        yield (
            f"ends a run with optimizer.redundancy={hosts}: no majority of a partition's hosts is correct then",
            f"raise that to at least {LEAST_HOSTS_TO_COMPARE}",
        )


def survivable_kinds(config: RunConfig) -> tuple[FaultKind, ...]:
    """Every kind that this run can survive, apart from those that not every machine can inject."""
    return tuple(
        kind
        for kind, row in KINDS.items()
        if row.drawn == "survived"
        and row.costs != "run"
        and not any(_why_not_survived(config, kind))
        and (row.costs != "departure" or config.spare.rejoins)
    )


def fault_problems(config: RunConfig) -> Iterator[str]:
    """Why faults of the trace cannot be injected."""
    trace, num_groups = config.faults.trace, config.layout.num_groups
    may_come_back = config.spare.rejoins > 0 or config.checkpoint.max_restarts > 0
    if len(trace) > num_groups and not may_come_back:
        yield (
            f"faults.trace has {len(trace)} faults for layout.num_groups={num_groups}; each hits a different group; "
            f"shorten the trace or raise layout.num_groups"
        )
    hit_by: dict[int, int] = {}
    for index, fault in enumerate(trace):
        yield from _fault_out_of_range(config, index, fault)
        if not may_come_back and fault.group is not None and hit_by.setdefault(fault.group, index) != index:
            yield (
                f"faults.trace[{index}].group={fault.group} is the group that faults.trace[{hit_by[fault.group]}] "
                f"hits; a group is lost only once: name another, or let groups come back with spare.rejoins or "
                f"checkpoint.max_restarts"
            )


def _fault_out_of_range(config: RunConfig, index: int, fault: FaultConfig) -> Iterator[str]:
    groups = "layout.max_groups" if config.layout.max_groups else "layout.num_groups"
    limits = (
        ("step", fault.step, config.train.steps, "train.steps"),
        ("group", fault.group, config.layout.most_groups, groups),
        ("rank", fault.rank, config.parallel.ranks_per_group, "the ranks of a group"),
    )
    where = f"faults.trace[{index}]"
    for name, value, limit, limit_text in limits:
        if value is not None and not 0 <= value < limit:
            yield f"{where}.{name}={value} lies outside 0 to {limit - 1}; {limit_text} is {limit}"
    if fault.phase in (FaultPoint.SEND, FaultPoint.RECEIVE) and config.layout.pipeline_parallel == 1:
        yield (
            f"{where}.phase={fault.phase} is never reached with layout.pipeline_parallel=1; "
            f"choose another phase or raise layout.pipeline_parallel"
        )
    if fault.phase in PHASES_WITH_SLICES and config.optimizer.sharding == "replicated":
        yield (
            f"{where}.phase={fault.phase} is never reached with optimizer.sharding=replicated; choose another phase or "
            f"set optimizer.sharding to stacked"
        )
    elif index == 0 and fault.phase in _AFTER_A_LOSS:
        yield f"{where}.phase={fault.phase} is never reached: no group is lost before it; add a fault before it"
    if fault.phase is FaultPoint.REPAIR and config.optimizer.sharding == "stacked":
        yield from _unreachable_repair(where, fault)
    if fault.phase in PHASES_OF_AN_EVALUATION:
        yield from _unreachable_evaluation(config, where, fault)
    if fault.phase in PHASES_OF_A_JOIN:
        yield from _unreachable_join(config, index, fault)
    yield from _unlikely_times(config, where, fault)
    yield from _wrong_factor(where, fault)
    yield from _impossible_corruption(config, where, fault)


def _unreachable_evaluation(config: RunConfig, where: str, fault: FaultConfig) -> Iterator[str]:
    every = config.eval.every_steps
    if not every or not fault.step or fault.step % every:
        yield (
            f"{where}.phase={fault.phase} is reached only after as many steps as eval.every_steps={every} divides, "
            f"before the step that {where}.step names; set both so"
        )


def _unreachable_repair(where: str, fault: FaultConfig) -> Iterator[str]:
    if fault.group is None:
        yield f"{where}.phase=repair strikes a group that copies lost partitions; set {where}.group"
    if fault.kind == "hang":
        yield (
            f"{where}.kind=hang at phase=repair stalls a background thread that no step waits for; choose another kind "
            f"or phase"
        )


def _unreachable_join(config: RunConfig, index: int, fault: FaultConfig) -> Iterator[str]:
    where = f"faults.trace[{index}]"
    if index == 0 or not config.spare.rejoins:
        yield (
            f"{where}.phase={fault.phase} is reached only when a lost group comes back: add a fault before it, and "
            f"raise spare.rejoins={config.spare.rejoins} to at least 1"
        )
    if fault.group is None:
        yield f"{where}.phase={fault.phase} strikes the donor or the group that comes back; set {where}.group"
    if fault.phase is FaultPoint.JOIN_TRANSFER and not KINDS[fault.kind].in_background:
        choices = " or ".join(kind for kind, row in KINDS.items() if row.in_background)
        yield f"{where}.kind={fault.kind} cannot strike the background transfer; choose {choices}"


def _unlikely_times(config: RunConfig, where: str, fault: FaultConfig) -> Iterator[str]:
    for reason, remedy in _lacks(config, fault.kind):
        yield f"{where}.kind={fault.kind} {reason}; {remedy}, or choose another kind"
    if fault.seconds is None:
        if KINDS[fault.kind].duration == "passes":
            yield f"{where}.kind={fault.kind} needs {where}.seconds, the delay or offset; set it"
    elif KINDS[fault.kind].duration == "lasts":
        yield f"{where}.seconds={fault.seconds} has no effect on kind={fault.kind}, which is permanent; remove it"
    elif fault.kind == "clock_jump":
        if not abs(fault.seconds) <= _MOST_SECONDS:
            yield f"{where}.seconds={fault.seconds} must lie within {_MOST_SECONDS:g} on either side of 0; change it"
    elif not 0 < fault.seconds <= _MOST_SECONDS:
        yield (
            f"{where}.seconds={fault.seconds} must be above 0 and at most {_MOST_SECONDS:g}; change it, or remove it "
            f"for a permanent fault"
        )


def _wrong_factor(where: str, fault: FaultConfig) -> Iterator[str]:
    if not KINDS[fault.kind].has_factor:
        if fault.factor is not None:
            yield f"{where}.factor={fault.factor} has no effect on kind={fault.kind}; remove it"
    elif fault.factor is None:
        yield f"{where}.kind={fault.kind} needs {where}.factor, how many times slower it is; set it above 1"
    elif not 1.0 < fault.factor <= _MOST_FACTOR:
        yield f"{where}.factor={fault.factor} must be above 1 and at most {_MOST_FACTOR:g}; change it"


def _impossible_corruption(config: RunConfig, where: str, fault: FaultConfig) -> Iterator[str]:
    row = KINDS[fault.kind]
    if row.phases and fault.phase not in row.phases:
        yield (
            f"{where}.kind={fault.kind} strikes {row.target} at phase={fault.phase}; choose one of "
            f"{', '.join(row.phases)}"
        )
    if row.flips == "token" and (fault.rank != 0 or config.program.file):
        yield (
            f"{where}.kind={fault.kind} strikes the tokens that the first stage reads; set {where}.rank=0, without "
            f"program.file"
        )
    if row.flips == "moment" and not fault.step and fault.phase not in PHASES_BETWEEN_STEPS:
        yield (
            f"{where}.kind={fault.kind} strikes moments, which the first update creates, but {where}.step="
            f"{'absent' if fault.step is None else fault.step} may come before it; set a step above 0"
        )
    if fault.bit is None:
        return
    if not row.flips:
        yield f"{where}.bit={fault.bit} has no effect on kind={fault.kind}; remove it"
    num_bits = bits_of(config, fault.kind)
    if not 0 <= fault.bit < num_bits:
        yield f"{where}.bit={fault.bit} lies outside 0 to {num_bits - 1}; the number has {num_bits} bits"


def bits_of(config: RunConfig, kind: FaultKind) -> int:
    """Bits of the number that a fault of this kind changes."""
    flips = KINDS[kind].flips
    if flips == "token":
        return (config.model.vocab_size - 1).bit_length()
    if flips == "bucket" and config.reduce.mode == "fast_bf16":
        return 16
    return 64 if flips in ("sum", "bucket") and config.reduce.mode == "reproducible" else 32


_LEAST_MEAN_STEPS = 0.1
"""Faults are drawn one by one, and those that find no group to hit are discarded."""

_LEAST_SHAPE = 0.1
"""Below, nearly all faults come at once, then none for longer than any run; far below, the mean overflows."""


def rate_problems(config: RunConfig) -> Iterator[str]:
    """Why random faults of these kinds cannot be drawn at this rate."""
    faults = config.faults
    if faults.mean_steps is None:
        return
    if faults.trace:
        yield "faults.mean_steps draws faults, but faults.trace lists them; remove one of them"
    if config.optimizer.sharding == "stacked":
        yield from _too_few_hosts(config)
    for key, value, least in (
        ("faults.mean_steps", faults.mean_steps, _LEAST_MEAN_STEPS),
        ("faults.shape", faults.shape, _LEAST_SHAPE),
    ):
        if not value >= least:
            yield f"{key}={value} must be at least {least:g}; raise it"
    for key, length in (("faults.max_seconds", faults.max_seconds), ("faults.recovery_steps", faults.recovery_steps)):
        if not length > 0:
            yield f"{key}={length} must be above 0; raise it"
    if not 0.0 <= faults.domain_share <= 1.0:
        yield f"faults.domain_share={faults.domain_share} lies outside 0 to 1; choose a share"
    yield from _impossible_kinds(config)
    yield from _too_long(config)


def _too_few_hosts(config: RunConfig) -> Iterator[str]:
    hosts = config.optimizer.redundancy
    if hosts < 2:
        yield (
            f"faults.mean_steps draws faults that must be masked, but with optimizer.redundancy={hosts} each lost "
            f"group holds the only copy of a partition; raise that to at least 2"
        )


def _impossible_kinds(config: RunConfig) -> Iterator[str]:
    for kind in dict.fromkeys(config.faults.kinds):
        row, where = KINDS[kind], f"faults.kinds has {kind}, which"
        if row.costs == "run" or row.drawn == "never":
            what = "ends the run" if row.costs == "run" else "is never drawn"
            yield f"{where} {what}; remove it, or list it in faults.trace instead"
            continue
        for reason, remedy in _why_not_survived(config, kind):
            yield f"{where} {reason}; remove it, or {remedy}"


def _too_long(config: RunConfig) -> Iterator[str]:
    faults = config.faults
    if faults.max_seconds >= config.control.store_timeout_s:
        yield (
            f"faults.max_seconds={faults.max_seconds} must be below control.store_timeout_s="
            f"{config.control.store_timeout_s}, after which a stopped store ends the run; lower it"
        )
    if faults.recovery_steps >= config.train.steps:
        yield (
            f"faults.recovery_steps={faults.recovery_steps} leaves no room for faults in train.steps="
            f"{config.train.steps}; lower it, or raise train.steps"
        )
    drawn = set(survivable_kinds(config)).intersection(faults.kinds or KINDS)
    corrupts = any(KINDS[kind].corrupts_state for kind in drawn)
    if corrupts and faults.recovery_steps <= config.train.params_check_every_steps:
        yield (
            f"faults.recovery_steps={faults.recovery_steps} must be above train.params_check_every_steps="
            f"{config.train.params_check_every_steps}, so that corrupted parameters are found in time; raise it"
        )
