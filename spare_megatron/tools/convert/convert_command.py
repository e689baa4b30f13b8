"""`spare convert`: a preset of a launch of Megatron-LM, with a report of what became of each argument."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.printing import say, write_exactly

if TYPE_CHECKING:
    from spare_megatron.tools.convert.arguments import Arguments
    from spare_megatron.tools.convert.settings import Preset

_KINDS = {
    "taken": "taken over",
    "implied": "implied: it always holds here",
    "without effect": "without effect on what is trained",
    "missing": "not had here",
}


def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE [-- ARGUMENT...]",
            help="A shell script, a YAML or a file of arguments; behind -- further ones, also of torchrun.",
        ),
    ],
    define: Annotated[
        list[str] | None,
        typer.Option("--define", metavar="NAME=VALUE", help="A variable of the script, also 1 for $1. Repeatable."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="ARGUMENT", help="Leave out an argument that is not had here. Repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The preset to write; stdout if absent.")
    ] = None,
) -> None:
    """Convert a launch of Megatron-LM to a preset.

    SOURCE launches pretrain_gpt.py. Scripts are read, never executed. The report names what became of each argument,
    and what is set because Megatron's default differs from the one here; it goes to stderr. Exit codes: 0 the preset is
    written and can run on a fitting machine, 2 it is not written or cannot run, for the reasons that the report names.
    """
    from spare_megatron.tools.convert.launch import read_launch
    from spare_megatron.tools.convert.settings import convert_launch, problems_of, toml_of

    if malformed := [text for text in define or () if "=" not in text]:
        raise ValueError(f"--define {malformed[0]} must have the form NAME=VALUE")
    defined = {name: value for name, _, value in (text.partition("=") for text in define or ())}
    is_file = not words[0].startswith("--")
    further = words[is_file:]
    launch = read_launch(Path(words[0]), defined, further) if is_file else None
    args, preset, reader = convert_launch(launch, further, without or ())
    name = Path(words[0]).stem if is_file else "converted"
    _print_report(args, preset, launch.environment if launch else {}, reader)
    missing = [args.written(name) for name, found in preset.classes.items() if found.kind == "missing"]
    if missing:
        raise ValueError(f"no preset: {len(missing)} arguments are not had here; change them, or --without")
    text = toml_of(preset, name)
    if output is None:
        write_exactly(text)
    else:
        output.write_text(text, encoding="utf-8")
    if problems := problems_of(preset, name):
        raise ValueError("the preset cannot run:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _print_report(args: "Arguments", preset: "Preset", environment: Mapping[str, str], reader: str) -> None:
    say(f"{len(preset.classes)} arguments, read {reader}", err=True)
    for kind, title in _KINDS.items():
        names = [name for name, found in preset.classes.items() if found.kind == kind]
        if names:
            say(f"{title} ({len(names)}):", err=True)
        for name in names:
            say(f"  {args.written(name)}: {_meaning(name, preset)}", err=True)
    others = [key for key, names in preset.sources.items() if not any(name in args.given for name in names)]
    say(f"set without an argument ({len(others)}), as Megatron's defaults or the layout have it:", err=True)
    for key in others:
        say(f"  {key} = {preset.settings.get(key)}", err=True)
    for name, value in environment.items():
        say(f"  {name}={value}: of the environment, not of a preset; export it, or add it to slurm.setup", err=True)


def _meaning(name: str, preset: "Preset") -> str:
    if preset.classes[name].kind != "taken":
        return preset.classes[name].text
    keys = [key for key, names in preset.sources.items() if name in names and key in preset.settings]
    if keys:
        note = f", {preset.notes[name]}" if name in preset.notes else ""
        return ", ".join(f"{key} = {preset.settings[key]}" for key in keys) + note
    is_incomplete = any(found.kind == "missing" for found in preset.classes.values())
    return preset.classes[name].text + (" (see below)" if is_incomplete else " is off")
