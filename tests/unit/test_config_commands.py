"""Every command that reads a configuration, with every preset and with every kind of data."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config, load_run_config, shipped_presets

PRESETS = {name: file.parent.name for name, file in shipped_presets().items()}
CLUSTER_ONLY = "h100"
"""Its nodes have 8 ranks, and the default layout has 4."""
BEGINS = 7
"""Exit code of a command at the moment at which it would start processes."""

BLEND = '[{corpus="{0}", weight=0.7}, {corpus="{1}", weight=0.3}]'
SETS = '[{name="wiki", corpus="{1}"}]'
DATA: dict[str, tuple[str, ...]] = {
    "a corpus": ("data.corpus={0}",),
    "a blend": ("data.corpus=", "data.blend=" + BLEND),
    "a split": ("data.corpus={0}", "data.split=90,10,0", "eval.every_steps=5"),
    "validation sets": ("data.corpus={0}", "data.validation=" + SETS, "eval.every_steps=5"),
    "a blend and validation sets": (
        "data.corpus=",
        "data.blend=" + BLEND,
        "data.validation=" + SETS,
        "data.split=90,10,0",
        "eval.every_steps=5",
    ),
    "packed documents": (
        "data.corpus={0}",
        "data.reset_attention_mask=true",
        "data.reset_position_ids=true",
        "data.eod_mask_loss=true",
    ),
}


def options(kind: str, *prefixes: str) -> list[str]:
    """Arguments that set this kind of data, of these corpora."""
    texts = list(DATA[kind])
    for place, prefix in enumerate(prefixes):
        texts = [text.replace(f"{{{place}}}", prefix) for text in texts]
    return [word for text in texts for word in ("--set", text)]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, f"{words}: {result.output}"
    return result.stdout


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two small corpora."""
    folder = tmp_path_factory.mktemp("corpora")
    for name in ("web", "code"):
        (folder / f"{name}.txt").write_text(f"text of {name} " * 2000)
        run("preprocess", "--input", str(folder / f"{name}.txt"), "--output-prefix", str(folder / name))
    return str(folder / "web"), str(folder / "code")


@pytest.mark.parametrize("kind", ["a corpus", "a blend and validation sets"])
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != CLUSTER_ONLY])
def test_every_preset_is_shown_and_checked_with_data_that_are_elsewhere(preset: str, kind: str) -> None:
    words = options(kind, "data/web", "data/code")
    shown = json.loads(run("config", "show", preset, *words, "--json"))["settings"]
    assert "data/web" in json.dumps([setting for key, setting in shown.items() if key.startswith("data.")])
    assert "data/web" in run("config", "show", preset, *words)
    run("config", "check", preset, *words, "--elsewhere")


def test_nodes_that_the_default_layout_does_not_fill_are_shown_with_one_that_does() -> None:
    refused = CliRunner().invoke(app, ["config", "show", CLUSTER_ONLY])
    assert refused.exit_code == 2
    assert "a preset of a cluster: add the groups that fill it, as --set layout.num_groups=8" in refused.output
    run("config", "show", CLUSTER_ONLY, "--set", "layout.num_groups=8")


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_is_taken_by_commands_that_start_nothing(kind: str, prefixes: tuple[str, str]) -> None:
    words = options(kind, *prefixes)
    for command in ("show", "check"):
        run("config", command, "demo_cpu", *words)
    run("submit", "--config", "demo_cpu", "--cluster", "cpu_nodes", *words, "--dry-run")


@pytest.mark.parametrize("kind", DATA)
def test_the_configuration_that_a_run_keeps_is_read_back_with_every_kind_of_data(kind: str, tmp_path: Path) -> None:
    words = options(kind, "data/web", "data/code")
    loaded = load_run_config(shipped_presets()["demo_cpu"], words[1::2])
    (tmp_path / "config.toml").write_text(dump_run_config(loaded.config))
    kept, given = (
        json.loads(run("config", "show", preset, *more, "--json"))["settings"]
        for preset, more in ((str(tmp_path / "config.toml"), []), ("demo_cpu", words))
    )
    assert {key: one["value"] for key, one in kept.items()} == {key: one["value"] for key, one in given.items()}


def reach_the_start(*_: object, **__: object) -> None:
    sys.exit(BEGINS)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["train", "demo_cpu"], "cli.train.run_and_show"),
        (["campaign", "campaign_cpu"], "tools.campaign.campaign_command.run_and_show"),
        (["doctor", "demo_cpu"], "tools.doctor.doctor._examine"),
        (["bench", "throughput", "--config", "demo_cpu"], "tools.bench.bench_throughput.measure"),
        (["check-program", "{program}", "demo_cpu"], "tools.doctor.check_program.run_trials"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_data_is_taken_by_commands_that_train(
    words: list[str], starts: str, kind: str, prefixes: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("def forward_step(batch, model, context): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"spare_megatron.{starts}", reach_the_start)
    found = CliRunner().invoke(app, [*(word.format(program=program) for word in words), *options(kind, *prefixes)])
    assert found.exit_code == BEGINS, found.output
