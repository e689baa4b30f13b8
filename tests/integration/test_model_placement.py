"""Where the tensors of a model are: on `meta`, a device that is not the default one, as a GPU is not."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers

from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig
from spare_megatron.mcore.model.model import build_chunks
from spare_megatron.mcore.model.process_groups import build_process_groups
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.tools.bench import plain_megatron
from tests.integration.mcore_group import run_ranks

META = torch.device("meta")
Places = dict[str, str]


def places_of_ours(config: RunConfig) -> Places:
    groups = build_process_groups(config.parallel, META, timedelta(seconds=30))
    (chunk,) = build_chunks(config, transformer_config(config, META), groups, META)
    return _places(chunk.module)


def places_of_plain(config: RunConfig) -> Places:
    parallel_state.initialize_model_parallel()
    dist.broadcast = lambda *_arguments, **_options: None  # of tensors without numbers
    chunk = plain_megatron._build(config, transformer_config(config, META), META, is_sharded=False)
    return _places(chunk.module)


def _places(module: torch.nn.Module) -> Places:
    """Name -> device of every parameter, its gradient and every buffer."""
    found = {f"gradient of {name}": parameter.main_grad.device for name, parameter in module.named_parameters()}
    found |= {name: tensor.device for name, tensor in module.state_dict(keep_vars=True).items() if tensor is not None}
    found |= {name: tensor.device for name, tensor in module.named_buffers()}
    return {name: str(device) for name, device in found.items()}


def on_meta(config: RunConfig, places: Callable[[RunConfig], Places]) -> Places:
    torch.cuda.current_device = lambda: META  # type: ignore[assignment, return-value]
    layers._initialize_affine_weight_gpu = lambda *_, **__: None  # a GPU's random numbers
    return places(config)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("places", [places_of_ours, places_of_plain])
def test_all_of_a_model_is_on_the_device_of_its_rank(places: Callable[..., Places], precision: Any) -> None:
    """Position embeddings and norms of plain Megatron stayed on the CPU, and its first forward pass failed."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=32, vocab_size=64, precision=precision
        ),
        layout=LayoutConfig(num_groups=1),
    )
    (found,) = run_ranks(1, on_meta, config, places)
    assert {name for name in found if "position_embeddings" in name or "layernorm" in name}
    assert {name: device for name, device in found.items() if device != "meta"} == {}
