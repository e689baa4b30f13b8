"""A job whose batch script is lost with its node: nobody ends it but the steps that are left."""

import contextlib
import os

from spare_megatron.slurm.commands import call, cancel, own_job


def end_orphaned_job(*, wants_more: bool) -> None:
    """Ends the job that this process is a step of, or sends it back into the queue. Outside of a job does nothing.

    Every node that is left does this, and only the first is heard.

    Args:
        wants_more: There are steps left that another attempt may commit.
    """
    job_id = own_job()
    if job_id is None:
        return
    num_left = int(os.environ.get("SPARE_REQUEUES", "0")) - int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with contextlib.suppress(ValueError):
        call("scontrol", "requeue", str(job_id)) if wants_more and num_left > 0 else cancel(job_id)
