"""`--resume` without a folder of checkpoints: from the run that is named, into a directory beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.cli.resuming import Resumption, resume
from spare_megatron.cli.running import warn_of_no_checkpoints
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import RunConfig, TrainConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.machine.lock import locked
from tests.unit.test_checkpoints import CONFIG, save

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Makes the directory of a run that has saved after these steps."""

    def run(name: str, *steps: int, config: RunConfig = CONFIG) -> Path:
        run_dir = tmp_path / name
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "config.toml").write_text(dump_run_config(config))
        for step in steps:
            save(run_dir / "checkpoints", step)
        return run_dir

    return run


def test_a_run_goes_on_from_the_one_that_is_named_in_a_directory_beside_it(
    run: Callable[..., Path], capsys: Output
) -> None:
    first = run("mine", 5, 10)
    before = sorted(first.rglob("*"))
    found = resume(CONFIG, first)
    second = first.with_name("mine-2")
    assert (found.run_dir, found.config.checkpoint.load) == (second, str(first / "checkpoints"))
    assert str(second) in capsys.readouterr().err
    assert sorted(first.rglob("*")) == before
    assert not second.exists(), "it is made when the run begins"


def test_the_same_command_goes_on_each_time(run: Callable[..., Path]) -> None:
    """A loop that repeats it would train the same steps again and again."""
    first, second = run("mine", 5), run("mine-2", 10)
    third = run("mine-3")  # ended before it saved
    found = resume(CONFIG, first)
    assert (found.run_dir, found.config.checkpoint.load) == (first.with_name("mine-4"), str(second / "checkpoints"))
    assert third.exists()


@pytest.mark.parametrize("named", [".", "checkpoints/..", "../mine", "./"])
def test_a_run_may_be_named_from_within(run: Callable[..., Path], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("mine", 5)
    monkeypatch.chdir(first)
    found = resume(CONFIG, Path(named)).run_dir
    assert found is not None
    assert found.resolve() == first.with_name("mine-2")


def test_a_run_that_does_not_exist_begins_there(tmp_path: Path, capsys: Output) -> None:
    assert resume(CONFIG, tmp_path / "mine") == Resumption(config=CONFIG, run_dir=tmp_path / "mine")
    assert "holds no checkpoint, training starts from the beginning" in capsys.readouterr().err


def test_a_run_without_checkpoints_is_begun_again_beside_it(run: Callable[..., Path], capsys: Output) -> None:
    first = run("mine")
    assert resume(CONFIG, first) == Resumption(config=CONFIG, run_dir=first.with_name("mine-2"))
    assert "holds no checkpoint, training starts from the beginning" in capsys.readouterr().err


def test_a_training_that_is_finished_is_found_in_the_newest_run(run: Callable[..., Path]) -> None:
    first, second = run("mine", 5), run("mine-2", CONFIG.train.steps)
    found = resume(CONFIG, first)
    assert found.finished == second / "checkpoints" / f"step-{CONFIG.train.steps:08d}"


def test_what_cannot_be_gone_on_from_is_named(run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the earlier run by --run-dir"):
        resume(CONFIG, None)
    elsewhere = replace(CONFIG, checkpoint=CheckpointConfig(folder="/kept"))
    with pytest.raises(ValueError, match=r"has saved in .*=/kept; set that"):
        resume(CONFIG, run("elsewhere", config=elsewhere))
    busy = run("busy", 5)
    with locked(busy), pytest.raises(ValueError, match="is in use by a run that goes on"):
        resume(CONFIG, busy)


def test_a_folder_that_is_set_is_the_one_that_counts(run: Callable[..., Path], tmp_path: Path) -> None:
    first = run("mine", 5)
    save(tmp_path / "kept", 10)
    config = replace(CONFIG, checkpoint=CheckpointConfig(folder=str(tmp_path / "kept")))
    found = resume(config, first)
    assert (found.run_dir, found.config.checkpoint.load) == (first, str(tmp_path / "kept"))


@pytest.mark.parametrize(
    ("steps", "checkpoint", "is_warned"),
    [
        (1001, CheckpointConfig(), True),
        (1000, CheckpointConfig(), False),
        (5000, CheckpointConfig(interval_steps=100), False),
        (5000, CheckpointConfig(cadence="optimal"), False),
        (5000, CheckpointConfig(folder="/kept"), True),
    ],
)
def test_a_long_run_that_takes_no_checkpoint_says_so(
    capsys: Output, steps: int, checkpoint: CheckpointConfig, *, is_warned: bool
) -> None:
    warn_of_no_checkpoints("train", RunConfig(train=TrainConfig(steps=steps), checkpoint=checkpoint))
    assert (f"no checkpoint is taken in these {steps} steps" in capsys.readouterr().err) == is_warned
