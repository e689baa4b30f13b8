"""Every field of megatron-core's TransformerConfig: where it is set, why it cannot be had, or when it has an effect.

A field that is on no list is refused. Rows of fields that only some versions have do no harm.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spare_megatron.config.building import nearest
from spare_megatron.config.limits import Limit, NonNegativeFloat, PositiveFloat, PositiveInt
from spare_megatron.config.megatron_defaults import DEFAULTS, is_off
from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.schema import RunConfig

OURS_IN_MEGATRON_WORDS: Mapping[str, str] = {
    name: setting
    for setting, names in (
        ("cluster.device", "use_cpu_initialization"),
        ("layout.context_parallel", "context_parallel_size"),
        ("layout.expert_parallel", "expert_model_parallel_size"),
        ("layout.pipeline_parallel", "pipeline_model_parallel_size"),
        ("layout.tensor_parallel", "expert_tensor_parallel_size tensor_model_parallel_size"),
        ("layout.virtual_pipeline", "virtual_pipeline_model_parallel_size"),
        ("model.attention_dropout", "attention_dropout"),
        ("model.expert_ffn_hidden_size", "moe_ffn_hidden_size"),
        ("model.experts_per_token", "moe_router_topk"),
        ("model.ffn_hidden_size", "ffn_hidden_size"),
        ("model.hidden_dropout", "hidden_dropout"),
        ("model.hidden_size", "hidden_size"),
        ("model.num_attention_heads", "num_attention_heads"),
        ("model.num_dense_layers", "moe_layer_freq"),
        ("model.num_experts", "num_moe_experts"),
        ("model.num_layers", "num_layers"),
        ("model.precision", "autocast_dtype bf16 fp16 params_dtype pipeline_dtype"),
        ("model.seq_length", "seq_length"),
        ("model.shared_expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        ("model.transformer_impl", "transformer_impl"),
        ("reduce.mode", "deterministic_mode"),
        ("train.micro_batch_size", "micro_batch_size"),
    )
    for name in names.split()
}
"""Fields that follow from our settings, and those settings."""

FIXED_IN_MEGATRON = {
    "calculate_per_token_loss": "gradients are always summed over tokens and scaled once, after the reduction",
    "finalize_model_grads_func": "gradients are finished after the commit, not inside the schedule",
    "grad_sync_func": "groups reduce after the schedule, not inside it",
    "no_sync_func": "groups reduce after the schedule, not inside it",
    "param_sync_func": "parameters are never sharded over groups",
    "grad_scale_func": "gradients are scaled once, after the reduction",
    "optimizer": (
        "Adam is the only optimizer; in megatron-core 0.16.1 Muon needs Megatron's global process groups "
        "and emerging-optimizers, and state partitions would cut the matrices that it orthogonalizes"
    ),
}
"""Fields that masking losses depends on, and why they cannot be set."""


_REFUSALS = {
    "layers are those of a GPT here": """
        heterogeneous_block_specs hetereogenous_dist_checkpoint is_hybrid_model mamba_head_dim mamba_num_groups
        mamba_num_heads mamba_state_dim mamba_training_ssm_states_dtype mrope_section use_mamba_mem_eff_path""",
    "layers have Megatron's usual attention here, and it would be ignored": """
        dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff
        dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_use_sparse_loss
        dsa_kernel_backend experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim""",
    "attention is that of torch or transformer-engine here, and it would be ignored": """
        apply_query_key_layer_scaling attention_softmax_in_fp32 masked_softmax_fusion""",
    "its sizes are in a configuration of its own, which is not built here": "multi_latent_attention",
    "layers have no such norm here, and it would be ignored": "qk_l2_norm",
    "only norms of apex have it, and no layer was checked with them": "memory_efficient_layer_norm persist_layer_norm",
    "Megatron's own training loop clips, and it would be ignored": """
        log_max_attention_logit qk_clip qk_clip_alpha qk_clip_threshold""",
    "megatron-core ignores it": "apply_residual_connection_post_layernorm",
    "layers here take inputs in the format of their parameters": "fp32_residual_connection",
    "model.precision is the format of all operations": "enable_autocast",
    "activation functions are torch's here, and it would be ignored": "use_fused_weighted_squared_relu",
    "the gradient of the embedding copies is not reduced over groups": """
        mtp_detach_heads mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_num_layers mtp_standalone
        mtp_use_repeated_layer""",
    "stages hold equally many layers here, as layout.pipeline_parallel says": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout""",
    "gradients are scaled once, after the reduction": """
        experimental_attention_variant_loss_scale_func moe_grad_scale_func mtp_grad_scale_func""",
    "it belongs to another parametrization, whose initialization and learning rates were not checked here": """
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
        use_mup""",
    "it divides parameters over process groups that are not made here": """
        expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards gtp_weight_remat_size
        tensor_parallel_num_weight_shards""",
    "a preset has no functions; choose init_method_std or embedding_init_method_std": """
        embedding_init_method init_method output_layer_init_method""",
    "parameters would begin with what memory holds, which differs between groups": "perform_initialization",
    "it belongs to Megatron's FSDP, which is not used here": "init_model_with_meta_device",
    "it runs a schedule that was not checked here": """
        ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream hybrid_context_parallel
        max_seqlen_per_dp_cp_rank overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm""",
    "it finishes gradients outside the backward pass": "delay_wgrad_compute",
    "it finishes gradients at the end of a schedule, and a patch is a second one": """
        defer_embedding_wgrad_compute wgrad_deferral_limit""",
    "a patch has another number of microbatches": "num_microbatches_with_partial_activation_checkpoints",
    "a patch has another number of microbatches than the graph of a step": """
        cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope
        cuda_graph_use_single_mempool cuda_graph_warmup_steps delay_offload_until_cuda_graph enable_cuda_graph
        external_cuda_graph""",
    "its waits would not be watched for lost ranks": "overlap_p2p_comm overlap_p2p_comm_warmup_flush",
    "it needs a torch that is built for it": "use_ring_exchange_p2p",
    "all sequences have model.seq_length tokens": "variable_seq_lengths",
    "process groups are made here, over NCCL on GPUs and gloo on CPUs": """
        hierarchical_context_parallel_sizes pipeline_model_parallel_comm_backend""",
    "Megatron's own training script sets up what it needs": """
        inference_rng_tracker quant_recipe symmetric_ar_type tp_comm_atomic_ag tp_comm_atomic_rs
        tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag
        tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_split_rs use_te_rng_tracker""",
    "Megatron's timers are not used here": "barrier_with_L1_time timers",
    "it asks for process groups of Megatron's global state, which are not there": "config_logger_dir",
    "it is a test of Megatron's own": "test_mode",
    "it is for inference": """
        batch_invariant_mode flash_decode inference_cuda_graph_scope inference_disable_triton_nvls_kernels
        inference_fuse_tp_communication inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type inference_sampling_seed mlp_chunks_for_prefill
        moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill use_inference_optimized_layers""",
    "with every recipe it scales attention scores by those of earlier microbatches": """
        fp8_dot_product_attention fp8_multi_head_attention""",
    "groups and checkpoints copy parameters in bf16 or fp32": "fp4_param fp8_param",
    "only recipes that are refused read it": """
        fp8_amax_compute_algo fp8_amax_history_len fp8_margin fp8_quantizer_factory fp8_wgrad tp_only_amax_red""",
    "whether a token is dropped would depend on the tokens that ranks of the group hold beside it": """
        moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity
        moe_token_drop_policy moe_token_dropping""",
    "the experts of a token would depend on the tokens beside it": """
        moe_router_padding_for_fp8 moe_router_padding_for_quantization""",
    "it routes tokens at random, for benchmarks": "moe_router_force_biased moe_router_force_load_balancing",
    "it belongs to a balance that depends on other microbatches": "moe_router_quantile_balancing_ema",
    "routes would depend on the layout; choose moe_router_num_groups": "moe_router_topk_limited_devices",
    "its noise would not be that of the microbatch": "moe_input_jitter_eps",
    "losses of routers are not logged here": "moe_per_layer_logging",
    "it is deprecated; choose recompute_modules": "moe_layer_recompute",
    "it was not checked here": """
        _cpu_offloading_context activation_offload_fraction clone_scatter_output_in_embedding cpu_offloading
        cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights delta_offload_bytes_across_pp_ranks
        disable_parameter_transpose_cache distribute_saved_activations fine_grained_activation_offloading
        fine_grained_offloading_max_inflight_offloads flash_attention_version fp4 fp4_quantizer_factory fp4_recipe
        fp8_output_proj fused_residual_rmsnorm kitchen_attention_backend min_offloaded_tensor_size
        mlp_chunks_for_training moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay
        moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_latent_size moe_mlp_glu_interleave_size moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_permute_fusion_into_hybridep
        moe_shared_expert_glu_interleave_size moe_shared_expert_overlap moe_single_grouped_bias
        moe_single_grouped_weight moe_use_legacy_grouped_gemm offload_modules use_grouped_gemm_for_dense_mlp
        use_grouped_gemm_for_shared_expert use_kitchen use_kitchen_attention use_te_activation_func
        use_transformer_engine_op_fuser""",
}
"""Why fields cannot be had: each would train something else, end every rank, or change nothing."""

