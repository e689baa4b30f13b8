"""The ranks of a replay on one machine, started, watched and ended there for the command that asks for the replay."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from spare_megatron.core.audits.audits import Boundary
from spare_megatron.formats.codec import decode, encode
from spare_megatron.machine.gpus import shown_to_children, visible_gpus
from spare_megatron.process.node_connection import connect
from spare_megatron.process.processes import set_environment_of_ranks
from spare_megatron.version import code_digest

_POLL_S = 0.05
_SHOWN = 2000
"""Characters of what a rank has printed before it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What a rank finds of a microbatch: its boundaries here, its linear number, and where its sequences lie."""

    boundaries: list[Boundary]
    number: int
    samples: list[str]


OfRank = list[Recomputed]  # in the order of the microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRank:
    """A rank of the replay. `number` is that among the ranks of all groups, of which some may share its device; `gpu`
    the number of its GPU on its machine, None on CPUs.
    """

    rank: int
    gpu: int | None
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be computed again: `microbatches` (shard, index) of a step."""

    step: int
    microbatches: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """What one rank is to do. The ranks of the group, which has so many stages, meet at `store`, host and port; each
    sees one GPU, by UUID.
    """

    store: tuple[str, int]
    gpu: str | None
    rank: PartRank
    stages: int
    wanted: Wanted


class DescribeMachine:
    """Request for the machine's facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    host: str
    gpus: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePart:
    """Request to compute these ranks; the answer is what each finds, or a ValueError. `config`: TOML text that loads
    the parameters.
    """

    config: str
    tasks: tuple[ReplayTask, ...]


def serve_part(folder: Path, node: int, wait_s: float) -> None:
    """Main function of the process on a machine other than the command's. ValueError: no command awaits it."""
    set_environment_of_ranks()
    answer_requests(connect(folder, node, wait_s))


def answer_requests(asking: Connection) -> None:
    """Returns when the connection is closed, and leaves no rank behind. Ranks have the environment of this process."""
    with asking, contextlib.suppress(EOFError, OSError):
        while True:
            match asking.recv():
                case DescribeMachine():
                    host, gpus = socket.gethostname(), tuple(gpu.uuid for gpu in visible_gpus())
                    asking.send(MachineFacts(host=host, gpus=gpus, code=code_digest()))
                case ComputePart() as part:
                    asking.send(_compute(part, asking))


def _compute(part: ComputePart, asking: Connection) -> dict[int, OfRank] | ValueError:
    """What each rank finds, or why that failed. Raises EOFError once the connection is closed."""
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = folder / "config.toml"
            config.write_text(part.config, encoding="utf-8")
            try:
                for task in part.tasks:
                    ranks[task.rank.rank] = _start(task, config, _log(folder, task.rank.rank))
                _await(ranks, folder, asking)
            finally:
                for process in ranks.values():
                    process.kill()
                    process.wait()
            return {rank: _found(_log(folder, rank)) for rank in ranks}
    except (OSError, ValueError) as error:
        return ValueError(str(error))


def _start(task: ReplayTask, config: Path, output: Path) -> "subprocess.Popen[bytes]":
    module = "spare_megatron.tools.replay.replay_rank"
    command = [sys.executable, "-P", "-m", module, str(config), str(os.getpid()), encode(task)]
    with output.open("wb") as out, shown_to_children(task.gpu):
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)


def _await(ranks: "Mapping[int, subprocess.Popen[bytes]]", folder: Path, asking: Connection) -> None:
    """Waits until all ranks have ended. ValueError: one has failed."""
    while any(process.poll() is None for process in ranks.values()):
        if any(process.returncode for process in ranks.values()):
            break
        if wait([asking], _POLL_S):
            asking.recv()  # nothing comes before the answer
    for rank, process in ranks.items():
        if process.returncode:
            text = _log(folder, rank).read_text(errors="replace")[-_SHOWN:]
            raise ValueError(f"rank {rank} of the replay has ended with {process.returncode}:\n{text}")


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _found(output: Path) -> OfRank:
    lines = output.read_text(errors="replace").splitlines()
    text = next(line.partition(" ")[2] for line in reversed(lines) if line.startswith("replayed "))
    return decode(text, list[Recomputed])
