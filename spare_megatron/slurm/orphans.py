"""A job whose batch script is lost with its node: nobody ends it but the steps that are left."""

import contextlib
import os

from spare_megatron.slurm.commands import call, cancel, own_job


def end_orphaned_job(*, wants_more: bool) -> None:
    """Ends the job that this process is a step of, or sends it back into the queue. Any other job is left alone.

    Every node that is left does this, and only the first is heard.

    Args:
        wants_more: There are steps left that another attempt may commit.
    """
    job_id, requeues = own_job(), os.environ.get("SPARE_REQUEUES", "")
    if job_id is None or not requeues.isdigit():  # only the script of `spare submit` says how often
        return
    num_left = int(requeues) - int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with contextlib.suppress(ValueError):
        call("scontrol", "requeue", str(job_id)) if wants_more and num_left > 0 else cancel(job_id)
