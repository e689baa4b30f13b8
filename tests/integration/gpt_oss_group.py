"""Models like gpt-oss, and the same by `transformers`: a task of `mcore_group.run_group`."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from spare_megatron.config.model.model_tensors import of_all_experts, with_local_norms
from spare_megatron.config.schema import RunConfig
from spare_megatron.tools.weights.hf_config import architecture_of, config_json
from spare_megatron.tools.weights.hf_tensors import tensor_pairs
from tests.integration.latent_group import backward
from tests.integration.mcore_group import Arrays

MODEL: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "position_embedding": "rope",
    "rope_base": 20.0,
    "normalization": "rmsnorm",
    "activation": "quick_geglu",
    "linear_bias": True,
    "tie_embeddings": False,
    "num_experts": 4,
    "experts_per_token": 2,
    "sliding_window": 5,
}
MEGATRON = {
    "kv_channels": 16,
    "softmax_type": "learnable",
    "window_attn_skip_freq": 2,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 3.0,
    "correction_range_round_to_int": False,
}
"""Some wavelengths are stretched, and others by more if the bounds between them are rounded."""


def gpt_oss_sums(config: RunConfig, parameters: Arrays, numbers: Sequence[int]) -> tuple[float, Arrays]:
    """Loss and gradients that `transformers` sums over microbatches of step 0."""
    found = architecture_of(config)
    described = GptOssConfig(**config_json(found, "float32"))
    described._attn_implementation = "eager"
    model = GptOssForCausalLM(described)
    theirs = dict(model.named_parameters())
    pairs = {with_local_norms(pair.tensor.key_in_layer): pair for pair in tensor_pairs(config, found)}
    with torch.no_grad():
        for name, whole in _joined(parameters).items():
            values = torch.from_numpy(whole[: config.model.vocab_size])
            for part, of_part in pairs[name].split(values, found).items():
                theirs[part].copy_(of_part)
    loss_sum = backward(model, config, numbers)
    gradients = {name: np.zeros_like(value) for name, value in parameters.items()}
    for name, gradient in gradients.items():
        pair = pairs[of_all_experts(name)]
        whole = pair.join([theirs[part].grad for part in pair.parts], found).numpy()
        expert = _EXPERT.search(name)
        rows = whole[int(expert[1])] if expert else whole
        gradient[: len(rows)] = rows
    return loss_sum, gradients


_EXPERT = re.compile(r"local_experts\.(\d+)\.")


def _joined(parameters: Arrays) -> Arrays:
    """With those of all experts as one, in the order of the experts."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, value in parameters.items():
        expert = _EXPERT.search(name)
        found.setdefault(of_all_experts(name), {})[int(expert[1]) if expert else -1] = value
    return {
        name: values[-1] if -1 in values else np.stack([values[number] for number in sorted(values)])
        for name, values in found.items()
    }
