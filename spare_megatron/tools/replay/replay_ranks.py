"""The ranks of a replay on one machine, started, watched and ended there for the command that asks for the replay.

As a main module it is one of these ranks: it computes audited microbatches once more, as one rank of a group that is
alone, and prints their digests as JSON.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import numbers_of
from spare_megatron.core.audits.audits import Boundary
from spare_megatron.formats.codec import decode, encode
from spare_megatron.machine.gpus import name_in_torch, shown_to_children, visible_gpus
from spare_megatron.process.node_connection import connect
from spare_megatron.process.processes import die_with, set_environment_of_ranks, set_gpu_environment
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.version import code_digest

_POLL_S = 0.05
_SHOWN = 2000
"""Characters of what a rank has printed before it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What a rank finds of a microbatch, or of a row of them: its boundaries here, and where its sequences lie."""

    boundaries: list[Boundary]
    number: int
    """Linear number of the first one."""
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


class DescribeMachine:
    """Request for the machine's facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    host: str
    gpus: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePart:
    """Request to compute these ranks; the answer is what each finds, or a ValueError. `config`: TOML that loads the
    parameters. The ranks of the group meet at `store`, host and port; each sees one of the machine's `gpus`, by UUID.
    """

    config: str
    store: tuple[str, int]
    stages: int
    """Of the group."""
    wanted: Wanted
    ranks: tuple[PartRank, ...]
    gpus: tuple[str, ...]


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
                for rank in part.ranks:
                    ranks[rank.rank] = _start(part, rank, config, _log(folder, rank.rank))
                _await(ranks, folder, asking)
            finally:
                for process in ranks.values():
                    process.kill()
                    process.wait()
            return {rank: _found(_log(folder, rank)) for rank in ranks}
    except (OSError, ValueError) as error:
        return ValueError(str(error))


def _start(part: ComputePart, rank: PartRank, config: Path, output: Path) -> "subprocess.Popen[bytes]":
    alone = encode(replace(part, config="", ranks=(rank,)))
    command = [sys.executable, "-P", "-m", "spare_megatron.tools.replay.replay_ranks"]
    with output.open("wb") as out, shown_to_children(None if rank.gpu is None else part.gpus[rank.gpu]):
        return subprocess.Popen(
            [*command, str(config), str(os.getpid()), alone],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


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


# ------------------------------------------------------------------------------------------------------------ a rank


def replayed(config: RunConfig, part: ComputePart) -> OfRank:
    """What the one rank of this part finds. Collective over: all ranks of the group."""
    import torch.distributed as dist

    from spare_megatron.mcore.trainer import GroupTrainer
    from spare_megatron.rank.bootstrap import choose_device

    (rank,) = part.ranks
    device = choose_device(config, name_in_torch("cpu" if rank.gpu is None else "gpu"), rank.number)
    timeout_s = config.control.startup_timeout_s
    host, port = part.store
    own_config = config.with_stages(part.stages)
    dist.init_process_group(
        "nccl" if device.type != "cpu" else "gloo",
        store=open_store(TcpStoreSpec(host=host, port=port)).rendezvous("replay", rank.rank, timeout_s),
        rank=rank.rank,
        world_size=own_config.parallel.ranks_per_group,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    trainer = GroupTrainer(own_config, device, slabs=config.slabs)
    microbatches = [Microbatch(ShardId(shard), index) for shard, index in part.wanted.microbatches]
    trainer.begin_step(part.wanted.step)
    trainer.audit(microbatches)
    found = []
    for microbatch in microbatches:
        numbers = numbers_of(config, part.wanted.step, microbatch)
        boundaries = trainer.passes.boundaries(microbatch)
        samples = [one for number in numbers for one in trainer.corpus.addresses(part.wanted.step, number)]
        found.append(Recomputed(boundaries=boundaries, number=numbers[0], samples=samples))
    return found


def main() -> None:
    config_file, parent, text = sys.argv[1:]
    part = decode(text, ComputePart)
    die_with(int(parent))  # before the imports, which take seconds
    config = load_run_config(Path(config_file)).config
    if config.cluster.device == "gpu":
        set_gpu_environment(config.parallel)
    import torch

    from spare_megatron.mcore.model.training_samples import prepare_index

    torch.set_num_threads(config.cluster.threads_per_rank)
    if part.ranks[0].rank == 0:
        prepare_index(config)  # the other ranks wait for this one
    print("replayed", encode(replayed(config, part)), flush=True)
    torch.distributed.barrier()  # an earlier exit would break connections that others read from
    os._exit(0)  # a program may have started threads


if __name__ == "__main__":
    main()
