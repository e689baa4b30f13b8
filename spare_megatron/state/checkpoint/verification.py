"""Verifies checkpoints, and marks wrong ones as refused in a file beside the manifest: those of one group, incarnation
and epoch, not a later one of that step. Loads without torch.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from spare_megatron.core.log.actions import CheckpointCandidate, RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.entries import Entry, decode_entry
from spare_megatron.core.saves.checkpoint_validity import why_refused
from spare_megatron.formats.codec import parsed_json
from spare_megatron.formats.output import real_paths
from spare_megatron.process.processes import say
from spare_megatron.state.checkpoint import checkpoint_folder as folders
from spare_megatron.state.checkpoint.emergency_checkpoint import (
    NotACheckpoint,
    NotFinished,
    assemble,
    is_emergency_checkpoint,
)
from spare_megatron.store.decision_log import DecisionLog

REFUSAL = "refused.json"
_ENTRIES = 16
"""Log entries read at once: few are written during a save."""
_CHUNK_BYTES = 1 << 20


def refusal_in_log(log: DecisionLog, head: int, action: SaveCheckpoint) -> str:
    """Why the log since `head` forbids a checkpoint to become visible; empty if it may. Call it once the folder is
    there: a group that folds a refusing entry later finds the folder, one that has folded it before may not have.
    """
    return why_refused(action, _entries(log, head))


def _entries(log: DecisionLog, head: int) -> Iterator[Entry]:
    while texts := log.read(head, _ENTRIES):
        yield from map(decode_entry, texts)
        head += len(texts)


def refuse(folder: Path, action: RefuseCheckpoint) -> None:
    """Removes an unfinished checkpoint, or marks a visible one as refused. Idempotent; an `OSError` is only logged."""
    try:
        folders.forestall(folder, action.step, action.member)  # first: it could become visible between the two
        _mark(folders.checkpoint_path(folder, action.step), action)
    except OSError as error:
        say(f"the checkpoint after {action.step} steps cannot be marked as refused: {error}")


def _mark(path: Path, action: RefuseCheckpoint) -> None:
    try:
        manifest = parsed_json((path / folders.MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):  # it cannot be loaded without its manifest
        return
    saved_by = manifest.get("group"), manifest.get("incarnation"), manifest.get("epoch")
    if saved_by != (*action.member, action.epoch) or refusal_of(path):
        return
    mark_refused(path, action.reason)


def mark_refused(path: Path, reason: str, audited_steps: int | None = None) -> None:
    """Keeps every run from loading a checkpoint; `audited_steps`: because it is later than these."""
    aside = path / f"{REFUSAL}.{secrets.token_hex(8)}"
    content = {"reason": reason} | ({} if audited_steps is None else {"audited_steps": audited_steps})
    folders.write_synced(aside, json.dumps(content))
    aside.rename(path / REFUSAL)
    folders.sync_folder(path)


def refusal_of(path: Path) -> str:
    """Why the checkpoint is refused; empty if it is not."""
    try:
        return str(parsed_json((path / REFUSAL).read_bytes())["reason"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{REFUSAL} cannot be read: {error}"


def is_usable(path: Path) -> bool:
    """Whether a checkpoint is not refused, or ranks have saved all of an emergency checkpoint; reads no other file."""
    try:
        return not refusal_of(path) and (not is_emergency_checkpoint(path) or bool(assemble(path)))
    except NotACheckpoint:
        return False


def audited_by_refusal(path: Path) -> int | None:
    """Steps of the audited checkpoint to which a run went back when it refused this one; None if that is not why."""
    try:
        steps = parsed_json((path / REFUSAL).read_bytes()).get("audited_steps")
    except (OSError, ValueError, AttributeError):
        return None
    return None if steps is None else int(steps)


class DamagedCheckpoint(Exception):
    """A checkpoint differs from what was written, in the file that the text names; or it is refused."""

    def __init__(self, text: str) -> None:
        super().__init__(real_paths(text))  # other groups read it in the log, perhaps after the directory is moved


class UnfinishedSave(DamagedCheckpoint):
    """Ranks were killed before their emergency checkpoint was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    path: Path
    reason: str


