"""What a file is, by its name and content, and what is read of JSON and TOML, against their libraries."""

import gzip
import json
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner, Result

from spare_megatron.commands import app
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
from spare_megatron.tools.text import documents as documents_module
from spare_megatron.tools.text.documents import Skipped, batches_of, documents_in, json_among

NUM_DRAWN = 2000
NAMES = ("a.jsonl", "a.ndjson", "a.json", "a.json", "a.txt", "a", "a.md", "a.JSON", "a.jsonl.gz", "a.json.zst", "a.gz")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
BLANK = " \t\r\n\ufeff"


@pytest.fixture
def _batches_of_a_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 60)
    monkeypatch.setattr(documents_module, "_CHUNK_BYTES", 24)


def read(path: Path) -> list[str]:
    """The texts of a file, beside one of JSON lines. ValueError: why it cannot be read."""
    other = path.with_name("other.jsonl")
    other.write_text('{"text": "other"}')
    forms = json_among([path, other], "text")
    batches = batches_of([path, other], forms, "text", frozenset([path]))
    found = [document.text for batch in batches for document in documents_in(batch, Skipped(), is_byte_0_text=True)]
    assert found.pop() == "other"
    return found


# ----------------------------------------------------------------------------------------------------- drawn files


def drawn_value(random: Random, depth: int = 0) -> Any:
    scalars = ["text", "", "\u00e9 \u2028", "{[", 1, -2.5e3, 10**5000, True, None, float("nan")]
    if depth > 2 or random.random() < 0.6:
        return random.choice(scalars)
    items = [drawn_value(random, depth + 1) for _ in range(random.randrange(3))]
    return items if random.random() < 0.5 else {random.choice(["a", "text"]): item for item in items}


def drawn_object(random: Random) -> str:
    fields = [(random.choice(["id", "more"]), drawn_value(random)) for _ in range(random.randrange(3))]
    fields += [("text", random.choice(["one", "two \u4e2d\n", 'a "quote" \\', "\U0001f600", ""]))]
    if random.random() < 0.05:
        fields += [("text", "the last of two counts")]
    random.shuffle(fields)
    if random.random() < 0.02:
        fields = [("text", random.choice([None, ["one"], "\ud800"])), ("no text", 1)][random.randrange(2) :]
    dump = {"ensure_ascii": random.random() < 0.5 or any(value == "\ud800" for _, value in fields)}
    text = ", ".join(f"{json.dumps(key)}: {json.dumps(value, **dump)}" for key, value in fields)
    if random.random() < 0.03:
        deep = random.choice((10, 400))
        text += f', "deep": {"[" * deep}{"]" * (deep - (random.random() < 0.2))}'
    return f"{{{text}}}"


def pretty(text: str) -> str:
    return text.replace(", ", ",\n  ").replace("{", "{\n", 1)


def drawn_content(random: Random) -> bytes:
    objects = [drawn_object(random) for _ in range(random.randrange(1, 5))]
    content = random.choice(
        [
            "\n".join(objects),
            "\n".join(objects) + "\n",
            "\r\n".join(objects) + "\r\n",
            f"[{', '.join(objects)}]",
            "[\n" + ",\n".join(map(pretty, objects)) + "\n]\n",
            pretty(objects[0]),
            "\n".join(map(pretty, objects)),
            random.choice(
                ["[1]\n[2]", "[]", "{}", "[section]\nkey = 1\n", "text\n", "", "\n \n", "3", '"text"', "{'a': 1}"]
            ),
        ]
    )
    if random.random() < 0.2:
        content = random.choice(["\n", " \n\r\n", "\ufeff", "text\n", "{'text': 'one'}\n"]) + content
    if random.random() < 0.1:
        content += random.choice([",", "\n\n", "text", "\n[", "]", '\n{"text": 1}', '\n{"text": "last"}'])
    encoded = content.encode(random.choice(["utf-16", "utf-16-le", "utf-32"]) if random.random() < 0.03 else "utf-8")
    if random.random() < 0.15:
        place = random.randrange(len(encoded) + 1)
        encoded = encoded[:place] + random.choice([b"", b"\0", b"\xff", b",", b"\n", b'"']) + encoded[place + 1 :]
    return encoded


# ------------------------------------------------------------------------------------------------------------ oracle


