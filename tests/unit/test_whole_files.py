"""JSON and TOML that is read whole: parsed as by the libraries, or refused with the file's name, at any depth."""

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.loader import load_run_config, without_exports
from spare_megatron.formats.codec import json_object, parsed_json, parsed_toml
from spare_megatron.journal.files import decode_line, origin_field
from spare_megatron.state.checkpoint.verification import (
    DamagedCheckpoint,
    audited_by_refusal,
    read_manifest,
    refusal_of,
)
from spare_megatron.tools.simulate.scenario_presets import load_scenario

DEEP = "[" * 1000 + "]" * 1000


def nested(draw: random.Random) -> str:
    """Lists and objects that are also values of TOML if a comma, and not a colon, follows each key's equals sign."""
    text, depth = str(draw.randrange(10)), draw.choice([0, 1, 5, 199, 200, 400, 900, 1100, 5000])
    kinds = draw.choices(["list", "object"], weights=[1, draw.random()], k=depth)
    return (
        "".join("[" if kind == "list" else '{"a": ' for kind in kinds)
        + text
        + "".join("]" if kind == "list" else "}" for kind in reversed(kinds))
    )


@pytest.mark.parametrize(
    ("parse", "library", "written"),
    [
        (parsed_json, json.loads, lambda text: text),
        (parsed_toml, tomllib.loads, lambda text: "a = " + text.replace(":", " =")),
    ],
)
def test_drawn_texts_are_parsed_as_by_the_library_or_refused(
    parse: Callable[[str], Any], library: Callable[[str], Any], written: Callable[[str], str]
) -> None:
    draw = random.Random(5)
    refused = 0
    for _ in range(600):
        text = written(nested(draw))
        if draw.random() < 0.2:
            text = text[: draw.randrange(len(text) + 1)]
        try:
            found = parse(text)
        except ValueError:
            refused += 1
        else:
            assert found == library(text)
    assert 100 < refused < 500


def test_files_of_all_kinds_are_refused_by_name_where_they_nest_deep(tmp_path: Path) -> None:
    file = tmp_path / "step-00000001" / "manifest.json"
    file.parent.mkdir()
    file.write_text(DEEP)
    refusal = file.with_name("refused.json")
    refusal.write_text(f'{{"reason": {DEEP}}}')
    preset = tmp_path / "deep.toml"
    for content in (f"name = {DEEP}", ".".join(1000 * "a") + " = 1"):
        preset.write_text(content)
        for load in (load_run_config, load_scenario):
            with pytest.raises(ValueError, match=r"deep\.toml is not valid TOML: it is nested"):
                load(preset)
        with pytest.raises(ValueError, match="nested"):
            without_exports(content)
    with pytest.raises(ValueError, match="must be a table of settings"):
        load_run_config(None, [f"model={DEEP}"])
    with pytest.raises(ValueError, match=r"manifest\.json is not valid JSON: it is nested"):
        json_object(file)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read: it is nested"):
        read_manifest(file.parent)
    assert "refused.json cannot be read: it is nested" in refusal_of(file.parent)
    assert audited_by_refusal(file.parent) is None
    with pytest.raises(ValueError, match="not a record"):
        decode_line(DEEP)
    (tmp_path / "origin.json").write_text(DEEP)
    assert origin_field(tmp_path, "version") == ""
