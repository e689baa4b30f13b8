"""`spare preprocess`: text files become the indexed dataset that training reads."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.process.interrupts import raising

VOCAB_SIZE = 256
END_OF_DOCUMENT = 0
"""Byte 0 does not occur in text, so it marks the end of a document."""
_JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_MOST_NAMED = 3


class _NoText(Exception):
    """A file cannot become a document."""


@dataclass(slots=True)
class SkippedFiles:
    """Files that became no document, by reason."""

    num_empty: int = 0
    num_not_utf8: int = 0
    num_with_byte_0: int = 0
    num_unreadable: int = 0

    @property
    def num_files(self) -> int:
        return self.num_empty + self.num_not_utf8 + self.num_with_byte_0 + self.num_unreadable


def preprocess(
    inputs: Annotated[list[Path], typer.Option("--input", help="Text file, or folder of text files. Repeatable.")],
    output_prefix: Annotated[
        Path, typer.Option(help="Path prefix of the output: PREFIX.bin, PREFIX.idx and PREFIX.json.")
    ],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer; byte is the only one.")] = "byte",
    suffix: Annotated[
        list[str] | None, typer.Option(help="Read only files with this suffix from folders, as in .txt. Repeatable.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Skip folders with this name. Repeatable.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Convert text files to the dataset that `spare train` reads.

    Each file becomes one document, in sorted order of the paths. Files in folders are skipped and counted if they are
    not UTF-8 or contain byte 0, which marks the end of a document; a file that is named itself is refused. JSON lines
    are refused, because they hold many documents.

    Example: `spare preprocess --input DIR --suffix .txt --output-prefix data/corpus`
    """
    with explained_errors("preprocess"):
        if tokenizer != "byte":
            raise ValueError(f"--tokenizer {tokenizer} is unknown; the only one is byte")
        check_output(output_prefix, overwrite=overwrite)
        paths = find_files(inputs, suffixes=suffix or (), excluded_folders=frozenset(exclude or ()))
        check_apart(paths, output_prefix)
        refuse_json_lines(paths)
        from spare_megatron.config.corpus import note_of
        from spare_megatron.journal.output import named_errors, whole_file
        from spare_megatron.mcore.corpus_writer import write_corpus

        skipped = SkippedFiles()
        with raising(), _progress(len(paths)) as advance:
            documents = read_documents(paths, skipped, advance, named=frozenset(inputs))
            with named_errors("--output-prefix", output_prefix):
                counts = write_corpus(documents, output_prefix, vocab_size=VOCAB_SIZE, end_of_document=END_OF_DOCUMENT)
        with whole_file("--output-prefix", outputs_of(output_prefix)[-1]) as note:
            note.write_text(note_of(output_prefix, tokenizer, VOCAB_SIZE))
        num_bytes = counts.num_tokens - counts.num_documents
        figures = {
            "documents": counts.num_documents,
            "tokens": counts.num_tokens,
            "bytes": num_bytes,
            "skipped_files": skipped.num_files,
        }
        typer.echo(json.dumps(figures) if as_json else _describe(output_prefix, figures, skipped))


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """Makes the output's folder. ValueError: it is not writable, the dataset exists, or the prefix is a folder."""
    if prefix.is_dir():
        raise ValueError(f"--output-prefix {prefix} is a folder; name the files in it, as in {prefix / 'corpus'}")
    existing = [file for file in outputs_of(prefix) if file.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} exists; choose another --output-prefix or give --overwrite")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder of --output-prefix {prefix} cannot be made: {error.strerror}") from error
    if not os.access(prefix.parent, os.W_OK | os.X_OK):
        raise ValueError(f"the folder of --output-prefix {prefix} cannot be written; choose another")


def outputs_of(prefix: Path) -> list[Path]:
    """The files of a dataset: tokens, index, and the note of what the tokens are."""
    return [Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".json")]


def check_apart(paths: Sequence[Path], prefix: Path) -> None:
    """Refuses to write over what is read, such as a corpus.json; ValueError."""
    outputs = [file for file in outputs_of(prefix) if file.exists()]
    for path in paths:
        if any(path.samefile(file) for file in outputs):
            raise ValueError(f"--input has {path}, which --output-prefix {prefix} would write over; choose another")


