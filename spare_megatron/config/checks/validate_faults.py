"""Problems of the faults to inject, both those of a trace and random ones."""

from collections.abc import Iterator
from dataclasses import dataclass

from spare_megatron.config.checks.requirements import Rule, broken
from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.core.controller.comparison import LEAST_HOSTS_TO_COMPARE
from spare_megatron.faults import points
from spare_megatron.faults.kinds import KINDS, Kind
from spare_megatron.faults.points import FaultKind, FaultPoint

_AFTER_A_LOSS = (FaultPoint.PATCH, FaultPoint.REPAIR, FaultPoint.EVALUATION_PATCH)
_OF_THE_FIRST_RANK = (FaultPoint.SAVE_MANIFEST, FaultPoint.SAVE_RENAME, FaultPoint.SAVE_DROP)
_IN_BACKGROUND = [kind for kind, row in KINDS.items() if row.in_background]
_MOST = 1e6
"""Seconds, and factors of slowness."""


_NO_LOAD = (
    "[.phase] is reached only when a checkpoint is loaded: add faults before it that cause a wipe-out, and raise "
    "[checkpoint.max_restarts] to at least 1"
)


def bits_of(config: RunConfig, kind: FaultKind) -> int:
    """Bits of the number that a fault of this kind changes."""
    flips = KINDS[kind].flips
    if flips == "token":
        return (config.model.vocab_size - 1).bit_length()
    if (flips == "bucket" and config.reduce.mode == "fast_bf16") or (
        flips == "result" and config.model.precision == "bf16"
    ):
        return 16
    return 64 if flips in ("sum", "bucket") and config.reduce.mode == "reproducible" else 32


@dataclass(frozen=True, slots=True)
class FaultCase:
    """The fault of a trace at an index."""

    config: RunConfig
    index: int

    @property
    def fault(self) -> FaultConfig:
        return self.config.faults.trace[self.index]

    @property
    def where(self) -> str:
        return f"faults.trace[{self.index}]"

    @property
    def kind(self) -> Kind:
        return KINDS[self.fault.kind]

    @property
    def phases(self) -> str:
        return ", ".join(self.kind.phases)

    @property
    def num_bits(self) -> int:
        return bits_of(self.config, self.fault.kind)

    @property
    def most_bit(self) -> int:
        return self.num_bits - 1


def _is_repair(at: FaultCase) -> bool:
    return at.fault.phase is FaultPoint.REPAIR and at.config.optimizer.sharding == "stacked"


def _is_loaded(at: FaultCase) -> bool:
    """Whether a checkpoint may be loaded after a wipe-out or, where this phase is reached then, at the start."""
    checkpoint, may_begin = at.config.checkpoint, at.fault.phase not in points.PHASES_AFTER_A_WIPE_OUT
    return bool((may_begin and checkpoint.load) or (at.index > 0 and checkpoint.max_restarts > 0))


