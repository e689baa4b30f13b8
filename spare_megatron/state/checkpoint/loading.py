"""Chooses the checkpoint that a run begins with, before any rank starts. Loads without torch."""

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path

from spare_megatron.config.loader import ConfigError, load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import differences, step_of
from spare_megatron.state.checkpoint.checkpoint_folder import FOLDER, Checkpoint, all_checkpoints, below, leftovers
from spare_megatron.state.checkpoint.emergency_checkpoint import is_emergency_checkpoint, misfits
from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, Rejected, newest_valid, verify

_ID_BYTES = 4
_WHAT_TO_SET = (
    "set it to a checkpoint (step-NNNNNNNN), to a folder of them, or to the directory of a run that has saved some; "
    "leave it empty to begin from nothing"
)


def resumed(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration that begins with the newest valid checkpoint of the folder, if it holds any checkpoint."""
    if not all_checkpoints(folder):
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=str(folder)))


def last_checkpoint(config: RunConfig, folder: Path) -> Path | None:
    """This training's valid checkpoint after all of its steps; None if the folder does not have it yet."""
    if not any(step_of(path) >= config.train.steps for path in all_checkpoints(folder)):
        return None  # decided by names: no file is read
    found = newest_valid(folder).found
    if found is None or found.manifest.step < config.train.steps or differences(found.manifest.terms, config):
        return None
    return found.path


def resolve_load(config: RunConfig, folder: Path, reject: Callable[[Rejected], None]) -> RunConfig:
    """Resolves `checkpoint.load` to the one checkpoint that the run begins with, if set, and sets the run id.

    The run keeps that checkpoint's id unless `metrics.run_id` is set; without one it gets a new id. `reject` receives
    newer ones that are damaged or refused. Raises ValueError if none fits, or `folder`, its own, has later ones.
    """
    rejected: list[Rejected] = []
    first_step = 0
    run_id = secrets.token_hex(_ID_BYTES)
    if config.checkpoint.load:
        checkpoint = _find(Path(config.checkpoint.load), rejected)
        for item in rejected:
            reject(item)
        _check(config, checkpoint)
        first_step = checkpoint.manifest.step
        load = str(checkpoint.path.absolute())
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=load))
        run_id = checkpoint.manifest.run_id
    damaged = {item.path.absolute() for item in rejected}
    later = [
        step_of(path)
        for path in all_checkpoints(folder)
        if step_of(path) > first_step and path.absolute() not in damaged
    ]
    if config.checkpoint.is_wanted and later:
        raise ValueError(
            f"{folder} holds checkpoints after {max(later)} steps, and the run begins after {first_step}: set "
            f"checkpoint.load={folder} to go on from the newest, or choose another checkpoint.folder"
        )
    metrics = dataclasses.replace(config.metrics, run_id=config.metrics.run_id or run_id)
    return dataclasses.replace(config, metrics=metrics)


def _find(path: Path, rejected: list[Rejected]) -> Checkpoint:
    if not path.is_dir():
        raise ValueError(f"checkpoint.load={path}: there is no such directory; {_WHAT_TO_SET}")
    try:
        step_of(path)
    except ValueError:
        pass
    else:
        try:
            return verify(path)
        except DamagedCheckpoint as error:
            raise ValueError(f"checkpoint.load={path} cannot be used: {error}; choose an earlier one") from error
    search = newest_valid(below(path))
    rejected.extend(search.rejected)
    if search.found is None and search.rejected:
        reasons = "; ".join(item.reason for item in search.rejected)
        raise ValueError(f"checkpoint.load={path} holds no checkpoint that can be used ({reasons}); {_WHAT_TO_SET}")
    if search.found is None:
        raise ValueError(f"checkpoint.load={path} {_what_is_missing(path)}")
    return search.found


def _what_is_missing(path: Path) -> str:
    """What was looked for in a folder without any checkpoint, and where one may be instead."""
    folder = below(path)
    looked_for = f"no step-NNNNNNNN in {folder}" + ("" if folder != path else f", and no {FOLDER} below it")
    left = ", but unfinished saves, which nothing can use" if leftovers(path) else ""
    try:
        own = load_run_config(path / "config.toml").config.checkpoint.folder
    except ConfigError:  # of no run, or of one that another version wrote
        own = ""
    instead = f"its run has saved in checkpoint.folder={own}: set checkpoint.load={own}" if own else _WHAT_TO_SET
    return f"holds no checkpoint: there is {looked_for}{left}; {instead}"


def _check(config: RunConfig, checkpoint: Checkpoint) -> None:
    manifest, where = checkpoint.manifest, f"checkpoint.load={checkpoint.path}"
    found = differences(manifest.terms, config)
    if found:
        raise ValueError("\n".join([f"{where} is of another training:", *(f"  - {text}" for text in found)]))
    found = misfits(manifest, config) if is_emergency_checkpoint(checkpoint.path) else []
    if found:
        what = "is the state of single ranks, which loads only as it was saved; set these until the next checkpoint:"
        raise ValueError("\n".join([f"{where} {what}", *(f"  - {text}" for text in found)]))
    if manifest.step >= config.train.steps:
        raise ValueError(f"{where} holds all of train.steps={config.train.steps}; there is nothing left to train")
