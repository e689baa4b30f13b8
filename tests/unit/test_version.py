"""Which code a run, a figure or a node has: digests see all of it, and no other project's commit is taken for ours."""

import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import spare_megatron
from spare_megatron import version
from spare_megatron.tools.doctor import node_survey as node_facts
from spare_megatron.version import UNKNOWN, code_digest, code_mismatch, commit, start_in_safe_path_mode

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of ours with two others in it."""
    folder = tmp_path / "checkout" / "ours"
    for name in ("", "core", "state/transfer"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(f"# {name}\n")
    monkeypatch.setattr(version, "PACKAGE", folder)
    code_digest.cache_clear()
    yield folder
    code_digest.cache_clear()


def digest(*packages: str) -> str:
    code_digest.cache_clear()
    return code_digest(*packages)


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=author", "-c", "user.email=author@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, timeout=30)


def test_a_change_anywhere_in_the_code_changes_its_digest(package: Path) -> None:
    seen = {digest()}
    for name in ("__init__.py", "core/__init__.py", "state/transfer/__init__.py"):
        (package / name).write_text("changed\n")
        seen.add(digest())
    for name in ("core/table.toml", "core/table.toml"):
        (package / name).write_text(f"# {len(seen)}")
        seen.add(digest())
    assert len(seen) == 6
    (package / "configs").mkdir()
    (package / "configs/preset.toml").touch()
    assert digest() in seen, "presets are no code"


def test_a_process_keeps_the_digest_of_the_code_that_it_has_imported(package: Path) -> None:
    """What is forked from it runs that, whatever becomes of the files."""
    before = digest()
    (package / "core/__init__.py").write_text("changed\n")
    assert code_digest() == before
    assert code_mismatch(before) == ""
    code_digest.cache_clear()
    assert code_mismatch(before) == (
        f"spare_megatron in {package} is code {digest()[:12]}, the driver of the run has {before[:12]}"
    )


def _say_where_it_looks(pipe: Connection) -> None:
    pipe.send((sys.flags.safe_path, "" in sys.path))


def test_what_multiprocessing_starts_does_not_look_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python begins it with -c, which puts the working directory before all others."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    start_in_safe_path_mode()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_say_where_it_looks, args=(theirs,))
    process.start()
    assert ours.poll(60.0)
    assert ours.recv() == (True, False)
    process.join()


def test_a_digest_of_some_packages_does_not_see_the_others(package: Path) -> None:
    before = digest("core")
    (package / "state/transfer/__init__.py").write_text("changed\n")
    assert digest("core") == before
    (package / "core/__init__.py").write_text("changed\n")
    assert digest("core") != before


def test_a_node_reports_the_digest_of_the_whole_package() -> None:
    """It once reported that of the runtime alone, after its module had moved there."""
    assert Path(spare_megatron.__file__).resolve().parent == version.PACKAGE
    found = node_facts._own_versions()["spare_megatron"]
    assert found == f"{spare_megatron.__version__} ({code_digest()[:12]})"


@needs_git
def test_the_commit_is_that_of_the_checkout_and_says_whether_it_was_changed(package: Path) -> None:
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "all")
    found = commit()
    assert len(found) == 40
    assert commit(num_digits=7) == found[:7]
    (package / "core/__init__.py").write_text("changed\n")
    assert commit() == f"{found}-dirty"


@needs_git
def test_the_commit_of_another_project_is_not_taken_for_ours(package: Path) -> None:
    """As where the package is installed in a virtual environment within a checkout."""
    git(package.parent, "init", "-q")
    git(package.parent, "commit", "-q", "--allow-empty", "-m", "another project")
    assert commit() == UNKNOWN


def test_without_git_the_commit_is_unknown(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run must not end for it: minimal images have none."""
    monkeypatch.setenv("PATH", str(package))
    assert commit() == UNKNOWN


def test_a_checkout_that_does_not_answer_is_unknown(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 10.0)

    monkeypatch.setattr("spare_megatron.version.subprocess.run", hang)
    assert commit() == UNKNOWN
