"""Corpora of a few tokens in Megatron's format, written without Megatron."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

DTYPE_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def write_tiny_corpus(
    prefix: Path, documents: Sequence[Sequence[int]] = ((1, 2, 3), (255, 0)), dtype: str = "u2"
) -> None:
    lengths = np.array([len(document) for document in documents])
    tokens = np.array([token for document in documents for token in document], dtype)
    begins = (np.cumsum(lengths) - lengths) * tokens.itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, DTYPE_CODES[dtype], len(lengths), len(lengths) + 1)
    numbers = (lengths.astype("<i4"), begins.astype("<i8"), np.arange(len(lengths) + 1).astype("<i8"))
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in numbers))
