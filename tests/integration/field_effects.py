"""What fields of `[megatron]` change, by the settings beside them, and a rank that observes it."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.pipeline import Item
from spare_megatron.mcore.model.program import program_of
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import agreed_loss, agreed_terms, all_work, reduce_alone

SEQ_LENGTH, VOCAB_SIZE = 16, 64

_TINY = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    f"model.seq_length={SEQ_LENGTH}",
    f"model.vocab_size={VOCAB_SIZE}",
    "layout.num_groups=1",
    "spare.redundancy=1",
    "spare.microbatches_per_shard=4",
    "data.corpus=none",
)

ROPE = ("model.position_embedding=rope",)
GATED = ("model.activation=swiglu",)
BF16 = ("model.precision=bf16",)
WINDOW = ("model.sliding_window=4",)
EXPERTS = ("model.num_experts=4", "model.linear_bias=false", *GATED)
ONE_EXPERT = (*EXPERTS, "model.experts_per_token=1", "megatron.moe_router_pre_softmax=true")
SHARED = (*EXPERTS, "model.shared_expert_ffn_hidden_size=8")
SIGMOID = (*EXPERTS, "megatron.moe_router_score_function=sigmoid")
LATENT = (
    *ROPE,
    "megatron.multi_latent_attention=true",
    *(f"megatron.{name}=8" for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim")),
)
YARN = (
    *LATENT,
    "model.rope_base=10",
    "megatron.qk_pos_emb_head_dim=16",
    "megatron.original_max_position_embeddings=64",
    "megatron.rotary_scaling_factor=4",
    "megatron.beta_fast=4",
)
YARN_OF_GPT = (
    *ROPE,
    "model.rope_base=10",
    "megatron.rope_type=yarn",
    "megatron.original_max_position_embeddings=64",
    "megatron.beta_fast=4",
)
STAGES = ("layout.pipeline_parallel=2",)
CHUNKS = (*STAGES, "layout.virtual_pipeline=2", "model.num_layers=4")


@dataclass(frozen=True)
class Case:
    """Settings with which a field has an effect, values to draw from, and what they change."""

    settings: Sequence[str]
    values: Sequence[Any]
    changes: str


SHAPES, PARAMETERS, GRADIENTS, UPDATE, ORDER, FUNCTIONS = (
    "shapes", "parameters", "gradients", "update", "order", "functions",
)  # fmt: skip

ON_CPUS: Mapping[str, Case] = {
    "activation_func": Case((), ("silu", "relu", "tanh", "squared_relu", "quick_gelu"), GRADIENTS),
    "activation_func_clamp_value": Case(GATED, (0.001, 0.002), GRADIENTS),
    "activation_func_fp8_input_store": Case((*GATED, "megatron.bias_activation_fusion=true"), (True,), GRADIENTS),
    "add_bias_linear": Case((), (False,), SHAPES),
    "add_qkv_bias": Case(("model.linear_bias=false",), (True,), SHAPES),
    "attention_output_gate": Case((), (True,), SHAPES),
    "batch_p2p_comm": Case(STAGES, (False,), FUNCTIONS),
    "beta_fast": Case(YARN, (2, 8), GRADIENTS),
    "beta_slow": Case(YARN, (0.5, 2), GRADIENTS),
    "bias_activation_fusion": Case((), (True,), FUNCTIONS),
    "bias_dropout_fusion": Case((), (True,), FUNCTIONS),
    "correction_range_round_to_int": Case(YARN_OF_GPT, (False,), GRADIENTS),
    "cross_entropy_loss_fusion": Case((), (True,), FUNCTIONS),
    "deallocate_pipeline_outputs": Case(STAGES, (True,), FUNCTIONS),
    "embedding_init_method_std": Case((), (0.1, 0.3), PARAMETERS),
    "gated_linear_unit": Case((), (True,), SHAPES),
    "glu_linear_offset": Case(GATED, (1.0, 0.5, -0.5), GRADIENTS),
    "init_method_std": Case((), (0.1, 0.01), PARAMETERS),
    "kv_channels": Case((), (2, 4, 12), SHAPES),
    "kv_lora_rank": Case(LATENT, (4, 16), SHAPES),
    "layernorm_epsilon": Case((), (0.1, 1e-3), GRADIENTS),
    "microbatch_group_size_per_vp_stage": Case(CHUNKS, (4,), ORDER),
    "moe_apply_probs_on_input": Case(ONE_EXPERT, (True,), GRADIENTS),
    "moe_aux_loss_coeff": Case(EXPERTS, (0.1, 0.01), GRADIENTS),
    "moe_router_bias_update_rate": Case((*SIGMOID, "megatron.moe_router_enable_expert_bias=true"), (0.1, 0.01), UPDATE),
    "moe_router_dtype": Case((*EXPERTS, *BF16), ("fp32", "fp64"), GRADIENTS),
    "moe_router_enable_expert_bias": Case(SIGMOID, (True,), UPDATE),
    "moe_router_group_topk": Case(
        (*EXPERTS, "megatron.moe_router_num_groups=2", "megatron.moe_router_group_topk=2"), (1,), GRADIENTS
    ),
    "moe_router_load_balancing_type": Case((*EXPERTS, "megatron.moe_aux_loss_coeff=0.1"), ("seq_aux_loss",), GRADIENTS),
    "moe_router_num_groups": Case(
        (*EXPERTS, "model.num_experts=8", "megatron.moe_router_num_groups=2", "megatron.moe_router_group_topk=1"),
        (4,),
        GRADIENTS,
    ),
    "moe_router_pre_softmax": Case(EXPERTS, (True,), GRADIENTS),
    "moe_router_score_function": Case(EXPERTS, ("sigmoid",), GRADIENTS),
    "moe_router_topk_scaling_factor": Case(EXPERTS, (2.0, 0.5), GRADIENTS),
    "moe_shared_expert_gate": Case(SHARED, (True,), SHAPES),
    "moe_z_loss_coeff": Case(EXPERTS, (0.1, 0.01), GRADIENTS),
    "mscale": Case(YARN, (0.5, 2.0), GRADIENTS),
    "mscale_all_dim": Case(YARN, (0.5, 1.0), GRADIENTS),
    "mtp_loss_scaling_factor": Case((*ROPE, "megatron.mtp_num_layers=1"), (0.2, 0.5), GRADIENTS),
    "mtp_num_layers": Case(ROPE, (1, 2), SHAPES),
    "multi_latent_attention": Case(ROPE, (True,), SHAPES),
    "no_rope_freq": Case(ROPE, (1, 2, [0, 1]), GRADIENTS),
    "normalization": Case((), ("RMSNorm",), SHAPES),
    "num_query_groups": Case((), (1,), SHAPES),
    "original_max_position_embeddings": Case(YARN, (32, 128), GRADIENTS),
    "q_lora_rank": Case(LATENT, (4, 16), SHAPES),
    "qk_head_dim": Case(LATENT, (4, 16), SHAPES),
    "qk_layernorm": Case((), (True,), SHAPES),
    "qk_pos_emb_head_dim": Case(LATENT, (4, 8), SHAPES),
    "rope_type": Case(LATENT, ("rope",), GRADIENTS),
    "rotary_interleaved": Case(ROPE, (True,), GRADIENTS),
    "rotary_percent": Case(ROPE, (0.25, 0.5), GRADIENTS),
    "rotary_scaling_factor": Case(YARN, (2.0, 8.0), GRADIENTS),
    "softmax_scale": Case((), (0.1, 2.0), GRADIENTS),
    "softmax_type": Case((), ("off-by-one", "learnable"), GRADIENTS),
    "v_head_dim": Case(LATENT, (4, 16), SHAPES),
    "window_attn_skip_freq": Case(WINDOW, (2, [0, 1]), GRADIENTS),
    "window_size": Case((), ([0, 0], [3, 0], [7, 0]), GRADIENTS),
}
"""Fields that ranks on CPUs honour."""

FP8 = ("megatron.fp8=hybrid", "megatron.fp8_recipe=tensorwise", *BF16)
FULL = (
    "megatron.recompute_granularity=full",
    "megatron.recompute_method=uniform",
    "megatron.recompute_num_layers=1",
)
TENSOR = ("layout.tensor_parallel=2",)

ON_GPUS: Mapping[str, Case] = {
    "apply_rope_fusion": Case(ROPE, (True,), FUNCTIONS),
    "attention_backend": Case(BF16, ("unfused", "fused"), FUNCTIONS),
    "batch_p2p_sync": Case(STAGES, (True,), FUNCTIONS),
    "cp_comm_type": Case(("layout.context_parallel=2", *BF16), ("a2a", "all_gather"), FUNCTIONS),
    "cross_entropy_fusion_impl": Case(("megatron.cross_entropy_loss_fusion=true",), ("te",), FUNCTIONS),
    "disable_bf16_reduced_precision_matmul": Case(BF16, (True,), FUNCTIONS),
    "first_last_layers_bf16": Case((*FP8, "model.num_layers=4"), (True,), GRADIENTS),
    "fp8": Case(FP8, ("e4m3",), GRADIENTS),
    "fp8_recipe": Case(FP8, ("blockwise",), GRADIENTS),
    "fused_single_qkv_rope": Case((*ROPE, *BF16), (True,), FUNCTIONS),
    "gradient_accumulation_fusion": Case((), (True,), FUNCTIONS),
    "layernorm_zero_centered_gamma": Case((), (True,), PARAMETERS),
    "moe_grouped_gemm": Case(EXPERTS, (False,), FUNCTIONS),
    "moe_permute_fusion": Case(EXPERTS, (True,), FUNCTIONS),
    "moe_router_fusion": Case(EXPERTS, (True,), FUNCTIONS),
    "moe_token_dispatcher_type": Case(EXPERTS, ("allgather",), FUNCTIONS),
    "num_layers_at_end_in_bf16": Case(
        (*FP8, "model.num_layers=4", "megatron.first_last_layers_bf16=true"), (0, 2), GRADIENTS
    ),
    "num_layers_at_start_in_bf16": Case(
        (*FP8, "model.num_layers=4", "megatron.first_last_layers_bf16=true"), (0, 2), GRADIENTS
    ),
    "recompute_granularity": Case((), ("selective",), FUNCTIONS),
    "recompute_method": Case(FULL, ("block",), FUNCTIONS),
    "recompute_modules": Case(("megatron.recompute_granularity=selective",), (["mlp"], ["layernorm"]), FUNCTIONS),
    "recompute_num_layers": Case(FULL, (2,), FUNCTIONS),
    "sequence_parallel": Case(TENSOR, (True,), FUNCTIONS),
}
"""Fields that need a GPU, most of them transformer-engine, too; `tests/gpu/test_megatron_fields.py` tries them."""


def configured(settings: Sequence[str], megatron: Mapping[str, Any], *, device: str = "cpu") -> RunConfig:
    config = load_run_config(None, [*_TINY, f"cluster.device={device}", *settings]).config
    return replace(config, megatron={**config.megatron, **megatron})


class Samples:
    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        text = torch.randint(VOCAB_SIZE, (SEQ_LENGTH + 1,), generator=torch.Generator().manual_seed(number))
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(SEQ_LENGTH)}


Effects = Mapping[str, str]
"""What a configuration trains, as digests: shapes, parameters, gradients, and so on."""


def effects_of(first: RunConfig, configs: Sequence[RunConfig]) -> list[Effects]:
    """The effects of each configuration on this rank. Compiled functions run as they are written."""
    torch.compiler.set_stance("force_eager")
    _effects(first, torch.device("cpu"))  # imports and caches are filled
    return [_effects(config, torch.device("cpu")) for config in configs]


def effects_on(device: torch.device, first: RunConfig, configs: Sequence[RunConfig]) -> list[Effects]:
    """The same on a device, with what is compiled."""
    return [_effects(config, device) for config in (first, *configs)][1:]


def _effects(config: RunConfig, device: torch.device) -> Effects:
    program = replace(program_of(config), datasets_provider=lambda _: Samples())
    with _counted() as functions:
        trainer = GroupTrainer(config, device, program=program)
        named = list(trainer.parameters_named())
        shapes = [(one.name, tuple(one.parameter.shape)) for one in named]
        parameters = _digest(one.parameter for one in named)
        order: list[tuple[int, int]] = []
        forward = trainer._forward

        def ordered(chunk: Chunk, item: Item) -> Any:
            order.append((chunk.stage, item.microbatch.number))
            return forward(chunk, item)

        trainer._forward = ordered  # type: ignore[method-assign]
        trainer.begin_step(0)
        trainer.compute(all_work(config))
        gradients = _digest(trainer.slabs[0].gradients.local_sums())
        reduce_alone(trainer)
        trainer.update(agreed_loss(trainer), terms=agreed_terms(trainer))
    updated = [*(one.parameter for one in named), *(bias for _, bias in trainer.slabs[0].gradients.experts.biases())]
    return {
        SHAPES: str(shapes),
        PARAMETERS: parameters,
        GRADIENTS: gradients,
        UPDATE: _digest(updated),
        ORDER: str(order),
        FUNCTIONS: str((functions, torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)),
    }


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


_WATCHED = ("megatron/core/", "transformer_engine/")


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Counts the functions of Megatron and transformer-engine that are called, and those that they call."""
    counts: dict[str, int] = {}

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and any(part in _file_of(one) for one in (frame, frame.f_back) for part in _WATCHED):
            name = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
            counts[name] = counts.get(name, 0) + 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def _file_of(frame: FrameType | None) -> str:
    return "" if frame is None else frame.f_code.co_filename
