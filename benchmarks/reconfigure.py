"""torch's `reconfigure` of a gloo process group beside the rebuild of `CrossGroupCommunicator`, on one machine.

A SIGKILL hits one of `GROUPS` processes while a sum is in flight; from the next common moment on the survivors connect
without it and sum a small tensor. The slowest survivor counts. Then two cases for safety: a member that is lost while
the others connect, and one that is stopped, not dead, while sums are in flight. Needs torch 2.14.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.tcp_store import TcpControlStore

GROUPS = 4
VICTIM = GROUPS - 1
TIMEOUT_S = 5.0
PATIENCE_S = 60.0
NUM_SUMS = 2
"""In flight when a member is lost: as many as gloo has threads."""


class Rebuilt:
    """The communicator of this project."""

    def __init__(self, address: tuple[str, int], group: int) -> None:
        self._communicator = CrossGroupCommunicator(
            group=GroupId(group),
            position=0,
            device=torch.device("cpu"),
            store=TcpControlStore(*address),
            timeout_s=TIMEOUT_S,
            ask_interval_s=1.0,
            probe=SilentProbe(),
        )

    def start(self, key: int, members: Sequence[int]) -> None:
        self._communicator.start_build(key, [GroupId(member) for member in members])

    def connect(self, key: int, members: Sequence[int]) -> None:
        self.start(key, members)

    def add(self) -> bool:
        return self._communicator.reduce(torch.ones(4), lambda: False)

    def post(self) -> None:
        self._communicator.start_attempt()
        assert all(self._communicator.post(torch.ones(4)) for _ in range(NUM_SUMS))

    def fail(self) -> None:
        while not self._communicator.evidence:
            self._communicator.wait(lambda: False)
            assert self._communicator.poll() == 0


class Reconfigured:
    """One process group that takes other members; their handles are exchanged before a loss, outside of what counts."""

    def __init__(self, address: tuple[str, int], group: int) -> None:
        client = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        self._store, self._group = dist.PrefixStore("reconfigured", client), group
        self._works: list[Any] = []
        self._process_group = dist.ProcessGroupGloo(
            self._store, group, GROUPS, timedelta(seconds=TIMEOUT_S), enable_reconfigure=True
        )
        self._exchange(0)

    def _exchange(self, number: int) -> None:
        self._store.set(f"handle/{number}/{self._group}", self._process_group.get_reconfigure_handle())
        self._handles = [self._store.get(f"handle/{number}/{group}").decode() for group in range(GROUPS)]

    def connect(self, key: int, members: Sequence[int]) -> None:
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid, options.handles = key, [self._handles[member] for member in members]
        self._process_group.reconfigure(options).wait()
        if len(members) == GROUPS:
            self._exchange(key + 1)

    def start(self, key: int, members: Sequence[int]) -> None:
        try:
            self.connect(key, members)
        except RuntimeError:
            return
        raise AssertionError("connected with a member that is dead")

    def add(self) -> bool:
        return bool(self._process_group.allreduce([torch.ones(4)], dist.AllreduceOptions()).wait())

    def post(self) -> None:
        options = dist.AllreduceOptions()
        self._works = [self._process_group.allreduce([torch.ones(4)], options) for _ in range(NUM_SUMS)]

    def fail(self) -> None:
        try:
            self._works[0].wait()
        except RuntimeError:
            return
        raise AssertionError("a sum without one of its members is complete")


WAYS: dict[str, Callable[[tuple[str, int], int], Any]] = {"rebuild": Rebuilt, "reconfigure": Reconfigured}


def member(way: str, case: str, address: tuple[str, int], group: int, pipe: Connection) -> None:
    """One group. It answers "ready" where the parent may stop or kill one, and then how long it took to sum again."""
    torch.set_num_threads(1)
    everyone, survivors = range(GROUPS), range(VICTIM)
    connection = WAYS[way](address, group)
    connection.connect(1, everyone)
    assert connection.add()
    if group != VICTIM:
        connection.post()
    pipe.send("ready")
    pipe.recv()
    if case == "killed":
        connection.fail()
    pipe.send("failed")
    pipe.recv()
    start_s = time.monotonic()
    if case == "lost_while_connecting":  # the last survivor stays away, as if it had died on the way
        survivors = range(VICTIM - 1)
        if group not in survivors:
            pipe.send(0.0)
            return
        connection.start(2, range(VICTIM))
    connection.connect(3, survivors)
    assert connection.add()
    pipe.send(time.monotonic() - start_s)
    pipe.recv()


def lose_one(way: str, case: str) -> float:
    """Seconds until the slowest survivor has summed again."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spare_megatron.comm.communicators", "__main__"])
    pipes = [context.Pipe() for _ in range(GROUPS)]
    address = ("127.0.0.1", server.port)
    processes = [
        context.Process(target=member, args=(way, case, address, group, pipe), daemon=True)
        for group, (_, pipe) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        ends = [end for end, _ in pipes]
        _answers(ends)
        if case == "stopped":
            pid = processes[VICTIM].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        else:
            processes[VICTIM].kill()
        for _ in range(2):
            for end in ends[:VICTIM]:
                end.send("go on")
            answers = _answers(ends[:VICTIM])
        return max(answers)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(ends: Sequence[Connection]) -> list[Any]:
    if not all(end.poll(PATIENCE_S) for end in ends):
        raise TimeoutError(f"a group did not answer within {PATIENCE_S} s")
    return [end.recv() for end in ends]


def measure(num_kills: int, num_others: int) -> dict[str, Any]:
    """All cases, in turns of both ways."""
    cases: dict[str, Any] = {}
    for case, number in (("killed", num_kills), ("lost_while_connecting", num_others), ("stopped", num_others)):
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(number):
            for way, found in times.items():
                found.append(lose_one(way, case))
        cases[case] = {
            way: {"median_s": statistics.median(found), "max_s": max(found), "all_s": found}
            for way, found in times.items()
        }
        print(case, {way: (found["median_s"], found["max_s"]) for way, found in cases[case].items()}, file=sys.stderr)
    return {"kills": num_kills, "others": num_others, "torch": torch.__version__, "cases": cases, **origin()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--others", type=int, default=5, help="of each of the cases for safety")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not hasattr(dist.ProcessGroup, "reconfigure"):
        parser.error(f"torch {torch.__version__} has no ProcessGroup.reconfigure; install 2.14 or later")
    result = measure(options.kills, options.others)
    if options.json:
        print(json.dumps(result))
