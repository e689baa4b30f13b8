"""What the processes of a run inherit from the fork server."""

import gc
from multiprocessing.connection import Connection

from spare_megatron.process.processes import end_child, fork_server, start_child


def report_garbage_collection(pipe: Connection) -> None:
    pipe.send((gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())))


def test_garbage_collection_examines_nothing_that_the_fork_server_has_imported() -> None:
    """It would stop a rank for 0.2 s in the middle of a step, and copy the pages of those objects."""
    child = start_child(fork_server(), "probe", report_garbage_collection)
    try:
        assert child.reports.poll(120.0)
        is_enabled, num_exempt, num_examined = child.reports.recv()
    finally:
        end_child(child)
    assert is_enabled
    assert num_exempt > 200_000
    assert num_examined < num_exempt / 10
