"""What is found in a corpus before anything is started with it, and when it is looked at again."""

import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.schema import ModelConfig, RunConfig
from spare_megatron.config.schema_sections import BlendedCorpus, DataConfig, ValidationCorpus
from spare_megatron.config.training import corpus as corpus_module
from spare_megatron.config.training.corpus import (
    CorpusFacts,
    described_corpora,
    is_same_corpus,
    judge_corpus,
    note_of,
    read_corpus,
    validation_names,
)
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.unit.tiny_corpus import write_tiny_corpus

DEMO = str(Path(__file__).parents[2] / "configs/run/demo_cpu.toml")
DOCUMENTS = [[1, 2, 3], [255, 0], list(range(200))]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_tiny_corpus(tmp_path / "text", DOCUMENTS)
    return tmp_path / "text"


def facts_of(prefix: Path, **data: str) -> CorpusFacts:
    facts, failure = judge_corpus(DataConfig(corpus=str(prefix), **data))
    assert facts is not None, failure
    return facts


def failure_of(prefix: Path) -> str:
    """Why it is unfit, after the kind and the name of the setting."""
    facts, failure = judge_corpus(DataConfig(corpus=str(prefix)))
    assert facts is None
    assert "\n" not in failure
    return failure.removeprefix(f"data.corpus={prefix}: ")


def overwritten(offset: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:offset] + content + old[offset + len(content) :]


# ------------------------------------------------------------------------------------------------------- what is found


def test_a_corpus_says_what_is_in_it(prefix: Path) -> None:
    facts = facts_of(prefix)
    assert (facts.num_tokens, facts.least_token, facts.largest_token) == (205, 0, 255)
    assert facts.identity == f"{facts.digest}, 205 tokens"


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_every_type_of_token_is_read(tmp_path: Path, dtype: str) -> None:
    write_tiny_corpus(tmp_path / "text", [[5, 100], [7]], dtype)
    facts = facts_of(tmp_path / "text")
    assert (facts.num_tokens, facts.least_token, facts.largest_token) == (3, 5, 100)


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 60000, length).tolist() for length in rng.integers(0, 9, 50)]
    write_tiny_corpus(tmp_path / "text", documents)
    whole = read_corpus(tmp_path / "text")
    monkeypatch.setattr(corpus_module, "_CHUNK", 7)
    assert read_corpus(tmp_path / "text") == whole
    assert whole.largest_token == max(token for document in documents for token in document)


def test_what_is_written_is_fit(tmp_path: Path) -> None:
    write_corpus([[97, 98, 256], [99, 256]], tmp_path / "text", vocab_size=257)
    facts = facts_of(tmp_path / "text")
    assert (facts.num_tokens, facts.largest_token) == (5, 256)


# ------------------------------------------------------------------------------------------------------------ refusals

COUNT, LENGTHS, POINTERS = 18, 34, 34 + 3 * 4
DOCUMENT_INDICES = POINTERS + 3 * 8
ANEW = "copy or write the corpus anew"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda old: b"", "is empty"),
        (lambda old: old[:20], "has 20 bytes, and its header alone takes 34: it is cut short"),
        (lambda old: old[:100], "has 100 bytes, and by its header 102: it is cut short or damaged"),
        (lambda old: old + b"a", "has 103 bytes, and by its header 102: it is damaged"),
        (overwritten(0, b"\0" * 34), "is no index of Megatron's: it does not begin with MMIDIDX"),
        (overwritten(0, b"garbage"), "is no index of Megatron's: it does not begin with MMIDIDX"),
        (overwritten(17, b"\x63"), "names a type of tokens that does not exist (99)"),
        (overwritten(COUNT, b"\xff" * 8), "has 102 bytes, and by its header 221360928884514619446: it is cut"),
        (overwritten(LENGTHS, struct.pack("<i", -3)), "has a sequence of -3 tokens"),
        (
            overwritten(LENGTHS, struct.pack("<i", 4)),
            "has sequence 1 at byte 6, which is not where the sequence",
        ),
        (overwritten(POINTERS + 8, struct.pack("<q", -8)), "has sequence 1 at byte -8, which is not where"),
        (overwritten(DOCUMENT_INDICES + 8, struct.pack("<q", 4)), "has documents that are out of order"),
        (
            overwritten(DOCUMENT_INDICES + 8, struct.pack("<q", -1)),
            "has documents that are out of order",
        ),
    ],
)
def test_a_damaged_index_is_named(prefix: Path, change: Callable[[bytes], bytes], expected: str) -> None:
    index = Path(f"{prefix}.idx")
    index.write_bytes(change(index.read_bytes()))
    failure = failure_of(prefix)
    assert failure.startswith(f"{index} {expected}"), failure
    assert failure.endswith(ANEW)


