"""Checkpoint folders: names, manifests, and publication by one atomic rename. Loads without torch.

A checkpoint is written to a folder whose name ends in `.tmp`; the manifest, with the size and SHA-256 of every file, is
written last. Once all is on the disk, one rename gives the final name, which thus always stands for a whole checkpoint,
whenever a process is killed; later damage is found by the manifest (`verification`).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.config.training.terms import (
    CHECKPOINT_NAME,
    EMERGENCY_CHECKPOINT_NAME,
    sequences_before,
    step_of,
    terms_of,
)
from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.faults.points import FaultPoint
from spare_megatron.machine.lock import LOCK
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.version import __version__

FOLDER = "checkpoints"
"""Inside a run's directory, unless `checkpoint.folder` is set."""

DISPUTES = "disputes"
"""Inside a run's directory: the parameters of steps in which groups have computed a microbatch differently."""

NUM_DISPUTES_KEPT = 3
"""Such steps whose parameters are kept, the newest ones."""

MANIFEST = "manifest.json"

FORMAT = 1

WEIGHTS_ALONE = "none"
"""Manifest's `sharding` of the optimizer state where there is none."""

EMERGENCY_SUFFIX = ".state"
"""Suffix of the folder and the files of an emergency checkpoint (`emergency_checkpoint`)."""

_UNFINISHED = re.compile(r"step-\d{8,}\..+\.tmp$")

