"""Megatron's defaults of the fields in `config.megatron_fields`, in every supported version of megatron-core."""

from collections.abc import Mapping

DEFAULTS: Mapping[str, object] = {
    name: default
    for default, names in (
        (
            True,
            """async_tensor_model_parallel_allreduce attention_softmax_in_fp32 barrier_with_L1_time batch_p2p_comm
            clone_scatter_output_in_embedding cpu_offloading_activations fp8_wgrad perform_initialization
            tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag
            tp_comm_split_rs use_mamba_mem_eff_path dsa_indexer_rotate_activation dsa_indexer_scoring_relu""",
        ),
        (
            0,
            """cpu_offloading_num_layers delta_offload_bytes_across_pp_ranks dsa_indexer_skip_topk_offset fp8_margin
            glu_linear_offset moe_aux_loss_coeff moe_paged_stash_buffer_size_factor_cpu
            moe_router_quantile_balancing_ema wgrad_deferral_limit""",
        ),
        ("", "config_logger_dir"),
        ([], "offload_modules"),
        (1, "activation_offload_fraction dsa_indexer_topk_freq expert_gtp_weight_remat_size fp8_amax_history_len"),
        (1, "fp8_interval gtp_weight_remat_size mlp_chunks_for_prefill mlp_chunks_for_training"),
        (1, "mup_attn_scale_power mup_embedding_mult mup_output_mult mup_width_mult"),
        (1, "num_layers_at_end_in_bf16 num_layers_at_start_in_bf16"),
        (128, "linear_key_head_dim linear_value_head_dim mamba_state_dim"),
        (108, "moe_hybridep_num_sms_preprocessing"),
        (64, "mamba_head_dim moe_paged_stash_page_size"),
        (42, "inference_sampling_seed"),
        (32, "linear_num_value_heads"),
        (20, "moe_deepep_num_sms"),
        (16, "linear_num_key_heads moe_hybridep_num_sms"),
        (8, "mamba_num_groups"),
        (4, "linear_conv_kernel_dim"),
        (3, "cuda_graph_warmup_steps"),
        (1048576, "min_offloaded_tensor_size"),
        (100, "qk_clip_threshold"),
        (1.1, "moe_paged_stash_buffer_size_factor_cuda"),
        (0.5, "qk_clip_alpha"),
        (0.1, "mtp_loss_scaling_factor"),
        (0.001, "moe_router_bias_update_rate"),
        ("auto", "attention_backend"),
        ("aux_loss", "moe_router_load_balancing_type"),
        ("deepep", "moe_flex_dispatcher_backend"),
        ("delayed", "fp8_recipe"),
        ("full", "cuda_graph_modules cuda_graph_scope"),
        ("most_recent", "fp8_amax_compute_algo"),
        ("native", "cross_entropy_fusion_impl"),
        ("nccl", "tp_comm_bootstrap_backend"),
        ("none", "cuda_graph_impl dsa_kernel_backend"),
        ("nvls", "inference_moe_token_dispatcher_type"),
        ("vllm", "inference_grouped_gemm_backend"),
        ("nvfp4", "fp4_recipe"),
        ("probs", "moe_token_drop_policy"),
        ("sdpa", "kitchen_attention_backend"),
        ("softmax", "moe_router_score_function"),
        ("vanilla", "softmax_type"),
    )
    for name in names.split()
}
"""Megatron's defaults other than None and false, of fields that are refused or need something."""

_FURTHER_DEFAULTS: Mapping[str, object] = {
    "cuda_graph_use_single_mempool": True,  # from 0.18 on
    "inference_grouped_gemm_backend": "auto",  # of 0.17
}
"""Those of other supported versions, other than None. Without what the fields belong to neither has an effect."""


def is_off(name: str, value: object) -> bool:
    """Whether a value of a field is Megatron's default."""
    default = DEFAULTS.get(name, False)
    defaults = (default, _FURTHER_DEFAULTS.get(name, default))
    return value is None or any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in defaults)
