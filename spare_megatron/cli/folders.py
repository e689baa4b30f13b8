"""Checks the paths that a user names before any work is done for them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig


def is_run_dir(folder: Path) -> bool:
    """Whether the folder is a run's directory rather than a job's; raises ValueError if it is neither."""
    from spare_megatron.driver.slurm.slurm_commands import JOB_FILE

    is_run = (folder / "journal").is_dir()
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; name that of a run, or the one that `spare submit` printed")
    if not is_run and not (folder / JOB_FILE).exists() and not any(folder.glob("attempt-*")):
        raise ValueError(
            f"{folder} holds no journal, as a run's directory does, and no {JOB_FILE}, as the folder of a job does"
        )
    return is_run


def check_folders(config: "RunConfig", run_dir: Path) -> None:
    """Raises ValueError if the run could not write `run_dir` or its checkpoint folder."""
    check_writable("--run-dir", run_dir.absolute())
    if config.checkpoint.is_wanted and config.checkpoint.folder:
        check_writable("checkpoint.folder", Path(config.checkpoint.folder).absolute())


def check_writable(setting: str, folder: Path) -> None:
    """Raises ValueError, naming `setting`, if the absolute path `folder` cannot be created or written."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{setting} {folder} cannot be made: {there} is a file; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting} {folder} cannot be written: {there} is not yours to write; choose another")


def check_output_file(option: str, path: Path) -> None:
    """Raises ValueError if the file cannot be written: it is a directory, lacks a folder, or is not permitted."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory; name a file in it")
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {folder}; make it")
    there, mode = (path, os.W_OK) if path.exists() else (folder, os.W_OK | os.X_OK)
    if not os.access(there, mode):
        raise ValueError(f"{option} {path} cannot be written: {there} is not yours to write; choose another")


def check_plot_file(path: Path) -> None:
    """Raises ValueError if the name does not end in .png or the file cannot be written."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: the name has to end with .png")
    check_output_file("--plot", path)
