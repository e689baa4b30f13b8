"""What the processes of a run inherit from the fork server."""

import gc
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.process.processes import end_child, fork_server, start_child
from tests.search_path import with_checkout


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


def test_an_import_that_raises_is_one_line_and_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "raising_module.py").write_text("raise OSError('a [library] is broken')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from spare_megatron.process import processes\n"
        "from spare_megatron.driver.preflight import preflight\n"
        "from spare_megatron.config.schema import RunConfig\n"
        "processes._IMPORTED = ('raising_module',)\n"
        "try:\n"
        "    preflight(RunConfig())\n"
        "except ValueError:\n"
        "    print('refused')\n"
    )
    environment = {**os.environ, "PYTHONPATH": with_checkout(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "refused\n"
    assert done.stderr.splitlines()[0].endswith("raising_module.py:1: OSError: a [library] is broken")
    assert "Traceback" not in done.stderr