REFUSED: Mapping[str, str] = {name: reason for reason, names in _REFUSALS.items() for name in names.split()}

IGNORED: Mapping[str, str] = {
    "async_tensor_model_parallel_allreduce": "Megatron ignores it, as deprecated",
    "fp8_interval": "transformer-engine ignores it from 1.8 on",
    "moe_extended_tp": "Megatron ignores it from 0.10 on, in favour of expert_tensor_parallel_size",
}
"""Fields without effect by Megatron's own rules, and the rule. They are accepted, with a warning."""


def fields_set(config: RunConfig, names: Iterable[str]) -> Iterator[str]:
    """Those of the named fields that are not off, as a user writes them."""
    values = {name: _value(config, name) for name in names}
    return (f"megatron.{name}={_written(value)}" for name, value in values.items() if not is_off(name, value))


def _value(config: RunConfig, name: str) -> Any:
    return config.megatron.get(name, DEFAULTS.get(name))


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ what has an effect


@dataclass(frozen=True, slots=True)
class Condition:
    """What a field needs beside it; `text` follows `megatron.FIELD=VALUE` in a problem."""

    is_met: Callable[[RunConfig], bool]
    text: str


def _needs(setting: str, is_met: Callable[[RunConfig], bool]) -> Condition:
    return Condition(is_met, f"has no effect without {setting}; remove it, or set that")


