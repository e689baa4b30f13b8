"""`spare train --resume`: which checkpoint a run goes on from, and where it writes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spare_megatron.cli.printing import message, say_json

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run that goes on from the newest checkpoint, if any. `finished`: the checkpoint of a training with nothing left
    to do.
    """

    config: "RunConfig"
    run_dir: Path | None
    finished: Path | None = None


def resume(config: "RunConfig", run_dir: Path | None) -> Resumption:
    """Looks in `checkpoint.folder` or, if that is not set, in the run of this directory and in those that went on from
    it; then the new one writes beside them. ValueError: neither is set, or such a run goes on.
    """
    if config.checkpoint.folder:
        return _from_folder(config, Path(config.checkpoint.folder).absolute(), run_dir)
    if run_dir is None:
        raise ValueError(
            "--resume starts from the newest checkpoint in checkpoint.folder, which is not set. Set it to the folder "
            "that both runs use, name the earlier run by --run-dir, or start from another one with --set "
            "checkpoint.load=RUN_DIR"
        )
    runs = [path for path in _names(run_dir) if path.exists()]
    if not any(map(_is_run, runs)):
        return _from_folder(config, run_dir, run_dir)
    new = next(path for path in _names(run_dir) if not path.exists())
    found = _from_folder(config, _newest_folder(list(reversed(runs))), new)
    if found.finished is None:
        message("train", f"--resume: {run_dir} stays as it is; the new run writes into {new}")
    return found


def _names(run_dir: Path) -> Iterator[Path]:
    """The directory of a run, and those of the runs that go on from it, up to the first that is not there."""
    run_dir = run_dir.resolve() if run_dir.name in ("", "..") else run_dir  # of no name to add a number to
    path, number = run_dir, 1
    yield path
    while path.exists():
        number += 1
        path = run_dir.with_name(f"{run_dir.name}-{number}")
        yield path


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _newest_folder(runs: list[Path]) -> Path:
    """The folder of the newest of these runs that holds a usable checkpoint, else any; else of the newest."""
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.machine.lock import is_held
    from spare_megatron.state.checkpoint.checkpoint_folder import FOLDER, all_checkpoints
    from spare_megatron.state.checkpoint.verification import is_usable

    for path in runs:
        if is_held(path):
            raise ValueError(f"--resume: {path} is in use by a run that goes on; wait for it, or end it")
        own = load_run_config(path / "config.toml").config.checkpoint.folder if _is_run(path) else ""
        if own:
            raise ValueError(f"--resume: the run in {path} has saved in checkpoint.folder={own}; set that")
    found = {path / FOLDER: all_checkpoints(path / FOLDER) for path in runs}
    usable = (folder for folder, checkpoints in found.items() if any(map(is_usable, checkpoints)))
    return next(usable, None) or next((folder for folder in found if found[folder]), runs[0] / FOLDER)


def _from_folder(config: "RunConfig", folder: Path, run_dir: Path | None) -> Resumption:
    from spare_megatron.state.checkpoint.start_checkpoint import last_checkpoint, resumed

    if finished := last_checkpoint(config, folder):
        return Resumption(config=config, run_dir=run_dir, finished=finished)
    found = resumed(config, folder)
    if not found.checkpoint.load:
        message("train", f"--resume: {folder} holds no checkpoint, training starts from the beginning")
    return Resumption(config=found, run_dir=run_dir)


def go_back(config: "RunConfig", *, is_resumed: bool) -> None:
    """Refuses the checkpoints after the newest audited one in the run's folder, and says so."""
    from spare_megatron.journal.event_texts import text_of_audited
    from spare_megatron.state.checkpoint.audited_checkpoints import go_back_to_audited

    if not (is_resumed and config.checkpoint.folder):
        raise ValueError(
            "--restart-from=audited goes back in checkpoint.folder, so it needs --resume, and that setting; a run that "
            "loads another one's checkpoint names an audited one in checkpoint.load (spare checkpoint list)"
        )
    found = go_back_to_audited(Path(config.checkpoint.folder).absolute(), config)
    if found is None:
        return
    path, steps, refused = found
    later = ", ".join(path.name for path in refused) or "none"
    message(
        "train",
        f"--restart-from=audited: {text_of_audited(steps)}, {path} is the newest checkpoint of at "
        f"most so many that no run has refused; later ones, refused from now on: {later}",
    )


def report_finished(checkpoint: Path, config: "RunConfig", *, as_json: bool) -> None:
    """Reports that nothing is left to train; not an error, so a loop that repeats the command ends."""
    from spare_megatron.journal.state.summary import NOT_RUN, Summary

    text = f"{checkpoint} holds all of train.steps={config.train.steps}: the training is finished, nothing was started"
    message("train", f"--resume: {text}")
    if as_json:
        summary = Summary(verdict=NOT_RUN, reasons=(), outcome="finished", outcome_reason=text, steps_committed=0)
        say_json({"run_dir": None, **asdict(summary)})
