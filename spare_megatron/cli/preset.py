"""Loads the run preset of a command and reports everything wrong with it at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.formats.output import printable

if TYPE_CHECKING:
    from spare_megatron.config.checks.validate import MachineResources
    from spare_megatron.config.loader import LoadedConfig
    from spare_megatron.config.schema import RunConfig

HELP = "The run preset: a name of `spare config list`, or a TOML file."
PresetArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help=HELP, show_default=False)]
PresetOption = Annotated[Path | None, typer.Option("--config", help="The run preset, if not given as an argument.")]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, as in train.steps=100. Repeatable."),
]


def one_preset(argument: Path | None, option: Path | None, command: str) -> Path:
    """The preset, given as an argument or as an option; raises ValueError if both or neither are given."""
    if argument is not None and option is not None:
        raise ValueError(f"the preset is given twice, as {argument} and as --config {option}; leave one out")
    preset = argument or option
    if preset is None:
        raise ValueError(
            f"the preset of the run is missing; name one of `spare config list`, or a TOML file: spare {command} CONFIG"
        )
    return preset


def load_without_problems(
    path: Path | None,
    overrides: Sequence[str],
    machine_of: Callable[["RunConfig"], "MachineResources"],
    *,
    cluster: Path | None = None,
    restrict: Callable[["RunConfig"], "RunConfig"] = lambda config: config,
    where: str = "",
) -> "tuple[RunConfig, LoadedConfig]":
    """Loads a configuration that can run on the machine; returns it restricted, and as it was loaded. `cluster` is a
    preset whose values override those of `path`; `restrict` removes what the command does not run, before validation;
    `where` is the place named in the error message. ValueError: it cannot run; the text lists every reason.
    """
    from spare_megatron.config.checks.validate import problems
    from spare_megatron.config.loader import load_and_judge

    def judge(config: "RunConfig") -> list[str]:
        restricted = restrict(config)
        return problems(restricted, machine_of(restricted))

    loaded, found = load_and_judge(path, overrides, judge, cluster)
    if found:
        raise ValueError(refusal(found, where))
    return restrict(loaded.config), loaded


def refusal(found: Sequence[str], where: str = "") -> str:
    return f"this configuration cannot run{where}:\n" + "\n".join(f"  - {printable(text)}" for text in found)
