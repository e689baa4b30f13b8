"""A small corpus of real text."""

import os
from pathlib import Path

from spare_megatron.tools.text.corpus_writer import write_corpus

_CORPUS_BYTES = 300_000


def write_text_corpus(prefix: Path) -> None:
    """Some of Python's own sources, as bytes."""
    documents: list[bytes] = []
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        documents.append(file.read_bytes())
        if sum(map(len, documents)) > _CORPUS_BYTES:
            break
    write_corpus(documents, prefix)
