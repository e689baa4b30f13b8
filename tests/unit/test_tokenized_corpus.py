"""Corpora of every tokenizer, against what the tokenizers' own libraries say of each document."""

import base64
import errno
import gzip
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO, Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
import zstandard
from typer.testing import CliRunner, Result

from spare_megatron.commands import app
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.corpus import judge_corpus, read_corpus
from spare_megatron.tools.text import documents as documents_module
from spare_megatron.tools.text import tokenizer as tokenizer_module
from spare_megatron.tools.text.preprocess import TextProgress
from spare_megatron.tools.text.tokenization import tokenizing
from spare_megatron.tools.text.tokenizer import build, read_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ta tab\r\nand lines\n\n",
    "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f600 \u2028 1234567",
    'quotes " and \\ and a NUL: [\0]',
    "a <|endoftext|> that is text",
    *(f"document {number}: {'abc ' * number}" for number in range(40)),
]
PATTERN = r"\w+|\s+|[^\w\s]+"


def spare(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [*command.split(), *map(str, arguments)])


def documents_of(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [tokens.tolist() for tokens in IndexedDataset(str(prefix))]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": number, "text": text}).encode() + b"\n" for number, text in enumerate(texts))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "docs.jsonl").write_bytes(lines_of(TEXTS))
    return tmp_path / "docs.jsonl"


@pytest.fixture
def hf(tmp_path: Path, lines: Path) -> Path:
    words = ("--input", lines, "--json-key", "text", "--vocab-size", 300, "--output", tmp_path / "hf")
    done = spare("tokenizer train", *words)
    assert done.exit_code == 0, done.output
    return tmp_path / "hf"


def preprocess(lines: Path, tokenizer: object, *arguments: object) -> tuple[Path, dict[str, Any]]:
    prefix = lines.parent / "out" / "corpus"
    words = ("--input", lines, "--json-key", "text", "--tokenizer", tokenizer, "--output-prefix", prefix)
    done = spare("preprocess", *words, "--json", "--overwrite", *arguments)
    assert done.exit_code == 0, done.output
    return prefix, json.loads(done.stdout)


def refusal(lines: Path, tokenizer: object, *arguments: object) -> str:
    prefix = lines.parent / "out" / "corpus"
    words = ("--input", lines, "--json-key", "text", "--tokenizer", tokenizer, "--output-prefix", prefix)
    done = spare("preprocess", *words, *arguments)
    assert done.exit_code == 2, done.output
    assert not list(prefix.parent.glob("*")), "nothing is left"
    return done.stderr


# -------------------------------------------------------------------------------------------------------- tokenizers


def test_a_trained_tokenizer_gives_the_ids_of_its_library(lines: Path, hf: Path) -> None:
    prefix, figures = preprocess(lines, f"hf:{hf}")
    library = tokenizers.Tokenizer.from_file(str(hf / "tokenizer.json"))
    library.encode_special_tokens = True
    end = library.token_to_id("<|endoftext|>")
    assert documents_of(prefix) == [[*library.encode(text).ids, end] for text in TEXTS]
    assert [library.decode(ids[:-1], skip_special_tokens=False) for ids in documents_of(prefix)] == TEXTS
    assert (figures["documents"], figures["vocab_size"]) == (len(TEXTS), library.get_vocab_size())
    assert figures["bytes"] == sum(len(text.encode()) for text in TEXTS)


def test_a_tokenizer_that_pads_and_cuts_does_neither_and_its_folder_names_the_end(lines: Path, hf: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(hf / "tokenizer.json"))
    expected = [library.encode(text, add_special_tokens=False).ids for text in TEXTS if "endoftext" not in text]
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(hf / "tokenizer.json"))
    (hf / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    lines.write_bytes(lines_of([text for text in TEXTS if "endoftext" not in text]))
    prefix, figures = preprocess(lines, f"hf:{hf}")
    assert documents_of(prefix) == [[*ids, 301] for ids in expected]
    assert figures["vocab_size"] == 302
    (hf / "tokenizer_config.json").unlink()
    prefix, _ = preprocess(lines, f"hf:{hf / 'tokenizer.json'}", "--end-of-document", "<s>")
    assert documents_of(prefix) == [[*ids, 300] for ids in expected]


def test_ids_that_are_no_token_are_shown_by_number() -> None:
    """Bytes with documents to be filled in could not be shown."""
    assert build(read_tokenizer("byte")).shown([257, 0xC3, 0xA9, 0xA9, 256, 258]) == "<257>\u00e9\\xa9<256><258>"


def test_sentencepiece_gives_the_ids_of_its_library(lines: Path, tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=330, byte_fallback=True, minloglevel=2
    )
    (tmp_path / "spm.model").write_bytes(model.getvalue())
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    prefix, figures = preprocess(lines, f"sentencepiece:{tmp_path / 'spm.model'}")
    assert documents_of(prefix) == [[*library.encode(text), library.eos_id()] for text in TEXTS]
    assert figures["vocab_size"] == library.vocab_size() == 330


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"do", b"abc", b"docu", b"  "]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "x.tiktoken").write_text("".join(lines))
    return tmp_path / "x.tiktoken"


