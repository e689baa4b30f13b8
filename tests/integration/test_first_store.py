"""Processes that are forked while another thread constructs this process's first store can construct theirs."""

import subprocess
import sys
from datetime import timedelta

import pytest

from spare_megatron.store.tcp_store import listen

pytestmark = pytest.mark.timeout(120)

NUM_TRIES = 4
FORKING = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from spare_megatron.store.tcp_store import construct_first

def connect():
    dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))

construct_first()
thread = threading.Thread(target=connect)
thread.start()
children = []
while thread.is_alive() or not children:
    child = os.fork()
    if child == 0:
        connect()
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
"""
"""Without `construct_first` a child in three waits for good for a variable that no thread of it initializes."""


def test_ranks_that_are_forked_beside_the_first_store_construct_theirs() -> None:
    store = listen("127.0.0.1", timedelta(seconds=60))
    command = [sys.executable, "-c", FORKING, str(store.port)]
    for _ in range(NUM_TRIES):
        assert subprocess.run(command, timeout=60, stderr=subprocess.DEVNULL, check=False).returncode == 0
