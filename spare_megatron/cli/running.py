"""Shared by the commands that train on this machine, with the corpus of the demo, which they make."""

import contextlib
import dataclasses
import datetime
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.folders import check_folders
from spare_megatron.cli.preset import load_without_problems
from spare_megatron.cli.printing import message
from spare_megatron.config.object_stores import refusal_of_address
from spare_megatron.formats.quantities import format_steps
from spare_megatron.machine import interrupts

if TYPE_CHECKING:
    from spare_megatron.config.checks.validate import MachineResources
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.config.schema_sections import DataConfig
    from spare_megatron.journal.state.summary import Summary
    from spare_megatron.observe.metrics import OnStep
    from spare_megatron.process.reports import RunEvent
    from spare_megatron.supervisor.remote_supervisor import Launcher

_LONG_RUN_STEPS = 1000
_MOST_FAULTS = 4
"""Faults to name before a run; a campaign has hundreds."""

DEMO_CORPUS = "data/demo/corpus"
"""`data.corpus` of these presets. Like every corpus, it lies below the working directory."""

_SUFFIXES = (".py", ".txt", ".rst", ".html")
_EXCLUDED = ("site-packages", "dist-packages")


def load_runnable(
    command: str,
    path: Path | None,
    overrides: Sequence[str],
    restrict: Callable[["RunConfig"], "RunConfig"] = lambda config: config,
) -> "RunConfig":
    """Loads a configuration that can run on this machine, as `resolved` returns it, and prints its warnings. Makes the
    demo's corpus if it alone is missing. `restrict` removes what the command does not run, before validation. Raises
    ValueError with every reason if it cannot run.
    """
    from spare_megatron.config.checks.validate import warnings
    from spare_megatron.driver.run import resolved

    look = partial(this_machine, command)
    config, _ = load_without_problems(path, overrides, look, restrict=restrict)
    if is_to_be_made(config.data):
        make_demo_corpus(command)
        config, _ = load_without_problems(path, overrides, look, restrict=restrict)
    machine = look(config)
    for text in warnings(config, machine):
        message(command, f"warning: {text}")
    return resolved(config, machine)


def this_machine(command: str, config: "RunConfig") -> "MachineResources":
    """What this machine offers the run, with the demo's corpus, which can be made."""
    from spare_megatron.driver.run import look_at_machine

    machine = look_at_machine(config, lambda what: message(command, what))
    return dataclasses.replace(machine, has_corpus=machine.has_corpus or is_to_be_made(config.data))


def is_to_be_made(data: "DataConfig") -> bool:
    """Whether `make_demo_corpus` has yet to write this corpus."""
    from spare_megatron.config.training.corpus import corpus_files

    return data.corpus == DEMO_CORPUS and not all(file.exists() for file in corpus_files(DEMO_CORPUS))


def make_demo_corpus(command: str) -> None:
    """Makes it of the text files of Python's standard library. ValueError: `spare preprocess` fails, and says why."""
    text = sysconfig.get_paths()["stdlib"]
    message(command, f"making the demo's corpus, {DEMO_CORPUS}, of the text files in {text} (about 60 MiB, once)")
    options = [word for suffix in _SUFFIXES for word in ("--suffix", suffix)]
    options += [word for name in _EXCLUDED for word in ("--exclude", name)]
    preprocess = ("-m", "spare_megatron", "preprocess", "--input", text, "--output-prefix", DEMO_CORPUS)
    done = subprocess.run(
        # --overwrite: one of its files may be there.
        [sys.executable, "-P", *preprocess, "--tokenizer", "byte", "--overwrite", *options],
        stdin=subprocess.DEVNULL,
        stdout=2,
        check=False,
    )
    if done.returncode == interrupts.INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise ValueError(f"data.corpus={DEMO_CORPUS} could not be made, see above; set data.corpus to one of yours")


