"""A run's model to and from the arguments of Megatron-LM's `pretrain_gpt.py`, as its checkpoints hold them.

Both directions raise ValueError for what the other side does not have. The arguments are those of Megatron-LM 0.16.1
and, where it renamed them, of earlier versions. Loads without torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from spare_megatron.config.model_fields import as_written, computed_activation, model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import FUNCTION_IN_MEGATRON, global_batch

_LLAMA3_FACTOR = 8.0
"""The scaling factor of RoPE; `pretrain_gpt.py` has an argument for it and does not pass it on."""

_SAME_NAME = (
    "activation_func_clamp_value",
    "glu_linear_offset",
    "layernorm_zero_centered_gamma",
    "no_rope_freq",
    "rotary_interleaved",
    "window_attn_skip_freq",
)
"""Fields of TransformerConfig that are arguments, too, and settings of `[megatron]` here."""

_OF_MODEL = (
    "activation_func",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "kv_channels",
    "layernorm_epsilon",
    "normalization",
    "num_query_groups",
    "qk_layernorm",
    "window_size",
)
"""Fields that have other names or values among the arguments, or settings of `[model]`."""

_ONLY: Mapping[str, tuple[object, ...]] = {
    "use_legacy_models": (False,),
    "spec": (None, ["local"]),
    "num_experts": (None,),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "quick_geglu": (False,),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (None,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "attention_output_gate": (False,),
    "apply_residual_connection_post_layernorm": (False,),
}
"""Arguments that change the model, and the values with which it is one that can be imported."""


def args_of(config: RunConfig) -> dict[str, Any]:
    """Arguments that describe the model; its vocabulary is padded by no rows. Raises ValueError with every reason."""
    model, fields = config.model, model_fields(config)
    function = computed_activation(config)
    if reasons := list(_not_of_pretrain_gpt(config, fields, function)):
        raise ValueError("\n  - ".join(["Megatron-LM's pretrain_gpt.py has no model like this one:", *reasons]))
    is_rope = model.position_embedding == "rope"
    base = model.rope_base
    norm_is_zero_centered = fields.get("layernorm_zero_centered_gamma", False)
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": fields["num_query_groups"] is not None,
        "num_query_groups": fields["num_query_groups"] or 1,
        "kv_channels": fields.get("kv_channels") or model.hidden_size // model.num_attention_heads,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.seq_length,
        "position_embedding_type": model.position_embedding,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": is_rope,
        "rotary_base": int(base) if base.is_integer() else base,
        "rotary_percent": 1.0,
        "use_rope_scaling": model.rope_scaling_factor != 1.0,
        "rope_scaling_factor": _LLAMA3_FACTOR,
        "normalization": fields["normalization"],
        "layernorm_epsilon": fields["layernorm_epsilon"],
        "norm_epsilon": fields["layernorm_epsilon"],
        "apply_layernorm_1p": norm_is_zero_centered,
        "add_bias_linear": fields["add_bias_linear"],
        "add_qkv_bias": fields["add_qkv_bias"],
        "qk_layernorm": fields["qk_layernorm"],
        "swiglu": function == "swiglu",
        "squared_relu": function == "squared_relu",
        "quick_geglu": False,
        "bias_gelu_fusion": function == "gelu_tanh",
        "window_size": None if fields["window_size"] is None else tuple(fields["window_size"]),
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "num_experts": None,
        "multi_latent_attention": False,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": global_batch(config),
        **{field: fields.get(field, FUNCTION_IN_MEGATRON[field]) for field in _SAME_NAME},
    }


def _not_of_pretrain_gpt(config: RunConfig, fields: Mapping[str, Any], function: str) -> Iterator[str]:
    written = as_written(config, "activation_func")
    if function not in ("swiglu", "gelu", "gelu_tanh", "squared_relu"):
        yield f"{written}: it has gelu, swiglu and squared_relu alone"
    if function == "gelu_tanh" and not fields["add_bias_linear"]:
        yield f"{written}: it has that function only fused with a bias, and here are none"
    if config.model.rope_scaling_factor not in (1.0, _LLAMA3_FACTOR):
        factor = config.model.rope_scaling_factor
        yield f"model.rope_scaling_factor={factor}: it always scales by {_LLAMA3_FACTOR}, whatever the argument says"
    for field, default in FUNCTION_IN_MEGATRON.items():
        value = fields.get(field, default)
        if field not in {*_OF_MODEL, *_SAME_NAME} and value != default:
            yield f"megatron.{field}={value}: it has no argument that equals it, or tensors that no export has"


def flags_of(args: Mapping[str, Any]) -> list[str]:
    """What `pretrain_gpt.py` has to be given for this model beside `--use-checkpoint-args`, which takes only some."""
    is_gelu_alone = not args["swiglu"] and args["add_bias_linear"] and not args["bias_gelu_fusion"]
    switches = {
        "--apply-layernorm-1p": args["layernorm_zero_centered_gamma"],
        "--no-bias-gelu-fusion": is_gelu_alone,
        "--qk-layernorm": args["qk_layernorm"],
        "--use-rope-scaling": args["use_rope_scaling"],
    }
    window = args["window_size"]
    values = {
        "--activation-func-clamp-value": (args["activation_func_clamp_value"], None),
        "--glu-linear-offset": (args["glu_linear_offset"], 0.0),
        "--no-rope-freq": (args["no_rope_freq"], None),
        "--norm-epsilon": (args["layernorm_epsilon"], 1e-5),
        "--window-attn-skip-freq": (args["window_attn_skip_freq"], None),
        "--window-size": (window and f"({window[0]},{window[1]})", None),
    }
    given = [f"{flag}={value}".replace(" ", "") for flag, (value, default) in values.items() if value != default]
    return [*(flag for flag, is_on in switches.items() if is_on), *given]


def settings_in(args: Mapping[str, Any], vocab_size: int, precision: str) -> dict[str, dict[str, Any]]:
    """The tables of a run's TOML file that describe the model. Raises ValueError for one that has no equal here."""
    wrong = [name for name, allowed in _ONLY.items() if args.get(name, allowed[0]) not in allowed]
    if wrong:
        raise ValueError(
            "\n  - ".join(["these arguments in common.pt have no equal here:", *(f"{n}={args[n]}" for n in wrong)])
        )
    num_heads, hidden_size = _number(args, "num_attention_heads"), _number(args, "hidden_size")
    has_bias = bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))
    model = {
        "num_layers": _number(args, "num_layers"),
        "hidden_size": hidden_size,
        "ffn_hidden_size": args.get("ffn_hidden_size") or 4 * hidden_size,
        "num_attention_heads": num_heads,
        "vocab_size": vocab_size,
        **_positions(args),
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "normalization": _one_of(args, "normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
        "norm_eps": float(args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5))),
        "activation": _activation(args, has_bias=has_bias),
        "linear_bias": has_bias,
        "qkv_bias": bool(args.get("add_qkv_bias", False)) and not has_bias,
        "qk_norm": bool(args.get("qk_layernorm", False)),
        "precision": precision,
    }
    if args.get("group_query_attention"):
        model["num_query_groups"] = _number(args, "num_query_groups")
    if (window := _window(args)) is not None:
        model["sliding_window"] = window
    others = {
        field: value
        for field in _SAME_NAME
        if (value := args.get(field, FUNCTION_IN_MEGATRON[field])) != FUNCTION_IN_MEGATRON[field]
    }
    if args.get("apply_layernorm_1p"):
        others["layernorm_zero_centered_gamma"] = True
    if (head := args.get("kv_channels")) not in (None, hidden_size // num_heads):
        others["kv_channels"] = head
    return {"model": model, "megatron": others} if others else {"model": model}


def _positions(args: Mapping[str, Any]) -> dict[str, Any]:
    kind = "rope" if args.get("use_rotary_position_embeddings") else args.get("position_embedding_type")
    if kind in (None, "learned_absolute"):
        return {"position_embedding": "learned_absolute", "seq_length": _number(args, "max_position_embeddings")}
    if kind != "rope":
        raise ValueError(f"common.pt: position_embedding_type={kind} has no equal here; only learned_absolute and rope")
    is_scaled, factor = bool(args.get("use_rope_scaling")), args.get("rope_scaling_factor", _LLAMA3_FACTOR)
    if is_scaled and factor != _LLAMA3_FACTOR:
        raise ValueError(
            f"common.pt: rope_scaling_factor={factor} is ambiguous: pretrain_gpt.py 0.16.1 computes with "
            f"{_LLAMA3_FACTOR} whatever it is; set it to that factor"
        )
    return {
        "position_embedding": "rope",
        "seq_length": _number(args, "seq_length"),
        "rope_base": float(args.get("rotary_base", 10000)),
        "rope_scaling_factor": _LLAMA3_FACTOR if is_scaled else 1.0,
    }


def _activation(args: Mapping[str, Any], *, has_bias: bool) -> str:
    if args.get("swiglu"):
        return "swiglu"
    if args.get("squared_relu"):
        return "squared_relu"
    return "gelu_tanh" if has_bias and args.get("bias_gelu_fusion", True) else "gelu"


def _window(args: Mapping[str, Any]) -> int | None:
    window = args.get("window_size")
    if window is None or tuple(window) == (-1, -1):
        return None
    before, after = window
    if before < 0 or after != 0:
        raise ValueError(f"common.pt: window_size={window} has no equal here; only windows (N, 0) of the tokens before")
    return int(before) + 1


def _one_of(args: Mapping[str, Any], name: str, names: Mapping[str, str]) -> str:
    value = args.get(name, next(iter(names)))
    if value not in names:
        raise ValueError(f"common.pt: {name}={value} has no equal here; only {', '.join(names)} can be imported")
    return names[value]


def _number(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    if type(value) is not int:
        raise ValueError(f"common.pt: {name}={value} must be a whole number")
    return value