@pytest.mark.parametrize(
    ("offset", "content", "expected"),
    [
        (9, struct.pack("<Q", 2), "is an index of version 2, and only 1 is known"),
        (17, b"\x07", "is the index of floating-point numbers, not of token ids"),
    ],
)
def test_an_index_of_something_else_is_named(prefix: Path, offset: int, content: bytes, expected: str) -> None:
    index = Path(f"{prefix}.idx")
    index.write_bytes(overwritten(offset, content)(index.read_bytes()))
    assert failure_of(prefix).startswith(f"{index} {expected}")


@pytest.mark.parametrize("num_bytes", [0, 205, 409, 412])
def test_tokens_that_do_not_fit_their_index_are_named(prefix: Path, num_bytes: int) -> None:
    tokens = Path(f"{prefix}.bin")
    tokens.write_bytes((tokens.read_bytes() * 2)[:num_bytes])
    expected = f"{tokens} has {num_bytes} bytes, and by its index {prefix}.idx there are 410: it is cut"
    assert failure_of(prefix).startswith(expected)


def test_a_corpus_without_tokens_is_refused(tmp_path: Path) -> None:
    write_tiny_corpus(tmp_path / "text", [])
    assert failure_of(tmp_path / "text") == f"{tmp_path}/text.bin is empty; write the corpus anew, from text"


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_without_permission_is_named(prefix: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice was to set data.cache."""
    really_open = Path.open

    def refuse(path: Path, *arguments: str) -> object:  # root may read everything
        if path == Path(f"{prefix}{ending}"):
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *arguments)

    monkeypatch.setattr(Path, "open", refuse)
    expected = f"{prefix}{ending} cannot be read: Permission denied; let the user that trains read it"
    assert failure_of(prefix) == expected


def test_a_missing_file_is_no_damage(prefix: Path) -> None:
    Path(f"{prefix}.idx").unlink()
    assert judge_corpus(DataConfig(corpus=str(prefix))) == (None, "")
    assert judge_corpus(DataConfig(corpus=f"{prefix}.bin/text")) == (None, "")


# ------------------------------------------------------------------------------------------------ on the command line


def refusal(command: str, prefix: Path, *settings: str) -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    preset = [DEMO] if command == "config check" else ["--config", DEMO]
    done = CliRunner().invoke(app, [*command.split(), *preset, "--set", f"data.corpus={prefix}", *words])
    assert done.exit_code == 2, done.output
    found = [line for line in done.output.splitlines() if "data.corpus" in line or "model.vocab_size" in line]
    assert len(found) == 1, done.output
    return found[0]


@pytest.mark.parametrize("command", ["train", "config check", "submit"])
def test_unfit_data_are_refused_before_anything_is_started(
    command: str, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokens = Path(f"{prefix}.bin")
    assert f"{tokens} has token ids up to 255, but model.vocab_size=255; raise that to at least 256" in (
        refusal(command, prefix, "model.vocab_size=255")
    )
    tokens.write_bytes(tokens.read_bytes()[:200])
    assert f"{tokens} has 200 bytes" in refusal(command, prefix)
    Path(f"{prefix}.idx").write_bytes(b"")
    assert f"{prefix}.idx is empty" in refusal(command, prefix)
    assert not (tmp_path / "runs").exists()


def test_negative_token_ids_are_refused(tmp_path: Path) -> None:
    write_tiny_corpus(tmp_path / "text", [[5, -1]], "i4")
    assert "text.bin has negative token ids, down to -1" in refusal("config check", tmp_path / "text")


def test_a_corpus_that_is_not_the_one_that_is_asked_for_is_refused(prefix: Path) -> None:
    identity = facts_of(prefix).identity
    found = refusal("config check", prefix, "data.identity='ab12, 205 tokens'")
    assert f"is '{identity}', not data.identity='ab12, 205 tokens'; use that corpus" in found


# ----------------------------------------------------------------------------------------------------------- identity


def test_the_identity_is_that_of_the_content_wherever_it_lies(prefix: Path, tmp_path: Path) -> None:
    here = facts_of(prefix)
    (tmp_path / "else").mkdir()
    for ending in (".bin", ".idx"):
        Path(f"{prefix}{ending}").rename(tmp_path / f"else/moved{ending}")
    assert facts_of(tmp_path / "else/moved") == here
    write_tiny_corpus(prefix, [[1, 2, 4], *DOCUMENTS[1:]])  # with the very same index
    other = facts_of(prefix)
    assert (other.num_tokens, is_same_corpus(other.identity, here.identity)) == (here.num_tokens, False)


def test_a_tokenizer_counts_where_both_name_one() -> None:
    byte, bpe, unknown = (f"ab12, 9 tokens{tokenizer}" for tokenizer in (", tokenizer byte", ", tokenizer bpe", ""))
    assert not is_same_corpus(byte, bpe)
    assert is_same_corpus(byte, unknown)
    assert is_same_corpus(byte, "")
    assert not is_same_corpus(unknown, "ab12, 10 tokens, tokenizer byte")


# --------------------------------------------------------------------------------------------------- validation sets


@pytest.fixture
def with_sets(prefix: Path, tmp_path: Path) -> DataConfig:
    """A corpus whose facts fit the default model, with two validation sets."""
    for name in ("one", "two"):
        write_tiny_corpus(tmp_path / name, [list(range(100))])
    sets = tuple(ValidationCorpus(name=name, corpus=str(tmp_path / name)) for name in ("one", "two"))
    return DataConfig(corpus=str(prefix), validation=sets)


def problems_of(data: DataConfig, **model: Any) -> list[str]:
    facts, failure = judge_corpus(data)
    machine = MachineResources(
        num_gpus=0, num_cores=64, has_corpus=facts is not None, corpus_failure=failure, corpus=facts
    )
    return problems(RunConfig(data=data, model=ModelConfig(**model)), machine)


def test_each_validation_set_is_found_and_named(with_sets: DataConfig) -> None:
    facts, failure = judge_corpus(with_sets)
    assert (failure, facts is not None) == ("", True)
    assert facts is not None
    assert facts.validation == tuple(read_corpus(one.corpus) for one in with_sets.validation)
    assert validation_names(with_sets) == ("one", "two")
    assert validation_names(replace(with_sets, split="9,1")) == ("validation", "one", "two")
    assert validation_names(replace(with_sets, split="9,0,1")) == ("one", "two")
    assert problems_of(with_sets) == []


def test_validation_sets_that_cannot_be_read_are_refused_before_anything_starts(
    with_sets: DataConfig, tmp_path: Path
) -> None:
    one = f"data.validation: name=one, corpus={tmp_path}/one"
    assert problems_of(with_sets, vocab_size=257, seq_length=99) == []
    assert problems_of(with_sets, vocab_size=257, seq_length=100) == [
        f"data.validation: name={name}, corpus={tmp_path}/{name} has 100 tokens, a window needs model.seq_length + 1 = "
        f"101; use a larger corpus or shorter sequences"
        for name in ("one", "two")
    ]
    twice = replace(with_sets, split="1,1", validation=(replace(with_sets.validation[0], name="validation"),))
    (found,) = problems_of(twice)
    assert "name=validation is the name of two validation sets, one of them that of data.split; rename one" in found
    assert problems_of(replace(twice, split="")) == []
    assert (
        "use at most 64 letters"
        in problems_of(replace(with_sets, validation=(replace(with_sets.validation[0], name="a/b"),)))[0]
    )
    other = replace(with_sets, validation=(replace(with_sets.validation[0], identity="ab12, 9 tokens"),))
    assert (
        f"{one} is '{read_corpus(tmp_path / 'one').identity}', not identity='ab12, 9 tokens'" in problems_of(other)[0]
    )
    write_tiny_corpus(tmp_path / "one", [[300] * 100])
    assert problems_of(with_sets) == [
        f"{one}: {tmp_path}/one.bin has token ids up to 300, but model.vocab_size=256; raise that to at least 301"
    ]
    (tmp_path / "one.idx").unlink()
    assert problems_of(with_sets) == [f"{one}: its .bin or .idx is missing; write them with `spare preprocess`"]


def test_a_validation_set_has_the_tokenizer_and_ends_of_the_text_that_is_trained_on(with_sets: DataConfig) -> None:
    written = zip((with_sets.corpus, with_sets.validation[0].corpus), ("byte", "bpe"), (0, 7), strict=True)
    for corpus, tokenizer, end in written:
        facts = replace(read_corpus(corpus), tokenizer=tokenizer, vocab_size=256, end_of_document=end)
        Path(f"{corpus}.json").write_text(note_of(facts))
    (found,) = problems_of(with_sets)
    assert f"was written with tokenizer bpe, and data.corpus={with_sets.corpus} with byte; write both with" in found
    _, found = problems_of(replace(with_sets, eod_mask_loss=True))
    assert f"ends documents with token 7, data.corpus={with_sets.corpus} with 0; write both alike" in found


# --------------------------------------------------------------------------------------------------------------- notes


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever a corpus is read from end to end."""
    reads: list[str] = []
    really_read = corpus_module.read_corpus

    def read(prefix: str, on_read: Callable[[str], None] = lambda _: None) -> CorpusFacts:
        reads.append(prefix)
        return really_read(prefix, on_read)

    monkeypatch.setattr(corpus_module, "read_corpus", read)
    return reads


@pytest.mark.parametrize("cache", ["", "elsewhere"])
def test_a_corpus_is_read_once(prefix: Path, tmp_path: Path, num_reads: list[str], cache: str) -> None:
    data = {"cache": str(tmp_path / cache)} if cache else {}
    assert facts_of(prefix, **data) == facts_of(prefix, **data)
    assert len(num_reads) == 1
    assert len(list((tmp_path / (cache or "cache")).iterdir())) == 1


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_that_has_changed_is_read_again(prefix: Path, num_reads: list[str], ending: str) -> None:
    facts_of(prefix)
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes().replace(b"\xff\0", b"\xff\x01"))
    os.utime(f"{prefix}{ending}", ns=(1, 1))
    assert facts_of(prefix).largest_token == 0x1FF
    assert len(num_reads) == 2


