"""`spare checkpoint`: what checkpoints there are, whether they are whole and what they hold."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.command import SpareCommand
from spare_megatron.cli.printing import message, say, say_json
from spare_megatron.formats.quantities import format_bytes, format_steps

if TYPE_CHECKING:
    from spare_megatron.state.checkpoint.checkpoint_folder import Manifest

app = typer.Typer(
    name="checkpoint",
    help="List, verify or show checkpoints; export or import weights.",
    no_args_is_help=True,
)

_PATH = Annotated[Path, typer.Argument(help="A checkpoint, a folder of checkpoints, or the directory of a run.")]
_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object or array.")]


@app.command("list", cls=SpareCommand)
def list_checkpoints(path: _PATH, as_json: _JSON = False) -> None:
    """List checkpoints by their manifests, newest first."""
    from spare_megatron.state.checkpoint.audited_checkpoints import audited_steps_in

    checkpoints = _checkpoints(path)
    audited_steps = audited_steps_in(checkpoints)
    entries = [_entry(checkpoint, audited_steps) for checkpoint in checkpoints]
    if as_json:
        say_json(entries)
        return
    for entry in entries:
        what = entry["damage"] or f"{format_steps(entry['step'])}  {format_bytes(entry['num_bytes'])}"
        if entry["audited_steps"] is not None:
            of_steps = "audited" if entry["is_audited"] else "not audited"
            what += f"  of steps that are {of_steps} ({entry['audited_steps']} were at its save)"
        say(f"{entry['path']}  {what}" + (f"  refused: {entry['refused']}" if entry["refused"] else ""))


def _entry(checkpoint: Path, audited_steps: int | None) -> dict[str, Any]:
    """A row of the list; `audited_steps` are those known from all checkpoints."""
    from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, read_manifest, refusal_of

    entry: dict[str, Any] = {"path": str(checkpoint), "step": None, "num_bytes": None, "damage": ""}
    entry |= {"refused": refusal_of(checkpoint), "audited_steps": None, "is_audited": None}
    try:
        manifest = read_manifest(checkpoint)
        entry |= {"step": manifest.step, "num_bytes": manifest.num_bytes, "audited_steps": manifest.audited_steps}
        if audited_steps is not None:
            entry["is_audited"] = manifest.step <= audited_steps
    except DamagedCheckpoint as error:
        entry["damage"] = str(error)
    return entry


@app.command(cls=SpareCommand)
def verify(path: _PATH, as_json: _JSON = False) -> None:
    """Verify every byte of checkpoints against its SHA-256.

    Interrupted saves are listed, too, with the command that removes them. No run uses them, and they do not count as
    damage.

    Exit codes: 0 all are whole, 1 one is damaged or refused, 2 there is none, 130 interrupted.
    """
    from spare_megatron.state.checkpoint import verification
    from spare_megatron.state.checkpoint.checkpoint_folder import checkpoints_at, leftovers

    damage: dict[str, str] = {}
    path = _folder_of_run(path)
    unfinished = {str(aside): _unfinished(aside) for aside in leftovers(path)}
    for checkpoint in checkpoints_at(path) if unfinished else _checkpoints(path):
        try:
            verification.verify(checkpoint)
            damage[str(checkpoint)] = ""
        except verification.UnfinishedSave as error:
            unfinished[str(checkpoint)] = f"{error}: {_unfinished(checkpoint)}"
        except verification.DamagedCheckpoint as error:
            damage[str(checkpoint)] = str(error)
    if as_json:
        say_json(damage | unfinished)
    else:
        for name, reason in (damage | unfinished).items():
            say(f"{name}  {reason or 'whole'}")
    if not damage:
        message("checkpoint verify", f"{path} holds only unfinished saves")
        raise typer.Exit(2)
    raise typer.Exit(1 if any(damage.values()) else 0)


@app.command(cls=SpareCommand)
def show(path: _PATH, as_json: _JSON = False) -> None:
    """Show the manifest of the newest checkpoint."""
    from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, read_manifest, refusal_of

    newest = _checkpoints(path)[0]
    try:
        manifest = read_manifest(newest)
    except DamagedCheckpoint as error:
        raise ValueError(str(error)) from error
    if as_json:
        say_json({"path": str(newest), "refused": refusal_of(newest), **asdict(manifest)})
        return
    say(str(newest))
    if refusal_of(newest):
        say(f"  {'refused':24}  {refusal_of(newest)}")
    for name, value in _lines(manifest):
        say(f"  {name:24}  {value}")


def _lines(manifest: "Manifest") -> list[tuple[str, str]]:
    writer = f"group {manifest.group}, incarnation {manifest.incarnation}, spare_megatron {manifest.version}"
    optimizer = manifest.optimizer["sharding"]
    if "writers" in manifest.optimizer:
        writers = ", ".join(map(str, manifest.optimizer["writers"]))
        optimizer += (
            f": {manifest.optimizer['num_slices']} partitions on {manifest.optimizer['redundancy']} groups each, "
            f"written by groups {writers}"
        )
    return [
        ("committed steps", str(manifest.step)),
        ("audited steps", "none" if manifest.audited_steps is None else str(manifest.audited_steps)),
        ("sequences read", str(manifest.num_samples)),
        ("written by", writer),
        ("optimizer state", optimizer),
        ("epoch, entries of the log", f"{manifest.epoch}, {manifest.log_head}"),
        ("size", f"{manifest.num_bytes} bytes in {len(manifest.files)} files"),
        *((f"layout.{name}", str(value)) for name, value in manifest.layout.items()),
        *((f"spare.{name}", str(value)) for name, value in manifest.placement.items()),
        *((name, str(value)) for name, value in manifest.terms.items() if value != ""),
    ]


def _unfinished(path: Path) -> str:
    """What is to be done with a save that is no checkpoint: nothing, while a run may be at it."""
    from spare_megatron.machine.lock import is_held

    if is_held(path.parent) or is_held(path.parent.parent):  # a folder of checkpoints, or the run's directory
        return "an unfinished save, which a run that goes on may be writing"
    return f"an unfinished save, which nothing uses; to remove it: rm -r {shlex.quote(str(path))}"


def _folder_of_run(path: Path) -> Path:
    """Where the checkpoints of a run are, if the path is its directory and it has set checkpoint.folder."""
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.state.checkpoint.checkpoint_folder import folder_of

    file = path / "config.toml"
    return folder_of(load_run_config(file).config.checkpoint, path) if file.is_file() else path


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint at the path, or all below it, newest first. Raises ValueError if there is none, and OSError."""
    from spare_megatron.state.checkpoint.checkpoint_folder import checkpoints_at

    folder = _folder_of_run(path)
    found = checkpoints_at(folder)
    if not found:
        what = "holds no checkpoint (step-NNNNNNNN)" if folder.is_dir() else "is no directory"
        raise ValueError(f"{folder} {what}; name a checkpoint, checkpoint.folder, or the directory of a run")
    return found