def field(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError(f"no text in {value}")
    return str(value["text"].encode().decode())


def is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line.removeprefix("\ufeff")), dict)
    except ValueError:
        return False


def expected(path: Path, content: bytes) -> list[str]:
    """By the json module. ValueError: it is not what it should be."""
    name = next((part for part in path.suffixes[::-1] if part not in COMPRESS), "").lower()
    is_named = name in (".jsonl", ".ndjson", ".json")
    text = content.decode()
    lines = [line for line in text.split("\n") if line.strip(BLANK)]
    if name in (".jsonl", ".ndjson") or (lines and is_object(lines[0])) or (is_named and not lines):
        return [found for line in lines if (found := field(json.loads(line.removeprefix("\ufeff"))))]
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except ValueError:
        if is_named or sum(map(is_object, lines[:100])) > 1:
            raise
        value = None
    if is_named or isinstance(value, list | dict):
        return [found for item in (value if isinstance(value, list) else [value]) if (found := field(item))]
    if path.suffix in COMPRESS or "\0" in text:
        raise ValueError("no text")
    return [text] if text else []


@pytest.fixture
def _boundless_json() -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("_boundless_json", "_batches_of_a_few_bytes")
def test_drawn_files_are_read_as_by_the_json_module_or_refused_by_name(tmp_path: Path) -> None:
    random = Random(39)
    found: Counter[str] = Counter()
    limit = sys.get_int_max_str_digits()
    for number in range(NUM_DRAWN):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / random.choice(NAMES)
        sys.set_int_max_str_digits(0)
        content = drawn_content(random)
        try:
            texts = expected(path, content)
        except ValueError:
            texts = None
        sys.set_int_max_str_digits(limit)
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
        try:
            ours = read(path)
        except ValueError as error:
            ours, refusal = None, str(error)
        assert ours == texts, (path.name, content)
        if ours is None:
            where = ", (line|item) \\d+ " if ".js" in path.name.lower() else "( |, (line|item) )"
            assert re.search(re.escape(str(path)) + where, refusal), refusal
            assert "\n" not in refusal
        found["refused" if ours is None else "text" if ours and ours[0].encode() == content else "json"] += 1
    assert min(found[kind] for kind in ("refused", "json", "text")) > NUM_DRAWN // 20, found


# -------------------------------------------------------------------------------------------------- on the command line

LINES = '{"text": "one"}\n{"text": "two"}\n'


def preprocess(folder: Path, *arguments: object) -> Result:
    words = ["preprocess", "--output-prefix", folder / "out" / "corpus", "--overwrite", *arguments]
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.json", '[{"text": "one"}, {"text": "two"}]', 2),
        ("a.json", '[\n {\n  "text": "one"\n },\n {\n  "text": "two"\n }\n]\n', 2),
        ("a.json", '{\n "text": "one"\n}', 1),
        ("a.json", "\n" + LINES, 2),
        ("a.json", "\ufeff" + LINES, 2),
        ("a.jsonl", LINES.replace("\n", "\r\n\r\n"), 2),
        ("part-00000", LINES, 2),
        ("a.txt", LINES, 2),
        ("a.txt", '[{"text": "one"}]', 1),
        ("a.txt", "[section]\nkey = 1", 1),
    ],
)
def test_a_file_is_what_its_name_and_content_say(tmp_path: Path, name: str, content: str, documents: int) -> None:
    """The source of all of these but lines became one document, in spite of the key."""
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / name).write_bytes(content.encode())
    inputs = ["--input", tmp_path / name, "--input", tmp_path / "b.jsonl"]
    done = preprocess(tmp_path, *inputs, "--json-key", "text", "--json")
    assert done.exit_code == 0, done.output
    is_text = content.startswith("[s")
    expected = len(content) if is_text else 3 * documents
    assert (json.loads(done.stdout)["documents"], json.loads(done.stdout)["bytes"]) == (documents + 1, expected + 1)


