"""Designs in `state` beside their alternatives: the time that they take, and the memory.

Snapshots: in memory of the node's snapshot server, or in files of /dev/shm that the rank writes, hashes and renames.
Their redundancy: a second copy, or the parity of several parts.
Restarts: reading all files of a checkpoint before the decision, divided among the groups, beside loading it once.
"""

import argparse
import ctypes
import hashlib
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.core.log.actions import CheckpointCandidate
from spare_megatron.process.specs import NodeSpec
from spare_megatron.state.checkpoint.checkpoint_folder import Checkpoint, Manifest, StoredFile
from spare_megatron.state.checkpoint.checkpoint_reader import CheckpointReader
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient, SnapshotServerGone
from spare_megatron.state.snapshot.snapshot_server import NodeSnapshotServer

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.005
Write = Callable[[mmap.mmap], None]
Copy = Callable[[int, int, Write], object]
"""Takes an attempt, the previous one, and what writes the copy."""


class SnapshotFiles:
    """A rank position's two newest snapshots as files, of which the older is overwritten by the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy(self, attempt: int, previous: int, num_bytes: int, write: Write) -> None:
        aside = self._folder / "aside"
        for file in self._folder.iterdir():
            if file.name.partition(".")[0] != str(previous):
                file.rename(aside)
        with aside.open("r+b" if aside.exists() else "w+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, num_bytes)  # a full file system is an error here, SIGBUS later
            with mmap.mmap(opened.fileno(), num_bytes) as memory:
                write(memory)
                digest = hashlib.sha256(memory).hexdigest()
        aside.rename(self._folder / f"{attempt}.{digest}")


@contextmanager
def snapshot_server(run_dir: Path) -> Iterator[SnapshotClient]:
    spec = cast(NodeSpec, SimpleNamespace(run_dir=run_dir, node=0))
    server = NodeSnapshotServer(spec, multiprocessing.get_context("fork"))
    try:
        server.ensure_running()
        client = SnapshotClient(server.address, 0)
        end_s = time.monotonic() + 30.0
        while True:
            try:
                client.pass_over(0, ())
                break
            except SnapshotServerGone:
                if time.monotonic() > end_s:
                    raise
                time.sleep(POLL_S)
        yield client
    finally:
        server.stop()


def shared_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Shmem"].split()[0]) * 1024


def timed_copy(state: bytearray, attempt: int, copy: Copy) -> tuple[float, float]:
    """Seconds until the state is copied, and until the copy is hashed and visible."""
    copied_s: list[float] = []
    source = (ctypes.c_char * len(state)).from_buffer(state)
    began_s = time.monotonic()

    def write(memory: mmap.mmap) -> None:
        ctypes.memmove((ctypes.c_char * len(state)).from_buffer(memory), source, len(state))
        copied_s.append(time.monotonic() - began_s)

    copy(attempt, attempt - 1, write)
    return copied_s[0], time.monotonic() - began_s


def measure_snapshots(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Both ways in turn. Medians over all but the first two rounds, in which memory is new."""
    state = bytearray(num_bytes)
    with (
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder,
        tempfile.TemporaryDirectory() as run_dir,
        snapshot_server(Path(run_dir)) as client,
    ):
        files = SnapshotFiles(Path(folder))
        ways: dict[str, Copy] = {
            "files": lambda now, last, write: files.copy(now, last, num_bytes, write),
            "server": lambda now, last, write: client.copy(
                now, (last,), {None: num_bytes}, lambda mapped: write(mapped[0].memory)
            ),
        }
        before = shared_bytes()
        times = [{way: timed_copy(state, attempt, copy) for way, copy in ways.items()} for attempt in range(rounds + 2)]
        copies = (shared_bytes() - before) / num_bytes
    found = {
        way: {
            "copied_s": statistics.median(row[way][0] for row in times[2:]),
            "hashed_s": statistics.median(row[way][1] for row in times[2:]),
            "first_s": times[0][way][1],
        }
        for way in ways
    }
    return {**found, "copies_in_both": copies}