def test_tiktoken_gives_the_ids_of_its_library_and_text_never_becomes_a_special_token(
    lines: Path, ranks: Path, tmp_path: Path
) -> None:
    parsed = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in ranks.read_text().splitlines()}
    special = {"<|endoftext|>": 300, "<|fim|>": 301}
    library = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=parsed, special_tokens=special)
    (tmp_path / "pattern").write_text(PATTERN + "\n")
    words = ["--special-token", "<|endoftext|>=300", "--special-token", "<|fim|>=301"]
    end = ["--end-of-document", "<|endoftext|>"]
    prefix, figures = preprocess(lines, f"tiktoken:{ranks}", "--split-pattern", f"@{tmp_path}/pattern", *words, *end)
    assert documents_of(prefix) == [[*library.encode(text, disallowed_special=()), 300] for text in TEXTS]
    assert [library.decode(ids[:-1]) for ids in documents_of(prefix)] == TEXTS
    assert figures["vocab_size"] == library.n_vocab == 302
    identities = {figures["tokenizer"]}
    identities.add(preprocess(lines, f"tiktoken:{ranks}", "--split-pattern", ".", *words, *end)[1]["tokenizer"])
    identities.add(preprocess(lines, f"tiktoken:{ranks}", "--split-pattern", ".", *words[:2])[1]["tokenizer"])
    assert len(identities) == 3, "the pattern and the special tokens count"


