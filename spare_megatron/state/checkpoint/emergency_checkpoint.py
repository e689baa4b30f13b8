"""What ranks save by themselves when the control store is gone for good, and what makes a checkpoint of it.

Nobody can agree on anything any more. So each rank writes its state to a file of its own, and beside it what that is.
Whoever is to begin with it puts the files together. They count as a checkpoint

- if all ranks of a group have saved, or, where the optimizer's state is stacked, of groups that have every slice;
- if all groups that have saved have saved the same: nobody is left to say who is right;
- if the journal of the run proves that the last step was committed, and not undone.

It loads only at the layout that has written it. Loads without torch.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import step_of
from spare_megatron.journal.check import fold_evidence
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.records import RunRecord
from spare_megatron.process.lock import LOCK
from spare_megatron.state.checkpoint.checkpoint_folder import (
    FOLDER,
    LAST_STATE,
    Manifest,
    StoredFile,
    all_checkpoints,
    checkpoint_path,
    folder_of,
)

_DESCRIPTION = ".json"


class NotACheckpoint(Exception):
    """Nobody can begin with what was saved; the text says why."""


class NotFinished(NotACheckpoint):
    """Ranks were ended before they had saved all that is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """What one rank has saved.

    Attributes:
        run_dir: The directory of its run.
        group: Its group.
        rank: Its position there.
        num_ranks: Of the group.
        num_bytes: Of the file.
        sha256: Of the file.
        params_sha256: Of the parameters in it.
        slices: The slices of the optimizer's state in it, with the SHA-256 of each; none where it has all state.
        manifest: Of the checkpoint that it is a part of, as the rank knows, without files.
    """

    run_dir: str
    group: int
    rank: int
    num_ranks: int
    num_bytes: int
    sha256: str
    params_sha256: str
    slices: Mapping[str, str]
    manifest: Mapping[str, Any]

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{_stem(self.group, self.rank)}{LAST_STATE}"


def _stem(group: int, rank: int) -> str:
    return f"group-{group:04d}-rank-{rank}"


# ------------------------------------------------------------------------------------------------------------- write


def last_state_path(config: RunConfig, run_dir: Path, step: int) -> Path:
    """Where ranks save their state after so many steps: with the checkpoints, if that folder is the run's and there."""
    folder = folder_of(config, run_dir)
    if not (config.checkpoint.is_wanted and (folder / LOCK).exists()):
        folder = run_dir.absolute() / FOLDER
    path = checkpoint_path(folder, step)
    return path.with_name(path.name + LAST_STATE)


def file_of(path: Path, group: int, rank: int) -> Path:
    """Where a rank writes its state; the folder is made."""
    path.mkdir(parents=True, exist_ok=True)
    return path / f"{_stem(group, rank)}{LAST_STATE}"


def describe(path: Path, saved: SavedRank) -> None:
    """Makes a rank's file count: what it is becomes visible at once, when the file is on the disk."""
    file = path / f"{_stem(saved.group, saved.rank)}{_DESCRIPTION}"
    aside = file.with_suffix(".tmp")
    with aside.open("w") as out:
        json.dump(asdict(saved), out)
        out.flush()
        os.fsync(out.fileno())
    aside.rename(file)


# -------------------------------------------------------------------------------------------------------------- read


def misfits(manifest: Manifest, config: RunConfig) -> list[str]:
    """Why ranks of a run cannot take over what ranks have saved there, for people; empty where they can."""
    sharding = manifest.optimizer["sharding"]
    pairs = {"optimizer.sharding": (sharding, config.optimizer.sharding)}
    ours = asdict(config.layout)
    needed = [name for name in ours if name != "num_groups" or sharding == "stacked"]  # as many groups as slices
    pairs |= {f"layout.{name}": (manifest.layout[name], ours[name]) for name in needed}
    return [f"{key} = {own}, and it was saved with {theirs}" for key, (theirs, own) in pairs.items() if theirs != own]


def is_last_state(path: Path) -> bool:
    """Whether ranks have saved there by themselves; else it is a checkpoint."""
    return path.name.endswith(LAST_STATE)


def files_for(path: Path, names: Iterable[str], rank: int) -> list[Path]:
    """Those of the files that ranks of a position have saved."""
    return [path / name for name in sorted(names) if name.endswith(f"-rank-{rank}{LAST_STATE}")]


