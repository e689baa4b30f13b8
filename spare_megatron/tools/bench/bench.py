"""`spare bench`: how fast this machine trains."""

import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.command import SpareCommand
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.folders import check_output_file
from spare_megatron.cli.preset import HELP, OverridesOption
from spare_megatron.cli.printing import message, say
from spare_megatron.cli.running import load_runnable
from spare_megatron.formats.output import whole_file
from spare_megatron.machine.gpus import visible_gpus
from spare_megatron.machine.interrupts import raising
from spare_megatron.machine.machine_signs import processor
from spare_megatron.version import __version__, commit

if TYPE_CHECKING:
    from spare_megatron.tools.bench.bench_throughput import Speed, Throughput

app = typer.Typer(help="Measure how fast this machine trains.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure how fast this machine trains."""


@app.command("throughput", cls=SpareCommand)
def throughput(
    config: Annotated[Path, typer.Option(help=HELP)],
    overrides: OverridesOption = None,
    pairs: Annotated[int, typer.Option(min=1, help="Number of runs, each paired with one of plain Megatron.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each run, of which the first 5 are not measured.")] = 40,
    alone: Annotated[bool, typer.Option("--alone", help="Do not run plain Megatron.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the speed without faults, beside plain Megatron.

    Trains the same model, data and settings with and without this package, without the faults, checkpoints, snapshots,
    metrics and time limit of the preset.

    Model operations per token: 2 for each element of a matrix that it is multiplied with, plus 4 x sequence length x
    width of all heads per layer for attention, times 3 for forward and backward pass. Redundant and recomputed
    operations do not count. MFU is their rate over metrics.peak_tflops.

    Exit codes: 0 measured, 1 a run failed or lost a group, 2 the configuration cannot run, 130 interrupted.
    """
    from spare_megatron.tools.bench.bench_throughput import kernels_measured, measure, problems_of, training_alone

    console = RunConsole(stderr=as_json)
    came_from = {"config": str(config), "overrides": overrides or [], "pairs": pairs, "commit": commit()}
    if out is not None:
        check_output_file("--out", out)
    short = [f"train.steps={steps}", "optimizer.warmup_steps=0", *(overrides or ())]
    loaded = load_runnable("bench throughput", config, short, training_alone)
    if found := list(problems_of(loaded, has_plain=not alone)):
        raise ValueError("this cannot be measured:\n" + "\n".join(f"  - {text}" for text in found))
    try:
        with raising():
            result = measure(loaded, pairs, has_plain=not alone, report=console.line)
    except RuntimeError as error:
        message("bench throughput", str(error))
        raise typer.Exit(1) from error
    kernels = kernels_measured(loaded, has_plain=not alone)
    text = json.dumps({**asdict(result), **kernels, **_origin(), **came_from})
    if as_json:
        say(text)
    else:
        console.line(", ".join(f"{name}: {value}" for name, value in kernels.items()))
        _print(result, console)
    if out is not None:
        with whole_file("--out", out) as file:
            file.write_text(text + "\n")


def _origin() -> dict[str, str]:
    import torch

    return {
        "machine": describe_machine(),
        "spare_megatron": __version__,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def describe_machine() -> str:
    """Processor, number of cores, GPUs if any, and the Python version."""
    parts = [processor(), f"{len(os.sched_getaffinity(0))} cores"]
    if gpus := visible_gpus():
        parts.append(f"{len(gpus)} x {gpus[0].name}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def _print(result: "Throughput", console: RunConsole) -> None:
    columns = {way: dict(_cells(speed)) for way, speed in result.speeds.items()}
    names = dict.fromkeys(name for cells in columns.values() for name in cells)
    rows = [(name, *(cells.get(name, "") for cells in columns.values())) for name in names]
    console.tables(Table(columns=("", *result.speeds), rows=rows, has_numbers=True))
    if result.ratio is not None:
        pairs = ", ".join(f"{ratio:.3f}" for ratio in result.ratios)
        console.line(
            f"step of ours over plain Megatron's: {result.ratio:.3f} (pairs of runs: {pairs}); "
            f"of the mean steps: {result.ratio_of_means:.3f}"
        )


def _cells(speed: "Speed") -> Iterator[tuple[str, str]]:
    yield "median step", f"{speed.step_s * 1e3:.1f} ms"
    yield "mean step", f"{speed.mean_step_s * 1e3:.1f} ms"
    yield "tokens/s", f"{speed.tokens_per_s:,.0f}"
    yield "TFLOP/s of a rank", f"{speed.tflops_per_rank:.4g}"
    yield "MFU", "set metrics.peak_tflops" if speed.mfu is None else f"{speed.mfu:.1%}"
    for name, spent_s in speed.split_s.items():
        yield f"  {name}", f"{spent_s * 1e3:.1f} ms"
    yield "host memory of the fullest rank", f"{speed.memory.host_bytes / 2**20:,.0f} MiB"
    if speed.memory.device_bytes:
        yield "taken of the fullest GPU", f"{speed.memory.device_bytes / 2**20:,.0f} MiB"
    yield "steps measured", str(speed.num_steps)
