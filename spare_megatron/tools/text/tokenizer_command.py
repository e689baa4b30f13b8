"""`spare tokenizer`: tokenizers of one's own, without a download."""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path

import typer

from spare_megatron.cli.command import SpareCommand, option, same_option, with_options
from spare_megatron.cli.folders import check_writable
from spare_megatron.cli.printing import say
from spare_megatron.machine.interrupts import deferred, raising
from spare_megatron.tools.text.preprocess import PreprocessOptions, TextProgress

END_OF_TEXT = "<|endoftext|>"
LEAST_VOCAB_SIZE = 257
"""All bytes, and the token that ends a document."""
app = typer.Typer(name="tokenizer", help="Train a tokenizer.", no_args_is_help=True)


@app.callback()
def _tokenizer() -> None:
    """Train a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerTrainOptions:
    """Options of `spare tokenizer train` as the user wrote them; None where absent."""

    inputs: list[Path] = same_option(PreprocessOptions, "inputs")
    output: Path = option("Folder of the tokenizer, for `--tokenizer hf:FOLDER`.", default=MISSING)
    vocab_size: int = option("Size of the vocabulary.", default=32768)
    json_key: str | None = same_option(PreprocessOptions, "json_key")
    workers: int = option("Threads. The tokenizer does not depend on it.", default=1, least=1)
    suffix: list[str] | None = same_option(PreprocessOptions, "suffix")
    exclude: list[str] | None = same_option(PreprocessOptions, "exclude")
    overwrite: bool = option("Replace an existing tokenizer.", "--overwrite", default=False)
    as_json: bool = option("Print the figures as JSON.", "--json", default=False)


@app.command("train", cls=SpareCommand)
@with_options(TokenizerTrainOptions)
def train(given: TokenizerTrainOptions) -> None:
    """Train a byte-level BPE tokenizer on text.

    It reads what `spare preprocess` reads, and ends documents with <|endoftext|>. The folder holds a tokenizer.json and
    a tokenizer_config.json, which transformers load, too.

    Example: `spare tokenizer train --input docs.jsonl --json-key text --vocab-size 32768 --output data/tokenizer`
    """
    from spare_megatron.formats.output import whole_file
    from spare_megatron.tools.text.documents import Skipped, batches_of, documents_in, find_files, json_among
    from spare_megatron.tools.text.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, read_tokenizer

    if given.vocab_size < LEAST_VOCAB_SIZE:
        least = LEAST_VOCAB_SIZE
        raise ValueError(f"--vocab-size {given.vocab_size} is below the {least} of single bytes; raise it")
    found = given.output / TOKENIZER_JSON
    if found.exists() and not given.overwrite:
        raise ValueError(f"{found} exists; choose another --output or give --overwrite")
    paths = find_files(given.inputs, suffixes=given.suffix or (), excluded_folders=frozenset(given.exclude or ()))
    batches = batches_of(paths, json_among(paths, given.json_key), given.json_key, frozenset(given.inputs))
    num_documents = 0

    def texts() -> Iterator[str]:
        nonlocal num_documents
        for batch in batches:
            for document in documents_in(batch, Skipped(), is_byte_0_text=True):
                num_documents += 1
                yield document.text
            progress.advance(batch.num_input_bytes)

    check_writable("--output", given.output.absolute())
    with raising():
        given.output.mkdir(parents=True, exist_ok=True)
        with TextProgress(paths) as progress:
            content, size = train_bpe(texts(), given.vocab_size, given.workers)
        if not num_documents:
            raise ValueError("there is no document in the input; give it some text")
        with deferred(), whole_file("--output", found) as file:
            with whole_file("--output", given.output / TOKENIZER_CONFIG) as config:
                config.write_text(tokenizer_config())
            file.write_text(content, encoding="utf-8")
    identity = read_tokenizer(f"hf:{given.output}").identity
    figures = {"documents": num_documents, "vocab_size": size, "tokenizer": identity}
    fewer = f"; the text has too few pairs to merge for {given.vocab_size}" if size < given.vocab_size else ""
    text = f"{found}: vocabulary {size} from {num_documents} documents, {identity}{fewer}"
    say(json.dumps(figures) if given.as_json else text)


def train_bpe(texts: Iterable[str], vocab_size: int, num_workers: int) -> tuple[str, int]:
    """The tokenizer.json of a byte-level BPE, as GPT-2's, in which any text has tokens, and the size of its vocabulary,
    which is smaller than asked for if there are too few pairs to merge.

    Merges are by frequency, with ties by id, so the result does not depend on `num_workers`, the threads that count.
    The library runs in a thread of its own, so that a signal can end the process meanwhile. Raises as `texts` does.
    """
    from spare_megatron.tools.text.tokenizer import library_errors, package

    # The library reads both when it starts its threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_workers > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(num_workers)
    tokenizers = package("tokenizers", "train")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    failures: list[Exception] = []

    def train() -> None:
        try:
            with library_errors("the tokenizer cannot be trained"):
                tokenizer.train_from_iterator(texts, trainer)
        except (ValueError, MemoryError) as error:
            failures.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return tokenizer.to_str(pretty=True) + "\n", tokenizer.get_vocab_size()


def tokenizer_config() -> str:
    """The tokenizer_config.json beside it, by which transformers load the folder."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    return json.dumps({**config, "clean_up_tokenization_spaces": False}, indent=2) + "\n"