def assemble(path: Path) -> Manifest:
    """What there is, as the manifest of a checkpoint.

    Raises:
        NotACheckpoint: Nobody can begin with it.
    """
    by_group: dict[int, dict[int, SavedRank]] = {}
    for file in sorted(path.glob(f"group-*{_DESCRIPTION}")):
        try:
            saved = SavedRank(**json.loads(file.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise NotACheckpoint(f"{path.name}: {file.name} cannot be read: {error}") from error
        by_group.setdefault(saved.group, {})[saved.rank] = saved
    whole = {group: ranks for group, ranks in by_group.items() if len(ranks) == next(iter(ranks.values())).num_ranks}
    if not whole:
        raise NotFinished(f"{path.name}: no group has saved the state of all of its ranks")
    first = whole[min(whole)][0]
    _require_alike(path, list(whole.values()))
    is_stacked = "num_slices" in first.manifest["optimizer"]
    if is_stacked:
        _require_all_slices(path, list(whole.values()), first.manifest["optimizer"]["num_slices"])
    if step_of(path) != first.manifest["step"]:
        raise NotACheckpoint(f"{path.name}: it is that of step {first.manifest['step']}")
    _require_commit(path, Path(first.run_dir))
    counted = sorted(whole) if is_stacked else [min(whole)]
    files = {
        saved.file: StoredFile(num_bytes=saved.num_bytes, sha256=saved.sha256)
        for group in counted
        for saved in whole[group].values()
    }
    fields = {**first.manifest, "files": files}
    if is_stacked:
        fields["optimizer"] = {**first.manifest["optimizer"], "writers": counted}
    return Manifest(**fields)


def saved_state(config: RunConfig, run_dir: Path) -> str:
    """Where ranks have saved their state, and whether the next run can begin with it, for people; empty if nowhere."""
    folders = {folder_of(config, run_dir), run_dir.absolute() / FOLDER}
    found = [path for folder in sorted(folders) for path in all_checkpoints(folder) if is_last_state(path)]
    path = max(found, key=step_of, default=None)
    if path is None:
        return ""
    try:
        assemble(path)
    except NotACheckpoint as error:
        return f"; ranks have saved their state, which is of no use: {error}"
    return f"; the state is in {path}, for checkpoint.load or --resume"


def _require_alike(path: Path, groups: Sequence[Mapping[int, SavedRank]]) -> None:
    """All have the same parameters, and the same state of what several have."""
    found: dict[tuple[int, str], set[str]] = {}
    for ranks in groups:
        for rank, saved in ranks.items():
            found.setdefault((rank, "parameters"), set()).add(saved.params_sha256)
            if not saved.slices:
                found.setdefault((rank, "optimizer state"), set()).add(saved.sha256)
            for number, sha256 in saved.slices.items():
                found.setdefault((rank, f"state of slice {number}"), set()).add(sha256)
    for (rank, what), digests in sorted(found.items()):
        if len(digests) > 1:
            ids = sorted(saved.group for ranks in groups for saved in ranks.values() if saved.rank == rank)
            raise NotACheckpoint(f"{path.name}: groups {ids} have saved different {what} of rank {rank}")


def _require_all_slices(path: Path, groups: Collection[Mapping[int, SavedRank]], num_slices: int) -> None:
    on_all_ranks = [set.intersection(*(set(saved.slices) for saved in ranks.values())) for ranks in groups]
    missing = sorted({str(number) for number in range(num_slices)}.difference(*on_all_ranks), key=int)
    if missing:
        raise NotFinished(f"{path.name}: no group has saved slices [{', '.join(missing)}] of the optimizer state")


def _require_commit(path: Path, run_dir: Path) -> None:
    """The journal says that the last step was committed, and no restart has undone it."""
    last = step_of(path) - 1
    try:
        evidence = JournalIndex(run_dir)
        [run] = [line.record for line in evidence.rare if isinstance(line.record, RunRecord)]
        is_proven = any(commit.step == last for commit in fold_evidence(evidence, run).kept)
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{path.name}: nothing proves that step {last} was committed: {error}") from error
    if not is_proven:
        raise NotACheckpoint(f"{path.name}: the journal of {run_dir} does not prove that step {last} was committed")
