"""Emergency checkpoints: what ranks save by themselves when the control store is lost for good.

No agreement is possible any more, so each rank writes its state to a file of its own and a description beside it. The
next run assembles them. They make a checkpoint if all ranks of a group have saved (with partitioned optimizer state:
of groups that hold every partition), if all groups that have saved hold the same, and if the run's journal proves that
the last step was committed and not undone. It loads only at the layout that wrote it, and this module without torch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.config.training.terms import step_of
from spare_megatron.formats.codec import decode, encode
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.proofs.proof import fold_view
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.machine.lock import LOCK
from spare_megatron.state.checkpoint import checkpoint_folder as folders

_DESCRIPTION = ".json"


class NotACheckpoint(Exception):
    """What ranks have saved makes no usable checkpoint; the text says why."""


class NotFinished(NotACheckpoint):
    """Ranks were killed before they had saved all that is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """What one rank of `num_ranks` has saved. `sha256`: of the file; `params_sha256`: of the parameters in it; `rest`:
    of all other state, unless groups differ in it. `slices`: digests of its state partitions, none if it holds all.
    `manifest`: of the checkpoint that it is a part of.
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
    rest: str = ""

    @property
    def file(self) -> str:
        return f"{_stem(self.group, self.rank)}{folders.EMERGENCY_SUFFIX}"


def _stem(group: int, rank: int) -> str:
    return f"group-{group:04d}-rank-{rank}"


# ------------------------------------------------------------------------------------------------------------- write


def emergency_checkpoint_path(checkpoint: CheckpointConfig, run_dir: Path, step: int) -> Path:
    """The emergency checkpoint's folder: beside the checkpoints if that folder is the run's, else in `run_dir`."""
    folder = folders.folder_of(checkpoint, run_dir)
    if not (folder / LOCK).exists():
        folder = run_dir.absolute() / folders.FOLDER
    path = folders.checkpoint_path(folder, step)
    return path.with_name(path.name + folders.EMERGENCY_SUFFIX)


def file_of(path: Path, group: int, rank: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path / f"{_stem(group, rank)}{folders.EMERGENCY_SUFFIX}"


def describe(path: Path, saved: SavedRank) -> None:
    """Makes a rank's file count: its description appears by one rename, once the file is on the disk."""
    file = path / f"{_stem(saved.group, saved.rank)}{_DESCRIPTION}"
    aside = file.with_suffix(".tmp")
    folders.write_synced(aside, encode(saved))
    aside.rename(file)


# -------------------------------------------------------------------------------------------------------------- read


def misfits(manifest: folders.Manifest, config: RunConfig) -> list[str]:
    """Why a run's ranks cannot load this emergency checkpoint, as text; empty if they can."""
    sharding = manifest.optimizer["sharding"]
    pairs: dict[str, tuple[Any, Any]] = {"optimizer.sharding": (sharding, config.optimizer.sharding)}
    if sharding == "replicated":  # the state lies in the order of Megatron's parameter groups
        pairs["optimizer.rules"] = (manifest.optimizer.get("rules", []), folders.rules_of(config))
    precision = manifest.terms.get("model.precision")
    pairs["model.precision"] = (precision, config.model.precision)
    ours = asdict(config.layout)
    # One partition per group of the start; further ones hold copies at most.
    needed = [name for name in ours if name != "max_groups" and (name != "num_groups" or sharding == "stacked")]
    # Versions without lanes wrote neither `data_parallel` nor `expert_parallel`.
    earlier = asdict(LayoutConfig())
    pairs |= {f"layout.{name}": (manifest.layout.get(name, earlier[name]), ours[name]) for name in needed}
    if strips := manifest.optimizer.get("strips"):
        pairs |= {key: (theirs, folders.strips_of(config).get(key, theirs)) for key, theirs in strips.items()}
    return [f"{key} = {own}, and it was saved with {theirs}" for key, (theirs, own) in pairs.items() if theirs != own]


def is_emergency_checkpoint(path: Path) -> bool:
    """Whether the path is that of an emergency checkpoint."""
    return path.name.endswith(folders.EMERGENCY_SUFFIX)


def files_for(path: Path, names: Iterable[str], rank: int) -> list[Path]:
    """Those of the files that ranks of this position have saved."""
    return [path / name for name in sorted(names) if name.endswith(f"-rank-{rank}{folders.EMERGENCY_SUFFIX}")]


