"""Writes text as the indexed dataset that Megatron reads."""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from spare_megatron.config.corpus import keep_facts, note_of, read_corpus

_UNGUARDED: AbstractContextManager = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusCounts:
    num_documents: int
    num_tokens: int


def write_corpus(
    documents: Iterable[bytes | Sequence[int] | np.ndarray],
    prefix: str | Path,
    *,
    vocab_size: int = 256,
    end_of_document: int | None = None,
    tokenizer: str = "",
    noted_end: int | None = None,
    publishing: AbstractContextManager = _UNGUARDED,
) -> CorpusCounts:
    """Writes PREFIX.bin, PREFIX.idx and, for a named `tokenizer`, the note PREFIX.json; skips empty documents.

    A document is a sequence of tokens, or bytes that are its tokens; `end_of_document` is appended to each. `noted_end`
    goes into the note: the token that ends each already. A prefix with an index is whole. The files get their names
    inside `publishing`, which may defer signals. Raises ValueError if a token is not below `vocab_size`, or no document
    has tokens.
    """
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    aside = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    endings = (".bin", ".json", ".idx") if tokenizer else (".bin", ".idx")
    written = {ending: Path(f"{aside}{ending}") for ending in endings}
    try:
        counts = _write(documents, written, vocab_size, end_of_document)
        if tokenizer:
            facts = replace(read_corpus(aside), tokenizer=tokenizer, vocab_size=vocab_size, end_of_document=noted_end)
            written[".json"].write_text(note_of(facts))
        with publishing:
            # Readers open the index first: without it there is no corpus, so no two files of different ones.
            Path(f"{prefix}.idx").unlink(missing_ok=True)
            for ending, path in written.items():
                path.replace(f"{prefix}{ending}")
    finally:
        for path in written.values():
            path.unlink(missing_ok=True)
    if tokenizer:
        keep_facts(prefix, facts)
    return counts


def _write(
    documents: Iterable[bytes | Sequence[int] | np.ndarray],
    written: dict[str, Path],
    vocab_size: int,
    end_of_document: int | None,
) -> CorpusCounts:
    builder = IndexedDatasetBuilder(str(written[".bin"]), dtype=DType.optimal_dtype(vocab_size))
    num_documents = num_tokens = 0
    try:
        for document in documents:
            tokens = _tokens(document, end_of_document)
            if tokens.size == 0:
                continue
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise ValueError(
                    f"document {num_documents} has tokens from {tokens.min()} to {tokens.max()}, but the vocabulary "
                    f"has {vocab_size}; raise vocab_size or use the tokenizer that it belongs to"
                )
            builder.add_document(tokens, [tokens.size])
            num_documents, num_tokens = num_documents + 1, num_tokens + tokens.size
        if num_documents == 0:
            raise ValueError("there is no document with tokens in the input; give it some text")
        builder.finalize(str(written[".idx"]))
    finally:
        builder.data_file.close()
    return CorpusCounts(num_documents=num_documents, num_tokens=num_tokens)


def _tokens(document: bytes | Sequence[int] | np.ndarray, end_of_document: int | None) -> np.ndarray:
    tokens = np.frombuffer(document, np.uint8) if isinstance(document, bytes) else np.asarray(document)
    if end_of_document is not None and tokens.size > 0:
        tokens = np.append(tokens, end_of_document)
    return tokens
