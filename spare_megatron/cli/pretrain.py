"""`spare_megatron.pretrain`: trains a program from the script that it stands in."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spare_megatron.config.program_file import LOSS_TERMS, MODULE, ROLES, LossTerm, ProgramImported, read_program
from spare_megatron.config.schema import ProgramConfig
from spare_megatron.machine.standard_streams import open_closed, outlasting

if TYPE_CHECKING:
    from spare_megatron.journal.state.summary import Summary
    from spare_megatron.observe.metrics import OnStep


def pretrain(
    config: str | Path,
    *,
    model_provider: Callable[..., Any] | None = None,
    forward_step: Callable[..., Any] | None = None,
    datasets_provider: Callable[..., Any] | None = None,
    loss_terms: Mapping[str, LossTerm] | None = None,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    on_step: "OnStep | None" = None,
) -> "Summary":
    """Trains as `spare train CONFIG` does, and returns how the run ended. A role that is None has our default.

    Each function stands at the top level of the calling script under the name of its role, as ranks import the script
    and find it there. `overrides` are those of `--set`; `on_step` is called on the driver for each step. Raises
    ValueError if the run cannot start, and KeyboardInterrupt once all processes have ended.
    """
    if MODULE in sys.modules:
        raise ProgramImported
    open_closed()
    given = dict(zip((*ROLES, LOSS_TERMS), (model_provider, forward_step, datasets_provider, loss_terms), strict=True))
    caller = sys._getframe(1).f_globals
    settings = [*overrides, *_program_setting({name: one for name, one in given.items() if one is not None}, caller)]
    return _train(Path(config), settings, None if run_dir is None else Path(run_dir), on_step)


def _program_setting(given: Mapping[str, object], caller: Mapping[str, Any]) -> list[str]:
    """The setting that names the calling script. ValueError: ranks would find other functions there."""
    if not given:
        return []
    file = caller.get("__file__")
    if file is None:
        raise ValueError("pretrain was called where there is no file for ranks to import; write the program into one")
    found = read_program(ProgramConfig(file=file)).names
    for name in {*given, *found}:
        if name not in found or given.get(name) is not caller.get(name):
            raise ValueError(
                f"pretrain: ranks find {name} in {file} by that name, at its top level, and it is not what {name}= was "
                f"given; define it there and pass it, or remove both"
            )
    return [f"program.file={file}"]


@outlasting()
def _train(preset: Path, settings: Sequence[str], stated: Path | None, on_step: "OnStep | None") -> "Summary":
    from spare_megatron.cli.console import RunConsole
    from spare_megatron.cli.progress import print_summary
    from spare_megatron.cli.running import load_runnable, run_and_show, run_directory
    from spare_megatron.cli.train import elsewhere
    from spare_megatron.machine import end_signal, interrupts

    console = RunConsole()
    with end_signal.blocked(), _not_imported_by_children(), interrupts.raising():
        loaded = load_runnable("pretrain", preset, settings)
        directory = run_directory("pretrain", loaded, stated)
        with elsewhere(loaded, directory.path) as (loaded, launcher):
            summary = run_and_show(loaded, directory, console, launcher=launcher, on_step=on_step, takes_requests=True)
    print_summary(summary, directory.path, console)
    return summary


@contextmanager
def _not_imported_by_children() -> Iterator[None]:
    """Processes started in the block do not run the main script again, so that it needs no `__main__` guard."""
    main = sys.modules["__main__"]
    spec, file = main.__spec__, main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
