"""`spare config`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import FOLDER

DEMO = str(Path(__file__).parents[2] / "configs/run/demo_cpu.toml")
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
