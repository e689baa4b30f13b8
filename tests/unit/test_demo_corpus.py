"""The corpus that the small presets train on is made when it is first needed, and only then."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from typer.testing import CliRunner

from spare_megatron.cli import running, submit
from spare_megatron.cli.running import is_to_be_made
from spare_megatron.commands import app
from spare_megatron.config.loader import shipped_presets
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.driver import run

TEXTS = {"b.py": "import this\n", "a.txt": "text", "site-packages/other.py": "no", "c.pyc": "no", "lib/d.rst": "=="}
STARTED = "the run is started"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and a standard library of a few files."""
    for name, text in TEXTS.items():
        file = tmp_path / "stdlib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "stdlib")})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def start(*_: object, **__: object) -> None:
        raise ValueError(STARTED)

    monkeypatch.setattr(run, "start_run", start)
    return tmp_path / "here"


def spare(*words: str, expected: int) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == expected, result.output
    return result.output


def test_the_first_run_makes_the_corpus_of_the_standard_library_and_the_next_one_does_not(folder: Path) -> None:
    first = spare("train", "demo_cpu", expected=2)
    assert "spare train: making the demo's corpus, data/demo/corpus, of the text files in" in first
    assert STARTED in first
    corpus = IndexedDataset(str(folder / "data/demo/corpus"))
    wanted = [[*TEXTS[name].encode(), 0] for name in ("a.txt", "b.py", "lib/d.rst")]
    assert [np.asarray(corpus[index]).tolist() for index in range(len(corpus))] == wanted
    again = spare("train", "demo_cpu", expected=2)
    assert "making" not in again
    assert STARTED in again
    (folder / "data/demo/corpus.idx").unlink()
    assert is_to_be_made(DataConfig(corpus="data/demo/corpus"))


@pytest.mark.parametrize(
    "words",
    [
        ("train", "demo_cpu", "--set", "spare.redundancy=9"),
        ("train", "demo_cpu", "--set", "data.corpus=mine"),
        ("campaign", "wipeout_cpu", "--set", "train.steps=0"),
        ("config", "check", "demo_cpu", "--set", "model.num_layers=0"),
    ],
)
def test_a_run_that_is_refused_makes_nothing(words: tuple[str, ...], folder: Path) -> None:
    assert "making" not in spare(*words, expected=2)
    assert list(folder.iterdir()) == []


def test_a_check_and_a_script_that_is_only_shown_make_nothing(folder: Path) -> None:
    assert "demo_cpu can run here" in spare("config", "check", "demo_cpu", expected=0)
    assert "#SBATCH" in spare("submit", "--config", "demo_cpu", "--dry-run", expected=0)
    assert list(folder.iterdir()) == []


def test_a_job_has_the_corpus_before_it_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def hand_over(*_: object) -> None:
        done.append("submitted")
        raise ValueError(STARTED)

    monkeypatch.setattr(submit, "make_demo_corpus", done.append)
    monkeypatch.setattr(submit, "_hand_over", hand_over)
    assert STARTED in spare("submit", "--config", "demo_cpu", "--cluster", "cpu_nodes", expected=2)
    assert done == ["submit", "submitted"]


def test_a_corpus_that_cannot_be_made_starts_nothing(folder: Path) -> None:
    (folder / "data").write_text("a file")
    output = spare("train", "demo_cpu", expected=2)
    assert "data.corpus=data/demo/corpus could not be made, see above; set data.corpus to one of yours" in output
    assert STARTED not in output


def test_presets_for_cpus_train_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(running, "make_demo_corpus", made.append)
    names = [name for name, file in shipped_presets().items() if file.parent.name == "run" and name.endswith("_cpu")]
    for name in names:
        spare("bench", "throughput", "--config", name, "--alone", expected=2)
    assert made == ["bench throughput"] * len(names)