_ASIDE = re.compile(r"step-\d{8,}\.group-(\d+)-life-(\d+)\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint after `step` committed steps, which have read `num_samples` sequences. `terms`: as
    in `config.training.terms`. `placement`: settings that decide which group hosts which shard. `log_head`: log entries
    folded at the save. `optimizer`: how its state was spread over groups, and which wrote parts. `audited_steps`: how
    many of the first steps were audited when it was begun; None without audits.
    """

    step: int
    num_samples: int
    terms: Mapping[str, Any]
    layout: Mapping[str, int]
    placement: Mapping[str, Any]
    group: int
    incarnation: int
    epoch: int
    log_head: int
    version: str
    run_id: str
    files: Mapping[str, StoredFile]
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"sharding": "replicated"})
    audited_steps: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    manifest: Manifest


def manifest_of(
    config: RunConfig,
    action: SaveCheckpoint,
    head: int,
    files: Mapping[str, StoredFile],
    writers: Iterable[Member] = (),
) -> Manifest:
    """The manifest of these files; `head` counts the log entries folded, `writers` wrote state partitions, if any."""
    layout, spare = config.layout, config.spare
    optimizer: dict[str, Any] = {"sharding": config.optimizer.sharding}
    if rules := rules_of(config):
        optimizer["rules"] = rules
    if strips := strips_of(config):
        optimizer["strips"] = strips
    if action.hosts:
        groups = sorted({member.group for member in writers})
        optimizer |= {"num_slices": len(action.hosts), "redundancy": config.optimizer.redundancy, "writers": groups}
    return Manifest(
        step=action.step,
        num_samples=sequences_before(config, action.step),
        terms=terms_of(config),
        layout=asdict(layout),
        placement={
            "kind": "golomb",
            "redundancy": spare.redundancy,
            "groups_per_domain": spare.groups_per_domain,
            "microbatches_per_shard": spare.microbatches_per_shard,
        },
        group=action.member.group,
        incarnation=action.member.incarnation,
        epoch=action.epoch,
        log_head=head,
        version=__version__,
        run_id=config.metrics.run_id,
        files=dict(sorted(files.items())),
        optimizer=optimizer,
        audited_steps=action.audited_steps,
    )


def rules_of(config: RunConfig) -> list[dict[str, Any]]:
    """`optimizer.rules` as a manifest has them."""
    return [asdict(rule) for rule in config.optimizer.rules]


def strips_of(config: RunConfig) -> dict[str, Any]:
    """The settings beside the layout that decide which optimizer state a rank has; empty if it has all of it."""
    if config.layout.data_parallel == 1:
        return {}
    return {"reduce.mode": config.reduce.mode, "reduce.bucket_mib": config.bucket_mib}


# ----------------------------------------------------------------------------------------------------------- names


def folder_of(checkpoint: CheckpointConfig, run_dir: Path) -> Path:
    return Path(checkpoint.folder).absolute() if checkpoint.folder else run_dir.absolute() / FOLDER


def disputes_of(run_dir: Path) -> Path:
    return run_dir.absolute() / DISPUTES


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def aside_path(folder: Path, step: int, member: Member) -> Path:
    """The temporary folder in which a group writes the checkpoint."""
    name = checkpoint_path(folder, step).name
    return folder / f"{name}.group-{member.group:04d}-life-{member.incarnation}.tmp"


def require_folder(folder: Path) -> None:
    """Raises `OSError` unless the folder is readable and the one that the run locked, not an empty mount point."""
    if not (folder / LOCK).exists():
        raise FileNotFoundError(f"{folder} is not the folder of checkpoints that the run began with: put that back")
    os.listdir(folder)


def visible_steps(folder: Path) -> list[int]:
    """Steps of the visible checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((int(m[1]) for m in map(CHECKPOINT_NAME.fullmatch, os.listdir(folder)) if m), reverse=True)


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints and emergency checkpoints in a folder, newest first."""
    last = [
        folder / name
        for name in (os.listdir(folder) if folder.is_dir() else ())
        if EMERGENCY_CHECKPOINT_NAME.fullmatch(name)
    ]
    found = [checkpoint_path(folder, step) for step in visible_steps(folder)]
    return sorted([*found, *last], key=step_of, reverse=True)


def below(path: Path) -> Path:
    """The checkpoint folder that a path stands for: that of a run's directory, or the path itself."""
    return path / FOLDER if (path / FOLDER).is_dir() else path


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint at the path, or all in the folder that it stands for, newest first."""
    if path.is_dir() and (CHECKPOINT_NAME.fullmatch(path.name) or EMERGENCY_CHECKPOINT_NAME.fullmatch(path.name)):
        return [path]
    return all_checkpoints(below(path))


def leftovers(path: Path) -> list[Path]:
    """Temporary folders of saves that were interrupted or are under way."""
    folder = below(path)
    return sorted(folder / name for name in (os.listdir(folder) if folder.is_dir() else ()) if _UNFINISHED.match(name))


# ----------------------------------------------------------------------------------------------------------- write


def clear_leftovers(folder: Path, writing: Collection[Member]) -> None:
    """Removes what interrupted saves have left, but not the unfinished checkpoints of the members `writing`."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        match = _ASIDE.fullmatch(name)
        is_left = (
            name.endswith(".tmp") if match is None else Member(GroupId(int(match[1])), int(match[2])) not in writing
        )
        if is_left:
            shutil.rmtree(folder / name, ignore_errors=True)


def publish(aside: Path, manifest: Manifest, probe: Callable[[FaultPoint], None]) -> Checkpoint:
    """Writes the manifest, last of all files, and makes the checkpoint visible in place of any of the same step."""
    probe(FaultPoint.SAVE_MANIFEST)
    _write_manifest(aside, manifest)
    probe(FaultPoint.SAVE_RENAME)
    path = checkpoint_path(aside.parent, manifest.step)
    if path.exists():
        drop(aside.parent, [manifest.step])
    _rename(aside, path)
    return Checkpoint(path=path, manifest=manifest)


def forestall(folder: Path, step: int, member: Member) -> None:
    """Removes what the member is still writing, so that it never becomes visible."""
    _remove(aside_path(folder, step, member))


def drop(folder: Path, steps: Iterable[int]) -> None:
    """Removes checkpoints. None of them is ever visible in part."""
    for step in sorted(steps):
        _remove(checkpoint_path(folder, step))


def _remove(path: Path) -> None:
    aside = path.with_name(f"{path.name}.dropped.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):  # another group may have dropped it
        _rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _rename(path: Path, new: Path) -> None:
    path.rename(new)
    sync_folder(new.parent)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    content = {"format": FORMAT, **asdict(manifest)}
    write_synced(folder / MANIFEST, json.dumps({**content, "sha256": digest_of(content)}, indent=1))
    sync_folder(folder)


def stored(written: Mapping[str, tuple[int, str]]) -> dict[str, StoredFile]:
    """The files of a manifest by the size and SHA-256 of each."""
    return {name: StoredFile(num_bytes=size, sha256=sha256) for name, (size, sha256) in written.items()}


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Writes a file and syncs it; its name is on the disk once the folder is synced."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
