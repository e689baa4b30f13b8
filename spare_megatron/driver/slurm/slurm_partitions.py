"""Finds jobs that no partition can ever hold: Slurm queues them, and they wait forever."""

import os
import re
from collections.abc import Mapping, Sequence

from spare_megatron.config.schema import SlurmConfig
from spare_megatron.driver.slurm.slurm_commands import call

_FIELD = re.compile(r"(\w+)=(\S*)")
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")
_CHOSEN_ELSEWHERE = ("-p", "--partition", "-M", "--cluster")


def partitions_of(slurm: SlurmConfig) -> list[Mapping[str, str]]:
    """Partitions that the job may run in, from slurmctld; empty if something else chooses them."""
    by_option = any(option.startswith(_CHOSEN_ELSEWHERE) for option in slurm.options)
    if by_option or {"SBATCH_PARTITION", "SBATCH_CLUSTERS"} & os.environ.keys():
        return []
    known = [dict(_FIELD.findall(line)) for line in call("scontrol", "--oneliner", "show", "partition").splitlines()]
    names = slurm.partition.split(",")
    if slurm.partition:
        return [partition for partition in known if partition.get("PartitionName") in names]
    return [partition for partition in known if partition.get("Default") == "YES"]


def never_fits(num_nodes: int, partitions: Sequence[Mapping[str, str]]) -> str:
    """Why no partition can hold so many nodes, whatever the other limits; empty if one can or its size is unknown.

    >>> never_fits(5, [{"PartitionName": "a", "TotalNodes": "4"}, {"PartitionName": "b", "TotalNodes": "5"}])
    ''
    """
    sizes = {partition.get("PartitionName", ""): partition.get("TotalNodes", "") for partition in partitions}
    if not sizes or not all(size.isdigit() and int(size) < num_nodes for size in sizes.values()):
        return ""
    found = ", ".join(f"{name} has {size} nodes" for name, size in sizes.items())
    return (
        f"slurm.partition: {found}, and cluster.num_nodes + slurm.num_spare_nodes = {num_nodes}: the job would wait "
        f"forever; lower them, or choose another partition (`sinfo --summarize`)"
    )


def may_not_fit(slurm: SlurmConfig, num_nodes: int, partitions: Sequence[Mapping[str, str]]) -> list[str]:
    """Limits of the partition that the job exceeds, unless its QOS lifts them. Only judges a single partition."""
    if len(partitions) != 1:
        return []
    (partition,) = partitions
    found, most, longest = [], partition.get("MaxNodes", ""), _minutes(partition.get("MaxTime", ""))
    if most.isdigit() and int(most) < num_nodes:
        found.append(
            f"cluster.num_nodes + slurm.num_spare_nodes = {num_nodes} exceeds MaxNodes={most} of partition "
            f"{partition.get('PartitionName')}: the job waits forever unless its QOS may do that"
        )
    if longest is not None and (slurm.time_limit_minutes or 0) > longest:
        found.append(
            f"slurm.time_limit_minutes={slurm.time_limit_minutes} exceeds MaxTime={partition['MaxTime']} of partition "
            f"{partition.get('PartitionName')}: the job waits forever unless its QOS may do that"
        )
    return found


def _minutes(text: str) -> float | None:
    """Minutes of a time as Slurm prints it; None if it is unlimited.

    >>> [_minutes(text) for text in ("1-00:30:00", "04:00:30", "UNLIMITED")]
    [1470.0, 240.5, None]
    """
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 60.0 * (24 * days + hours) + minutes + seconds / 60