@dataclasses.dataclass(slots=True)
class RunDirectory:
    """Where the directory of a run is, which may be moved while the run goes on."""

    path: Path


def choose_run_dir(config: "RunConfig", stated: Path | None) -> Path:
    """The stated directory, or one named after the run and the current time. ValueError: it is an address."""
    if reason := refusal_of_address(str(stated or "")):
        raise ValueError(f"--run-dir {stated}: {reason}")
    return stated or Path("runs") / f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def run_directory(command: str, config: "RunConfig", stated: Path | None) -> RunDirectory:
    """As `choose_run_dir`. Warns of a run without checkpoints; raises ValueError if a folder could not be written."""
    warn_of_no_checkpoints(command, config)
    directory = RunDirectory(choose_run_dir(config, stated))
    check_folders(config, directory.path)
    return directory


def warn_of_no_checkpoints(command: str, config: "RunConfig") -> None:
    """Warns before a long run that takes no checkpoint before its end; `RunProgress` warns by its measured time."""
    if config.train.steps > _LONG_RUN_STEPS and not config.checkpoint.is_wanted:
        message(
            command,
            f"warning: no checkpoint is taken in these {config.train.steps} steps, unless the run is asked to end "
            f"(SIGTERM); set checkpoint.cadence=optimal, or checkpoint.interval_steps",
        )


@contextlib.contextmanager
def reported_interruption(command: str, directory: RunDirectory) -> Iterator[None]:
    """Makes signals raise KeyboardInterrupt; once all processes have ended, prints where the run is and exits."""
    try:
        with interrupts.raising():
            yield
    except KeyboardInterrupt:
        has_begun = (directory.path / "config.toml").exists()
        where = f"the run so far is in {directory.path}" if has_begun else "the run had not begun"
        message(command, f"interrupted; all processes are ended, {where}")
        raise typer.Exit(interrupts.INTERRUPTED) from None


def run_and_show(
    config: "RunConfig",
    directory: RunDirectory,
    console: RunConsole,
    *listeners: Callable[["RunEvent"], None],
    launcher: "Launcher | None" = None,
    on_step: "OnStep | None" = None,
    takes_requests: bool = False,
) -> "Summary":
    """Trains, with progress on the console and events passed to `listeners`; without a launcher, on this machine.
    `takes_requests` is that of `start_run`. Notes where the directory is moved.
    """
    from spare_megatron.cli.progress import DetachedView, RunProgress
    from spare_megatron.driver.run import start_run
    from spare_megatron.process.reports import Message, RunDirectoryMoved

    with contextlib.ExitStack() as shown:
        with interrupts.deferred():
            progress = shown.enter_context(DetachedView(RunProgress(config, console, directory.path)))
        progress.on_event(Message(text=f"starting: {plan_of(config)}"))

        def dispatch(event: "RunEvent") -> None:
            if isinstance(event, RunDirectoryMoved):
                directory.path = event.path
            for on_event in (progress.on_event, *listeners):
                on_event(event)

        return start_run(
            config, directory.path, dispatch, launcher=launcher, on_step=on_step, takes_requests=takes_requests
        )


def plan_of(config: "RunConfig") -> str:
    """One line about the run to start and the faults to inject."""
    from spare_megatron.driver.planned_faults import draw_faults, resolve_trace
    from spare_megatron.journal.event_texts import fault_named

    layout = config.parallel
    faults = (*resolve_trace(config), *draw_faults(config))
    named = [fault_named(fault) for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        named.append(f"and {len(faults) - _MOST_FAULTS} more")
    lanes = f" in {layout.data_parallel} lanes" if layout.data_parallel > 1 else ""
    ranks = f"{layout.ranks_per_group} rank{'s' if layout.ranks_per_group > 1 else ''}{lanes}"
    return f"{config.name}, {format_steps(config.train.steps)} in {layout.num_groups} groups of {ranks}" + (
        f"; faults to inject: {'; '.join(named)}" if named else ""
    )
