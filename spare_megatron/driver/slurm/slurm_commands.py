"""Runs Slurm's commands and parses their output."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.schema import SlurmConfig
from spare_megatron.formats.codec import decode, encode, set_fields

JOB_FILE = "job.json"  # in a job's folder: a `_Job`

UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED")
"""States of a job that has not ended."""

JobId = int | str  # a job's number, or ARRAY_TASK for a job of an array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    job_id: JobId
    tasks: Mapping[str, str] | None = None  # of an array


_TIMEOUT_S = 60.0
_FIELD = re.compile(r"(\w[\w/:]*)=(\S*)")
_NUMBER = re.compile(r"(\d+)(;.*)?")  # NUMBER[;CLUSTER]
_NO_ANSWER = ("timed out", "unable to contact")
"""Messages of commands that fail although slurmctld may have done what they asked: its answer was lost."""


class Unanswered(ValueError):
    """Slurm's answer to a command is not known: the request may have been carried out or not."""


def submit(script: Path) -> int:
    """Submits a script; returns the number of the job or array. ValueError: refused. Unanswered: perhaps accepted."""
    printed = call("sbatch", "--parsable", str(script))
    numbers = [match[1] for line in printed.splitlines() if (match := _NUMBER.fullmatch(line.strip()))]
    if not numbers:
        raise Unanswered(f"sbatch printed no job id: {printed or 'nothing'}")
    return int(numbers[-1])  # a site's sbatch may print a greeting first


def note_job(folder: Path, job_id: JobId, tasks: Mapping[str, str] | None = None) -> None:
    """Records in a job's folder which job it is, and for an array, which setting each task's folder has (`tasks`)."""
    (folder / JOB_FILE).write_text(encode(set_fields(_Job(job_id=job_id, tasks=tasks))) + "\n")


def job_of(folder: Path) -> JobId:
    """The job that the folder belongs to. Raises ValueError if it is no job's folder."""
    return _noted(folder).job_id


def tasks_of(folder: Path) -> Mapping[str, str]:
    """The task folders of an array with the setting that distinguishes each; empty for a single job."""
    return _noted(folder).tasks or {}


def _noted(folder: Path) -> _Job:
    try:
        return decode((folder / JOB_FILE).read_text(), _Job)
    except (OSError, ValueError):
        raise ValueError(f"{folder} holds no {JOB_FILE}: name the directory that `spare submit` printed") from None


def own_job() -> JobId | None:
    """The job of this process, if any; ARRAY_TASK in an array, one of whose jobs has the number of the whole."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if array.isdigit() and task.isdigit():
        return f"{array}_{task}"
    number = os.environ.get("SLURM_JOB_ID", "")
    return int(number) if number.isdigit() else None


def job_fields(job_id: JobId) -> Mapping[str, str]:
    """Fields of a job from slurmctld: `JobState`, `NodeList`, ... Empty if slurmctld has forgotten the job."""
    try:
        return dict(_FIELD.findall(call("scontrol", "--oneliner", "show", "job", str(job_id))))
    except ValueError as error:
        if "Invalid job id" in str(error):
            return {}
        raise


def cancel(job_id: JobId) -> None:
    call("scancel", str(job_id))


def wait_for(job_ids: Collection[JobId], *, poll_s: float = 2.0, silence_s: float = 300.0) -> int:
    """Waits until all jobs have ended, requeues included; returns the highest exit code. Polls all, because Slurm soon
    forgets ended jobs. ValueError: Slurm is silent for `silence_s`, or has forgotten how a job ended.
    """
    codes: dict[JobId, int] = {}
    answered_s = dict.fromkeys(job_ids, time.monotonic())
    while True:
        for job_id in [job_id for job_id in job_ids if job_id not in codes]:
            try:
                fields = job_fields(job_id)
            except ValueError:  # the job goes on
                if time.monotonic() - answered_s[job_id] > silence_s:
                    raise
                continue
            answered_s[job_id] = time.monotonic()
            if not fields:
                raise ValueError(f"Slurm no longer knows job {job_id}; `spare status` shows its runs")
            if fields["JobState"] not in UNDER_WAY:
                codes[job_id] = int(fields["ExitCode"].partition(":")[0]) or int(fields["JobState"] != "COMPLETED")
        if len(codes) == len(job_ids):
            return max(codes.values())
        time.sleep(poll_s)


def require(command: str, advice: str = "run this on a login node of a Slurm cluster, or load its module") -> None:
    """Raises ValueError, with the advice, if the command is not in PATH."""
    if shutil.which(command) is None:
        raise ValueError(f"{command} is not in PATH: {advice}")


def call(command: str, *arguments: str) -> str:
    """Runs a command and returns its output. ValueError: the command is missing or fails. Unanswered: it does not
    return in time, or fails without an answer of slurmctld.
    """
    require(command)
    try:
        done = subprocess.run((command, *arguments), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command} has not answered within {_TIMEOUT_S:g} s; ask `scontrol ping`") from None
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        if not message or any(text in message.lower() for text in _NO_ANSWER):
            raise Unanswered(f"{command} failed: {message or f'exit code {done.returncode}'}")
        raise ValueError(f"{command} failed: {message}{_advice(message)}")
    return done.stdout.strip()


_ADVICE = {
    "invalid partition": "correct slurm.partition; `sinfo --summarize` lists those that exist",
    "invalid account": "correct slurm.account; `sacctmgr show assoc user=$USER` lists yours",
    "Requested time limit is invalid": "lower slurm.time_limit_minutes; `sinfo` has each partition's limit",
    "Node count specification invalid": "lower cluster.num_nodes; `sinfo --summarize` has the nodes of each partition",
    "More processors requested than permitted": "lower cluster.num_nodes",
    "Requested node configuration is not available": "no node has this: check slurm.gpus_per_node and slurm.options",
    "Invalid generic resource": "the partition has no such GPUs: check slurm.gpus_per_node, or set cluster.device=cpu",
}
"""Text in Slurm's errors -> what to change."""


def _advice(message: str) -> str:
    found = [advice for text, advice in _ADVICE.items() if text.lower() in message.lower()]
    return f"\n  {found[0]}" if found else ""


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