@pytest.mark.parametrize(
    "pattern", [PATTERN, r"\s+(?!\S)|\s+|\S", r"'(?i:[sdmt]|ll)|[^\r\n\p{L}\p{N}]?+\p{L}++|\s++$|\s+(?!\S)|."]
)
def test_long_pieces_have_the_ids_that_tiktoken_gives_them(
    ranks: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose regular expressions overflow their stack in them; here all pieces are long ones."""
    monkeypatch.setattr(tokenizer_module, "_LONG_PIECE", 1)
    tokenizer = build(read_tokenizer(f"tiktoken:{ranks}", split_pattern=pattern, special_tokens=["<|endoftext|>=300"]))
    parsed = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in ranks.read_text().splitlines()}
    library = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=parsed, special_tokens={"<|endoftext|>": 300})
    random = Random(39)
    texts = ["".join(random.choices([" ", "\n", "\t", "ab", "doc", "'s", "\u00e9", "1"], k=30)) for _ in range(200)]
    assert tokenizer.encode(texts) == [library.encode_ordinary(text) for text in texts]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_million_spaces_are_read_with_tiktoken(lines: Path, ranks: Path, workers: int) -> None:
    lines.write_bytes(lines_of(["a" + " " * 2**20 + "b"]))
    words = ["--split-pattern", r" ?\w+|\s+(?!\S)|\s+", "--special-token", "<|endoftext|>=300", "--workers", workers]
    prefix, _ = preprocess(lines, f"tiktoken:{ranks}", *words)
    assert documents_of(prefix) == [[ord("a"), *[260] * (2**19 - 1), ord(" "), ord(" "), ord("b"), 300]]


def test_the_note_names_the_tokenizer_and_training_refuses_a_smaller_vocabulary(lines: Path, hf: Path) -> None:
    prefix, figures = preprocess(lines, f"hf:{hf}")
    note = json.loads(Path(f"{prefix}.json").read_text())
    largest = max(max(document) for document in documents_of(prefix))
    assert (note["tokenizer"], note["vocab_size"], note["largest_token"]) == (figures["tokenizer"], 300, largest)
    assert {note["end_of_document"]} == {document[-1] for document in documents_of(prefix)}
    facts, _ = judge_corpus(DataConfig(corpus=str(prefix)))
    assert facts is not None
    assert facts.identity.endswith(f"tokenizer {figures['tokenizer']}")
    demo = str(Path(__file__).parents[2] / "configs/run/demo_cpu.toml")
    words = ["--set", f"data.corpus={prefix}", "--set", "model.vocab_size=299"]
    done = spare("config check", demo, *words)
    assert f"model.vocab_size=299 is below the vocabulary of data.corpus={prefix}, 300 tokens; raise it" in done.output
    hf.rename(hf.with_name("moved"))
    assert preprocess(lines, f"hf:{hf.with_name('moved')}")[1]["tokenizer"] == figures["tokenizer"]


# ------------------------------------------------------------------------------------------------------------- input


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson.gz", "a.jsonl.zst", "a.json.gz"])
def test_json_lines_are_read_whatever_their_compression(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In members of a few bytes, cut in the middle of lines, and in batches of a few lines."""
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 50)
    monkeypatch.setattr(documents_module, "_CHUNK_BYTES", 7)
    texts = [text for text in TEXTS if "\0" not in text]
    content = lines_of(texts).replace(b"\n", b"\r\n").rstrip()
    cut = [content[:100], content[100:150], content[150:]]
    compress: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    (tmp_path / name).write_bytes(b"".join(map(compress.get(Path(name).suffix, bytes), cut)))
    prefix, figures = preprocess(tmp_path / name, "byte")
    assert documents_of(prefix) == [[*text.encode(), 0] for text in texts]
    assert figures["skipped_documents"] == 0


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_text_that_is_cut_short_or_damaged_is_refused(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name.endswith("gz") else zstandard.compress
    content = compress(lines_of([str(number**9) for number in range(2000)]))
    (tmp_path / name).write_bytes(content[:-9])
    assert f"{tmp_path / name} is cut short; copy or write it anew" in refusal(tmp_path / name, "byte")
    (tmp_path / name).write_bytes(b"text")
    assert f"{tmp_path / name} cannot be decompressed" in refusal(tmp_path / name, "byte")


def zstd_frame(text: bytes, window_log: int) -> bytes:
    """Written by hand (RFC 8878): a header with the window alone, and the text as it is in one block."""
    block = (len(text) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\0" + bytes([(window_log - 10) << 3]) + block + text


def test_every_window_that_zstd_writes_is_read_and_a_larger_one_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    for window_log in (27, 28, 31):
        path.write_bytes(zstd_frame(lines_of(["one", "two"]), window_log))
        assert preprocess(path, "byte")[1]["tokens"] == 8
    path.write_bytes(zstd_frame(lines_of(["one", "two"]), 32))
    expected = (
        "requires too much memory for decoding; copy or write it anew with a smaller window, as of zstd --long=27"
    )
    assert expected in spare("preprocess", "--input", path, "--json-key", "text", "--output-prefix", path).stderr


def test_text_files_and_json_lines_are_read_together(tmp_path: Path, hf: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "e.txt").write_text("last")
    words = ["--input", tmp_path / "a.txt", "--input", tmp_path / "e.txt", "--suffix", ".jsonl"]
    prefix, figures = preprocess(tmp_path / "docs.jsonl", f"hf:{hf}", *words)
    library = tokenizers.Tokenizer.from_file(str(hf / "tokenizer.json"))
    documents = documents_of(prefix)
    assert [library.decode(documents[index]) for index in (0, -1)] == ["first", "last"]
    assert figures["documents"] == len(TEXTS) + 2


def test_lines_without_text_are_counted_and_odd_ones_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "a", "score": NaN}\n\n  \n{"text": ""}\n{"text": "\\u0000"}\n'
        b'{"other": [{}], "text": "b"}'
    )
    prefix, figures = preprocess(tmp_path / "a.jsonl", "byte")
    assert documents_of(prefix) == [[ord("a"), 0], [ord("b"), 0]]
    assert (figures["skipped_documents"], figures["skipped_files"]) == (2, 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b'{"text": "\\ud800"}', "has half of a surrogate pair"),
        (b'{"body": "a", "id": 1}', "has no --json-key text; its keys are 'body', 'id'"),
        (b'{"text": ["a"]}', "has list under --json-key text; give the key of a string"),
        (b"[1]", "is not a JSON object"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    workers = 2 if line == b"[1]" else 1  # also where a worker finds it
    assert f"{tmp_path}/a.jsonl, line 3 {reason}" in refusal(tmp_path / "a.jsonl", "byte", "--workers", workers)


def test_other_compression_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(b"")
    assert "a.jsonl.xz: only .gz and .zst are decompressed" in refusal(tmp_path / "a.jsonl.xz", "byte")


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hf:{tmp}/none"], "/none cannot be read: No such file"),
        (["hf:"], "--tokenizer hf: is unknown; choose byte"),
        (["hf:{tmp}/x.tiktoken"], "x.tiktoken cannot be read as tokenizer.json: "),
        (["sentencepiece:{tmp}/x.tiktoken"], "x.tiktoken cannot be read as a model of SentencePiece: "),
        (["tiktoken:{tmp}/x.tiktoken"], "has neither the pattern that splits text nor the special tokens; give"),
        (["hf:{tmp}/hf", "--split-pattern", "."], "--split-pattern and --special-token are for tiktoken:FILE"),
        (["byte", "--end-of-document", "a"], "--tokenizer byte ends documents with byte 0"),
        (["hf:{tmp}/hf", "--end-of-document", "</s>"], "has no token '</s>' to end a document with"),
        (
            ["tiktoken:{tmp}/hf/tokenizer.json", "--split-pattern", ".", "--special-token", "<|e|>=300"],
            "tokenizer.json cannot be read as a .tiktoken file, with a token in base64 and its rank on each line",
        ),
        (
            ["tiktoken:{tmp}/x.tiktoken", "--split-pattern", "(", "--special-token", "<|e|>=300"],
            "--split-pattern ( is not a regular expression",
        ),
        (
            ["tiktoken:{tmp}/x.tiktoken", "--split-pattern", ".", "--special-token", "<|e|>=260"],
            "--special-token: each needs an id of its own, and the ranks",
        ),
        (
            ["tiktoken:{tmp}/x.tiktoken", "--split-pattern", ".", "--special-token", "<|e|>"],
            "--special-token <|e|> is not TEXT=ID",
        ),
        (
            [
                "tiktoken:{tmp}/x.tiktoken",
                "--split-pattern",
                ".",
                "--special-token",
                "a=300",
                "--special-token",
                "b=301",
            ],
            "does not say which token ends a document; name it with --end-of-document, such as a, b",
        ),
    ],
)
@pytest.mark.usefixtures("hf", "ranks")
def test_a_tokenizer_that_cannot_be_used_is_explained(
    lines: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    tokenizer, *words = (word.format(tmp=tmp_path) for word in arguments)
    assert expected in refusal(lines, tokenizer, *words)


@pytest.mark.parametrize(
    ("module", "tokenizer"), [("tokenizers", "hf:{tmp}/hf"), ("sentencepiece", "sentencepiece:{tmp}/x.tiktoken")]
)
@pytest.mark.usefixtures("hf", "ranks")
def test_a_missing_package_is_named_with_its_extra(
    lines: Path, tmp_path: Path, module: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    expected = f"needs the package {module}, which is not installed: pip install 'spare_megatron[text]'"
    assert expected in refusal(lines, tokenizer.format(tmp=tmp_path))


def test_an_existing_tokenizer_is_kept_and_a_small_vocabulary_refused(lines: Path, hf: Path) -> None:
    words = ("--input", lines, "--json-key", "text", "--output", hf)
    assert f"{hf}/tokenizer.json exists; choose another --output or give" in spare("tokenizer train", *words).stderr
    done = spare("tokenizer train", *words, "--overwrite", "--vocab-size", 256)
    assert "--vocab-size 256 is below the 257 of single bytes; raise it" in done.stderr


def test_the_tokenizer_is_never_written_over(lines: Path, hf: Path) -> None:
    words = ("--input", lines, "--json-key", "text", "--tokenizer", f"hf:{hf}", "--overwrite")
    done = spare("preprocess", *words, "--output-prefix", hf / "tokenizer")
    assert f"{hf}/tokenizer.json is read, and --output-prefix {hf}/tokenizer would write over it" in done.stderr


# ----------------------------------------------------------------------------------------------- workers, interrupts


def test_the_number_of_workers_changes_no_byte(lines: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 100)
    monkeypatch.setattr(documents_module, "_CHUNK_BYTES", 100)
    contents = []
    for workers in (1, 3):
        prefix, _ = preprocess(lines, f"hf:{hf}", "--workers", workers)
        contents.append([Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx", ".json")])
    assert contents[0] == contents[1]
    tokenizer = (hf / "tokenizer.json").read_bytes()
    words = ("--input", lines, "--json-key", "text", "--vocab-size", 300, "--output", hf, "--overwrite")
    assert spare("tokenizer train", *words, "--workers", 3).exit_code == 0
    assert (hf / "tokenizer.json").read_bytes() == tokenizer


def test_workers_take_no_more_than_two_batches_each_ahead(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 100)
    monkeypatch.setattr(documents_module, "_CHUNK_BYTES", 100)
    taken = []
    batches = documents_module.batches_of([lines], {lines: "lines"}, "text", frozenset())
    counted = (taken.append(batch) or batch for batch in batches)
    with tokenizing(counted, read_tokenizer("byte"), 2) as results:
        for number, _ in enumerate(results, 1):
            assert len(taken) <= number + 3
    assert number == len(taken) > 20


def test_a_worker_that_dies_is_reported(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 100)
    monkeypatch.setattr(documents_module, "_CHUNK_BYTES", 100)

    def kill(self: TextProgress, num_bytes: int, num_tokens: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    monkeypatch.setattr(TextProgress, "advance", kill)
    expected = "spare preprocess: a worker has ended with exit code -9; if memory was short, lower --workers\n"
    assert refusal(lines, "byte", "--workers", 2).endswith(expected)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_library_of_a_tokenizer_raises_is_one_line_with_the_document(
    lines: Path, ranks: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic of Rust is no Exception, and ended workers silently; the message blamed three options."""
    monkeypatch.setenv("RUST_BACKTRACE", "0")  # takes seconds to print
    lines.write_bytes(lines_of(["b", "a" * 60 + "c"]))
    pattern = "(?:(?!x)a|(?!x)a)+(?=b)|."
    words = ["--split-pattern", pattern, "--special-token", "<|endoftext|>=300", "--workers", workers]
    found = refusal(lines, f"tiktoken:{ranks}", *words)
    expected = f"{lines}, line 2 cannot be encoded by --tokenizer tiktoken:{ranks} with --split-pattern '{pattern}': "
    assert found.startswith(f"spare preprocess: {expected}")
    assert found.count("\n") == 1
    assert "--workers" not in found
    assert "--output-prefix" not in found


def test_the_first_error_of_the_input_is_reported_whatever_the_number_of_workers(tmp_path: Path) -> None:
    """The damaged file was read ahead of the answer on the bad line."""
    (tmp_path / "a.jsonl").write_bytes(b"bad\n")
    (tmp_path / "b.jsonl.gz").write_bytes(b"damaged")
    for workers in (1, 2):
        words = ["--input", tmp_path / "b.jsonl.gz", "--workers", workers]
        assert f"{tmp_path}/a.jsonl, line 1 is not JSON" in refusal(tmp_path / "a.jsonl", "byte", *words)


@pytest.mark.parametrize("workers", [1, 2])
def test_input_that_cannot_be_read_is_not_put_on_the_output(
    lines: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_decompress = documents_module._decompressed

    def fail(path: Path, file: IO[bytes]) -> Iterator[bytes]:
        yield from really_decompress(path, file)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(documents_module, "_decompressed", fail)
    words = ("--input", lines, "--json-key", "text", "--output-prefix", lines.parent / "corpus", "--workers", workers)
    done = spare("preprocess", *words)
    assert (done.exit_code, done.stderr) == (2, f"spare preprocess: {lines} cannot be read: Input/output error\n")


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_dataset_as_it_was_and_no_process(
    lines: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 100)
    monkeypatch.setattr(documents_module, "_CHUNK_BYTES", 100)
    prefix, _ = preprocess(lines, "byte")
    before = {path: path.read_bytes() for path in prefix.parent.glob("corpus.*")}
    lines.write_bytes(lines_of(TEXTS[5:] * 3))
    num_children = []

    def interrupt(self: TextProgress, num_bytes: int, num_tokens: int) -> None:
        num_children.append(len(multiprocessing.active_children()))
        signal.raise_signal(number)

    monkeypatch.setattr(TextProgress, "advance", interrupt)
    words = ("--input", lines, "--json-key", "text", "--output-prefix", prefix, "--workers", 2, "--overwrite")
    done = spare("preprocess", *words)
    assert (done.exit_code, done.stderr) == (130, "spare preprocess: interrupted\n")
    assert (num_children, multiprocessing.active_children()) == ([2], [])
    assert {path: path.read_bytes() for path in prefix.parent.iterdir() if path.is_file()} == before


@pytest.mark.usefixtures("_handlers")
def test_an_interrupt_leaves_the_tokenizer_as_it_was(lines: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in hf.iterdir()}
    monkeypatch.setattr(TextProgress, "advance", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    words = ("--input", lines, "--json-key", "text", "--vocab-size", 290, "--output", hf, "--overwrite")
    done = spare("tokenizer train", *words)
    assert (done.exit_code, done.stderr) == (130, "spare tokenizer train: interrupted\n")
    assert {path: path.read_bytes() for path in hf.iterdir()} == before


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_dataset_is_whole_or_not_there_wherever_its_replacement_ends(
    lines: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The .bin of the new text stood beside the .idx of the old one."""
    prefix, _ = preprocess(lines, "byte")
    lines.write_bytes(lines_of(TEXTS[5:] * 3))
    replaced, replace = [], Path.replace

    def fail(path: Path, target: str) -> Path:
        replaced.append(target)
        if len(replaced) == failing + 1:
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    words = ("--input", lines, "--json-key", "text", "--output-prefix", prefix, "--overwrite")
    assert spare("preprocess", *words).exit_code == 2
    assert len(replaced) == failing + 1
    assert judge_corpus(DataConfig(corpus=str(prefix))) == (None, ""), "missing"


@pytest.mark.usefixtures("_handlers")
def test_a_signal_while_the_files_get_their_names_comes_after_them(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, _ = preprocess(lines, "byte")
    lines.write_bytes(lines_of(["new"]))
    replace = Path.replace

    def interrupted(path: Path, target: str) -> Path:
        signal.raise_signal(signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    words = ("--input", lines, "--json-key", "text", "--output-prefix", prefix, "--overwrite")
    assert spare("preprocess", *words).exit_code == 130
    monkeypatch.undo()
    assert documents_of(prefix) == [[*b"new", 0]]
    assert read_corpus(prefix).num_tokens == 4
