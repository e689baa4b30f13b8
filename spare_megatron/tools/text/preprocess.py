"""`spare preprocess`: text becomes the indexed dataset that training reads."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from spare_megatron.cli.command import option, with_options
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.folders import check_writable
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_bytes
from spare_megatron.machine.interrupts import deferred, raising

if TYPE_CHECKING:
    import numpy as np

    from spare_megatron.tools.text.documents import Skipped
    from spare_megatron.tools.text.tokenizer import TokenizerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOptions:
    """Options of `spare preprocess` as the user wrote them; None where absent."""

    inputs: list[Path] = option("Text file, file of JSON, or folder of them. Repeatable.", "--input", default=MISSING)
    output_prefix: Path = option("Path prefix of the output: PREFIX.bin, PREFIX.idx and PREFIX.json.", default=MISSING)
    tokenizer: str = option(
        "byte, hf:PATH (a tokenizer.json or its folder), sentencepiece:FILE or tiktoken:FILE.", default="byte"
    )
    json_key: str | None = option("Key of the text in each object of JSON, as in text.")
    workers: int = option("Processes that tokenize. The output does not depend on it.", default=1, least=1)
    suffix: list[str] | None = option("Read only files with this suffix from folders, as in .txt. Repeatable.")
    exclude: list[str] | None = option("Skip folders with this name. Repeatable.")
    end_of_document: str = option("Token that ends a document, where the tokenizer does not say it.", default="")
    split_pattern: str = option("For tiktoken: the regular expression, or @FILE with it.", default="")
    special_token: list[str] | None = option("For tiktoken: TEXT=ID of a special token. Repeatable.")
    overwrite: bool = option("Replace an existing dataset.", "--overwrite", default=False)
    as_json: bool = option("Print the figures as JSON.", "--json", default=False)


@with_options(PreprocessOptions)
def preprocess(given: PreprocessOptions) -> None:
    """Convert text to the dataset that `spare train` reads.

    Each text file becomes one document, as does the text in each object of a file of JSON lines or of a JSON array
    (.jsonl, .ndjson or .json; also with .gz or .zst), in sorted order of the paths. Text files in folders are skipped
    and counted if they are not UTF-8 or contain byte 0; a file that is named itself is refused.

    Example: `spare preprocess --input docs.jsonl.zst --json-key text --tokenizer hf:tokenizer.json --workers 8
    --output-prefix data/corpus`
    """
    from spare_megatron.tools.text.tokenizer import read_tokenizer

    source = read_tokenizer(
        given.tokenizer,
        end_of_document=given.end_of_document,
        split_pattern=given.split_pattern,
        special_tokens=given.special_token or (),
    )
    figures, skipped = _convert(given, source)
    if given.as_json:
        say_json(figures)
    else:
        say(*_describe(given.output_prefix, figures, skipped).split("\n"))


def _convert(given: PreprocessOptions, source: "TokenizerSource") -> tuple[dict[str, object], "Skipped"]:
    """Writes the dataset. Returns its figures and what was skipped. ValueError: it cannot be made."""
    from spare_megatron.formats.output import named_errors
    from spare_megatron.tools.text.corpus_writer import write_corpus
    from spare_megatron.tools.text.documents import Skipped, batches_of, find_files, json_among
    from spare_megatron.tools.text.tokenization import tokenizing
    from spare_megatron.tools.text.tokenizer import build

    built = build(source)
    check_output(given.output_prefix, overwrite=given.overwrite)
    paths = find_files(given.inputs, suffixes=given.suffix or (), excluded_folders=frozenset(given.exclude or ()))
    check_apart([*paths, *source.paths], given.output_prefix)
    json_forms = json_among(paths, given.json_key)
    batches = batches_of(paths, json_forms, given.json_key, frozenset(given.inputs))
    skipped = Skipped()
    num_text_bytes = 0

    def documents() -> Iterator["np.ndarray"]:
        nonlocal num_text_bytes
        for batch in tokenized:
            yield from batch.documents()
            skipped.add(batch.skipped)
            num_text_bytes += batch.num_text_bytes
            progress.advance(batch.num_input_bytes, batch.tokens.size)

    with raising(), TextProgress(paths) as progress, tokenizing(batches, source, given.workers) as tokenized:
        with named_errors("--output-prefix", given.output_prefix):
            counts = write_corpus(
                documents(),
                given.output_prefix,
                vocab_size=built.vocab_size,
                tokenizer=source.identity,
                noted_end=built.end_of_document,
                publishing=deferred(),
            )
    figures = {
        "documents": counts.num_documents,
        "tokens": counts.num_tokens,
        "bytes": num_text_bytes,
        "skipped_files": skipped.files.total(),
        "skipped_documents": skipped.documents.total(),
        "tokenizer": source.identity,
        "vocab_size": built.vocab_size,
    }
    return figures, skipped


class TextProgress:
    """Progress of reading files, on stderr: a bar on a terminal, otherwise a line for every tenth."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._num_bytes = sum(path.stat().st_size for path in paths)
        self._num_read = self._num_tokens = 0
        self._began_s = time.monotonic()
        self._console = RunConsole(stderr=True)
        self._shown = ExitStack()

    def __enter__(self) -> Self:
        self._update = self._shown.enter_context(self._console.bar("reading", self._num_bytes))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def advance(self, num_bytes: int, num_tokens: int = 0) -> None:
        tenths = self._tenths()
        self._num_read += num_bytes
        self._num_tokens += num_tokens
        self._update(self._num_read, self._rate())
        if self._tenths() > tenths and not self._console.is_terminal:
            left_s = (time.monotonic() - self._began_s) * (self._num_bytes / max(self._num_read, 1) - 1)
            read = f"read {format_bytes(self._num_read)} of {format_bytes(self._num_bytes)}"
            self._console.line(f"{read}, {self._rate()}, {max(left_s, 0.0):.0f} s left")

    def _tenths(self) -> int:
        return self._num_read * 10 // max(self._num_bytes, 1)

    def _rate(self) -> str:
        """In tokens if there are any yet: a tokenizer in training makes none."""
        spent_s = max(time.monotonic() - self._began_s, 1e-9)
        if self._num_tokens:
            return f"{self._num_tokens / spent_s:.3g} tokens/s"
        return f"{format_bytes(self._num_read / spent_s)}/s"


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """ValueError: the output's folder cannot be written, the dataset exists, or the prefix is a folder."""
    if prefix.is_dir():
        raise ValueError(f"--output-prefix {prefix} is a folder; name the files in it, as in {prefix / 'corpus'}")
    existing = [file for file in outputs_of(prefix) if file.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} exists; choose another --output-prefix or give --overwrite")
    check_writable("the folder of --output-prefix", prefix.parent.absolute())


def outputs_of(prefix: Path) -> list[Path]:
    """The files of a dataset: tokens, index, and the note of what the tokens are."""
    return [Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".json")]


def check_apart(paths: Sequence[Path], prefix: Path) -> None:
    """Refuses to write over what is read, such as a corpus.json; ValueError."""
    outputs = [file for file in outputs_of(prefix) if file.exists()]
    for path in paths:
        if any(path.samefile(file) for file in outputs):
            raise ValueError(f"{path} is read, and --output-prefix {prefix} would write over it; choose another")


def _describe(prefix: Path, figures: dict[str, object], skipped: "Skipped") -> str:
    text = (
        f"{prefix}.bin and .idx: {figures['documents']} documents, {figures['tokens']} tokens, {figures['bytes']} "
        f"bytes; tokenizer {figures['tokenizer']}, vocabulary {figures['vocab_size']}"
    )
    for what, reasons in (("files", skipped.files), ("documents", skipped.documents)):
        if reasons:
            listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            text += f"\nskipped {reasons.total()} {what}: {listed}"
    return text
