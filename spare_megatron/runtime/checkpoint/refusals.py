"""Checkpoints whose files are whole and whose state is wrong: the run that finds it out says so beside the manifest.

A checkpoint is told by who has saved it: another one after as many steps, from after a restart, is not meant, and takes
the place of what is refused. Loads without torch.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.core.doubts import why_refused
from spare_megatron.core.messages import Entry, decode_entry
from spare_megatron.core.saves import RefuseCheckpoint, SaveCheckpoint
from spare_megatron.runtime.checkpoint.checkpoints import MANIFEST, checkpoint_path, forestall, sync_folder
from spare_megatron.runtime.process.processes import say

REFUSAL = "refused.json"
_ENTRIES = 16
"""Read from the log at once: few have been written since a save was begun."""


def refusal_in_log(log: DecisionLog, head: int, action: SaveCheckpoint) -> str:
    """Why a checkpoint is not to become visible, by what has been written since it was begun; empty if it may.

    To be asked when its folder is there. Whoever folds a later entry for which the checkpoint does not count finds that
    folder, or the checkpoint; and whoever has folded an earlier one may have found neither.

    Args:
        log: The log.
        head: Entries that had been folded when it was begun.
        action: What was saved, and by whom.
    """
    return why_refused(action, _entries(log, head))


def _entries(log: DecisionLog, head: int) -> Iterator[Entry]:
    while texts := log.read(head, _ENTRIES):
        yield from map(decode_entry, texts)
        head += len(texts)


def refuse(folder: Path, action: RefuseCheckpoint) -> None:
    """Marks the checkpoint as refused if it is visible, else keeps it from becoming so. Twice is no error.

    A folder that cannot be written is told in the log: this run does not use the checkpoint in any case.
    """
    try:
        forestall(folder, action.step, action.member)  # first: else it might become visible between
        _mark(checkpoint_path(folder, action.step), action)
    except OSError as error:
        say(f"the checkpoint after {action.step} steps cannot be marked as refused: {error}")


def _mark(path: Path, action: RefuseCheckpoint) -> None:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):  # nobody begins with what has none
        return
    saved_by = manifest.get("group"), manifest.get("incarnation"), manifest.get("epoch")
    if saved_by != (*action.member, action.epoch) or refusal_of(path):
        return
    fd, aside = tempfile.mkstemp(prefix=REFUSAL, dir=path)
    with os.fdopen(fd, "w") as file:
        json.dump({"reason": action.reason}, file)
        file.flush()
        os.fsync(file.fileno())
    Path(aside).rename(path / REFUSAL)
    sync_folder(path)


def refusal_of(path: Path) -> str:
    """Why nobody is to begin with the checkpoint; empty if it is not refused."""
    try:
        return str(json.loads((path / REFUSAL).read_bytes())["reason"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{REFUSAL} cannot be read: {error}"
