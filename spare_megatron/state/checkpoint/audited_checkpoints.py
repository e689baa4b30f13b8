"""Which checkpoints of a folder are audited. Loads without torch. A manifest says how many of the first steps were
audited at its save (`core.audits.clean_prefix`), which are fewer than its own: the newest one says it of the others.
"""

from collections.abc import Sequence
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import step_of
from spare_megatron.journal.event_texts import text_of_audited
from spare_megatron.machine.lock import locked
from spare_megatron.state.checkpoint import verification
from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints
from spare_megatron.state.checkpoint.start_checkpoint import check

WentBack = tuple[Path, int, Sequence[Path]]
"""The newest audited checkpoint of a folder, audited steps, and the later ones, which no run loads any more."""


def audited_steps_in(checkpoints: Sequence[Path]) -> int | None:
    """How many of the first steps are audited, by these checkpoints, newest first; None if none of them says."""
    found: list[int] = []
    for path in checkpoints:
        steps = _audited_steps_of(path)
        if steps is not None:
            found.append(steps)
            if not verification.refusal_of(path):
                break
    return max(found, default=None)


def _audited_steps_of(path: Path) -> int | None:
    """What a checkpoint says of the others; of a refused one what a run that went back has left."""
    if verification.refusal_of(path):
        return verification.audited_by_refusal(path)
    try:
        return verification.read_manifest(path).audited_steps
    except verification.DamagedCheckpoint:
        return None


def go_back_to_audited(folder: Path, config: RunConfig) -> WentBack | None:
    """Refuses all checkpoints later than the newest audited one; None if there are none. Raises ValueError if none is
    audited, nothing says which, a run uses the folder, or this one cannot begin with that checkpoint.
    """
    checkpoints = all_checkpoints(folder)
    if not checkpoints:
        return None
    steps = audited_steps_in(checkpoints)
    if steps is None:
        raise ValueError(
            f"--restart-from=audited: no checkpoint in {folder} says how many steps are audited: they were saved "
            f"without audits (audit.every_steps); leave it out to start from the newest"
        )
    with locked(folder):
        return _go_back(folder, config, checkpoints, steps)


def _go_back(folder: Path, config: RunConfig, checkpoints: Sequence[Path], steps: int) -> WentBack:
    later: list[Path] = []
    for path in checkpoints:
        try:
            found = verification.verify(path) if step_of(path) <= steps else verification.glance(path)
        except verification.DamagedCheckpoint:
            continue
        if found.manifest.step > steps:
            later.append(path)
            continue
        check(config, found)
        reason = f"it is later: {text_of_audited(steps)}, and a run went back to {path.name}"
        for one in later:
            verification.mark_refused(one, reason, audited_steps=found.manifest.step)
        return path, steps, later
    raise ValueError(
        f"--restart-from=audited: {text_of_audited(steps)}, and no valid checkpoint in {folder} is of so few; leave "
        f"it out to start from the newest, or set checkpoint.folder to an empty one to start from the beginning"
    )
