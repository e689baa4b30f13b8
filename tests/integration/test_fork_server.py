"""What the processes of a run inherit from the fork server."""

import gc
import os
import subprocess
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spare_megatron.process.processes import end_child, fork_server, start_child
from spare_megatron.store.tcp_store import listen
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


def test_what_the_fork_server_imports_sees_no_gpu_and_its_children_see_all(tmp_path: Path) -> None:
    """transformer-engine asks for the kind of GPU as it is imported; the server held a context on GPU 0 to the end."""
    (tmp_path / "curious_module.py").write_text("import os\nSEEN = os.environ.get('CUDA_VISIBLE_DEVICES')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from spare_megatron.process import processes\n"
        "def answer(pipe):\n"
        "    import curious_module\n"
        "    pipe.send((curious_module.SEEN, os.environ.get('CUDA_VISIBLE_DEVICES')))\n"
        "if __name__ == '__main__':\n"
        "    processes._IMPORTED = ('curious_module',)\n"
        "    child = processes.start_child(processes.fork_server(), 'child', answer)\n"
        "    assert child.reports.poll(60.0)\n"
        "    print(child.reports.recv(), os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        "    processes.end_child(child)\n"
    )
    for given in ("2,GPU-a", None):
        environment = {**os.environ, "PYTHONPATH": with_checkout(tmp_path)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        environment |= {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout == f"('', {given!r}) {given}\n", done.stderr


NUM_TRIES = 100
FORKING = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from spare_megatron.store.tcp_store import initialize_requests

def connect():
    timeout = timedelta(seconds=30)
    return dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=timeout)

def ask(client):
    client.compare_set("key", "", "value")
    client.set("other", "value")
    client.add("number", 1)
    client.check(["key"])
    client.get("key")
    client.multi_get(["key", "other"])
    client.wait(["key"])
    client.delete_key(str(os.getpid()))

def fork_beside_first_requests():
    thread = threading.Thread(target=lambda: ask(connect()))
    thread.start()
    children = []
    while thread.is_alive() or not children:
        child = os.fork()
        if child == 0:
            ask(connect())
            os._exit(0)
        children.append(child)
    end_s = time.monotonic() + 15.0
    for child in children:
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > end_s:
                [os.kill(one, 9) for one in children if one >= child]
                os._exit(3)
            time.sleep(0.01)
    os._exit(0)

initialize_requests()
for _ in range(int(sys.argv[2])):
    parent = os.fork()
    if parent == 0:
        fork_beside_first_requests()
    if os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]):
        os._exit(3)
os._exit(0)
"""
"""With a store constructed before, but not used, a child of 3 of the 100 waits for good for a counter of requests."""


@pytest.mark.timeout(120)
def test_ranks_that_are_forked_beside_the_first_requests_make_theirs() -> None:
    store = listen("127.0.0.1", timedelta(seconds=60))
    command = [sys.executable, "-c", FORKING, str(store.port), str(NUM_TRIES)]
    assert subprocess.run(command, timeout=100, stderr=subprocess.DEVNULL, check=False).returncode == 0
