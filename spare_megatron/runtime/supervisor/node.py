"""A supervisor's process from its first line to its last."""

import os
import sys
from multiprocessing.connection import Connection

from spare_megatron.runtime.process import end_signal
from spare_megatron.runtime.process.processes import log_to_file
from spare_megatron.runtime.process.spec import NodeSpec
from spare_megatron.runtime.supervisor.supervisor import Supervisor


def supervise(spec: NodeSpec, driver: Connection) -> None:
    """The main function of a supervisor's process. It ends with its ranks, or when the driver says so or is gone."""
    look_after(spec, driver)
    os._exit(0)  # the link's thread may be waiting for a store that does not answer


def look_after(spec: NodeSpec, driver: Connection) -> bool:
    """Looks after a node to its end.

    Returns:
        Whether the run has come to its end without a driver. A thread may still be waiting for the store.
    """
    log_to_file(spec.run_dir, spec.name)
    supervisor = Supervisor(spec, driver)
    end_signal.listen(supervisor.ask_to_end)
    failure = supervisor.run()
    is_orphaned = supervisor.close(failure)
    sys.stdout.flush()
    return is_orphaned