def assemble(path: Path, num_committed: int | None = None) -> folders.Manifest:
    """The manifest of an emergency checkpoint. Raises `NotACheckpoint` if it is not usable: unless `num_committed`
    covers them, the journal has to prove the commit of its steps.
    """
    by_group: dict[int, dict[int, SavedRank]] = {}
    for saved in _saved_ranks(path):
        by_group.setdefault(saved.group, {})[saved.rank] = saved
    whole = {group: ranks for group, ranks in by_group.items() if len(ranks) == next(iter(ranks.values())).num_ranks}
    if not whole:
        raise NotFinished(f"{path.name}: no group has saved the state of all of its ranks")
    first = whole[min(whole)][0]
    _require_alike(path, list(whole.values()))
    is_stacked = "num_slices" in first.manifest["optimizer"]
    if is_stacked:
        _require_all_partitions(path, list(whole.values()), first.manifest["optimizer"]["num_slices"])
    if step_of(path) != first.manifest["step"]:
        raise NotACheckpoint(f"{path.name}: it is that of {first.manifest['step']} steps")
    if num_committed is None or step_of(path) > num_committed:
        _require_commit(path, Path(first.run_dir))
    counted = sorted(whole) if is_stacked else [min(whole)]
    files = {
        saved.file: folders.StoredFile(num_bytes=saved.num_bytes, sha256=saved.sha256)
        for group in counted
        for saved in whole[group].values()
    }
    fields = {**first.manifest, "files": files}
    if is_stacked:
        fields["optimizer"] = {**first.manifest["optimizer"], "writers": counted}
    return folders.Manifest(**fields)


def _saved_ranks(path: Path) -> Iterator[SavedRank]:
    for file in sorted(path.glob(f"group-*{_DESCRIPTION}")):
        try:
            yield decode(file.read_bytes(), SavedRank)
        except (OSError, ValueError) as error:
            raise NotACheckpoint(f"{path.name}: {file.name} cannot be read: {error}") from error


def saved_state(checkpoint: CheckpointConfig, run_dir: Path, num_committed: int) -> str:
    """Where ranks of a run have saved their state, and whether the next run can load it, as text; empty if nowhere.
    `num_committed`: steps that the run is known to have committed; ranks that have not read the last one save one less.
    """
    places = sorted({folders.folder_of(checkpoint, run_dir), run_dir.absolute() / folders.FOLDER})
    found = [path for place in places for path in folders.all_checkpoints(place) if is_emergency_checkpoint(path)]
    for path in sorted(found, key=step_of, reverse=True):
        try:
            run_dirs = {Path(saved.run_dir).resolve() for saved in _saved_ranks(path)}
            if step_of(path) + 1 < num_committed or run_dir.resolve() not in run_dirs:
                continue  # from a node that was cut off long before, or from an earlier run
            assemble(path, num_committed)
        except NotACheckpoint as error:
            return f"; ranks have saved their state, which is of no use: {error}"
        return f"; the state is in {real_paths(str(path))}, for checkpoint.load or --resume"
    return ""


def _require_alike(path: Path, groups: Sequence[Mapping[int, SavedRank]]) -> None:
    """Requires equal parameters, and equal optimizer state where several groups hold it."""
    found: dict[tuple[int, str], set[str]] = {}
    for ranks in groups:
        for rank, saved in ranks.items():
            found.setdefault((rank, "parameters"), set()).add(saved.params_sha256)
            if not saved.slices:  # equal state makes other files in groups that came back; older versions had no rest
                found.setdefault((rank, "optimizer state"), set()).add(saved.rest or saved.sha256)
            for number, digest in saved.slices.items():
                found.setdefault((rank, f"state of partition {number}"), set()).add(digest)
    for (rank, what), digests in sorted(found.items()):
        if len(digests) > 1:
            ids = sorted(saved.group for ranks in groups for saved in ranks.values() if saved.rank == rank)
            raise NotACheckpoint(f"{path.name}: groups {ids} have saved different {what} of rank {rank}")


def _require_all_partitions(path: Path, groups: Collection[Mapping[int, SavedRank]], num_partitions: int) -> None:
    on_all_ranks = [set.intersection(*(set(saved.slices) for saved in ranks.values())) for ranks in groups]
    missing = sorted({str(number) for number in range(num_partitions)}.difference(*on_all_ranks), key=int)
    if missing:
        raise NotFinished(f"{path.name}: no group has saved partitions [{', '.join(missing)}] of the optimizer state")


def _require_commit(path: Path, run_dir: Path) -> None:
    """Requires that the journal proves the commit of the last step, and that no restart has undone it."""
    last = step_of(path) - 1
    try:
        view = JournalIndex(run_dir)
        [run] = [line.record for line in view.rare if isinstance(line.record, RunRecord)]
        is_proven = any(commit.step == last for commit in fold_view(view, run).kept_commits)
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{path.name}: nothing proves that step {last} was committed: {error}") from error
    if not is_proven:
        raise NotACheckpoint(f"{path.name}: the journal of {run_dir} does not prove that step {last} was committed")
