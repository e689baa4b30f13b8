"""`spare check-program`: whether losses of groups can be masked exactly with a custom program."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.preset import HELP, OverridesOption
from spare_megatron.cli.printing import say, say_json

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_BASE = {**dict.fromkeys(_RANK_VARIABLES, "0"), "WORLD_SIZE": "4"}
_OTHER = {**dict.fromkeys(_RANK_VARIABLES, "3"), "WORLD_SIZE": "8"}
TRIALS = (
    ("group-0000-rank-0", {**_BASE, "PYTHONHASHSEED": "0"}),
    ("group-0003-rank-0", {**_OTHER, "PYTHONHASHSEED": "0"}),
    ("group-0000-rank-0", {**_BASE, "PYTHONHASHSEED": "1"}),
)
"""Name of the process and environment of each trial: the first, as another group, with other hashes."""

_TIMEOUT_S = 600.0

ADVICE = {
    "random": "draw from torch in model_provider and forward_step, where it is seeded by stage and by microbatch; "
    "elsewhere from a generator seeded with the number of the sample",
    "state": "let a forward pass change nothing in the model: groups compute different microbatches, and some twice",
    "collective": "use the groups tp, cp and pp of the context alone; the run itself adds over data-parallel groups",
    "environment": "derive it from the context, the batch and the number of the sample, not from variables of the "
    "environment, ids of processes, times or addresses",
    "hash_order": "sort what comes from a set or from hash() before it has an effect",
    "position": "let nothing that earlier microbatches left behind, such as a count of them, enter the loss; return "
    "sum and count, which the run divides once all groups are added",
    "mask": "use each mask that the settings ask for in every microbatch and stage, also in evaluations",
    "raises": "correct what the traceback shows",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFinding:
    """A rule that the program breaks, the role or microbatch in which it shows, and what was seen."""

    rule: str
    where: str
    what: str

    @property
    def advice(self) -> str:
        return ADVICE[self.rule]


def check_program(
    program: Annotated[Path, typer.Argument(metavar="FILE.py", help="The program.", show_default=False)],
    preset: Annotated[Path | None, typer.Argument(metavar="CONFIG", help=HELP, show_default=False)] = None,
    overrides: OverridesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdict and findings as JSON.")] = False,
) -> None:
    """Check that a program recovers exactly from losses.

    Computes some microbatches in three fresh processes, with other group ids, environments and PYTHONHASHSEED, and in
    two orders in each; gradients are compared bit by bit. On one CPU per group, without parallelism inside a group.

    Example: `spare check-program examples/sums/program.py examples/sums/config.toml`

    Exit codes: 0 valid, 1 invalid, 2 it could not be checked.
    """
    from spare_megatron.cli.running import load_runnable

    settings = [*(overrides or ()), f"program.file={program}"]
    config = load_runnable("check-program", preset, settings, _alone)
    found = findings_of(run_trials([config])[0])
    if as_json:
        listed = [{**dataclasses.asdict(one), "advice": one.advice} for one in found]
        say_json({"verdict": "invalid" if found else "valid", "findings": listed})
    else:
        for one in found:
            say(f"{one.rule}: {one.where}: {one.what}", f"  {one.advice}")
        say(f"{program} is {'invalid' if found else 'valid'}")
    raise typer.Exit(1 if found else 0)


def _alone(config: "RunConfig") -> "RunConfig":
    """The configuration of a trial: groups of one rank on a CPU, whose gradients are not rounded."""
    from spare_megatron.config import schema, schema_sections, schema_sites

    layout = schema.LayoutConfig(num_groups=config.layout.num_groups)
    return dataclasses.replace(
        config,
        layout=layout,
        optimizer=dataclasses.replace(config.optimizer, sharding="replicated"),
        reduce=dataclasses.replace(config.reduce, mode="fast"),
        checkpoint=schema_sections.CheckpointConfig(),
        snapshot=schema_sections.SnapshotConfig(),
        sites=schema_sites.SitesConfig(),
        faults=schema.FaultsConfig(),
        cluster=schema.ClusterConfig(device="cpu"),
        metrics=schema.MetricsConfig(),
        profile=schema.ProfileConfig(),
    )


# --------------------------------------------------------------------------------------------------------- trials


def run_trials(configs: "Sequence[RunConfig]") -> list[list[dict[str, Any]]]:
    """For each configuration what each of `TRIALS` observed; all programs share the processes."""
    from spare_megatron.config.loader import dump_run_config

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.toml" for number in range(len(configs))]
        for path, config in zip(paths, configs, strict=True):
            path.write_text(dump_run_config(config), encoding="utf-8")
        processes = [_start(name, environment, paths) for name, environment in TRIALS]
        try:
            observed = [_observed(process, len(configs)) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [list(trials) for trials in zip(*observed, strict=True)]


def _start(name: str, environment: Mapping[str, str], paths: Sequence[Path]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "spare_megatron.tools.doctor.program_trial", name, *map(str, paths)]
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, env=everything, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _observed(process: "subprocess.Popen[str]", num_programs: int) -> list[dict[str, Any]]:
    """The observations of a trial. ValueError: it was too slow, or ended otherwise than by an error of a program."""
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"the program did not compute within {_TIMEOUT_S:g} s; check it with a smaller model"
        ) from error
    lines = [json.loads(line.partition(" ")[2]) for line in output.splitlines() if line.startswith("observed ")]
    if len(lines) != num_programs:
        raise ValueError(f"a process that checks the program has ended with {process.returncode}:\n{errors[-2000:]}")
    return lines


# ------------------------------------------------------------------------------------------------------- judgement


def findings_of(trials: Sequence[Mapping[str, Any]]) -> list[ProgramFinding]:
    """What the trials of a program show, the most direct evidence first; empty for a program that breaks no rule.

    ValueError: its samples are not what the settings need.
    """
    for trial in trials:
        if "refused" in trial:
            raise ValueError(trial["refused"])
        if "error" in trial:
            return [ProgramFinding(rule="raises", where="program", what=trial["error"])]
    direct = dict.fromkeys(tuple(fault) for trial in trials for fault in trial["faults"])
    found = [ProgramFinding(rule=rule, where=where, what=what) for rule, where, what in direct]
    rules = {one.rule for one in found}
    if "random" in rules:
        return found  # every difference may follow from it
    base, other, hashed = trials
    if "state" not in rules:
        found += _differences("position", *base["passes"], what="after other microbatches it")
    elsewhere = [*_between("environment", base, other, what="in another process it")]
    return [*found, *(elsewhere or _between("hash_order", base, hashed, what="with another PYTHONHASHSEED it"))]


def _between(rule: str, one: Mapping[str, Any], other: Mapping[str, Any], *, what: str) -> Iterator[ProgramFinding]:
    """Differences between two trials in the first parameters, or else in their first passes."""
    if one["parameters"] != other["parameters"]:
        yield ProgramFinding(rule=rule, where="model_provider", what=f"{what} builds other parameters")
        return
    yield from _differences(rule, one["passes"][0], other["passes"][0], what=what)


def _differences(rule: str, one: Mapping[str, Any], other: Mapping[str, Any], *, what: str) -> Iterator[ProgramFinding]:
    """The first microbatch that differs."""
    for address, ours in one.items():
        theirs = other[address]
        if ours["batch"] != theirs["batch"]:
            yield ProgramFinding(rule=rule, where=f"datasets_provider, {address}", what=f"{what} reads other samples")
            return
        if ours != theirs:
            yield ProgramFinding(
                rule=rule, where=f"forward_step, {address}", what=f"{what} gives another loss or gradient"
            )
            return
