"""Which kernels a run's layers and its optimizer have on a device."""

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, Adam
from megatron.core.utils import get_te_version

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model import uses_transformer_engine


def kernels_of(config: RunConfig, device: torch.device) -> dict[str, str]:
    """What layers are built from, and whose Adam updates the parameters; plain Megatron has the latter at all times.

    Raises:
        ValueError: The configuration wants transformer-engine and it cannot be had.
    """
    has_te = uses_transformer_engine(config, device)
    megatrons = "torch" if USING_PYTORCH_OPTIMIZER else f"{Adam.__module__.partition('.')[0]}, fused"
    stacked = "torch, fused" if device.type == "cuda" else "torch"
    return {
        "layers": f"transformer-engine {get_te_version()}" if has_te else "megatron-core",
        "adam": stacked if config.optimizer.sharding == "stacked" else megatrons,
        "adam_of_plain": megatrons,
    }