def test_what_preprocess_has_noted_is_not_read_again(tmp_path: Path, num_reads: list[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    words = ["preprocess", "--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "text")]
    assert CliRunner().invoke(app, words).exit_code == 0
    facts = facts_of(tmp_path / "text")
    assert len(num_reads) == 0
    assert (facts.largest_token, facts.tokenizer, facts.vocab_size) == (ord("x"), "byte", 256)
    assert facts.end_of_document == 0
    assert facts.identity == f"{facts.digest}, 5 tokens, tokenizer byte"
    for ending in (".bin", ".idx"):  # as copies have another time
        os.utime(tmp_path / f"text{ending}", ns=(1, 1))
    assert facts_of(tmp_path / "text") == facts
    assert len(num_reads) == 1


def test_what_an_earlier_version_found_fit_is_read_again(prefix: Path, num_reads: list[str]) -> None:
    """It did not check all that Megatron asserts."""
    facts_of(prefix)
    (kept,) = (prefix.parent / "cache").iterdir()
    kept.write_text(kept.read_text().replace('"checked"', '"state"'))
    facts_of(prefix)
    assert len(num_reads) == 2


def test_a_note_of_another_corpus_says_nothing_of_this_one(prefix: Path) -> None:
    facts = facts_of(prefix)
    note = {"tokenizer": "byte", "vocab_size": 256, "digest": "0" * 16, "state": []}
    Path(f"{prefix}.json").write_text(json.dumps(note))
    assert facts_of(prefix) == facts
    Path(f"{prefix}.json").write_text(json.dumps({"tokenizer": "byte", "vocab_size": 256}))  # of an earlier version
    assert facts_of(prefix) == replace(facts, tokenizer="byte", vocab_size=256, end_of_document=0)


def test_where_no_note_can_be_kept_the_corpus_is_read_each_time(
    prefix: Path, tmp_path: Path, num_reads: list[str]
) -> None:
    (tmp_path / "cache").touch()  # no folder
    assert facts_of(prefix) == facts_of(prefix)
    assert len(num_reads) == 2


def test_reading_a_large_corpus_is_reported(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["config", "check", DEMO, "--set", f"data.corpus={prefix}"])
    assert "reading" not in done.output
    (prefix.parent / "cache").rename(prefix.parent / "away")
    monkeypatch.setattr(corpus_module, "_LONG_BYTES", 100)
    for expected in (True, False):
        done = CliRunner().invoke(app, ["config", "check", DEMO, "--set", f"data.corpus={prefix}"])
        line = f"spare config check: reading {prefix}.bin, all 410 B of it, which is done once"
        assert (line in done.output, done.exit_code) == (expected, 0), done.output


# ---------------------------------------------------------------------------------------------------------- blends


@pytest.fixture
def blend(tmp_path: Path) -> DataConfig:
    write_tiny_corpus(tmp_path / "a", [[1, 2, 3]])
    write_tiny_corpus(tmp_path / "b", [[4, 200]])
    parts = (BlendedCorpus(corpus=str(tmp_path / "a"), weight=3.0), BlendedCorpus(corpus=str(tmp_path / "b")))
    return DataConfig(blend=parts)


def test_the_identity_of_a_blend_names_each_corpus_with_its_share(blend: DataConfig) -> None:
    first, second = (read_corpus(part.corpus) for part in blend.blend)
    facts, failure = judge_corpus(blend)
    assert (failure, facts is not None) == ("", True)
    assert facts is not None
    assert facts.identity == f"0.75 of {first.identity} + 0.25 of {second.identity}"
    assert (facts.num_tokens, facts.least_token, facts.largest_token) == (5, 1, 200)
    assert is_same_corpus(facts.identity, f"0.75 of {first.identity}, tokenizer byte + 0.25 of {second.identity}")
    for other in (
        f"0.5 of {first.identity} + 0.5 of {second.identity}",
        f"0.75 of {second.identity} + 0.25 of {first.identity}",
        f"0.75 of {first.identity}",
        first.identity,
    ):
        assert not is_same_corpus(facts.identity, other), other


@pytest.mark.parametrize("weights", [(0.1, 0.2), (0.7, 0.3), (1 / 3, 1e-7), (3, 1)])
def test_a_message_about_another_blend_has_neither_digests_nor_digits_of_rounding(
    blend: DataConfig, weights: tuple[float, float]
) -> None:
    first, second = blend.blend
    ours = replace(
        blend, blend=tuple(replace(part, weight=weight) for part, weight in zip(blend.blend, weights, strict=True))
    )
    facts, _ = judge_corpus(ours)
    assert facts is not None
    for other in (replace(blend, blend=(second, first)), DataConfig(corpus=first.corpus)):
        known, _ = judge_corpus(other)
        assert known is not None
        texts = described_corpora(facts.identity, known.identity)
        assert texts[0] != texts[1]
        for text in texts:
            assert not re.search(r"[0-9a-f]{8}|\d\.\d{3}", text), text
            assert "3 tokens" in text or "2 tokens" in text


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_no_share_is_refused(blend: DataConfig, weight: float) -> None:
    _, failure = judge_corpus(replace(blend, blend=(blend.blend[0], replace(blend.blend[1], weight=weight))))
    assert failure == f"data.blend: corpus={blend.blend[1].corpus} has weight={weight}; set it to a number above 0"


def test_a_blend_ends_its_documents_with_the_token_that_all_of_its_corpora_end_them_with(blend: DataConfig) -> None:
    for ends, expected in (((7, 7), 7), ((7, 8), None), ((7, None), None)):
        for part, end in zip(blend.blend, ends, strict=True):
            facts = replace(read_corpus(part.corpus), tokenizer="bpe", vocab_size=256, end_of_document=end)
            Path(f"{part.corpus}.json").write_text(note_of(facts))
        facts, _ = judge_corpus(blend)
        assert facts is not None
        assert facts.end_of_document == expected


def test_corpora_of_different_tokenizers_do_not_blend(blend: DataConfig) -> None:
    for part, tokenizer in zip(blend.blend, ("byte", "bpe"), strict=True):
        Path(f"{part.corpus}.json").write_text(
            note_of(replace(read_corpus(part.corpus), tokenizer=tokenizer, vocab_size=256))
        )
    _, failure = judge_corpus(blend)
    assert "written with different tokenizers, " in failure
    assert "a with byte, " in failure
    assert failure.endswith("b with bpe; write all with one")


def test_what_is_wrong_with_a_corpus_of_a_blend_names_it(blend: DataConfig) -> None:
    prefix = blend.blend[1].corpus
    tables = ", ".join(f"{{corpus='{part.corpus}', weight={part.weight}}}" for part in blend.blend)
    words = ["config", "check", DEMO, "--set", f"data.blend=[{tables}]", "--set", "data.corpus="]
    assert CliRunner().invoke(app, words).exit_code == 0

    def refused(*more: str) -> str:
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 2
        return done.output

    named = f"data.blend: corpus={prefix}: "
    assert f"{named}{prefix}.bin has token ids up to 200" in refused("--set", "model.vocab_size=9")
    assert "are both set; clear one of them" in refused("--set", "data.corpus=c")
    Path(f"{prefix}.bin").unlink()
    assert f"{named}its .bin or .idx is missing" in refused()


# ---------------------------------------------------------------------------------------------------------- splits


def test_a_split_is_part_of_the_identity_in_shares(prefix: Path) -> None:
    whole, one, other = (facts_of(prefix, split=split).identity for split in ("", "99,1", "990,10,0"))
    assert one == other == f"{whole} split 0.99:0.01:0.0"
    assert not is_same_corpus(whole, one)


@pytest.mark.parametrize("split", ["a", "1,", "0,1", "-1,2", "1,-1", "inf,1", "nan", "1,nan", "1,1,1,1", "[99, 1]"])
def test_what_is_no_split_is_refused(prefix: Path, split: str) -> None:
    _, failure = judge_corpus(DataConfig(corpus=str(prefix), split=split))
    assert failure.startswith(
        f"data.split={split} must be one to three numbers, separated by commas, the first above 0"
    )
