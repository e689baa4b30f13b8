"""Models with latent attention, and the same by `transformers`: tasks of `mcore_group.run_group`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, Arrays, work_of

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "original_max_position_embeddings": 8,
    "rotary_scaling_factor": 4.0,
    "beta_fast": 4.0,
    "mscale_all_dim": 0.8,
}
"""No two widths are equal, and YaRN stretches some wavelengths."""

MODEL = {
    "linear_bias": False,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "norm_eps": 1e-6,
    "position_embedding": "rope",
    "qk_norm": True,
    "tie_embeddings": False,
}
MIXTURE = {
    "num_experts": 8,
    "experts_per_token": 4,
    "expert_ffn_hidden_size": 20,
    "shared_expert_ffn_hidden_size": 40,
    "num_dense_layers": 1,
}
ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}


def deepseek_sums(config: RunConfig, parameters: Arrays, numbers: Sequence[int]) -> tuple[float, Arrays]:
    """Loss and gradients that `transformers` sums over microbatches of step 0."""
    model = deepseek(config)
    theirs = dict(model.named_parameters())
    fill(theirs, parameters)
    return backward(model, config, numbers), gradients_of(theirs, parameters)


def backward(model: PreTrainedModel, config: RunConfig, numbers: Sequence[int]) -> float:
    """The loss summed over microbatches of step 0; adds up its gradients."""
    corpus, loss_sum = Corpus(config), 0.0
    for number in numbers:
        batch = corpus.microbatch(0, number)
        logits = model(batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss.backward()
        loss_sum += loss.item()
    return loss_sum


def fill(theirs: Mapping[str, Tensor], parameters: Arrays) -> None:
    """Gives tensors by their names in `transformers` the values by our names."""
    with torch.no_grad():
        for name, value in parameters.items():
            found = list(parts_of(theirs, name))
            for part, of_part in zip(found, torch.from_numpy(value).chunk(len(found)), strict=True):
                part.copy_(of_part[: len(part)])


def gradients_of(theirs: Mapping[str, Tensor], parameters: Arrays) -> Arrays:
    """Their gradients by our names; zeros for rows that pad the vocabulary."""
    gradients = {name: np.zeros_like(value) for name, value in parameters.items()}
    for name, gradient in gradients.items():
        rows = torch.cat(list(parts_of({key: one.grad for key, one in theirs.items()}, name))).numpy()
        gradient[: len(rows)] = rows
    return gradients


def deepseek(config: RunConfig) -> DeepseekV3ForCausalLM:
    model, fields = config.model, config.megatron
    rope = {"rope_type": "default", "rope_theta": model.rope_base}
    if fields.get("rope_type") != "rope":
        rope |= {
            "rope_type": "yarn",
            "factor": fields["rotary_scaling_factor"],
            "original_max_position_embeddings": fields["original_max_position_embeddings"],
            "beta_fast": fields["beta_fast"],
            "mscale": 1.0,
            "mscale_all_dim": fields["mscale_all_dim"],
        }
    has_experts = model.num_experts is not None
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            moe_intermediate_size=model.expert_width,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_attention_heads,
            n_shared_experts=(model.shared_expert_ffn_hidden_size or 1) // model.expert_width,
            n_routed_experts=model.num_experts or 2,
            num_experts_per_tok=model.experts_per_token,
            routed_scaling_factor=fields.get("moe_router_topk_scaling_factor", 1.0),
            n_group=fields.get("moe_router_num_groups", 1),
            topk_group=fields.get("moe_router_group_topk", 1),
            first_k_dense_replace=model.num_dense_layers if has_experts else model.num_layers,
            q_lora_rank=fields["q_lora_rank"],
            kv_lora_rank=fields["kv_lora_rank"],
            qk_nope_head_dim=fields["qk_head_dim"],
            qk_rope_head_dim=fields["qk_pos_emb_head_dim"],
            v_head_dim=fields["v_head_dim"],
            max_position_embeddings=model.seq_length,
            rms_norm_eps=model.norm_eps,
            rope_parameters=rope,
            attn_implementation="eager",
        )
    )


_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    r"decoder\.layers\.(\d+)": r"model.layers.\1",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
    r"local_experts\.(\d+)\.linear_fc1.weight": r"gate_up_proj:\1",
    r"local_experts\.(\d+)\.linear_fc2.weight": r"down_proj:\1",
    "linear_fc2": "down_proj",
}


def parts_of(theirs: Any, name: str) -> Iterator[Tensor]:
    """Those of the tensors by their names in `transformers` that make up the rows of the one with our name."""
    for ours, found in _NAMES.items():
        name = re.sub(ours, found, name)
    for part in ("gate_proj", "up_proj") if "linear_fc1" in name else ("",):
        key, _, expert = name.replace("linear_fc1", part).partition(":")
        yield theirs[key][int(expert)] if expert else theirs[key]


def bytes_kept(config: RunConfig) -> int:
    """What the forward pass of a microbatch keeps for the backward pass, parameters and masks left out."""
    trainer = GroupTrainer(config, CPU)
    parameters = {parameter.data_ptr() for chunk in trainer.chunks for parameter in chunk.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trainer.begin_step(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.compute(work_of((0, 0)))
    return sum(kept.values())
