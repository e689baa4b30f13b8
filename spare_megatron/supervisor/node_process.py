"""The main functions of a supervisor's process."""

import contextlib
import dataclasses
import importlib
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.own_code import code_mismatch
from spare_megatron.journal.summary import Summary, conclude
from spare_megatron.process import end_signal
from spare_megatron.process.node_connection import connect
from spare_megatron.process.processes import log_to_file, set_environment_of_ranks
from spare_megatron.process.specs import NodeSpec
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.open_store import open_store, with_credentials
from spare_megatron.supervisor.run_end import wait_for_others
from spare_megatron.supervisor.supervisor import Supervisor


def supervise(spec: NodeSpec, driver: Connection) -> None:
    """Main function of a supervisor that the driver starts. Ends with its ranks, the driver, or an order of it."""
    look_after(spec, driver)
    os._exit(0)  # the store link's thread may be blocked


def look_after(spec: NodeSpec, driver: Connection) -> bool:
    """Supervises a node to its end. Returns whether the run has ended without a driver."""
    log_to_file(spec.run_dir, spec.name)
    supervisor = Supervisor(spec, driver)
    end_signal.listen(supervisor.ask_to_end)
    failure = supervisor.run()
    is_orphaned = supervisor.close(failure)
    sys.stdout.flush()
    return is_orphaned


def look_after_node(run_dir: Path, node: int, wait_s: float) -> Summary | None:
    """Supervises a node for a driver on another machine. Returns how the run has ended if the driver is lost and the
    nodes have to conclude the run; else None. ValueError: the node is not awaited, its code is not the driver's, or it
    cannot use the control store.
    """
    set_environment_of_ranks()
    driver = connect(run_dir, node, wait_s)
    importlib.import_module("spare_megatron.rank.rank")  # so that forked ranks have it
    spec: NodeSpec = driver.recv()
    if mismatch := code_mismatch(spec.code):
        raise ValueError(f"{mismatch}: install the same on all nodes")
    config = spec.config
    spec = dataclasses.replace(spec, store=with_credentials(spec.store, config.control, os.environ))
    if not look_after(spec, driver):
        return None
    with contextlib.suppress(StoreLost):
        wait_for_others(open_store(spec.store), node, config.parallel.num_nodes, config.control.heartbeat_interval_s)
    return conclude(spec.run_dir)
