"""The state of a rank as bytes: what a group that comes back takes over from one that trained on."""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.optimizer import Optimizer
from spare_megatron.mcore.stacked_optimizer import StackedOptimizer

_DIGEST_BYTES = 32


class DamagedState(Exception):
    """The bytes are not those that were sent."""


def dump_state(chunks: Sequence[Chunk], optimizer: Optimizer | StackedOptimizer) -> bytes:
    """Parameters, buffers, optimizer state and the place in the learning-rate schedule, behind their SHA-256.

    Of a stacked optimizer only the place in the schedule: its slices are another group's too, and copied by the piece.
    """
    state = {
        "chunks": [_tensors(chunk) for chunk in chunks],
        "optimizer": optimizer.state_dict(),
    }
    file = io.BytesIO()
    torch.save(state, file)
    content = file.getvalue()
    return hashlib.sha256(content).digest() + content


def save_state(folder: Path, name: str, data: bytes) -> None:
    """Writes what `dump_state` gave to FOLDER/NAME.state, which is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{name}.tmp"
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(folder / f"{name}.state")


def load_state(data: bytes, chunks: Sequence[Chunk], optimizer: Optimizer | StackedOptimizer) -> None:
    """Takes over what `dump_state` wrote on the rank of the same position.

    Raises:
        DamagedState: The checksum does not fit. Nothing is changed.
    """
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise DamagedState(f"{len(content)} bytes of state do not fit their checksum")
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    with torch.no_grad():
        for chunk, saved in zip(chunks, state["chunks"], strict=True):
            for name, tensor in _tensors(chunk).items():
                tensor.copy_(saved[name])
    optimizer.load_state_dict(state["optimizer"])


def _tensors(chunk: Chunk) -> dict[str, torch.Tensor]:
    module = chunk.module.module
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
