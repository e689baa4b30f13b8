"""`spare checkpoint`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.machine.lock import locked
from spare_megatron.state.checkpoint.verification import refuse
from spare_megatron.tools.weights.hf_config import FAMILIES
from tests.unit.test_checkpoints import MEMBERS, REFUSED, STACKED, WRONG, cut_short, save


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_checkpoints_of_a_run_are_listed_the_newest_first(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    code, output = invoke("list", tmp_path, "--json")
    assert code == 0
    newest, damaged = json.loads(output)
    assert (newest["step"], newest["num_bytes"], newest["damage"]) == (10, 4000, "")
    assert damaged["damage"] == "step-00000005: manifest.json is missing"
    assert "10 steps  4 kB" in invoke("list", tmp_path)[1]


def test_damage_is_named_and_is_an_exit_code(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    assert invoke("verify", path) == (0, f"{path}  whole\n")
    save(tmp_path, 20)
    cut_short(path / "0.distcp")
    assert invoke("verify", tmp_path / "step-00000020")[0] == 0
    code, output = invoke("verify", tmp_path, "--json")
    assert code == 1
    reasons = json.loads(output)
    assert reasons[str(path)] == "step-00000010: 0.distcp has 1999 bytes, and 2000 were written"
    assert reasons[str(tmp_path / "step-00000020")] == ""


def test_an_interrupted_verification_has_found_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 would say that a checkpoint is damaged."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    save(tmp_path, 10)
    monkeypatch.setattr("spare_megatron.state.checkpoint.verification.verify", interrupt)
    assert invoke("verify", tmp_path) == (130, "spare checkpoint verify: interrupted\n")


@pytest.mark.parametrize("command", ["list", "verify", "show"])
def test_a_folder_that_cannot_be_read_is_reported_in_a_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_all(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("spare_megatron.state.checkpoint.checkpoint_folder.os.listdir", refuse_all)
    code, output = invoke(command, tmp_path)
    assert (code, output) == (2, f"spare checkpoint {command}: [Errno 13] Permission denied: '{tmp_path}'\n")


def test_what_is_not_there_is_not_called_empty(tmp_path: Path) -> None:
    code, output = invoke("list", tmp_path / "missing")
    assert code == 2
    assert f"{tmp_path}/missing is no directory; name a checkpoint, checkpoint.folder, or" in output


def test_a_save_that_was_interrupted_is_no_damage(tmp_path: Path) -> None:
    aside = tmp_path / "checkpoints" / "step-00000020.group-0001-life-0.tmp"
    aside.mkdir(parents=True)
    code, output = invoke("verify", tmp_path)
    assert code == 2
    assert "holds only unfinished saves" in output
    path = save(tmp_path / "checkpoints", 10)
    code, output = invoke("verify", tmp_path)
    assert (code, output.splitlines()) == (
        0,
        [f"{path}  whole", f"{aside}  an unfinished save, which nothing uses; to remove it: rm -r {aside}"],
    )
    assert invoke("verify", path) == (0, f"{path}  whole\n")
    with locked(aside.parent):
        assert "which a run that goes on may be writing" in invoke("verify", tmp_path)[1]
    cut_short(path / "0.distcp")
    assert invoke("verify", tmp_path)[0] == 1


def test_the_newest_is_shown(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    code, output = invoke("show", tmp_path, "--json")
    assert (code, json.loads(output)["step"]) == (0, 10)
    code, output = invoke("show", tmp_path / "step-00000005")
    assert code == 0
    assert "committed steps           5" in output
    assert "group 0, incarnation 0" in output


def test_partitions_of_the_optimizer_state_are_shown_with_their_writers(tmp_path: Path) -> None:
    save(tmp_path, 5)
    assert "optimizer state           replicated" in invoke("show", tmp_path)[1]
    save(tmp_path, 10, config=STACKED, writers=MEMBERS[:2])
    assert "stacked: 3 partitions on 1 groups each, written by groups 0, 1" in invoke("show", tmp_path)[1]


def test_a_refused_checkpoint_is_reported_as_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    refuse(tmp_path, WRONG)
    assert json.loads(invoke("list", tmp_path, "--json")[1])[0]["refused"] == WRONG.reason
    assert f"refused: {WRONG.reason}" in invoke("list", tmp_path)[1]
    assert json.loads(invoke("show", path, "--json")[1])["refused"] == WRONG.reason
    assert WRONG.reason in invoke("show", path)[1]
    code, output = invoke("verify", path)
    assert code == 1
    assert REFUSED in output


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for command in ("list", "verify", "show"):
        code, output = invoke(command, tmp_path)
        assert code == 2
        assert "holds no checkpoint" in output


def test_a_damaged_manifest_cannot_be_shown(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    cut_short(path / "manifest.json")
    code, output = invoke("show", path)
    assert code == 2
    assert "manifest.json cannot be read" in output


def test_the_help_of_exports_names_every_family() -> None:
    output = " ".join(invoke("export", "--help")[1].replace("│", " ").split())
    assert "Llama, Qwen2, Qwen3, Mixtral, DeepSeek-V3 and GPT-2 models" in output
    assert list(FAMILIES) == ["llama", "qwen2", "qwen3", "mixtral", "deepseek_v3", "gpt2"]
