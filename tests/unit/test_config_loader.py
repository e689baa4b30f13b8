"""Presets, overrides, their precedence and their errors."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.building import valid_keys
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.loader import (
    RETIRED,
    ConfigError,
    dump_run_config,
    load_and_judge,
    load_run_config,
    settings,
)
from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from tests.unit.configured import CPU


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, overrides)
    return str(caught.value)


def test_nothing_given_means_the_defaults() -> None:
    loaded = load_run_config(None)
    assert loaded.config == RunConfig()
    assert loaded.provenance == {}


def test_later_sources_win_over_earlier_ones(tmp_path: Path) -> None:
    first = write(
        tmp_path / "model/a.toml", "[train]\nsteps = 1\nseed = 1\n[spare]\nredundancy = 1\n[model]\nnum_layers = 8"
    )
    second = write(tmp_path / "model/b.toml", "[train]\nsteps = 2\nseed = 2\n[spare]\nredundancy = 2")
    run = write(
        tmp_path / "run/r.toml",
        'include = ["../model/a.toml", "../model/b.toml"]\n[train]\nsteps = 3\n[spare]\nredundancy = 3',
    )
    loaded = load_run_config(run, ["train.steps=4"])
    assert loaded.config.model.num_layers == 8
    assert (loaded.config.train.seed, loaded.config.spare.redundancy, loaded.config.train.steps) == (2, 3, 4)
    assert loaded.provenance == {
        "model.num_layers": str(first),
        "train.seed": str(second),
        "spare.redundancy": str(run),
        "train.steps": "--set train.steps=4",
    }


def test_includes_nest_and_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    write(tmp_path / "deep/leaf.toml", "[train]\nsteps = 9")
    write(tmp_path / "deep/middle.toml", 'include = ["leaf.toml"]')
    run = write(tmp_path / "run.toml", 'include = ["deep/middle.toml"]')
    assert load_run_config(run).config.train.steps == 9


def test_an_include_that_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'include = ["b.toml"]')
    write(tmp_path / "b.toml", 'include = ["a.toml"]')
    with pytest.raises(ConfigError, match="includes itself"):
        load_run_config(tmp_path / "a.toml")


def test_a_missing_include_names_the_file_that_wanted_it(tmp_path: Path) -> None:
    run = write(tmp_path / "run.toml", 'include = ["gone.toml"]')
    with pytest.raises(ConfigError, match=r"gone\.toml \(included from .*run\.toml\)"):
        load_run_config(run)


def test_include_must_be_a_list_of_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a list of paths"):
        load_run_config(write(tmp_path / "run.toml", 'include = "a.toml"'))


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        load_run_config(write(tmp_path / "bad.toml", "steps = = 1"))


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("spare.redundency=3", "spare.redundancy"),
        ("layout.groups=3", "layout.num_groups"),
        ("train.step=3", "train.steps"),
        ("trian.steps=3", "train.steps"),
        ("nmae=mine", "name"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one_and_its_source(override: str, nearest: str) -> None:
    text = message_of(override)
    assert override.partition("=")[0] in text
    assert f"--set {override}" in text
    assert text.endswith(f"the nearest valid one is {nearest}")


def test_settings_of_earlier_versions_can_have_their_defaults_alone() -> None:
    assert not RETIRED.keys() & set(valid_keys())
    loaded = load_run_config(None, ["spare.placement=x", "spare.placement=golomb", "checkpoint.restart_window_s=3600"])
    assert (loaded.config, loaded.provenance) == (RunConfig(), {})
    window, placement = message_of("spare.placement=consecutive", "checkpoint.restart_window_s=60.0").splitlines()
    assert window.startswith("checkpoint.restart_window_s=60.0 can only be 3600.0 in this version: checkpoint.max_re")
    assert window.endswith("; remove it (set by --set checkpoint.restart_window_s=60.0)")
    assert placement.startswith("spare.placement=consecutive can only be golomb in this version: other hosts of shards")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("optimizer.name=adam", "[optimizer] has kind, learning_rate, min_learning_rate, "),
        ("redundancy=3", "its table is missing: spare.redundancy or optimizer.redundancy or snapshot.redundancy"),
        ("model.kv_channels=2", "it is Megatron's: set megatron.kv_channels"),
        ("layers.depth=2", "there are name, model, layout, "),
        ("faults.trace=[{phase='patch', when=3}]", "there are phase, step, "),
    ],
)
def test_an_unknown_key_that_is_like_none_of_its_table_names_what_there_is(override: str, advice: str) -> None:
    text = message_of(override)
    assert f"; {advice}" in text
    assert "nearest" not in text


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    run = write(tmp_path / "run.toml", "[spare]\nredundency = 3")
    with pytest.raises(ConfigError, match=r"spare\.redundency \(set by .*run\.toml\)"):
        load_run_config(run)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=2O", "train.steps='2O' must be a whole number"),
        ("train.steps=2.0", "train.steps=2.0 must be a whole number"),
        ("train.steps=true", "train.steps=True must be a whole number"),
        ("model.hidden_dropout=false", "model.hidden_dropout=False must be a number"),
        (f"optimizer.eps=1{400 * '0'}", "0 must be a number"),
        ("model.tie_embeddings=1", "model.tie_embeddings=1 must be true or false"),
        ("name=3", "name=3 must be a string"),
        ("cluster.device=tpu", "cluster.device='tpu' must be one of auto, cpu, gpu"),
        ("faults.trace=3", "faults.trace=3 must be a list"),
        ("faults.trace=[3]", "faults.trace[0]=3 must be a table"),
        ("faults.trace=[{step=3}]", "needs faults.trace[0].phase, one of forward, send"),
        ("faults.trace=[{phase='lunch'}]", "faults.trace[0].phase='lunch' must be one of forward, send"),
        ("faults.trace=[{phase='patch', stp=3}]", "unknown setting faults.trace[0].stp; the nearest valid one is step"),
        ("model=3", "model=3 must be a table"),
        ("megatron=3", "megatron=3 must be a table"),
        ("megatron.a.b=3", "unknown setting megatron.a.b"),
        ("train.steps", "must have the form section.key=value"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_value_and_expectation(override: str, expected: str) -> None:
    assert expected in message_of(override)


def test_all_errors_are_reported_at_once() -> None:
    text = message_of("train.steps=x", "spare.redundency=3", "name=3")
    assert len(text.splitlines()) == 3


def test_overrides_are_toml_values_or_bare_strings() -> None:
    config = load_run_config(
        None,
        [
            "name=my-run",
            "train.seed=7",
            "optimizer.learning_rate=3",
            'data.corpus="a b"',
            "megatron.add_bias_linear=false",
        ],
    ).config
    assert (config.name, config.train.seed, config.data.corpus) == ("my-run", 7, "a b")
    assert config.optimizer.learning_rate == 3.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.megatron == {"add_bias_linear": False}


def test_an_override_cannot_smuggle_in_a_second_setting() -> None:
    assert load_run_config(None, ["name=1\ntrain.steps = 3"]).config == RunConfig(name="1\ntrain.steps = 3")


def test_fault_tables_become_faults(tmp_path: Path) -> None:
    preset = tmp_path / "faults.toml"
    preset.write_text('[[faults.trace]]\nphase = "backward"\nstep = 3\n[[faults.trace]]\nphase = "in_reduce"\n')
    loaded = load_run_config(preset)
    assert loaded.config.faults.trace == (
        FaultConfig(phase=FaultPoint.BACKWARD, step=3),
        FaultConfig(phase=FaultPoint.IN_REDUCE),
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "faults.trace=[{phase='backward', step=3, kind='raise'}, {phase='after_vote'}]",
            "model.ffn_hidden_size=96",
            "optimizer.eps=1e-12",
            'name="quotes \\" and \\\\"',
            "megatron.attention_softmax_in_fp32=true",
            "megatron.layernorm_epsilon=1e-6",
        ],
    ],
)
def test_a_dumped_configuration_loads_back_to_an_equal_one(overrides: list[str], tmp_path: Path) -> None:
    config = load_run_config(None, overrides).config
    preset = tmp_path / "config.toml"
    preset.write_text(dump_run_config(config))
    assert load_run_config(preset).config == config


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.virtual_pipeline=2", "megatron.microbatch_group_size_per_vp_stage=2", "layout.pipeline_parallel=2"],
        ["layout.data_parallel=2", "model.num_experts=2", "model.linear_bias=false"],
    ],
)
def test_a_setting_of_0_is_refused_or_fine(layout: list[str]) -> None:
    evaluated = ["data.corpus=c", "data.split=9,1", "eval.every_steps=2", "eval.sequences=16"]
    given = ["cluster.device=gpu", *evaluated, *layout]
    machine = replace(CPU, num_gpus=8)
    assert load_and_judge(None, given, lambda config: problems(config, machine))[1] == []
    for key, default in settings(RunConfig()):
        if default is None or type(default) is int:
            _, found = load_and_judge(None, [*given, f"{key}=0"], lambda config: problems(config, machine))
            assert not found or any(key in text for text in found)
