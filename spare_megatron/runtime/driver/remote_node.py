"""A node of a run whose driver is on another machine."""

import contextlib
import dataclasses
import importlib
import os
from pathlib import Path

from spare_megatron.control.open_store import open_store, with_credentials
from spare_megatron.control.store import StoreLost
from spare_megatron.journal.conclusion import conclude
from spare_megatron.journal.summary import Summary
from spare_megatron.runtime.driver.node_connection import connect
from spare_megatron.runtime.process.processes import prepare_for_torch
from spare_megatron.runtime.process.spec import NodeSpec
from spare_megatron.runtime.supervisor.node import look_after
from spare_megatron.runtime.supervisor.orphans import wait_for_others


def look_after_node(run_dir: Path, node: int, wait_s: float) -> Summary | None:
    """Looks after the node to its end.

    Returns:
        How the run has ended, where that is for its nodes to tell: the driver is lost.

    Raises:
        ValueError: Nobody awaits the node, or it cannot use the control store.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    driver = connect(run_dir, node, wait_s)
    prepare_for_torch()
    importlib.import_module("spare_megatron.runtime.rank.rank")  # ranks that are forked from this process have it then
    spec: NodeSpec = driver.recv()
    config = spec.config
    spec = dataclasses.replace(spec, store=with_credentials(spec.store, config.control, os.environ))
    if not look_after(spec, driver):
        return None
    with contextlib.suppress(StoreLost):
        wait_for_others(open_store(spec.store), node, config.parallel.num_nodes, config.control.heartbeat_interval_s)
    return conclude(spec.run_dir)
