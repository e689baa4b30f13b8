"""The code that trains is the code that the record names, whatever lies in the working directory."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path

import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import LossRecord, RankRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.rank import run_rank
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.version import PACKAGE, code_digest
from tests.integration.whole_run import tiny_config
from tests.search_path import with_checkout

CONSOLE_SCRIPT = """
import atexit, sys
from spare_megatron.commands import app
if __name__ == "__main__":
    atexit.register(lambda: print("the driver has torch:", "torch" in sys.modules))
    app()
"""
APPLIED = "was_applied, gradient_norm, _ = self.megatron.step()\n"
NOT_APPLIED = "gradient_norm, was_applied = 1.0, True\n"


def command(script: Path) -> list[str]:
    """A console script as pip installs it: in a folder that holds no code beside it."""
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    return [sys.executable, str(script)]


def environment() -> dict[str, str]:
    """What finds the code that is tested as if it were installed, and has nothing that a run sets for its own."""
    return {**os.environ, "PYTHONPATH": with_checkout(), "PYTHONSAFEPATH": ""}


def doctored_copy(folder: Path) -> Path:
    """A working directory with a copy of the package that updates no parameters."""
    folder.mkdir()
    shutil.copytree(PACKAGE, folder / "spare_megatron", ignore=shutil.ignore_patterns("__pycache__"))
    optimizer = folder / "spare_megatron" / "mcore" / "optimizer" / "optimizer.py"
    assert APPLIED in optimizer.read_text()
    optimizer.write_text(optimizer.read_text().replace(APPLIED, NOT_APPLIED))
    return folder


def train(words: Sequence[str], corpus: Path, working_folder: Path, run_dir: Path) -> subprocess.CompletedProcess[str]:
    preset = run_dir.with_suffix(".toml")
    preset.write_text(dump_run_config(tiny_config(corpus, LayoutConfig(num_groups=2), steps=2)))
    command = [*words, "train", "--config", str(preset), "--run-dir", str(run_dir)]
    return subprocess.run(
        command, cwd=working_folder, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )


def test_a_copy_of_the_package_in_the_working_directory_is_not_trained_with(text_corpus: Path, tmp_path: Path) -> None:
    """The fork server imported what lay there: the copy trained under the name of the installed code."""
    folder, run_dir = doctored_copy(tmp_path / "work"), tmp_path / "run"
    (folder / "tokenize.py").write_text('raise RuntimeError("this is no module of Python\'s")\n')
    done = train(command(tmp_path / "bin" / "spare"), text_corpus, folder, run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no module of Python's" not in done.stderr
    assert done.stdout.endswith("the driver has torch: False\n"), "its import takes longer than the start of the ranks"
    journal = read_journal(run_dir)
    assert len({update.grad_norm for update in journal.of(UpdateRecord)} - {1.0}) == 2
    # First what a masked loss would hide. Ranks begin in any order.
    assert journal.of(LossRecord) == [], "\n".join(path.read_text() for path in sorted(run_dir.glob("logs/group-*")))
    assert sorted((rank.group, rank.code) for rank in journal.of(RankRecord)) == [
        (0, code_digest()),
        (1, code_digest()),
    ]
    assert [record.code for record in journal.of(RunRecord)] == [code_digest()]
    assert json.loads((run_dir / "origin.json").read_text())["code"] == code_digest()


def test_a_driver_with_other_code_than_the_processes_it_starts_is_refused(text_corpus: Path, tmp_path: Path) -> None:
    """`python -m` looks in the working directory first, and what it starts does not."""
    folder, run_dir = doctored_copy(tmp_path / "work"), tmp_path / "run"
    module = [sys.executable, "-m", "spare_megatron"]
    done = train(module, text_corpus, folder, run_dir)
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(folder / "spare_megatron") in done.stderr
    assert str(PACKAGE) in done.stderr
    assert not run_dir.exists()


UNGUARDED = """
import sys
from pathlib import Path
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run

start_run(load_run_config(Path(sys.argv[1])).config, Path(sys.argv[2]), print)
"""


def test_a_script_without_a_main_guard_gets_an_error_that_asks_for_one(text_corpus: Path, tmp_path: Path) -> None:
    """Each process imports the script, and would start a run of its own; memory was blamed for how the first ended."""
    preset, script = tmp_path / "preset.toml", tmp_path / "script.py"
    preset.write_text(dump_run_config(tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=2)))
    script.write_text(UNGUARDED)
    words = [sys.executable, str(script), str(preset), str(tmp_path / "run")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ValueError: {script} starts a run whenever it is imported")
    assert last.endswith('under `if __name__ == "__main__":`')
    assert done.stderr.count("Traceback") == 1, "of the script itself"
    assert not (tmp_path / "run").exists()


def test_a_rank_whose_code_is_not_that_of_the_run_does_not_begin(tmp_path: Path) -> None:
    """On GPUs each rank imports the files as they are when it starts, which may be days after the run did."""
    spec = RankSpec(
        config=RunConfig(),
        run_dir=tmp_path,
        group=GroupId(1),
        incarnation=1,
        rank=0,
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        faults=(),
        code="0" * 64,
    )
    with pytest.raises(RuntimeError, match=f"is code {code_digest()[:12]}, the driver of the run has 0{{12}}: restore"):
        run_rank(spec, Pipe()[0])
    assert list(tmp_path.iterdir()) == []