def measure_parity(num_bytes: int, num_parts: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of one core: to copy the state, to add its parts up to their parity, and to restore one part
    from the others. RuntimeError: the part is another one.
    """
    state = np.random.default_rng(0).integers(0, 2**63, num_bytes // 8 // num_parts * num_parts)
    parts, copied = state.reshape(num_parts, -1), np.empty_like(state)
    parity, restored = np.empty_like(parts[0]), np.empty_like(parts[0])
    times: dict[str, list[float]] = {"copy_s": [], "parity_s": [], "restore_s": []}
    for _ in range(rounds + 1):
        stamps = [time.thread_time()]
        np.copyto(copied, state)
        stamps.append(time.thread_time())
        parity[:] = parts[0]
        for part in parts[1:]:
            np.bitwise_xor(parity, part, out=parity)
        stamps.append(time.thread_time())
        restored[:] = parity
        for part in parts[1:]:
            np.bitwise_xor(restored, part, out=restored)
        stamps.append(time.thread_time())
        for name, seconds in zip(times, np.diff(stamps).tolist(), strict=True):
            times[name].append(seconds)
    if not (restored == parts[0]).all():
        raise RuntimeError("the parity does not restore the part")
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # memory is new in the first


def measure_restart(num_bytes: int, num_files: int, groups: Sequence[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "step-00000001"
        tensors = {f"{number}": torch.rand(num_bytes // 4 // num_files) for number in range(num_files)}
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        files = {file.name: _stored(file) for file in folder.glob("*.distcp")}
        manifest = cast(Manifest, SimpleNamespace(files=files))
        began_s = time.monotonic()
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        load_s = time.monotonic() - began_s
        read_s = {num: _read_share(Checkpoint(path=folder, manifest=manifest), num) for num in groups}
    return {"load_s": load_s, "read_s": read_s}


def _stored(file: Path) -> StoredFile:
    with file.open("rb") as opened:
        return StoredFile(num_bytes=file.stat().st_size, sha256=hashlib.file_digest(opened, "sha256").hexdigest())


def _read_share(checkpoint: Checkpoint, num_groups: int) -> float:
    """Seconds in which one of the groups verifies its share of the files."""
    reader, candidate = CheckpointReader(), CheckpointCandidate(step=1, num_files=len(checkpoint.manifest.files))
    began_s = time.monotonic()
    reader.read(candidate, checkpoint, range(0, candidate.num_files, num_groups))
    while reader.is_reading:
        time.sleep(POLL_S)
    spent_s = time.monotonic() - began_s
    damaged = reader.readings()[0].reason
    reader.stop()
    if damaged:
        raise RuntimeError(damaged)
    return spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="snapshots that count")
    parser.add_argument("--parts", type=int, default=7, help="parts of the state that have one parity")
    parser.add_argument("--files", type=int, default=8, help="files of the checkpoint")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    num_bytes = options.mib * 2**20
    snapshots = measure_snapshots(num_bytes, options.rounds)
    ratio = snapshots["server"]["hashed_s"] / snapshots["files"]["hashed_s"]
    parity = measure_parity(num_bytes, options.parts, options.rounds)
    restart = measure_restart(num_bytes, options.files, options.groups)
    result = {"ratio": ratio, "snapshots": snapshots, "parity": parity, "restart": restart} | origin()
    if options.json:
        print(json.dumps(result))
        return
    for way in ("files", "server"):
        found = snapshots[way]
        print(
            f"snapshot in {way}: copied after {found['copied_s']:.2f} s, hashed after {found['hashed_s']:.2f} s "
            f"(the first {found['first_s']:.2f} s)"
        )
    print(f"memory of both: {snapshots['copies_in_both']:.1f} copies")
    print(
        f"one core: a copy {parity['copy_s']:.2f} s, parity of {options.parts} parts {parity['parity_s']:.2f} s, one "
        f"part from it {parity['restore_s']:.2f} s"
    )
    shares = ", ".join(f"{spent_s:.2f} s in each of {num}" for num, spent_s in restart["read_s"].items())
    print(f"restart: all groups load in {restart['load_s']:.2f} s; before that they read for {shares} groups")


if __name__ == "__main__":
    main()
