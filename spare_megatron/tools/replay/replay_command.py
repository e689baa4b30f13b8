"""`spare replay`: computes a microbatch about which groups differed again, and says which of them was wrong."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.command import option, with_options
from spare_megatron.cli.printing import say, say_json
from spare_megatron.machine.interrupts import raising

if TYPE_CHECKING:
    from spare_megatron.tools.replay.replay import GroupCompared, MicrobatchReplay, Replay

_ORDER = ("forward", "backward", "gradients")
"""Of the digests along the way of a microbatch: forward up the stages, the others down."""
_WHAT = {"forward": "output of", "backward": "gradient received by", "gradients": "gradients of parameters of"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of `spare replay` as the user wrote them; None where absent."""

    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]
    step: int | None = option("A step with a mismatch, as spare audit lists them. [required without --node]")
    microbatch: str | None = option("One of the microbatches in dispute. [default: all of them]", metavar="SHARD.INDEX")
    group: str | None = option(
        "Compute on the machines of this group, or of the one that machine:N was last in, with its devices. "
        "[default: on this machine]",
        metavar="GROUP",
    )
    node: int | None = option(
        "Act as this node for the `spare replay --group` elsewhere; without other options but --wait-s.", least=0
    )
    wait_s: float = option("Longest wait for other nodes, in seconds.", default=300, least=0)
    as_json: bool = option("Print the replay as JSON.", "--json", default=False)


@with_options(ReplayOptions)
def replay(given: ReplayOptions) -> None:
    """Compute the disputed microbatches of a step again.

    Starts the ranks of one group, with the parameters that the run saved at the mismatch, and compares the digests
    along the stages with what each group has stated.

    With --group it is computed where that group stands: in a Slurm job (cluster.launcher=srun) on its nodes, beside
    what trains there, with cluster.launcher=hand on this machine, the first of the group, and on those where
    `spare replay RUN_DIR --node` runs, otherwise on this machine.

    Exit codes: 0 each came out as some group has stated it, 1 one did not, 2 it cannot be computed.
    """
    if given.node is not None:
        _serve(given, given.node)
        return
    if given.step is None:
        raise ValueError("--step is missing; `spare audit RUN_DIR` lists steps with a mismatch")
    from spare_megatron.tools.replay import replay as replays
    from spare_megatron.tools.replay.replay_parts import Where

    number, machine = (None, None) if given.group is None else _group_or_machine(given.group)
    where = Where(group=number, machine=machine, wait_s=given.wait_s, on_awaited=partial(say, err=True))
    microbatch = None if given.microbatch is None else _address(given.microbatch)
    with raising():
        found = replays.replay(given.run_dir, given.step, microbatch, where)
    if given.as_json:
        say_json({**asdict(found), "is_confirmed": found.is_confirmed})
    else:
        for line in lines_of(found):
            say(line)
    raise typer.Exit(0 if found.is_confirmed else 1)


def _serve(given: ReplayOptions, node: int) -> None:
    if (given.step, given.microbatch, given.group) != (None, None, None):
        raise ValueError("--node takes RUN_DIR and --wait-s alone, those of the `spare replay --group` elsewhere")
    from spare_megatron.tools.replay.replay import serve_node

    with raising():
        serve_node(given.run_dir, node, given.wait_s, partial(say, err=True))


def _group_or_machine(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(machine:)?(\d+)", text)
    if match is None:
        raise ValueError(f"--group={text} is neither the number of a group nor a machine, such as machine:2")
    number = int(match[2])
    return (None, number) if match[1] else (number, None)


def _address(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(
            f"--microbatch={text} is not of the form SHARD.INDEX, such as 3.1; spare audit lists those in dispute"
        )
    return int(match[1]), int(match[2])


def lines_of(found: "Replay") -> Iterator[str]:
    """The replay as text: of each microbatch which groups differ and where, then all digests side by side."""
    yield f"step {found.step}, with the parameters of {found.path}, computed on {found.device} by {_machines(found)}"
    if found.params:
        by_digest: dict[str, list[int]] = {}
        for group, digest in sorted(found.params.items()):
            by_digest.setdefault(digest, []).append(group)
        equal = "; ".join(f"{digest[:16]} in groups {', '.join(map(str, of))}" for digest, of in by_digest.items())
        yield f"parameters before the step: {equal}{'' if len(by_digest) == 1 else ' (they differ)'}"
    for one in found.microbatches:
        yield from _lines_of_microbatch(one)


def _machines(found: "Replay") -> str:
    if found.group is None:
        return f"this machine ({found.machines[0].host})"
    return f"group {found.group}: {', '.join(f'node {one.node} ({one.host})' for one in found.machines)}"


def _lines_of_microbatch(one: "MicrobatchReplay") -> Iterator[str]:
    yield ""
    yield f"microbatch {one.index} of shard {one.shard}, number {one.number} of the step: {one.digest}"
    yield from (f"  {sample}" for sample in one.samples)
    for group in one.groups:
        yield f"  group {group.group} {_verdict(group)}"
    rows = [["(=: as the replay)", "replay", *(f"group {group.group}" for group in one.groups)]]
    for kind, stage, rank, digest in sorted(one.boundaries, key=_along_the_way):
        place = [kind, stage, rank]
        stated = [next((value for *at, value in group.boundaries if at == place), "unknown") for group in one.groups]
        shown = ["=" if value == digest else value for value in stated]
        rows.append([f"{_WHAT[kind]} stage {stage}, rank {rank}", digest, *shown])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _verdict(group: "GroupCompared") -> str:
    if group.agrees:
        return "agrees"
    what = "contradicts itself" if len(group.digests) > 1 else "differs"
    return f"{what}: {', '.join(group.digests)}{f'; first at {group.differs_at}' if group.differs_at else ''}"


def _along_the_way(boundary: tuple[str, int, int, str]) -> tuple[int, int, int]:
    kind, stage, rank, _ = boundary
    return _ORDER.index(kind), stage if kind == _ORDER[0] else -stage, rank
