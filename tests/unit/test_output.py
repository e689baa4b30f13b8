"""Files that are written as a whole or not at all, and errors that say which setting chose the path."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig, DataConfig
from spare_megatron.driver import run
from spare_megatron.driver.run import start_run
from spare_megatron.formats import output
from spare_megatron.formats.output import NotWritten, named_errors, whole_file
from spare_megatron.state.checkpoint.saver import with_folder
from tests.unit.tiny_corpus import write_tiny_corpus

FULL = "[Errno 28] No space left on device"


class FullDisk:
    """`Path.write_text` writes half of a text, and then the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write_text = Path.write_text

        def write_half(path: Path, text: str, *args: Any, **kwargs: Any) -> int:
            write_text(path, text[: len(text) // 2], *args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_text", write_half)


def test_a_file_takes_the_place_of_the_one_before_with_its_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(target)
    for text in ("first", "second"):
        with whole_file("--out", link) as file:
            file.write_text(text)
        assert target.read_text() == text
        target.chmod(0o640)
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]


@pytest.mark.parametrize("before", [None, "what was there"])
def test_what_fails_in_the_middle_leaves_what_was_there(
    tmp_path: Path, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    if before is not None:
        target.write_text(before)
    FullDisk(monkeypatch)
    with pytest.raises(NotWritten) as raised, whole_file("--out", target) as file:
        file.write_text("a new page")
    assert str(raised.value) == f"{FULL}: --out {target}: make room there, or choose another"
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_what_is_no_plain_file_is_written_in_place(tmp_path: Path) -> None:
    """A rename would have put a file where the device was."""
    link = tmp_path / "page.html"
    link.symlink_to(os.devnull)
    with whole_file("--out", link) as file:
        file.write_text("page")
    assert Path(os.devnull).is_char_device()
    assert link.is_symlink()


def test_an_error_about_something_else_keeps_its_own_text(tmp_path: Path) -> None:
    other = tmp_path.parent / "other" / "document.txt"
    with pytest.raises(OSError, match="document") as raised, named_errors("--out", tmp_path / "page.html"):
        raise PermissionError(errno.EACCES, "Permission denied", str(other))
    assert not isinstance(raised.value, NotWritten)
    with (
        pytest.raises(NotWritten, match=r"Errno 13.*--out .*page.html: choose one that you may write"),
        named_errors("--out", tmp_path / "page.html"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))


def simulated(tmp_path: Path) -> Path:
    options = ("--preset", "paper_n200", "--set", "num_steps=3", "--seeds", "1", "--journal", str(tmp_path / "run"))
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == 0, result.output
    return tmp_path / "run"


def test_a_report_that_the_disk_does_not_take_leaves_no_file_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty page was left, and the message had the error, and not its subject."""
    run_dir, page = simulated(tmp_path), tmp_path / "page.html"
    FullDisk(monkeypatch)
    result = CliRunner().invoke(app, ["report", str(run_dir), "--out", str(page)])
    assert result.exit_code == 2
    assert result.stderr == f"spare report: {FULL}: --out {page}: make room there, or choose another\n"
    assert not page.exists()


@pytest.mark.parametrize(
    ("fails", "settings", "named"),
    [
        ("write_with_exports", {}, "--run-dir {run}"),
        ("locked", {}, "--run-dir {run}"),
        ("second lock", {}, "--run-dir {run}/checkpoints"),
        ("second lock", {"folder": "{tmp}/kept"}, "checkpoint.folder {tmp}/kept"),
    ],
)
def test_a_run_that_cannot_write_its_folders_names_them_and_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, settings: dict[str, str], named: str
) -> None:
    paths = {"run": tmp_path / "run", "tmp": tmp_path}
    write_tiny_corpus(tmp_path / "corpus")
    settings = {key: value.format(**paths) for key, value in settings.items()}
    config = RunConfig(
        data=DataConfig(corpus=str(tmp_path / "corpus")), checkpoint=CheckpointConfig(interval_steps=1, **settings)
    )
    num_locked, locked = [], run.locked

    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lock(folder: Path) -> Any:
        num_locked.append(folder)
        return full() if fails == "locked" or (len(num_locked) == 2 and fails == "second lock") else locked(folder)

    monkeypatch.setattr(run, "preflight", lambda config: {})
    monkeypatch.setattr(run, "locked", lock)
    if fails == "write_with_exports":
        monkeypatch.setattr(run, fails, full)
    with pytest.raises(NotWritten) as raised:
        start_run(config, tmp_path / "run", lambda event: None)
    assert str(raised.value).startswith(f"{FULL}: {named.format(**paths)}: make room there")


def test_the_note_beside_a_corpus_names_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, prefix = tmp_path / "text.txt", tmp_path / "corpus"
    text.write_text("text")
    FullDisk(monkeypatch)
    result = CliRunner().invoke(app, ["preprocess", "--input", str(text), "--output-prefix", str(prefix)])
    assert result.exit_code == 2, result.output
    assert f"{FULL}: --output-prefix {prefix}: make room there" in result.stderr
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        (f"OSError: {FULL}", f"OSError: {FULL}: checkpoint.folder /kept"),
        (f"OSError: {FULL}: '/kept/.step-00000004'", f"OSError: {FULL}: '/kept/.step-00000004'"),
        ("group 1 was lost", "group 1 was lost"),
    ],
)
def test_a_failed_save_names_its_folder(reason: str, named: str) -> None:
    assert with_folder(reason, Path("/kept")) == named


def test_remedies_are_for_the_error() -> None:
    path = Path("/there/file")
    assert str(NotWritten(OSError(errno.EIO, "Input/output error"), "--out", path)).endswith(": choose another")
    assert str(output.NotWritten(OSError("odd"), "--out", path)) == "odd: --out /there/file: choose another"
