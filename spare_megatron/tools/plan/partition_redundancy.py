"""Plans how many groups host each state partition, from the expected time until one loses all hosts, and estimates what
the update costs without partitions.

Symbols: N groups and as many partitions; r_o hosts of each partition; F mean time between losses of one group; R_o mean
time from the loss of a host until another group has its copy and counts as a host.
"""

from dataclasses import dataclass

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.run_sizes import rank_memory, state_bytes_per_parameter
from spare_megatron.core.saves.survival import coverage_probabilities, lost_counts
from spare_megatron.tools.plan.facts import ClusterFacts
from spare_megatron.tools.plan.plan import TOLERANCE, Plan, best_availability
from spare_megatron.tools.plan.repair import RepairTimes, survival

MAX_CANDIDATE = 8
"""The highest r_o tried: each further host multiplies the time to a wipe-out by about F / R_o."""


UPDATE_BYTES = 30
"""Of each parameter: reads and writes 12 of state, reads 4 of gradient and writes 2 in bf16."""
MEMORY_BYTES_PER_S = 4e12
"""Of a GPU of the H200's kind, of whose 4.8 TB/s such a kernel reaches some 80%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """A number of hosts for each state partition, and what to expect of it."""

    redundancy: int
    """r_o."""
    copy_s: float
    time_to_wipe_out_s: float
    """Mean seconds until a partition has lost all hosts."""
    time_to_wipe_out_without_copies_s: float
    """The same without repairs."""
    time_to_train_ratio: float
    """That of the plan, including restarts for lost state."""


def state_time_to_wipe_out_s(num_groups: int, redundancy: int, group_interval_s: float, back_s: float | None) -> float:
    """Mean seconds until some state partition has lost all its hosts, starting with r_o hosts for each.

    `redundancy` is r_o, `group_interval_s` F and `back_s` R_o, None if no copies are made. With copies a partition is
    as a shard whose groups come back after R_o (`tools.plan.repair.survival`): for R_o << F about
    F^r_o / (N r_o R_o^(r_o - 1)). Without, a group hosts its partitions until its first loss: the sum over k of
    P(no wipe-out after k losses) F / (N - k). Derived. ValueError if a value is out of its range.

    >>> [round(state_time_to_wipe_out_s(600, hosts, 180000.0, 60.0) / 60) for hosts in (1, 2)]
    [5, 7508]
    """
    if back_s is not None:
        repair = RepairTimes(group_interval_s=group_interval_s, repair_s=back_s)
        return survival(num_groups, redundancy, repair).mean_s
    counts = lost_counts(num_groups)
    covered = coverage_probabilities(num_groups, redundancy, counts.middle) * counts.width
    return float((covered * group_interval_s / (num_groups - counts.middle)).sum())


def plan_partitions(facts: ClusterFacts, plan: Plan, copy_s: float) -> PartitionPlan:
    """The least r_o whose time to train is within `tools.plan.plan.TOLERANCE` of the plan's, else the largest tried.

    Wipe-outs of state and of shards are taken as independent, so their rates add up. R_o is the time of the copy plus
    one step: half a step until the loss is acted on, and half until the next commit counts the copy.
    """
    back_s = copy_s + facts.times.step_s * plan.stretch
    group_interval_s = facts.num_groups * facts.lost_group_interval_s
    found = None
    for redundancy in range(1, min(facts.num_groups, MAX_CANDIDATE) + 1):
        time_s, without_s = (
            state_time_to_wipe_out_s(facts.num_groups, redundancy, group_interval_s, after_s)
            for after_s in (back_s, None)
        )
        lived_s = 1 / (1 / plan.time_to_wipe_out_s + 1 / time_s)
        up = best_availability(facts.checkpoint.save_s, lived_s, facts.checkpoint.restart_s)
        found = PartitionPlan(
            redundancy=redundancy,
            copy_s=copy_s,
            time_to_wipe_out_s=time_s,
            time_to_wipe_out_without_copies_s=without_s,
            time_to_train_ratio=plan.stretch / up,
        )
        if found.time_to_train_ratio <= plan.time_to_train_ratio * (1 + TOLERANCE):
            break
    assert found is not None, "there is at least one group"
    return found


def update_share(config: RunConfig, step_s: float) -> float | None:
    """Share of a step in which Adam updates all parameters in every group, by the bytes that it moves. None on CPUs,
    where partitions or lanes divide that, and with Muon.
    """
    optimizer = config.optimizer
    is_whole = optimizer.sharding == "replicated" and optimizer.kind == "adam" and config.layout.data_parallel == 1
    if config.cluster.device != "gpu" or config.model.precision != "bf16" or not is_whole:
        return None
    _, state_bytes = state_bytes_per_parameter(config)
    num_parameters = rank_memory(config).optimizer_bytes / state_bytes
    return num_parameters * UPDATE_BYTES / MEMORY_BYTES_PER_S / step_s
