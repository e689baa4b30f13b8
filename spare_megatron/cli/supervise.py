"""`spare supervise`: the supervisor of a node other than the driver's."""

from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors


def supervise(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run, on storage that all nodes share.")],
    node: Annotated[int, typer.Option(help="Which of cluster.num_nodes this machine is.", min=0)],
    wait_s: Annotated[float, typer.Option(help="Longest wait for the driver of the run.", min=0)] = 300.0,
) -> None:
    """Look after one node of a run that `spare train` drives elsewhere (cluster.launcher=hand or srun).

    The node goes on without the driver if that is lost. Exit codes: 0 the node has done its part, 2 nobody awaits it.
    """
    import os

    with explained_errors("supervise"):
        from spare_megatron.runtime.process import end_signal

        end_signal.block()
        from spare_megatron.config.loader import load_run_config
        from spare_megatron.runtime.driver.remote_node import look_after_node
        from spare_megatron.slurm.orphans import end_orphaned_job

        summary = look_after_node(run_dir, node, wait_s)
        if summary is not None and load_run_config(run_dir / "config.toml").config.cluster.launcher == "srun":
            has_more = summary.outcome == "wipe_out" or (summary.outcome == "finished" and summary.steps_left > 0)
            end_orphaned_job(wants_more=has_more)
    os._exit(0)  # a thread may be waiting for a store that does not answer
