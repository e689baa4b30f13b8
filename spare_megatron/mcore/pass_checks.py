"""Which passes of a rank are checked as they are computed, and the tokens that they take in."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.audits.audits import is_checked
from spare_megatron.mcore.checked_operations import CheckedOperations, checksum
from spare_megatron.mcore.model.compatibility import part_of_context_rank
from spare_megatron.mcore.model.model import Chunk, kernels_of, uses_transformer_engine
from spare_megatron.mcore.model.pipeline import Item
from spare_megatron.stacking.plans import Numbered


class PassChecks:
    """The checks that a rank makes of its own passes. They change no number."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """Raises ValueError if passes are to be checked whose operations are not torch's."""
        is_cpu, share = device.type == "cpu", config.audit.products
        self._seed, self._share_of_passes = config.train.seed, share
        if share > 0.0 and uses_transformer_engine(config, device):
            raise ValueError(
                f"audit.products={share}, but the layers are those of transformer-engine, whose operations are "
                f"not torch's and cannot be checked; remove it, or set model.transformer_impl=local"
            )
        self._checks_tokens = share > 0.0
        has_fusions = not is_cpu and kernels_of(config, device)["fusions"] != "none"
        self._operations = CheckedOperations(
            repeats=torch.are_deterministic_algorithms_enabled() or (is_cpu and torch.get_num_threads() == 1),
            keeps_records=not (has_fusions or config.program.file),
        )
        self._step = 0
        self._read: dict[str, Tensor] = {}

    def begin_step(self, step: int) -> None:
        """Forgets what was found in the step before."""
        self._step = step
        self._operations.forget()

    def found(self) -> str:
        """The first thing that is wrong since `begin_step`, in words; empty if nothing is. Waits for the device."""
        return self._operations.found()

    def around(
        self, chunk: Chunk, item: Item, which: Literal["forward", "backward"]
    ) -> AbstractContextManager[object] | None:
        """Where a pass runs whose operations are checked, if it is drawn."""
        number = item.microbatch.number
        if item.is_padding or not is_checked(self._share_of_passes, self._seed, self._step, number):
            return None
        return self._operations.checking(f"{which} pass of {_named(item.microbatch)} at stage {chunk.stage}")

    def on_read(self, batch: Mapping[str, Tensor], context_parallel: ProcessGroup) -> None:
        """What was read of a microbatch, of which `on_batch` gets the part that a model takes in."""
        if self._checks_tokens:
            part = part_of_context_rank(dict(batch), context_parallel)
            self._read = {name: checksum(tensor) for name, tensor in part.items()}

    def on_batch(self, batch: Mapping[str, Tensor], microbatch: Numbered) -> None:
        if self._read:
            self._operations.compare(f"batch of {_named(microbatch)}", self._read, batch)


def _named(microbatch: Numbered) -> str:
    return f"microbatch {microbatch.unit.index} of shard {microbatch.unit.shard}"