def _needs_field(name: str, *values: object) -> Condition:
    """A field of `[megatron]` that has one of the values, or any but its default."""
    return _needs(
        f"megatron.{name}{'=' if values else ''}{' or '.join(map(_written, values))}",
        lambda config: _value(config, name) in values if values else not is_off(name, _value(config, name)),
    )


def _reproducible(reason: str) -> Condition:
    return Condition(
        lambda config: config.reduce.mode != "reproducible",
        f"does not go with reduce.mode=reproducible: {reason}; remove it, or set reduce.mode=fast",
    )


_NONDETERMINISTIC = _reproducible("Megatron does not count it among its deterministic kernels")
_EXPERTS = Condition(
    lambda config: config.model.num_experts is not None,
    "has no effect without experts; remove it, or set model.num_experts",
)
_GATED = _needs("a gated model.activation", lambda config: bool(model_fields(config)["gated_linear_unit"]))
_ROPE = _needs("model.position_embedding=rope", lambda config: config.model.position_embedding == "rope")
_STAGES = _needs("layout.pipeline_parallel above 1", lambda config: config.layout.pipeline_parallel > 1)


def _listed(config: RunConfig, name: str) -> list[Any]:
    """The value of a field that takes one or a list."""
    value = _value(config, name)
    return value if isinstance(value, list) else [value]


def _is_balanced(config: RunConfig) -> bool:
    return any(kind != "none" for kind in _listed(config, "moe_router_load_balancing_type"))


def _is_fused(config: RunConfig) -> bool:
    """Whether Megatron has a fusion for the activation."""
    fields = model_fields(config)
    functions = ["silu", "gelu"] if config.model.num_experts is None else ["silu"]
    return fields["activation_func"] in (functions if fields["gated_linear_unit"] else functions[1:])


