"""`spare tokenizer`: tokenizers of one's own, without a download."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.command import SpareCommand
from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.printing import say
from spare_megatron.machine.interrupts import deferred, raising
from spare_megatron.tools.text.preprocess import EXCLUDE, INPUTS, JSON_KEY, SUFFIX
from spare_megatron.tools.text.text_progress import TextProgress

app = typer.Typer(name="tokenizer", help="Train a tokenizer.", no_args_is_help=True)


@app.callback()
def _tokenizer() -> None:
    """Train a tokenizer."""


@app.command("train", cls=SpareCommand)
def train(
    inputs: INPUTS,
    output: Annotated[Path, typer.Option(help="Folder of the tokenizer, for `--tokenizer hf:FOLDER`.")],
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32768,
    json_key: JSON_KEY = None,
    workers: Annotated[int, typer.Option(min=1, help="Threads. The tokenizer does not depend on it.")] = 1,
    suffix: SUFFIX = None,
    exclude: EXCLUDE = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing tokenizer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train a byte-level BPE tokenizer on text.

    It reads what `spare preprocess` reads, and ends documents with <|endoftext|>. The folder holds a tokenizer.json and
    a tokenizer_config.json, which transformers load, too.

    Example: `spare tokenizer train --input docs.jsonl --json-key text --vocab-size 32768 --output data/tokenizer`
    """
    with explained_errors("tokenizer train"):
        from spare_megatron.formats.output import whole_file
        from spare_megatron.tools.text.documents import Skipped, batches_of, documents_in, find_files, json_among
        from spare_megatron.tools.text.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, read_tokenizer
        from spare_megatron.tools.text.tokenizer_training import LEAST_VOCAB_SIZE, tokenizer_config, train_bpe

        if vocab_size < LEAST_VOCAB_SIZE:
            raise ValueError(f"--vocab-size {vocab_size} is below the {LEAST_VOCAB_SIZE} of single bytes; raise it")
        found = output / TOKENIZER_JSON
        if found.exists() and not overwrite:
            raise ValueError(f"{found} exists; choose another --output or give --overwrite")
        paths = find_files(inputs, suffixes=suffix or (), excluded_folders=frozenset(exclude or ()))
        batches = batches_of(paths, json_among(paths, json_key), json_key, frozenset(inputs))
        num_documents = 0

        def texts() -> Iterator[str]:
            nonlocal num_documents
            for batch in batches:
                for document in documents_in(batch, Skipped(), is_byte_0_text=True):
                    num_documents += 1
                    yield document.text
                progress.advance(batch.num_input_bytes)

        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output {output} cannot be made: {error.strerror}") from error
        with raising():
            with TextProgress(paths) as progress:
                content, size = train_bpe(texts(), vocab_size, workers)
            if not num_documents:
                raise ValueError("there is no document in the input; give it some text")
            with deferred(), whole_file("--output", found) as file:
                with whole_file("--output", output / TOKENIZER_CONFIG) as config:
                    config.write_text(tokenizer_config())
                file.write_text(content, encoding="utf-8")
        identity = read_tokenizer(f"hf:{output}").identity
        figures = {"documents": num_documents, "vocab_size": size, "tokenizer": identity}
        fewer = f"; the text has too few pairs to merge for {vocab_size}" if size < vocab_size else ""
        text = f"{found}: vocabulary {size} from {num_documents} documents, {identity}{fewer}"
        say(json.dumps(figures) if as_json else text)
