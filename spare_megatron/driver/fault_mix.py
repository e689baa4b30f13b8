"""Weights of fault kinds, from the causes that interrupted a published training."""

from collections.abc import Mapping
from types import MappingProxyType

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.controller.comparison import LEAST_HOSTS_TO_COMPARE
from spare_megatron.faults.points import FaultKind

LLAMA3_INTERRUPTIONS: Mapping[str, int] = MappingProxyType(
    {
        "gpu": 148,
        "hbm": 72,
        "software": 54,
        "switch_or_cable": 35,
        "host_maintenance": 32,
        "sram": 19,
        "system_processor": 17,
        "nic": 7,
        "nccl_watchdog": 7,
        "silent_data_corruption": 6,
        "thermal": 6,
        "ssd": 3,
        "psu": 3,
        "cpu": 2,
        "chassis": 2,
        "io_board": 2,
        "dependency": 2,
        "memory": 2,
    }
)
"""Cause -> unplanned interruptions of Llama 3 405B in 54 days on 16,384 GPUs (arXiv 2407.21783)."""


_ANYWHERE: tuple[FaultKind, ...] = (
    "kill",
    "raise",
    "hang",
    "stop",
    "delay",
    "slow",
    "slow_data",
    "disk_full",
    "clock_jump",
    "nan",
    "bit_flip",
    "param_flip",
)


_LIKE: Mapping[str, tuple[FaultKind, ...]] = {
    "gpu": ("kill", "hang", "raise"),
    "hbm": ("raise", "nan"),
    "software": ("raise", "kill"),
    "switch_or_cable": ("cut", "hang"),
    "host_maintenance": ("kill_supervisor", "stop_node", "stop", "drain"),
    "sram": ("nan", "raise"),
    "system_processor": ("kill", "stop"),
    "nic": ("cut", "hang", "slow_link"),
    "nccl_watchdog": ("hang",),
    "silent_data_corruption": ("bit_flip", "param_flip"),
    "thermal": ("slow",),
    "ssd": ("disk_full", "slow_data"),
    "psu": ("kill_supervisor", "kill"),
    "cpu": ("stop", "kill", "slow_host"),
    "chassis": ("kill_supervisor", "kill"),
    "io_board": ("cut", "kill"),
    "dependency": ("stop_store", "raise"),
    "memory": ("param_flip", "kill"),
}
"""Cause of an interruption -> the kinds whose effect on a run is most similar; an assumption of this project."""


def survivable_kinds(config: RunConfig) -> tuple[FaultKind, ...]:
    """Every kind that this run can survive, apart from those that not every machine can inject."""
    kinds = _ANYWHERE
    if config.optimizer.sharding == "stacked" and config.optimizer.redundancy < LEAST_HOSTS_TO_COMPARE:
        kinds = tuple(kind for kind in kinds if kind != "param_flip")
    if config.spare.rejoins:
        kinds += ("drain",)
    if config.parallel.further_groups:
        kinds += ("resize",)
    if config.control.store == "embedded":
        kinds += ("stop_store",)
    if config.cluster.num_nodes > 1:
        kinds += ("stop_node", "kill_supervisor")
    if config.cluster.isolate_nodes:
        kinds += ("cut",)
    return kinds


def kind_weights(config: RunConfig) -> dict[FaultKind, float]:
    """Probability of each kind, summing to 1; raises ValueError if no kind is left. With `faults.mix=llama3` the kinds
    allowed here share a cause equally; a cause without any is left out.
    """
    listed = config.faults.kinds or survivable_kinds(config)
    weights: dict[FaultKind, float] = dict.fromkeys(dict.fromkeys(listed), 0.0)
    if config.faults.mix == "listed":
        for kind in listed:
            weights[kind] += 1.0
    else:
        for cause, count in LLAMA3_INTERRUPTIONS.items():
            like = [kind for kind in _LIKE[cause] if kind in weights]
            for kind in like:
                weights[kind] += count / len(like)
    total = sum(weights.values())
    if not total:
        raise ValueError(f"faults.mix=llama3 has none of faults.kinds={', '.join(listed)}; list others, or none")
    return {kind: weight / total for kind, weight in weights.items() if weight}
