"""Which checkpoints are clean of lasting faults, by what all of them say, and how a training goes back to one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.resuming import go_back
from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.machine.lock import locked
from spare_megatron.state.checkpoint.audited_checkpoints import audited_steps_in, go_back_to_audited
from spare_megatron.state.checkpoint.checkpoint_folder import MANIFEST, all_checkpoints, digest_of
from spare_megatron.state.checkpoint.start_checkpoint import resolve_load
from spare_megatron.state.checkpoint.verification import mark_refused, read_manifest, refusal_of
from tests.unit.test_checkpoints import CONFIG, cut_short, save


def audited_in(folder: Path) -> int | None:
    return audited_steps_in(all_checkpoints(folder))


def begun_with(folder: Path) -> str:
    """The checkpoint with which `--resume` begins a run that saves into the folder, too."""
    checkpoint = CheckpointConfig(load=str(folder), folder=str(folder), interval_steps=5)
    config = replace(CONFIG, checkpoint=checkpoint, train=replace(CONFIG.train, steps=99))
    return Path(resolve_load(config, folder, lambda _: None).checkpoint.load).name


def test_a_checkpoint_of_an_earlier_version_says_nothing_and_can_be_read(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    content = json.loads((path / MANIFEST).read_text())
    del content["sha256"], content["audited_steps"]
    (path / MANIFEST).write_text(json.dumps({**content, "sha256": digest_of(content)}))
    assert read_manifest(path).audited_steps is None
    assert audited_in(tmp_path) is None
    with pytest.raises(ValueError, match=r"no checkpoint in .* says how many steps are audited"):
        go_back_to_audited(tmp_path)


def test_the_newest_checkpoint_says_of_the_others_whether_they_are_audited(tmp_path: Path) -> None:
    for step, steps in ((5, 0), (10, 7), (15, 14), (20, 14)):
        save(tmp_path, step, audited_steps=steps)
    assert audited_in(tmp_path) == 14
    listed = json.loads(CliRunner().invoke(app, ["checkpoint", "list", str(tmp_path), "--json"]).output)
    assert [(one["step"], one["audited_steps"], one["is_audited"]) for one in listed] == [
        (20, 14, False),
        (15, 14, False),
        (10, 7, True),
        (5, 0, True),
    ]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    saved_there = replace(CONFIG, checkpoint=CheckpointConfig(folder=str(tmp_path), interval_steps=5))
    (run_dir / "config.toml").write_text(dump_run_config(saved_there))
    text = CliRunner().invoke(app, ["checkpoint", "list", str(run_dir)]).output
    assert "20 steps  4 kB  of steps that are not audited (14 were at its save)" in text
    assert "10 steps  4 kB  of steps that are audited (7 were at its save)" in text


def test_a_training_goes_back_to_the_newest_audited_checkpoint_and_stays_there(tmp_path: Path) -> None:
    """The second start loads the same checkpoint, though that was saved before anything had shown it to be clean."""
    for step, steps in ((5, 0), (10, 7), (15, 14), (20, 14)):
        save(tmp_path, step, audited_steps=steps)
    assert begun_with(tmp_path) == "step-00000020"
    for refused in (["step-00000020", "step-00000015"], []):
        found = go_back_to_audited(tmp_path)
        assert found is not None
        assert (found.path.name, [path.name for path in found.refused]) == ("step-00000010", refused)
        assert begun_with(tmp_path) == "step-00000010"
    assert "it is later: the first 14 steps are audited" in refusal_of(tmp_path / "step-00000015")
    save(tmp_path, 15, audited_steps=11)
    assert audited_in(tmp_path) == 11, "the run that went back takes what it began with for audited"
    assert begun_with(tmp_path) == "step-00000015"


def test_checkpoints_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    for step, steps in ((5, 0), (10, 7), (15, 14), (20, 14), (25, 14)):
        save(tmp_path, step, audited_steps=steps)
    cut_short(tmp_path / "step-00000010" / "0.distcp")
    mark_refused(tmp_path / "step-00000025", "wrong state")
    found = go_back_to_audited(tmp_path)
    assert found is not None
    assert (found.path.name, len(found.refused)) == ("step-00000005", 2)


def test_a_folder_without_an_audited_checkpoint_is_refused_and_an_empty_one_is_none(tmp_path: Path) -> None:
    assert go_back_to_audited(tmp_path) is None
    save(tmp_path, 10, audited_steps=7)
    with pytest.raises(ValueError, match=r"the first 7 steps are audited, and no valid checkpoint in .* is of so few"):
        go_back_to_audited(tmp_path)
    assert refusal_of(tmp_path / "step-00000010") == ""
    with locked(tmp_path), pytest.raises(ValueError, match="is in use by"):
        go_back_to_audited(tmp_path)


@pytest.mark.parametrize(("folder", "resume"), [("", True), ("somewhere", False)])
def test_going_back_needs_the_folder_of_the_training(folder: str, resume: bool) -> None:
    config = replace(CONFIG, checkpoint=CheckpointConfig(folder=folder))
    with pytest.raises(ValueError, match="it needs --resume, and that setting"):
        go_back(config, is_resumed=resume)


def test_going_back_says_what_is_loaded_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(CONFIG, checkpoint=CheckpointConfig(folder=str(tmp_path)))
    go_back(config, is_resumed=True)
    for step in (5, 10):
        save(tmp_path, step, audited_steps=5)
    go_back(config, is_resumed=True)
    text = capsys.readouterr().err
    assert f"the first 5 steps are audited, {tmp_path}/step-00000005 is the newest checkpoint of at most so" in text
    assert text.endswith("later ones, refused from now on: step-00000010\n")