def _has_enough_experts(config: RunConfig) -> bool:
    """Whether a token finds its experts in the groups that it is limited to; true for fields of wrong types."""
    num_groups, chosen = config.megatron.get("moe_router_num_groups"), config.megatron["moe_router_group_topk"]
    if type(num_groups) is not int or num_groups < 1 or chosen < 1:
        return True
    return bool(chosen <= config.model.experts_per_token <= chosen * (config.model.num_experts or 0) // num_groups)


def _is_window(config: RunConfig) -> bool:
    match config.megatron["window_size"]:
        case [int(before), int(after)]:
            return before >= 0 and after == 0
    return False


_ABOVE_0, _FROM_0, _FROM_1 = (get_args(kind)[1] for kind in (PositiveFloat, NonNegativeFloat, PositiveInt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Honoured:
    """A field that changes the model, the step, or its schedule and memory.

    Attributes:
        where: What alone has it: GPUs, norms of transformer-engine or apex, or layers of transformer-engine.
        kind: Its type, if limits, sizes or memory are computed from it, without Megatron loaded.
        limit: Of each of its numbers.
    """

    where: Literal["", "gpu", "norms", "te"] = ""
    kind: type | None = None
    limit: Limit | None = None
    conditions: tuple[Condition, ...] = ()


def _if(
    *conditions: Condition,
    where: Literal["", "gpu", "norms", "te"] = "",
    kind: type | None = None,
    limit: Limit | None = None,
) -> Honoured:
    return Honoured(where=where, kind=kind, limit=limit, conditions=conditions)


HONOURED: Mapping[str, Honoured] = {
    "activation_func": Honoured(),
    "activation_func_clamp_value": _if(
        _GATED,
        Condition(
            lambda config: not config.megatron.get("bias_activation_fusion"),
            "has no effect with megatron.bias_activation_fusion=true; remove one of them",
        ),
        limit=_ABOVE_0,
    ),
    "activation_func_fp8_input_store": _if(_needs_field("bias_activation_fusion")),
    "add_bias_linear": Honoured(kind=bool),
    "add_qkv_bias": Honoured(kind=bool),
    "apply_rope_fusion": _if(_ROPE, where="te"),
    "attention_backend": _if(
        Condition(
            lambda config: config.megatron["attention_backend"] != "local",
            "leaves transformer-engine no attention; set model.transformer_impl=local instead",
        ),
        where="te",
    ),
    "attention_output_gate": Honoured(kind=bool),
    "batch_p2p_comm": _if(_STAGES, kind=bool),
    "batch_p2p_sync": _if(_STAGES, where="gpu"),
    "bias_activation_fusion": _if(
        Condition(_is_fused, "fuses swiglu and, without experts, gelu and geglu alone; remove it, or choose of these")
    ),
    "bias_dropout_fusion": Honoured(),
    "cp_comm_type": _if(
        _needs("layout.context_parallel above 1", lambda config: config.layout.context_parallel > 1),
        Condition(
            lambda config: all(kind in ("p2p", "all_gather", "a2a") for kind in _listed(config, "cp_comm_type")),
            "cannot be had: process groups for it are not made here; choose p2p, all_gather or a2a",
        ),
        where="te",
    ),
    "cross_entropy_fusion_impl": _if(_needs_field("cross_entropy_loss_fusion"), where="te"),
    "cross_entropy_loss_fusion": _if(_NONDETERMINISTIC),
    "deallocate_pipeline_outputs": _if(_STAGES),
    "disable_bf16_reduced_precision_matmul": _if(
        _needs("model.precision=bf16", lambda config: config.model.precision == "bf16"), where="gpu"
    ),
    "embedding_init_method_std": Honoured(limit=_FROM_0),
    "first_last_layers_bf16": _if(_needs_field("fp8")),
    "fp8": Honoured(where="te"),
    "fp8_recipe": _if(_needs_field("fp8")),
    "fused_single_qkv_rope": _if(
        _ROPE,
        Condition(
            lambda config: not model_fields(config)["qk_layernorm"],
            "does not go with model.qk_norm=true, whose norms stand between; remove one of them",
        ),
        where="te",
    ),
    "gated_linear_unit": Honoured(kind=bool),
    "glu_linear_offset": _if(_GATED),
    "gradient_accumulation_fusion": _if(
        _reproducible("the kernel adds to the sum, and hides the gradient of a single microbatch"), where="gpu"
    ),
    "init_method_std": Honoured(limit=_FROM_0),
    "kv_channels": Honoured(kind=int, limit=_FROM_1),
    "layernorm_epsilon": Honoured(limit=_ABOVE_0),
    "layernorm_zero_centered_gamma": Honoured(where="norms"),
    "microbatch_group_size_per_vp_stage": _if(
        _needs("layout.virtual_pipeline above 1", lambda config: config.layout.virtual_pipeline > 1),
        Condition(
            lambda config: config.rounds.multiple >= config.layout.pipeline_parallel,
            "is below layout.pipeline_parallel, with which Megatron's schedule cannot run; raise it",
        ),
        kind=int,
        limit=_FROM_1,
    ),
    "moe_apply_probs_on_input": _if(
        _EXPERTS,
        Condition(
            lambda config: config.model.experts_per_token == 1,
            "needs model.experts_per_token=1; remove it, or set that",
        ),
    ),
    "moe_aux_loss_coeff": _if(
        _EXPERTS,
        _needs("megatron.moe_router_load_balancing_type other than none", _is_balanced),
        Condition(
            lambda config: (
                isinstance(config.megatron["moe_aux_loss_coeff"], list)
                is isinstance(_value(config, "moe_router_load_balancing_type"), list)
            ),
            "must be a list where megatron.moe_router_load_balancing_type is one, else a number; change one",
        ),
        limit=_FROM_0,
    ),
    "moe_grouped_gemm": _if(_EXPERTS, where="te"),
    "moe_permute_fusion": _if(_EXPERTS, _NONDETERMINISTIC, where="te"),
    "moe_router_bias_update_rate": _if(_EXPERTS, _needs_field("moe_router_enable_expert_bias"), limit=_FROM_0),
    "moe_router_dtype": _if(_EXPERTS),
    "moe_router_enable_expert_bias": _if(
        _EXPERTS,
        Condition(
            lambda config: config.megatron.get("moe_router_score_function") == "sigmoid",
            "with megatron.moe_router_score_function=softmax: biases are added to the scores of sigmoid alone; set "
            "that, or remove the first",
        ),
    ),
    "moe_router_fusion": _if(_EXPERTS, _NONDETERMINISTIC, where="te"),
    "moe_router_group_topk": _if(
        _EXPERTS,
        _needs_field("moe_router_num_groups"),
        Condition(
            _has_enough_experts,
            "must be at most model.experts_per_token, and so many groups, of megatron.moe_router_num_groups, must have "
            "as many experts; change one of them",
        ),
        kind=int,
        limit=_FROM_1,
    ),
    "moe_router_load_balancing_type": _if(
        _EXPERTS,
        Condition(
            lambda config: (
                {*map(str, _listed(config, "moe_router_load_balancing_type"))} <= {"aux_loss", "seq_aux_loss", "none"}
            ),
            "cannot be had: global_aux_loss depends on other microbatches, and nothing but aux_loss, seq_aux_loss and "
            "none was checked here; choose of these",
        ),
        Condition(
            lambda config: not _is_balanced(config) or any(_listed(config, "moe_aux_loss_coeff")),
            "has no effect without megatron.moe_aux_loss_coeff; remove it, or set that",
        ),
    ),
    "moe_router_num_groups": _if(_EXPERTS, _needs_field("moe_router_group_topk"), kind=int, limit=_FROM_1),
    "moe_router_pre_softmax": _if(_EXPERTS, _needs_field("moe_router_score_function", "softmax")),
    "moe_router_score_function": _if(
        _EXPERTS,
        Condition(
            lambda config: config.megatron["moe_router_score_function"] in ("softmax", "sigmoid"),
            "cannot be had: it was not checked here; choose softmax or sigmoid",
        ),
    ),
    "moe_router_topk_scaling_factor": _if(_EXPERTS, limit=_ABOVE_0),
    "moe_shared_expert_gate": _if(
        _EXPERTS,
        _needs("model.shared_expert_ffn_hidden_size", lambda config: bool(config.model.shared_expert_ffn_hidden_size)),
        kind=bool,
    ),
    "moe_token_dispatcher_type": _if(
        _EXPERTS,
        Condition(
            lambda config: config.megatron["moe_token_dispatcher_type"] != "flex",
            "cannot be had: it was not checked here; choose alltoall or allgather",
        ),
    ),
    "moe_z_loss_coeff": _if(_EXPERTS, limit=_FROM_0),
    "no_rope_freq": _if(_ROPE),
    "normalization": Honoured(kind=str),
    "num_layers_at_end_in_bf16": _if(_needs_field("first_last_layers_bf16")),
    "num_layers_at_start_in_bf16": _if(_needs_field("first_last_layers_bf16")),
    "num_query_groups": Honoured(kind=int, limit=_FROM_1),
    "qk_layernorm": Honoured(kind=bool),
    "recompute_granularity": Honoured(where="gpu", kind=str),
    "recompute_method": _if(_needs_field("recompute_granularity", "full")),
    "recompute_modules": _if(
        _needs_field("recompute_granularity", "selective"),
        Condition(
            lambda config: (
                config.model.num_experts is not None
                or not {"moe", "moe_act", "shared_experts"} & {*map(str, _listed(config, "recompute_modules"))}
            ),
            "names modules that only experts have; remove them, or set model.num_experts",
        ),
    ),
    "recompute_num_layers": _if(_needs_field("recompute_granularity", "full"), limit=_FROM_1),
    "rotary_interleaved": _if(_ROPE),
    "sequence_parallel": _if(
        _needs("layout.tensor_parallel above 1", lambda config: config.layout.tensor_parallel > 1),
        where="norms",
        kind=bool,
    ),
    "softmax_scale": Honoured(limit=_ABOVE_0),
    "softmax_type": Honoured(where="te"),
    "window_attn_skip_freq": _if(
        _needs("model.sliding_window", lambda config: model_fields(config)["window_size"] is not None), where="te"
    ),
    "window_size": _if(
        Condition(_is_window, "must be the number of tokens before and 0, as tokens after never count; change it")
    ),
}
"""Fields of `[megatron]` that may be set, and what each needs to have an effect."""

COUNTED_WITH = {name: row.kind for name, row in HONOURED.items() if row.kind is not None}
"""Types of the fields that sizes and memory are computed from without Megatron loaded; the loader checks them."""

OF_TRANSFORMER_ENGINE = tuple(name for name, row in HONOURED.items() if row.where == "te")
"""Fields that only layers of transformer-engine use; other layers silently ignore most of them."""

NOT_OF_TORCH_NORMS = tuple(name for name, row in HONOURED.items() if row.where == "norms")
"""Fields that need the norms of transformer-engine or apex; a norm of torch refuses them without a reason."""

ON_GPUS_ALONE = tuple(name for name, row in HONOURED.items() if row.where)
"""Fields with which ranks on CPUs cannot be built, cannot compute, or ignore them."""


# ------------------------------------------------------------------------------------------------------- the check


def field_problems(config: RunConfig) -> Iterator[str]:
    """Why fields of `[megatron]` cannot be had, or would have no effect."""
    for name, value in config.megatron.items():
        yield from _problems_of(config, name, value)
    yield from _recipe_problems(config)


def _problems_of(config: RunConfig, name: str, value: Any) -> Iterator[str]:
    if name in OURS_IN_MEGATRON_WORDS:
        yield f"megatron.{name} follows from {OURS_IN_MEGATRON_WORDS[name]}; set that instead"
    elif name in FIXED_IN_MEGATRON:
        yield f"megatron.{name} cannot be set: {FIXED_IN_MEGATRON[name]}; remove it"
    elif name in REFUSED:
        if not is_off(name, value):
            yield f"megatron.{name}={value} cannot be had: {REFUSED[name]}; remove it"
    elif name in HONOURED:
        yield from _misfits(config, name, value)
    elif name not in IGNORED:
        near = nearest(name, HONOURED)
        hint = f"; did you mean {near}?" if near else ", and none is near; remove it"
        yield f"megatron.{name} is not a field of megatron-core's TransformerConfig that is known here{hint}"


def _misfits(config: RunConfig, name: str, value: Any) -> Iterator[str]:
    row = HONOURED[name]
    numbers: list[Any] = value if isinstance(value, list) else [value]
    for number in numbers:
        if type(number) not in (int, float):
            continue
        if not math.isfinite(number):
            yield f"megatron.{name}={value} must be finite; choose a number"
        elif row.limit is not None and not row.limit.is_met(number):
            yield f"megatron.{name}={value} {row.limit.text}"
    if not is_off(name, value):
        yield from (f"megatron.{name}={_written(value)} {one.text}" for one in row.conditions if not one.is_met(config))


_STATELESS_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Values of Megatron's `fp8_recipe` that scale a tensor by its own values."""


def _recipe_problems(config: RunConfig) -> Iterator[str]:
    megatron = config.megatron
    recipe = megatron.get("fp8_recipe", DEFAULTS["fp8_recipe"])
    if not megatron.get("fp8") or recipe in _STATELESS_RECIPES:
        return
    what = f"megatron.fp8_recipe={recipe}{'' if 'fp8_recipe' in megatron else ', the default,'}"
    remedy = "set megatron.fp8_recipe to tensorwise, blockwise or mxfp8"
    if recipe == "delayed":
        # It would also take maxima over all pipeline stages of a group, which come to them at different times.
        yield f"{what} scales by values of earlier microbatches, which no other group and no checkpoint has; {remedy}"
    else:
        yield f"{what} may keep values of earlier microbatches; {remedy}"


def field_warnings(config: RunConfig) -> Iterator[str]:
    """Fields that Megatron ignores by rules of its own."""
    for name, value in config.megatron.items():
        if name in IGNORED and not is_off(name, value):
            yield f"megatron.{name}={_written(value)} has no effect: {IGNORED[name]}; remove it"
