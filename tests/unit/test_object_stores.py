"""Addresses of object stores in the place of paths: refused by every command and setting, with what is possible."""

import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.loader import ConfigError, load_run_config, settings
from spare_megatron.config.object_stores import refusal_of_address
from tests.unit.configured import CPU, configured
from tests.unit.test_help import COMMANDS

HINT = "s3:// is not read or written: name a path of a mounted file system"
LEAVES = {words: command for words, command in COMMANDS.items() if not hasattr(command, "commands")}


def texts_of(command: Any) -> set[str]:
    """Names of the parameters that are paths or free text."""
    written = inspect.unwrap(command.callback, stop=lambda function: hasattr(function, "__signature__"))
    hints = typing.get_type_hints(written)
    return {name for name, hint in hints.items() if re.search(r"\b(Path|str)\b", str(hint))}


PARAMETERS = [
    (words, parameter)
    for words, command in LEAVES.items()
    for parameter in command.params
    if parameter.name in texts_of(command)
]


def test_almost_every_command_takes_a_path() -> None:
    assert len({words for words, _ in PARAMETERS}) > len(LEAVES) - 5


@pytest.mark.parametrize(
    ("words", "parameter"), PARAMETERS, ids=lambda value: getattr(value, "name", None) or " ".join(value)
)
def test_every_path_of_every_command_is_refused_in_one_line(words: tuple[str, ...], parameter: Any) -> None:
    given: list[str] = []
    for one in LEAVES[words].params:
        if one is parameter or one.required:
            value = "s3://bucket/a" if one is parameter else "hf" if "--format" in one.opts else "1"
            given += [one.opts[-1], value] if one.param_type_name == "option" else [value]
    result = CliRunner().invoke(app, [*words, *given])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert f"s3://bucket/a: {HINT}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_every_setting_that_is_text_is_refused() -> None:
    """Those that take no text of this kind are refused for that."""
    found = {}
    for key, value in settings(configured()):
        if not isinstance(value, str):
            continue
        try:
            config = configured(f"{key}=s3://bucket/a")
        except ConfigError:
            continue
        found[key] = [text for text in problems(config, CPU) if HINT in text]
    assert {"data.corpus", "data.cache", "checkpoint.folder", "checkpoint.load", "program.file"} <= set(found)
    assert [key for key, texts in found.items() if len(texts) != 1] == []


@pytest.mark.parametrize(
    "setting",
    [
        'data.blend=[{corpus="s3://bucket/a", weight=1}]',
        'data.validation=[{name="v", corpus="s3://bucket/a"}]',
    ],
)
def test_corpora_of_blends_and_validation_sets_are_refused(setting: str) -> None:
    corpus = "data.corpus=" if "blend" in setting else "data.corpus=c"
    found = problems(load_run_config(None, [corpus, "eval.every_steps=5", setting]).config, CPU)
    assert [text for text in found if HINT in text]


def test_a_preset_and_what_it_includes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('include = ["s3://bucket/a.toml"]\n')
    for preset in (Path("s3://bucket/a.toml"), tmp_path / "mine.toml"):
        with pytest.raises(ConfigError, match="s3:// is not read or written"):
            load_run_config(preset)


@pytest.mark.parametrize(
    "path", ["S3://b/a", "s3:/b/a", "hf:gs://b/a", "hdfs://n/a", "az://c/a", "abfss://c@a/b", "https://h/a"]
)
def test_addresses_of_all_kinds_are_known_also_as_a_path_shortens_them(path: str) -> None:
    assert "is not read or written" in refusal_of_address(path)
    assert "is not read or written" in refusal_of_address(str(Path(path)))


def test_paths_that_only_look_like_addresses_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert [
        path for path in ("s3:/a", "runs/s3", "a/s3://b", "gs", "hf:/m", "x-s3://a") if refusal_of_address(path)
    ] == []