# fmt: off
_OF_A_FAULT: tuple[Rule[FaultCase], ...] = (
    Rule(lambda at: at.fault.phase in (FaultPoint.SEND, FaultPoint.RECEIVE) and at.config.layout.pipeline_parallel == 1,
         "[.phase] is never reached with [layout.pipeline_parallel]; choose another phase or raise "
         "layout.pipeline_parallel"),
    Rule(lambda at: at.fault.phase in points.PHASES_WITH_PARTITIONS and at.config.optimizer.sharding == "replicated",
         "[.phase] is never reached with [optimizer.sharding]; choose another phase or set optimizer.sharding to "
         "stacked"),
    Rule(lambda at: at.index == 0 and at.fault.phase in _AFTER_A_LOSS
         and (at.fault.phase not in points.PHASES_WITH_PARTITIONS or at.config.optimizer.sharding == "stacked"),
         "[.phase] is never reached: no group is lost before it; add a fault before it"),
    Rule(lambda at: _is_repair(at) and at.fault.group is None,
         "[.phase] strikes a group that copies lost partitions; set <where>.group"),
    Rule(lambda at: _is_repair(at) and at.fault.kind == "hang",
         "[.kind] at phase=repair stalls a background thread that no step waits for; choose another kind or phase"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_AN_EVALUATION
         and (not at.config.eval.every_steps or not at.fault.step or at.fault.step % at.config.eval.every_steps),
         "[.phase] is reached only after as many steps as [eval.every_steps] divides, before the step that "
         "<where>.step names; set both so"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_ROUND
         and (not at.config.sites.is_used or at.fault.group is None),
         "[.phase] is reached only in a round with other sites; set sites.endpoints and <where>.group"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_JOIN and (at.index == 0 or not at.config.spare.rejoins),
         "[.phase] is reached only when a lost group comes back: add a fault before it, and raise [spare.rejoins] to "
         "at least 1"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_JOIN and at.fault.group is None,
         "[.phase] strikes the donor or the group that comes back; set <where>.group"),
    Rule(lambda at: at.fault.phase is FaultPoint.JOIN_TRANSFER and not at.kind.in_background,
         f"[.kind] cannot strike the background transfer; choose {' or '.join(_IN_BACKGROUND)}"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_SAVE and not at.config.checkpoint.is_wanted,
         "[.phase] is reached only when a checkpoint is taken; set checkpoint.interval_steps or checkpoint.interval_s"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_SAVE and not at.kind.in_background,
         f"[.kind] cannot strike a save; choose one of {', '.join(_IN_BACKGROUND)}"),
    Rule(lambda at: at.fault.phase in _OF_THE_FIRST_RANK and at.fault.rank != 0,
         "[.phase] is reached by rank 0 alone; set <where>.rank to 0"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_SAVE and at.fault.group is None,
         "[.phase] strikes the group that saves, which changes; set <where>.group"),
    Rule(lambda at: at.fault.phase in points.PHASES_OF_A_LOAD - points.PHASES_AFTER_A_WIPE_OUT and not _is_loaded(at),
         f"{_NO_LOAD}, or set checkpoint.load"),
    Rule(lambda at: at.fault.phase in points.PHASES_AFTER_A_WIPE_OUT and not _is_loaded(at), _NO_LOAD),
    Rule(lambda at: at.fault.seconds is None and at.kind.duration == "passes",
         "[.kind] needs <where>.seconds, the delay or offset; set it"),
    Rule(lambda at: at.fault.seconds is not None and at.kind.duration == "lasts",
         "[.seconds] has no effect on kind=<.kind>, which is permanent; remove it"),
    Rule(lambda at: at.fault.kind == "clock_jump" and not abs(at.fault.seconds or 0.0) <= _MOST,
         "[.seconds] must lie within 1e+06 on either side of 0; change it"),
    Rule(lambda at: at.fault.seconds is not None and at.fault.kind != "clock_jump" and at.kind.duration != "lasts"
         and not 0 < at.fault.seconds <= _MOST,
         "[.seconds] must be above 0 and at most 1e+06; change it, or remove it for a permanent fault"),
    Rule(lambda at: at.fault.factor is not None and not at.kind.has_factor,
         "[.factor] has no effect on kind=<.kind>; remove it"),
    Rule(lambda at: at.fault.factor is None and at.kind.has_factor,
         "[.kind] needs <where>.factor, how many times slower it is; set it above 1"),
    Rule(lambda at: at.fault.factor is not None and at.kind.has_factor and not 1.0 < at.fault.factor <= _MOST,
         "[.factor] must be above 1 and at most 1e+06; change it"),
    Rule(lambda at: at.kind.flips == "token" and (at.fault.rank != 0 or at.config.program.file),
         "[.kind] strikes the tokens that the first stage reads; set <where>.rank=0, without program.file"),
    Rule(lambda at: at.kind.flips == "moment" and not at.fault.step
         and at.fault.phase not in points.PHASES_BETWEEN_STEPS,
         "[.kind] strikes moments, which the first update creates, but [.step] may come before it; set a step above 0"),
    Rule(lambda at: at.kind.in_operations and at.fault.phase is FaultPoint.BACKWARD
         and at.fault.step == at.config.train.steps - 1,
         "[.kind] at phase=backward may strike in the pass after, which [.step] may not have; set an earlier step"),
    Rule(lambda at: at.fault.bit is not None and not at.kind.flips,
         "[.bit] has no effect on kind=<.kind>; remove it"),
    Rule(lambda at: at.kind.phases and at.fault.phase not in at.kind.phases,
         "[.kind] strikes <kind.target> at phase=<.phase>; choose one of <phases>"),
    Rule(lambda at: at.fault.bit is not None and not 0 <= at.fault.bit < at.num_bits,
         "[.bit] lies outside 0 to <most_bit>; the number has <num_bits> bits"),
)

_OF_RATES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: c.faults.trace,
         "faults.mean_steps draws faults, but faults.trace lists them; remove one of them"),
    Rule(lambda c: c.optimizer.sharding == "stacked" and c.optimizer.redundancy < 2,
         "faults.mean_steps draws faults that must be masked, but with [optimizer.redundancy] each lost group holds "
         "the only copy of a partition; raise that to at least 2"),
    Rule(lambda c: c.faults.mean_steps is not None and not c.faults.mean_steps >= 0.1,  # faults are drawn one by one
         "[faults.mean_steps] must be at least 0.1; raise it"),
    Rule(lambda c: not c.faults.shape >= 0.1,  # nearly all faults would come at once; far below, the mean overflows
         "[faults.shape] must be at least 0.1; raise it"),
    Rule(lambda c: not c.faults.max_seconds > 0, "[faults.max_seconds] must be above 0; raise it"),
    Rule(lambda c: not c.faults.recovery_steps > 0, "[faults.recovery_steps] must be above 0; raise it"),
    Rule(lambda c: not 0.0 <= c.faults.domain_share <= 1.0,
         "[faults.domain_share] lies outside 0 to 1; choose a share"),
    Rule(lambda c: c.faults.max_seconds >= c.control.store_timeout_s,
         "[faults.max_seconds] must be below [control.store_timeout_s], after which a stopped store ends the run; "
         "lower it"),
    Rule(lambda c: c.faults.recovery_steps >= c.train.steps,
         "[faults.recovery_steps] leaves no room for faults in [train.steps]; lower it, or raise train.steps"),
    Rule(lambda c: any(KINDS[kind].corrupts_state for kind in {*survivable_kinds(c)} & {*(c.faults.kinds or KINDS)})
         and c.faults.recovery_steps <= c.train.params_check_every_steps,
         "[faults.recovery_steps] must be above [train.params_check_every_steps], so that corrupted parameters are "
         "found in time; raise it"),
)
# fmt: on


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
    if row.costs == "run" or row.drawn == "never":
        yield "ends the run" if row.costs == "run" else "is never drawn", "list it in faults.trace instead"
        return
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
    yield from broken(_OF_A_FAULT, FaultCase(config, index))
    for reason, remedy in _lacks(config, fault.kind):
        yield f"{where}.kind={fault.kind} {reason}; {remedy}, or choose another kind"


def rate_problems(config: RunConfig) -> Iterator[str]:
    """Why random faults of these kinds cannot be drawn at this rate."""
    if config.faults.mean_steps is None:
        return
    yield from broken(_OF_RATES, config)
    for kind in dict.fromkeys(config.faults.kinds):
        for reason, remedy in _why_not_survived(config, kind):
            yield f"faults.kinds has {kind}, which {reason}; remove it, or {remedy}"
