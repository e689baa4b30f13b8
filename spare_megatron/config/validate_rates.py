"""What is wrong with the random faults that a configuration wants to be drawn."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.comparison import LEAST_HOSTS_TO_COMPARE

_LEAST_MEAN_STEPS = 0.1
"""Faults are drawn one by one, and those that find no group that may be hit are drawn in vain."""
_LEAST_SHAPE = 0.1
"""Below, nearly all faults come at once and then none for longer than any run; far below, their mean overflows."""


def rate_problems(config: RunConfig) -> Iterator[str]:
    """Why faults of these kinds, at this rate, cannot be drawn for the run."""
    faults = config.faults
    if faults.mean_steps is None:
        return
    if faults.trace:
        yield "faults.mean_steps draws faults, and faults.trace states them; remove one of them"
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
            f"faults.mean_steps draws faults that are masked for sure, and with optimizer.redundancy={hosts} each lost "
            f"group takes the only copy of a slice along; raise that to at least 2"
        )
    if "param_flip" in config.faults.kinds and hosts < LEAST_HOSTS_TO_COMPARE:
        yield (
            f"faults.kinds has param_flip, which ends a run with optimizer.redundancy={hosts}: most hosts of a slice "
            f"are not right then; remove it, or raise that to at least {LEAST_HOSTS_TO_COMPARE}"
        )


def _impossible_kinds(config: RunConfig) -> Iterator[str]:
    for kind in dict.fromkeys(config.faults.kinds):
        where = f"faults.kinds has {kind}, which"
        if kind == "kill_store":
            yield f"{where} ends the run; remove it, and state it in faults.trace to see that"
        if kind == "moment_flip":
            yield f"{where} is never drawn; remove it, and state it in faults.trace"
        if kind == "stop_store" and config.control.store != "embedded":
            yield f"{where} needs a control store of the run's own; remove it, or set control.store=embedded"
        if kind == "cut" and not config.cluster.isolate_nodes:
            yield f"{where} needs a network that can be cut; remove it, or set cluster.isolate_nodes=true"
        if kind in ("cut", "stop_node", "kill_supervisor") and config.cluster.num_nodes == 1:
            yield f"{where} hits the only node there is; remove it, or raise cluster.num_nodes"


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
    corrupts = not faults.kinds or "param_flip" in faults.kinds
    if corrupts and faults.recovery_steps <= config.train.params_check_every_steps:
        yield (
            f"faults.recovery_steps={faults.recovery_steps} must be above train.params_check_every_steps="
            f"{config.train.params_check_every_steps}, so that corrupted parameters are found in time; raise it"
        )