TRAILING_COMMA = (
    ", line 2 is not JSON: Illegal trailing comma"
    if sys.version_info >= (3, 13)
    else ", line 3 is not JSON: Expecting value"
)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", "{'text': 'one'}\n" + LINES, ", line 1 is not JSON: Expecting property name"),
        ("part-00000", '"text": "cut"}\n' + LINES, ", line 1 is not JSON: Extra data"),
        ("a.txt", "# exported\n" + LINES, ", line 1 is not JSON: Expecting value"),
        ("a.json", LINES + "text\n", ", line 3 is not JSON: Expecting value"),
        ("a.json", '{"text": "one"},\n{"text": "two"},\n', ", line 1 is not JSON: Extra data"),
        ("a.json", '[{"text": "one"},\n {"text": "two"},\n]', TRAILING_COMMA),
        (
            "a.json",
            '{\n "text": "one"\n}\n{\n "text": "two"\n}\n',
            ", line 4 is not JSON: Extra data; repair it, or write",
        ),
        ("a.json", '[{"text": "one"}, {"body": "two"}]', ", item 2 has no --json-key text; its keys are 'body'"),
        ("a.json", '["one"]', ", item 1 is not a JSON object"),
        ("a.json", "3", ", item 1 is not a JSON object"),
        ("a.jsonl", '[{"text": "one"}]', ", line 1 is not a JSON object"),
        ("a.jsonl", LINES + '{"text": "a", "more": "\udcff"}', ", line 3 is not JSON: 'utf-8' codec"),
        ("a.json.xz", LINES, ": only .gz and .zst are decompressed"),
        ("a.txt", "text", " hold no JSON"),
    ],
)
def test_what_is_no_json_is_refused_with_file_and_line(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    inputs = ["--input", tmp_path / name]
    if content != "text":
        (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
        inputs += ["--input", tmp_path / "b.jsonl"]
    done = preprocess(tmp_path, *inputs, "--json-key", "text")
    assert done.exit_code == 2, done.output
    expected = (
        f"--json-key text: no JSON in {tmp_path}/a.txt; leave" if content == "text" else f"{tmp_path}/{name}{reason}"
    )
    assert expected in done.stderr
    assert not list(tmp_path.glob("out/*"))


def test_a_json_value_too_long_to_be_read_as_a_whole_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "_MOST_VALUE_BYTES", 40)
    for name in ("a.json", "a"):
        (tmp_path / name).write_text(json.dumps([{"text": "one"}] * 5))
        done = preprocess(tmp_path, "--input", tmp_path / name, "--json-key", "text")
        assert done.exit_code == 2
        assert f"{tmp_path}/{name} is one JSON value of more than 0 MiB; write each document as a JSON" in done.stderr


@pytest.mark.parametrize("key", ['a "text"', "a\\b", "a\nb", "\u00e9", ""])
def test_a_key_may_be_any_string(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({key: "one"}))
    done = preprocess(tmp_path, "--input", tmp_path / "a.jsonl", "--json-key", key)
    assert "1 documents, 4 tokens" in done.stdout, done.output


def test_without_a_key_lines_of_json_are_refused_and_other_json_is_text(tmp_path: Path) -> None:
    for number, content in enumerate([LINES, "\n" + LINES, "{'text': 'one'}\n" + LINES]):
        (tmp_path / f"{number}.json").write_text(content)
        done = preprocess(tmp_path, "--input", tmp_path / f"{number}.json")
        assert f"{number}.json: each line is a document, but the key of its text is not given" in done.stderr
    (tmp_path / "a.json").write_text('[{"text": "one"}]')
    assert "1 documents, 18 tokens, 17 bytes" in preprocess(tmp_path, "--input", tmp_path / "a.json").stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_json_that_is_nested_too_deep_is_refused_with_its_line(tmp_path: Path, workers: int) -> None:
    """The parsers raise RecursionError from about 950 levels on, those of Python 3.12 and later from more on."""
    lines, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    for depth in (400, 100_000):
        text = f'{{"text": "one", "more": {"[" * depth}{"]" * depth}}}'
        lines.write_text(f'{{"text": "one"}}\n{text}')
        array.write_text(f"[{text}]")
        for file, number in ((lines, 2), (array, 1)):
            done = preprocess(tmp_path, "--input", file, "--json-key", "text", "--workers", workers)
            expected = f"{file}, line {number} is not JSON: it is nested too deep"
            assert expected in done.stderr if depth == 100_000 else "tokens" in done.stdout
            assert done.exit_code == (2 if depth == 100_000 else 0)


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
