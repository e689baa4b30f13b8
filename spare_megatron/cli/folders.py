"""What a path that a user names is, and whether it can be written, before anything is done for it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig


def is_run_dir(folder: Path) -> bool:
    """Whether it is the directory of a run; else it is that of a job.

    Raises:
        ValueError: It is neither.
    """
    from spare_megatron.driver.slurm.commands import JOB_FILE

    is_run = (folder / "journal").is_dir()
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; name that of a run, or the one that `spare submit` printed")
    if not is_run and not (folder / JOB_FILE).exists() and not any(folder.glob("attempt-*")):
        raise ValueError(
            f"{folder} holds no journal, as a run's directory does, and no {JOB_FILE}, as the folder of a job does"
        )
    return is_run


def check_folders(config: "RunConfig", run_dir: Path) -> None:
    """Refuses folders that a run could not write, before anything is started for it.

    Raises:
        ValueError: One cannot be written.
    """
    check_writable("--run-dir", run_dir.absolute())
    if config.checkpoint.is_wanted and config.checkpoint.folder:
        check_writable("checkpoint.folder", Path(config.checkpoint.folder).absolute())


def check_writable(setting: str, folder: Path) -> None:
    """Refuses a folder that cannot be made, or be written.

    Args:
        setting: Which one it is, for the message.
        folder: Its absolute path.

    Raises:
        ValueError: It cannot.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{setting} {folder} cannot be made: {there} is a file; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting} {folder} cannot be written: {there} is not yours to write; choose another")


def check_output_file(option: str, path: Path) -> None:
    """Refuses a file that cannot be made, before the work whose result it is to hold.

    Raises:
        ValueError: It has no folder, or is one, or cannot be written.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory; name a file in it")
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {folder}; make it")
    there, mode = (path, os.W_OK) if path.exists() else (folder, os.W_OK | os.X_OK)
    if not os.access(there, mode):
        raise ValueError(f"{option} {path} cannot be written: {there} is not yours to write; choose another")


def check_plot_file(path: Path) -> None:
    """Refuses a picture that cannot be made.

    Raises:
        ValueError: Its name does not end with .png, or it has no folder.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: the name has to end with .png")
    check_output_file("--plot", path)
