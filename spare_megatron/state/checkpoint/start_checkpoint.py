"""Chooses the checkpoint that a run begins with, before any rank starts. Loads without torch."""

import dataclasses
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from spare_megatron.config.loader import ConfigError, load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.config.training.terms import (
    differences,
    phases_after,
    sequences_before,
    step_of,
    weights_differences,
)
from spare_megatron.state.checkpoint import checkpoint_folder as folders
from spare_megatron.state.checkpoint import verification
from spare_megatron.state.checkpoint.emergency_checkpoint import is_emergency_checkpoint, misfits

_ID_BYTES = 4
_IDENTITY_DIGITS = 16
_WHAT_TO_SET = (
    "set it to a checkpoint (step-NNNNNNNN), to a folder of them, or to the directory of a run that has saved some; "
    "leave it empty to begin from nothing"
)


def resumed(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration that begins with the newest valid checkpoint of the folder, if it holds any checkpoint."""
    if all(map(_is_left_over, folders.all_checkpoints(folder))):
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=str(folder)))


def _is_left_over(path: Path) -> bool:
    """Whether ranks have left it that ended while they saved their state: nothing can use it."""
    return is_emergency_checkpoint(path) and not verification.is_usable(path)


def last_checkpoint(config: RunConfig, folder: Path) -> Path | None:
    """This training's valid checkpoint after all of its steps; None if the folder does not have it yet."""
    if not any(step_of(path) >= config.train.steps for path in folders.all_checkpoints(folder)):
        return None  # decided by names: no file is read
    found, _ = verification.newest_valid(folder)
    if found is None or found.manifest.step < config.train.steps or _differences(found.manifest, config):
        return None
    return found.path


def resolve_load(config: RunConfig, folder: Path, reject: Callable[[verification.Rejected], None]) -> RunConfig:
    """Resolves `checkpoint.load` to the one checkpoint that the run begins with, if set, and sets the run id.

    The run keeps that checkpoint's id unless `metrics.run_id` is set; without one it gets a new id. `reject` receives
    newer ones that are damaged or refused. Raises ValueError if none fits, or for `require_own_checkpoints`.
    """
    rejected: list[verification.Rejected] = []
    first_step = 0
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, offset=0, phases=()))
    run_id = secrets.token_hex(_ID_BYTES)
    if config.checkpoint.load:
        checkpoint = _find(Path(config.checkpoint.load), rejected)
        for item in rejected:
            reject(item)
        check(config, checkpoint)
        first_step = checkpoint.manifest.step
        load = str(checkpoint.path.absolute())
        identity = str(checkpoint.manifest.terms.get("checkpoint.weights_identity", ""))
        ours = dataclasses.replace(config.checkpoint, load=load, load_weights="", weights_identity=identity)
        config = dataclasses.replace(config, checkpoint=ours)
        run_id = checkpoint.manifest.run_id
        num_read = checkpoint.manifest.num_samples
        ahead = num_read - sequences_before(config, first_step)
        phases = phases_after(checkpoint.manifest.terms, config, num_read)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, offset=ahead, phases=phases))
    elif config.checkpoint.load_weights:
        config = _with_weights(config, rejected)
        for item in rejected:
            reject(item)
    metrics = dataclasses.replace(config.metrics, run_id=config.metrics.run_id or run_id)
    config = dataclasses.replace(config, metrics=metrics)
    require_own_checkpoints(config, folder, [item.path for item in rejected])
    return config


def require_own_checkpoints(config: RunConfig, folder: Path, rejected: Iterable[Path]) -> None:
    """Raises ValueError if the run would replace checkpoints in its folder: later ones than the one that it begins
    with, or those of another training. `config` is resolved; damaged, `rejected` and unfinished ones do not count.
    """
    first_step = step_of(Path(config.checkpoint.load)) if config.checkpoint.load else 0
    damaged = {path.absolute() for path in rejected}
    found = [path for path in folders.all_checkpoints(folder) if path.absolute() not in damaged]
    found = [path for path in found if not _is_left_over(path)]
    choice = f"set checkpoint.load={folder} to go on from the newest, or choose another checkpoint.folder"
    if found and step_of(found[0]) > first_step:
        newest = step_of(found[0])
        raise ValueError(
            f"{folder} holds checkpoints after {newest} steps, and the run begins after {first_step}: {choice}"
        )
    begins_with = Path(config.checkpoint.load or config.checkpoint.load_weights)
    is_own = begins_with.parent.resolve() == folder.resolve()
    if others := [path for path in found if not is_own and _is_of_another(path, config)]:
        raise ValueError(
            f"{folder} holds {others[0].name} of another training, whose checkpoints this run would replace: {choice}"
        )


def _is_of_another(path: Path, config: RunConfig) -> bool:
    """Whether a checkpoint is of a training that this run does not continue; not if it is damaged or refused."""
    try:
        return not is_emergency_checkpoint(path) and verification.glance(path).manifest.run_id != config.metrics.run_id
    except verification.DamagedCheckpoint:
        return False