def read_manifest(path: Path) -> folders.Manifest:
    """Reads, or assembles, and checks a manifest. Raises DamagedCheckpoint, or UnfinishedSave for an incomplete
    emergency one.
    """
    if is_emergency_checkpoint(path):
        try:
            return assemble(path)
        except NotFinished as error:
            raise UnfinishedSave(str(error)) from error
        except NotACheckpoint as error:
            raise DamagedCheckpoint(str(error)) from error
    file = path / folders.MANIFEST
    try:
        content = parsed_json(file.read_bytes())
        digest = content.pop("sha256")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path.name}: {folders.MANIFEST} is missing") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path.name}: {folders.MANIFEST} cannot be read: {error}") from error
    if digest != folders.digest_of(content):
        raise DamagedCheckpoint(f"{path.name}: {folders.MANIFEST} does not fit its own SHA-256: it has changed")
    if content.pop("format") != folders.FORMAT:
        raise DamagedCheckpoint(f"{path.name}: {folders.MANIFEST} is of a format that this version does not know")
    files = {name: folders.StoredFile(**fields) for name, fields in content.pop("files").items()}
    manifest = folders.Manifest(**content, files=files)
    if folders.checkpoint_path(path.parent, manifest.step).name != path.name:
        raise DamagedCheckpoint(f"{path.name}: {folders.MANIFEST} is that of {manifest.step} steps")
    return manifest


def glance(path: Path) -> folders.Checkpoint:
    """Checks the manifest and that each file has its full size. Raises `DamagedCheckpoint`, also for a refused one."""
    refusal = refusal_of(path)
    if refusal:
        raise DamagedCheckpoint(f"{path.name} is refused: {refusal}")
    manifest = read_manifest(path)
    for name, file in sorted(manifest.files.items()):
        try:
            num_bytes = (path / name).stat().st_size
        except OSError as error:
            raise _unreadable(path, name, error) from error
        _require_size(path, name, num_bytes, file)
    return folders.Checkpoint(path=path, manifest=manifest)


def candidate_of(manifest: folders.Manifest) -> CheckpointCandidate:
    """The identity of a checkpoint and its files, by which groups refer to it."""
    digest = folders.digest_of({"format": folders.FORMAT, **asdict(manifest)})
    return CheckpointCandidate(step=manifest.step, num_files=len(manifest.files), digest=digest)


def verify(path: Path) -> folders.Checkpoint:
    """As `glance`, and reads every byte. Raises `DamagedCheckpoint` also if a file has changed."""
    checkpoint = glance(path)
    for name, file in sorted(checkpoint.manifest.files.items()):
        verify_file(path, name, file)
    return checkpoint


def verify_file(
    folder: Path, name: str, stored: folders.StoredFile, on_read: Callable[[int], None] = lambda _: None
) -> None:
    """Compares a file with what was written, read from the disk where possible. `on_read` receives the bytes of each
    chunk. Raises `DamagedCheckpoint`.
    """
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with (folder / name).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                on_read(len(chunk))
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    _require_size(folder, name, num_bytes, stored)
    if digest.hexdigest() != stored.sha256:
        raise DamagedCheckpoint(f"{folder.name}: {name} does not fit its SHA-256: its content has changed")


def _unreadable(folder: Path, name: str, error: OSError) -> DamagedCheckpoint:
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpoint(f"{folder.name}: {name} is missing")
    return DamagedCheckpoint(f"{folder.name}: {name} cannot be read: {error}")


def _require_size(folder: Path, name: str, num_bytes: int, stored: folders.StoredFile) -> None:
    if num_bytes != stored.num_bytes:
        raise DamagedCheckpoint(f"{folder.name}: {name} has {num_bytes} bytes, and {stored.num_bytes} were written")


def newest_valid(folder: Path) -> tuple[folders.Checkpoint | None, list[Rejected]]:
    """The newest usable checkpoint of a folder, if any, every byte of which is read; and the newer, not usable ones."""
    rejected: list[Rejected] = []
    for path in folders.all_checkpoints(folder):
        try:
            return verify(path), rejected
        except DamagedCheckpoint as error:
            rejected.append(Rejected(path=path, reason=str(error)))
    return None, rejected
