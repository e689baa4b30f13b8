"""What `spare status`, `doctor`, `checkpoint` and `config` print, and what they refuse."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from spare_megatron.cli import status
from spare_megatron.commands import app
from spare_megatron.config.loader import FOLDER
from spare_megatron.journal.files import encode_line
from spare_megatron.journal.records import LossRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.machine.lock import locked
from spare_megatron.state.checkpoint.verification import refuse
from spare_megatron.tools.doctor import node_survey as node_facts
from spare_megatron.tools.weights.hf_config import FAMILIES
from tests.unit.test_checkpoints import MEMBERS, REFUSED, STACKED, WRONG, cut_short, save
from tests.unit.test_run_state import STAMP, commit, simulated, write
from tests.unit.tiny_corpus import write_tiny_corpus


def test_status_describes_a_run_directory_without_slurm(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", simulated(2, 2, 300.0))
    result = CliRunner().invoke(app, ["status", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "step 59 (60/60)" in result.output
    answer = json.loads(CliRunner().invoke(app, ["status", str(run_dir), "--json"]).stdout)
    assert answer["outcome"] == "finished"
    assert answer["steps_committed"] == 60
    assert len(answer["groups"]) == 7
    assert answer["restarts"] > 0
    assert answer["wall_s"] == pytest.approx(answer["goodput"] * answer["wall_s"] + sum(answer["lost_s"].values()))


def test_watching_without_a_terminal_shows_what_is_new_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = simulated(5, 3, 300.0)
    run_dir = write(tmp_path / "run", lines[:200])
    is_whole = False

    def grow(seconds: float) -> None:
        nonlocal is_whole
        assert not is_whole, "a run that has ended is not waited for"
        is_whole = True
        with (run_dir / "journal" / "test.jsonl").open("a") as file:
            file.write("".join(encode_line(item) + "\n" for item in lines[200:]))

    # Of that module alone: threads of other tests sleep, too.
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=grow, time=time.time, monotonic=time.monotonic))
    result = CliRunner().invoke(app, ["status", str(run_dir), "--watch"])
    assert result.exit_code == 0, result.output
    shown_lines = result.output.splitlines()
    assert is_whole
    assert re.fullmatch(STAMP + r"step 59 \(60/60\)  groups 7/7  load 3  \d.*", shown_lines[-2])
    assert re.fullmatch(STAMP + "the run ended: finished: all steps are committed", shown_lines[-1])
    assert all(re.match(STAMP, text) for text in shown_lines)
    num_losses = sum(isinstance(item.record, LossRecord) for item in lines)
    assert sum(" lost: rank" in text for text in shown_lines) == num_losses > 0


@pytest.mark.parametrize("arguments", [["--watch"], ["--watch", "--json"], []])
def test_what_is_neither_a_run_nor_a_job_is_named(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["status", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert (str(tmp_path) in result.output) != (len(arguments) == 2)


def test_a_journal_without_any_run_record_shows_nothing(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [commit(101.0, 0, 0)])
    assert read_run_state(run_dir).groups() == []
    assert "no run yet" in CliRunner().invoke(app, ["status", str(run_dir)]).output


DEMO = str(Path(__file__).parents[2] / "configs/run/demo_cpu.toml")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(node_facts, "_PIECE_BYTES", 1 << 16)
    monkeypatch.chdir(tmp_path)
    write_tiny_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def doctor(*words: str, expected: int) -> str:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == expected, result.output
    return result.output


def on_this_machine(corpus: Path, *words: str, expected: int) -> str:
    return doctor("--config", DEMO, "--set", f"data.corpus={corpus}", *words, expected=expected)


def test_a_machine_that_is_fit_is_shown_and_left_as_it_was(corpus: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert "1 node, 0 problems, 0 warnings" in on_this_machine(corpus, expected=0)
    assert sorted(tmp_path.rglob("*")) == before


def test_problems_end_with_another_exit_code_and_name_the_node(corpus: Path) -> None:
    Path(f"{corpus}.idx").unlink()
    assert f"problem: node 0: corpus: data.corpus={corpus}: {corpus}.idx cannot be read" in on_this_machine(
        corpus, expected=1
    )
    answer = json.loads(on_this_machine(corpus, "--json", expected=1))
    assert [(found["node"], found["check"]) for found in answer["problems"]] == [("node 0", "corpus")]
    assert answer["warnings"] == []
    (node,) = answer["nodes"]
    assert node["facts"]["sees_folder"]
    assert node["write"]["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the preset of the run is missing"),
        (["--node", "1"], "--node takes --folder"),
        (["--node", "1", "--folder", "f", "--config", DEMO], "and no preset"),
        (["--node", "1", "--folder", "f", "--wait-s", "0"], "node 1 is not awaited by a driver"),
        ([DEMO, "--set", "layout.num_groups=0"], "layout.num_groups=0 must be at least 1"),
    ],
)
def test_what_cannot_be_looked_at_is_explained(corpus: Path, words: list[str], expected: str) -> None:
    assert expected in doctor(*words, expected=2)


@pytest.fixture
def in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two nodes, where steps end at once."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    answers = 'case "$*" in *"show job"*) echo NodeList=n[1-2];; *hostnames*) printf "n1\\nn2\\n";; esac'
    for name, text in (("scontrol", answers), ("srun", 'echo "$@" >> $0.calls; echo srun: no such node; exit 1')):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    # A step is given this address to come to.
    monkeypatch.setattr("spare_megatron.driver.slurm.allocation.address_of", lambda name: "127.0.0.1")
    return folder


def test_in_a_job_each_node_is_a_step_and_those_that_fail_are_named(corpus: Path, in_a_job: Path) -> None:
    words = ("--set", "cluster.launcher=srun", "--set", "cluster.device=cpu")
    answer = json.loads(on_this_machine(corpus, *words, "--json", expected=1))
    assert [(found["node"], found["text"]) for found in answer["problems"]] == [
        ("n1", "its step has ended: srun: no such node"),
        ("n2", "its step has ended: srun: no such node"),
    ]
    calls = (in_a_job / "srun.calls").read_text()
    assert "--nodelist=n2 --job-name=doctor-1" in calls


def test_a_job_with_fewer_nodes_than_the_run_is_refused_before_anything_starts(corpus: Path, in_a_job: Path) -> None:
    words = ("cluster.launcher=srun", "cluster.device=cpu", "cluster.num_nodes=4", "control.store=etcd")
    many = [word for setting in words for word in ("--set", setting)]
    expected = "job 17 has 2 nodes (n1, n2), too few for cluster.num_nodes=4; ask for more"
    assert expected in on_this_machine(corpus, *many, expected=2)
    result = CliRunner().invoke(app, ["train", "--config", DEMO, "--set", f"data.corpus={corpus}", *many])
    assert (result.exit_code, expected in result.output) == (2, True), result.output
    assert not (in_a_job / "srun.calls").exists()


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
    assert "Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V3, gpt-oss and GPT-2 models" in output
    assert list(FAMILIES) == ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gpt2"]


NODE = str(Path(__file__).parents[2] / "configs/run/gpt_1p3b_node.toml")


def run(*arguments: str, expected: int = 0) -> str:
    result = CliRunner().invoke(app, ["config", *arguments])
    assert result.exit_code == expected, result.output
    return result.output


def test_show_prints_each_value_with_its_source() -> None:
    shown = json.loads(run("show", DEMO, "--set", "train.steps=7", "--json"))
    origins = {key: Path(shown["settings"][key]["origin"]).name for key in ("model.hidden_size", "layout.num_groups")}
    assert origins == {"model.hidden_size": "gpt_demo.toml", "layout.num_groups": "demo_cpu.toml"}
    assert shown["settings"]["train.steps"] == {"value": 7, "origin": "--set train.steps=7"}
    assert shown["settings"]["spare.rejoins"]["origin"] == "default"
    # 4 groups x 4 microbatches x 2 sequences x 128 tokens, 7 times
    assert (shown["num_ranks"], shown["tokens_per_step"], shown["tokens"]) == (8, 4096, 28672)


def test_list_has_every_preset_with_what_it_is() -> None:
    files = [file.relative_to(FOLDER) for file in FOLDER.rglob("*.toml")]
    listed = json.loads(run("list", "--json"))
    assert sorted(f"{preset['kind']}/{name}.toml" for name, preset in listed.items()) == sorted(map(str, files))
    assert [file for preset in listed.values() if not Path(file := preset["file"]).is_file()] == []
    assert listed["gpt_7b"]["description"].startswith("GPT-3 6.7B")
    table = run("list")
    assert [name for name in listed if name not in table] == []


def test_a_model_is_shown_without_a_corpus_that_it_has_not() -> None:
    assert json.loads(run("show", "gpt_7b", "--json"))["settings"]["data.corpus"]["value"] == ""
    assert "6.66B" in run("show", "gpt_7b")
    assert "data.corpus is empty" in run("check", "gpt_7b", "--elsewhere", expected=2)


def test_the_tables_name_every_setting() -> None:
    lines = run("show", DEMO)
    keys = json.loads(run("show", DEMO, "--json"))["settings"]
    assert [key for key in keys if key not in lines] == []


@pytest.mark.parametrize(("overrides", "bucket_mib"), [((), 128), (("cluster.device=cpu",), 32)])
def test_show_has_the_size_of_a_bucket_on_the_device(overrides: tuple[str, ...], bucket_mib: int) -> None:
    options = [word for text in overrides for word in ("--set", text)]
    shown = json.loads(run("show", NODE, *options, "--json"))
    assert (shown["bucket_mib"], shown["memory"]["reduction_bytes"]) == (bucket_mib, 3 * bucket_mib * 2**20)
    assert f"{bucket_mib} MiB" in run("show", NODE, *options)


def test_the_memory_of_mixed_precision_is_that_of_the_textbook() -> None:
    """2 bytes of weights, 4 of gradients and 12 of fp32 parameters and moments for each parameter (ZeRO, section 3)."""
    shown = json.loads(run("show", NODE, "--json"))
    memory, count = shown["memory"], shown["num_parameters"]
    names = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    assert [memory[name] / count for name in names] == [2, 4, 12]
    sharded = json.loads(run("show", NODE, "--set", "optimizer.sharding=stacked", "--json"))["memory"]
    assert sharded["optimizer_bytes"] / count == 12 * 2 / 8  # 2 copies over 8 groups


def test_stored_activations_are_those_of_the_paper() -> None:
    """22B of arXiv 2205.05198 without sequence parallelism: s b h (10 + 24/t) bytes in each of 48 layers."""
    layout = (
        "--set",
        "layout.tensor_parallel=8",
        "--set",
        "train.micro_batch_size=4",
        "--set",
        "model.hidden_size=6144",
    )
    model = {"hidden_size": 6144, "num_layers": 48, "num_attention_heads": 64, "vocab_size": 51200}
    shape = [word for key, value in model.items() for word in ("--set", f"model.{key}={value}")]
    shown = json.loads(run("show", NODE, *layout, *shape, "--json"))
    logits = 2048 * 4 * 4 * 51200 / 8
    assert shown["memory"]["activations_bytes"] == 48 * 2048 * 4 * 6144 * (10 + 24 / 8) + logits


def test_check_names_all_that_is_wrong_and_elsewhere_forgives_what_this_machine_lacks() -> None:
    assert "data.corpus" in run("check", NODE, "--set", "cluster.device=cpu", expected=2)
    run("check", NODE, "--elsewhere")
    wrong = run("check", NODE, "--elsewhere", "--set", "spare.redundancy=9", "--set", "train.steps=0", expected=2)
    assert "spare.redundancy=9" in wrong
    assert "train.steps=0" in wrong
    assert len(json.loads(run("check", NODE, "--set", "spare.redundancy=9", "--json", expected=2))["problems"]) >= 1


def test_a_wrong_type_and_an_unknown_key_hide_no_other_problem() -> None:
    """And nothing is reported about the default that stands in for a value that is no value."""
    overrides = ("model.num_layers=x", "spare.redundancy=[2]", "train.stepz=5", "optimizer.beta1=2", "train.seed=-1")
    options = [word for text in overrides for word in ("--set", text)]
    found = json.loads(run("check", NODE, "--elsewhere", *options, "--json", expected=2))["problems"]
    assert [text.split("=")[0].split(" (")[0] for text in found] == [
        "unknown setting train.stepz",
        "model.num_layers",
        "spare.redundancy",
        "train.seed",
        "optimizer.beta1",
    ]
    assert all(text in run("show", NODE, *options, expected=2) for text in found)


@pytest.mark.parametrize("wrong", ["layout.num_groups=x", "layout=3", "spare=[]", "cluster.num_nodes=two", "name=[]"])
def test_what_follows_from_a_mistake_is_no_problem_of_its_own(wrong: str) -> None:
    options = ("--set", "spare.redundancy=8", "--set", "cluster.num_nodes=7", "--set", wrong, "--elsewhere", "--json")
    found = json.loads(run("check", NODE, *options, expected=2))["problems"]
    key = wrong.partition("=")[0]
    assert [text for text in found if text.startswith(key) and "must be" in text] == found[:1]
    assert not any(f"{key}=" in text or f"{key}." in text for text in found[1:])


def test_check_asks_megatron_about_its_own_fields() -> None:
    output = run("check", NODE, "--elsewhere", "--set", "megatron.recompute_granularty=selective", expected=2)
    assert "did you mean recompute_granularity?" in output
    assert "can run" in run("check", NODE, "--elsewhere", "--set", "megatron.recompute_granularity=selective")


@pytest.mark.parametrize("words", [("list",), ("show", DEMO), ("show", NODE)], ids=" ".join)
def test_lines_without_a_terminal_are_as_long_as_their_text(words: tuple[str, ...]) -> None:
    """Tables were padded to the width of their longest row, and began and ended with blank lines."""
    lines = run(*words).split("\n")
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0]
    assert lines[-2:] != ["", ""]
    shortest, longest = min(map(len, filter(None, lines))), max(map(len, lines))
    assert shortest < longest / 2
