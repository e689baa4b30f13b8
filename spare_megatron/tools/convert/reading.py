"""From a launch to a preset: reads the arguments, by Megatron's own parser where it is installed, and checks it."""

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import tomli_w

from spare_megatron.cli.config import fitting_machine
from spare_megatron.config.building import build_run_config
from spare_megatron.config.checks.validate import problems
from spare_megatron.tools.convert.arguments import Arguments, read_arguments
from spare_megatron.tools.convert.launch import Launch
from spare_megatron.tools.convert.settings import Preset, preset_of, tables_of

OF_LAUNCHER = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone", "max_restarts"}
_LAUNCHER = re.compile(r"(.*/)?(torchrun|ft_launcher|torch\.distributed\.(run|launch))")


def convert_launch(
    launch: Launch | None, further: Sequence[str], without: Sequence[str]
) -> tuple[Arguments, Preset, str]:
    """The arguments, what they become, and how they were read. Later arguments win over those of the launch."""
    words = launch.launcher if launch else ()
    first = next((index + 1 for index, word in enumerate(words) if _LAUNCHER.fullmatch(word)), len(words))
    given = read_arguments(words[first:])
    given |= read_arguments([*(launch.arguments if launch else ()), *further])
    for name in [name.lstrip("-").replace("-", "_") for name in without]:
        if given.pop(name, None) is None:
            raise ValueError(f"--without {name}: the launch does not have it; remove that")
    parser, reader = own_parser()
    defaults: dict[str, Any] = {}
    unknown: set[str] = set()
    if parser is not None:
        flags = {name_of(flag): (flag, action) for action in parser._actions for flag in action.option_strings}
        defaults = {name: action.default for name, (_, action) in flags.items()}
        unknown = given.keys() - flags - OF_LAUNCHER
        parser.parse_args([word for name in given.keys() & flags for word in (flags[name][0], *given[name])])
    args = Arguments(given=given, defaults=defaults)
    preset = preset_of(args)
    for name in unknown:
        preset.refuse(name, "the installed Megatron has no such argument; remove it")
    return args, preset, reader


def name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's parser: {message}; correct it")


def own_parser() -> tuple[argparse.ArgumentParser | None, str]:
    """Megatron's own parser, if it can be imported, and which one reads the arguments."""
    if find_spec("megatron.training") is None:
        return None, "by the table of spare, as megatron.training is not installed"
    try:
        import_module("spare_megatron.mcore")  # what Megatron needs to be imported
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        return None, f"by the table of spare, as megatron.training cannot be imported ({error})"
    parser = _Parser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser, "by Megatron's own parser"


def toml_of(preset: Preset, name: str) -> str:
    return f"# Of {name}, by `spare convert`.\n{tomli_w.dumps(tables_of(preset.settings, name))}"


def problems_of(preset: Preset, name: str) -> list[str]:
    """Why the preset could run on no machine, with its data."""
    run_name = tables_of({}, name)["name"]
    config, mistakes = build_run_config({"name": run_name, **preset.settings})
    return [mistake.text for mistake in mistakes] or problems(config, fitting_machine(config))
