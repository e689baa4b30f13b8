"""The list of the model's tensors that exports and imports share."""

import math
from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.config.model.model_tensors import model_shape, model_tensors
from spare_megatron.config.schema import ModelConfig, RunConfig


@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        ({}, {}),
        ({"tie_embeddings": False, "position_embedding": "rope", "linear_bias": False, "qkv_bias": True}, {}),
        ({"num_query_groups": 2, "activation": "swiglu", "ffn_hidden_size": 96, "qk_norm": True}, {"kv_channels": 24}),
        ({"qk_norm": True, "position_embedding": "rope"}, {"multi_latent_attention": True, "q_lora_rank": 12}),
        ({"activation": "geglu", "normalization": "rmsnorm", "qk_norm": True}, {"add_bias_linear": False}),
    ],
)
def test_the_tensors_have_all_parameters_of_the_model(model: dict[str, Any], megatron: dict[str, Any]) -> None:
    config = RunConfig(model=replace(ModelConfig(), **model), megatron=megatron)
    tensors = list(model_tensors(config))
    assert sum(math.prod(tensor.shape) for tensor in tensors) == model_shape(config).num_parameters
    assert len({(tensor.key, tensor.layer) for tensor in tensors}) == len(tensors)