def find_files(
    inputs: Sequence[Path], *, suffixes: Sequence[str] = (), excluded_folders: frozenset[str] = frozenset()
) -> list[Path]:
    """The files to read, in sorted order, each once. A file named as input is taken whatever its suffix. ValueError: an
    input does not exist, or there is nothing to read.
    """
    found: set[Path] = set()
    for given in inputs:
        if given.is_file():
            found.add(given)
        elif given.is_dir():
            found |= set(_files_below(given, tuple(suffixes), excluded_folders))
        else:
            raise ValueError(f"--input {given} is neither a file nor a folder")
    if not found:
        wanted = f" with suffix {' or '.join(suffixes)}" if suffixes else ""
        raise ValueError(f"--input {' '.join(map(str, inputs))} holds no files{wanted}; give it some text")
    return sorted(found)


def _files_below(folder: Path, suffixes: tuple[str, ...], excluded_folders: frozenset[str]) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in excluded_folders]
        for name in names:
            path = Path(where, name)
            if name.endswith(suffixes or "") and path.is_file():
                yield path


def refuse_json_lines(paths: Sequence[Path]) -> None:
    """Each line of such a file is a document, and a file is taken for one. ValueError: there are some."""
    found = [path for path in paths if _is_json_lines(path)]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ValueError(
            f"{', '.join(map(str, found[:_MOST_NAMED]))}{more}: JSON lines are not read, and each file would be one "
            f"document; write each document into a file of its own, or choose others with --suffix and --exclude"
        )


def _is_json_lines(path: Path) -> bool:
    """By its name, also where it is compressed; and .json by its first two lines: Megatron calls JSON lines so."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if not suffixes or suffixes[-1] != ".json":
        return bool(suffixes) and suffixes[-1] in _JSON_LINES
    try:
        with path.open(encoding="utf-8") as file:
            return all(isinstance(json.loads(file.readline()), dict) for _ in range(2))
    except (OSError, ValueError):
        return False


def read_documents(
    paths: Sequence[Path], skipped: SkippedFiles, advance: Callable[[], None], *, named: frozenset[Path] = frozenset()
) -> Iterator[bytes]:
    """The bytes of each file that is text; counts the others in `skipped`. Calls `advance` once for every file.
    ValueError: one of those that are named is no text.
    """
    for path in paths:
        try:
            document = _read_text(path, skipped)
        except _NoText as error:
            if path in named:
                raise ValueError(f"--input {path} {error}; give files of UTF-8 text") from error
        else:
            if document:
                yield document
        advance()


def _read_text(path: Path, skipped: SkippedFiles) -> bytes:
    """What the file holds. Raises _NoText where that is no text."""
    try:
        document = path.read_bytes()
        document.decode("utf-8")
    except UnicodeDecodeError as error:
        skipped.num_not_utf8 += 1
        raise _NoText("is not UTF-8, as compressed and binary files are not") from error
    except OSError as error:
        skipped.num_unreadable += 1
        raise _NoText(f"cannot be read: {error.strerror}") from error
    if END_OF_DOCUMENT in document:
        skipped.num_with_byte_0 += 1
        raise _NoText("holds byte 0, which marks the end of a document")
    skipped.num_empty += not document
    return document


def _describe(prefix: Path, figures: dict[str, int], skipped: SkippedFiles) -> str:
    text = (
        f"{prefix}.bin and .idx: {figures['documents']} documents, {figures['tokens']} tokens, {figures['bytes']} bytes"
    )
    if skipped.num_files:
        text += (
            f"\nskipped {skipped.num_files} files: {skipped.num_empty} empty, {skipped.num_not_utf8} not UTF-8, "
            f"{skipped.num_with_byte_0} with byte 0, {skipped.num_unreadable} unreadable"
        )
    return text


# ---------------------------------------------------------------------------------------------------- progress


@contextmanager
def _progress(num_files: int) -> Iterator[Callable[[], None]]:
    """A function to call for each file read. Shows a bar on a terminal, otherwise a line for every tenth; on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(f"reading {num_files} files", total=num_files)
            yield lambda: bar.advance(task)
        return
    num_read = 0

    def advance() -> None:
        nonlocal num_read
        num_read += 1
        if num_read * 10 // num_files > (num_read - 1) * 10 // num_files:
            typer.echo(f"read {num_read} of {num_files} files", err=True)

    yield advance
