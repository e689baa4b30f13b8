"""Writes text as the indexed dataset that Megatron reads. Loads without torch."""

import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spare_megatron.config.training.corpus import keep_facts, note_of, read_corpus, write_index

_LEAST_WIDE_VOCABULARY = 65500
"""Megatron's choice (`DType.optimal_dtype`): a vocabulary of this size takes 4 bytes per token, a smaller one 2."""
_UNGUARDED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusCounts:
    num_documents: int
    num_tokens: int


def write_corpus(
    documents: Iterable[bytes | Sequence[int] | np.ndarray],
    prefix: str | Path,
    *,
    vocab_size: int = 256,
    tokenizer: str = "",
    noted_end: int | None = None,
    publishing: AbstractContextManager[object] = _UNGUARDED,
) -> CorpusCounts:
    """Writes PREFIX.bin, PREFIX.idx and, for a named `tokenizer`, the note PREFIX.json; skips empty documents.

    A document is a sequence of tokens, or bytes that are its tokens; `noted_end`, for the note, the token that ends
    each. A prefix with an index is whole. The files get their names inside `publishing`, which may defer signals.
    ValueError: a token is not below `vocab_size`, or no document has tokens.
    """
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    aside = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    endings = (".bin", ".json", ".idx") if tokenizer else (".bin", ".idx")
    written = {ending: Path(f"{aside}{ending}") for ending in endings}
    try:
        counts = _write(documents, written, vocab_size)
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
    documents: Iterable[bytes | Sequence[int] | np.ndarray], written: dict[str, Path], vocab_size: int
) -> CorpusCounts:
    dtype = np.dtype("<u2" if vocab_size < _LEAST_WIDE_VOCABULARY else "<i4")
    lengths = array("i")
    num_tokens = 0
    with written[".bin"].open("wb") as file:
        for document in documents:
            tokens = np.frombuffer(document, np.uint8) if isinstance(document, bytes) else np.asarray(document)
            if tokens.size == 0:
                continue
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise ValueError(
                    f"document {len(lengths)} has tokens from {tokens.min()} to {tokens.max()}, but the vocabulary "
                    f"has {vocab_size}; raise vocab_size or use the tokenizer that it belongs to"
                )
            file.write(tokens.astype(dtype).tobytes())
            lengths.append(tokens.size)
            num_tokens += tokens.size
    if not lengths:
        raise ValueError("there is no document with tokens in the input; give it some text")
    write_index(written[".idx"], dtype, np.asarray(lengths))
    return CorpusCounts(num_documents=len(lengths), num_tokens=num_tokens)