def _with_weights(config: RunConfig, rejected: list[verification.Rejected]) -> RunConfig:
    """The configuration with `checkpoint.load_weights` and their identity resolved. Raises ValueError."""
    settings = config.checkpoint
    found = find_weights(Path(settings.load_weights), rejected, "checkpoint.load_weights")
    where = f"checkpoint.load_weights={found.path}"
    if reasons := weights_differences(found.manifest.terms, config):
        raise ValueError("\n".join([f"{where} has weights of another model:", *(f"  - {text}" for text in reasons)]))
    identity = weights_identity(found.manifest)
    if settings.weights_identity not in ("", identity):
        raise ValueError(
            f"{where} is {identity}, not checkpoint.weights_identity={settings.weights_identity}; load those weights, "
            f"or clear checkpoint.weights_identity"
        )
    resolved = dataclasses.replace(settings, load_weights=str(found.path.absolute()), weights_identity=identity)
    return dataclasses.replace(config, checkpoint=resolved)


def check_weights(config: CheckpointConfig) -> None:
    """Raises ValueError unless the resolved `load_weights` is still the checkpoint that the run began with."""
    if config.load_weights:
        try:
            identity = weights_identity(verification.glance(Path(config.load_weights)).manifest)
        except verification.DamagedCheckpoint as error:
            raise ValueError(f"checkpoint.load_weights={config.load_weights} cannot be used: {error}") from error
        if identity != config.weights_identity:
            raise ValueError(f"checkpoint.load_weights={config.load_weights} is no longer {config.weights_identity}")


def weights_identity(manifest: folders.Manifest) -> str:
    """Identifies a checkpoint by its manifest, which has the SHA-256 of all files."""
    return verification.candidate_of(manifest).digest[:_IDENTITY_DIGITS]


def find_weights(path: Path, rejected: list[verification.Rejected], setting: str) -> folders.Checkpoint:
    """The checkpoint at the path, or the newest valid one below, whose weights any layout can read; else ValueError."""
    found = _find(path, rejected, setting)
    if is_emergency_checkpoint(found.path):
        raise ValueError(f"{setting}={found.path} is the state of single ranks, which loads only at its own layout")
    return found


def checkpoint_of_run(path: Path) -> tuple[folders.Checkpoint, RunConfig]:
    """A run's newest valid checkpoint, or the one at the path, with the run's configuration. Raises ValueError."""
    is_checkpoint = folders.checkpoints_at(path) == [path]
    run_dir = path.absolute().parents[1] if is_checkpoint else path
    try:
        config = load_run_config(run_dir / "config.toml").config
    except ConfigError as error:
        raise ValueError(f"{path} is no run's directory, nor a checkpoint in one: {error}") from error
    return find_weights(path if is_checkpoint else folders.folder_of(config.checkpoint, path), [], "checkpoint"), config


def _find(path: Path, rejected: list[verification.Rejected], setting: str = "checkpoint.load") -> folders.Checkpoint:
    if not path.is_dir():
        raise ValueError(f"{setting}={path}: there is no such directory; {_WHAT_TO_SET}")
    if folders.checkpoints_at(path) == [path]:
        try:
            return verification.verify(path)
        except verification.DamagedCheckpoint as error:
            raise ValueError(f"{setting}={path} cannot be used: {error}; choose an earlier one") from error
    found, newer = verification.newest_valid(folders.below(path))
    rejected.extend(newer)
    if found is None and newer:
        reasons = "; ".join(item.reason for item in newer)
        raise ValueError(f"{setting}={path} holds no checkpoint that can be used ({reasons}); {_WHAT_TO_SET}")
    if found is None:
        raise ValueError(f"{setting}={path} {_what_is_missing(path)}")
    return found


def _what_is_missing(path: Path) -> str:
    """What was looked for in a folder without any checkpoint, and where one may be instead."""
    folder = folders.below(path)
    looked_for = f"no step-NNNNNNNN in {folder}" + ("" if folder != path else f", and no {folders.FOLDER} below it")
    left = ", but unfinished saves, which nothing can use" if folders.leftovers(path) else ""
    try:
        own = load_run_config(path / "config.toml").config.checkpoint.folder
    except ConfigError:  # of no run, or of one that another version wrote
        own = ""
    instead = f"its run has saved in checkpoint.folder={own}: set checkpoint.load={own}" if own else _WHAT_TO_SET
    return f"holds no checkpoint: there is {looked_for}{left}; {instead}"


def _differences(manifest: folders.Manifest, config: RunConfig) -> list[str]:
    return differences(manifest.terms, config, manifest.num_samples)


def check(config: RunConfig, checkpoint: folders.Checkpoint) -> None:
    """Raises ValueError unless the run can begin with the checkpoint."""
    manifest, where = checkpoint.manifest, f"checkpoint.load={checkpoint.path}"
    if manifest.optimizer["sharding"] == folders.WEIGHTS_ALONE:
        raise ValueError(
            f"{where} has weights alone; set checkpoint.load_weights to it, and checkpoint.load to nothing"
        )
    found = _differences(manifest, config)
    if found:
        raise ValueError("\n".join([f"{where} is of another training:", *(f"  - {text}" for text in found)]))
    found = misfits(manifest, config) if is_emergency_checkpoint(checkpoint.path) else []
    if found:
        what = "is the state of single ranks, which loads only as it was saved; set these until the next checkpoint:"
        raise ValueError("\n".join([f"{where} {what}", *(f"  - {text}" for text in found)]))
    if manifest.step >= config.train.steps:
        raise ValueError(f"{where} holds all of train.steps={config.train.steps}; there is nothing left to train")
