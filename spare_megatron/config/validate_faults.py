"""What is wrong with the faults that a configuration wants to be injected."""

from collections.abc import Iterator

from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.core.phases import Phase


def fault_problems(config: RunConfig) -> Iterator[str]:
    """Why the faults of the trace cannot be injected."""
    trace, num_groups = config.faults.trace, config.layout.num_groups
    if len(trace) > num_groups:
        yield (
            f"faults.trace has {len(trace)} faults for layout.num_groups={num_groups}; each hits a group of its own, "
            f"so shorten it or raise layout.num_groups"
        )
    hit_by: dict[int, int] = {}
    for index, fault in enumerate(trace):
        yield from _fault_out_of_range(config, index, fault)
        if fault.group is not None and hit_by.setdefault(fault.group, index) != index:
            yield (
                f"faults.trace[{index}].group={fault.group} is the group that faults.trace[{hit_by[fault.group]}] "
                f"hits; a group is lost once, so name another"
            )


def _fault_out_of_range(config: RunConfig, index: int, fault: FaultConfig) -> Iterator[str]:
    limits = (
        ("step", fault.step, config.train.steps, "train.steps"),
        ("group", fault.group, config.parallel.num_groups, "layout.num_groups"),
        ("rank", fault.rank, config.parallel.ranks_per_group, "the ranks of a group"),
    )
    where = f"faults.trace[{index}]"
    for name, value, limit, limit_text in limits:
        if value is not None and not 0 <= value < limit:
            yield f"{where}.{name}={value} lies outside 0 to {limit - 1}; {limit_text} is {limit}"
    if fault.phase in (Phase.SEND, Phase.RECEIVE) and config.layout.pipeline_parallel == 1:
        yield (
            f"{where}.phase={fault.phase} is never reached with layout.pipeline_parallel=1; "
            f"choose another phase or raise layout.pipeline_parallel"
        )
    if fault.phase is Phase.PATCH and index == 0:
        yield f"{where}.phase=patch is never reached: no group is lost before it; put a fault before it"
