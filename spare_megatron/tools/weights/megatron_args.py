"""A run's model to and from the arguments of Megatron-LM's `pretrain_gpt.py`, as its checkpoints hold them.

Both directions raise ValueError for what the other side does not have. The arguments are those of Megatron-LM 0.16.1
to 0.19 and, where 0.16.1 renamed them, of earlier versions. Loads without torch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spare_megatron.config.foreign_fields import NumberFromOne, read_fields, require_values, shown
from spare_megatron.config.limits import PositiveFloat, PositiveInt
from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON, OF_LATENT_ATTENTION
from spare_megatron.config.model_fields import SETTING_OF, as_written, computed_activation, model_fields, uses_yarn
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import global_batch

_LLAMA3_FACTOR = 8.0
"""The scaling factor of RoPE; `pretrain_gpt.py` has an argument for it and does not pass it on."""

_SAME_NAME = (
    "activation_func_clamp_value",
    "glu_linear_offset",
    "layernorm_zero_centered_gamma",
    "no_rope_freq",
    "rotary_interleaved",
    "rotary_percent",
    "window_attn_skip_freq",
)
"""Fields of TransformerConfig that are arguments, too, and settings of `[megatron]` here."""

_OF_MODEL = ("kv_channels", *SETTING_OF)
"""Fields that have other names or values among the arguments, or settings of `[model]`."""

_ONLY: Mapping[str, Collection[object]] = {
    **{
        field: (default,)
        for field, default in FUNCTION_IN_MEGATRON.items()
        # Without experts and latent attention their fields have no effect.
        if field not in (*_OF_MODEL, *_SAME_NAME, *OF_LATENT_ATTENTION) and "moe" not in field
    },
    "use_legacy_models": (False,),
    "spec": (None, ["local"]),
    "num_experts": (None,),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    **dict.fromkeys(("is_hybrid_model", "use_mup", "qk_l2_norm"), (False,)),
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern", "linear_attention_freq"), (None,)),
    **dict.fromkeys(("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"), (None,)),
    **dict.fromkeys(("experimental_attention_variant", "rotary_seq_len_interpolation_factor"), (None,)),
}
"""Arguments that change the model, and the values with which it is one that can be imported."""


def args_of(config: RunConfig) -> dict[str, Any]:
    """Arguments that describe the model; its vocabulary is padded by no rows. Raises ValueError with every reason."""
    model, fields = config.model, model_fields(config)
    function = computed_activation(config)
    if reasons := list(_not_of_pretrain_gpt(config, fields, function)):
        raise ValueError("\n  - ".join(["Megatron-LM's pretrain_gpt.py has no model like this one:", *reasons]))
    is_rope = model.position_embedding == "rope"
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
        "rotary_base": int(model.rope_base) if model.rope_base.is_integer() else model.rope_base,
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
        "quick_geglu": function == "quick_geglu",
        "bias_gelu_fusion": function == "gelu_tanh",
        "bias_swiglu_fusion": not (fields.get("activation_func_clamp_value") or fields.get("glu_linear_offset")),
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
    if function not in ("swiglu", "quick_geglu", "gelu", "gelu_tanh", "squared_relu"):
        yield f"{written}: it has gelu, swiglu, quick_geglu and squared_relu alone"
    if function == "gelu_tanh" and not fields["add_bias_linear"]:
        yield f"{written}: it has that function only fused with a bias, and here are none"
    if config.model.rope_scaling_factor not in (1.0, _LLAMA3_FACTOR):
        factor = config.model.rope_scaling_factor
        yield f"model.rope_scaling_factor={factor}: it always scales by {_LLAMA3_FACTOR}, whatever the argument says"
    if uses_yarn(config):
        yield "megatron.rope_type=yarn: it has no argument that equals it"
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
        "--no-bias-swiglu-fusion": args["swiglu"] and not args["bias_swiglu_fusion"],
        "--qk-layernorm": args["qk_layernorm"],
        "--quick-geglu": args["quick_geglu"],
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """The arguments that describe the model; later versions save all of them."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    ffn_hidden_size: PositiveInt | None = None
    kv_channels: PositiveInt | None = None
    group_query_attention: bool = False
    num_query_groups: PositiveInt | None = None
    seq_length: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    use_rotary_position_embeddings: bool = False
    rotary_base: NumberFromOne = 10000
    use_rope_scaling: bool = False
    rope_scaling_factor: int | float = _LLAMA3_FACTOR
    untie_embeddings_and_output_weights: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    layernorm_epsilon: PositiveFloat | None = None
    norm_epsilon: PositiveFloat | None = None
    apply_layernorm_1p: bool = False
    add_bias_linear: bool | None = None
    disable_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    swiglu: bool = False
    quick_geglu: bool = False
    squared_relu: bool = False
    bias_gelu_fusion: bool = True
    bias_swiglu_fusion: bool = True
    window_size: tuple[int, ...] | list[int] | None = None
    activation_func_clamp_value: int | float | None = None
    glu_linear_offset: int | float = 0.0
    layernorm_zero_centered_gamma: bool = False
    no_rope_freq: int | list[int] | None = None
    rotary_interleaved: bool = False
    rotary_percent: int | float = 1.0
    window_attn_skip_freq: int | list[int] | None = None


def settings_in(args: Mapping[str, Any], vocab_size: int, precision: str) -> dict[str, dict[str, Any]]:
    """The tables of a run's TOML file that describe the model. Raises ValueError for one that is not supported here."""
    require_values(_ONLY, args, "")
    found = read_fields(ModelArgs, args, "")
    _require_divisible(found)
    has_bias = not found.disable_bias_linear if found.add_bias_linear is None else found.add_bias_linear
    model = {
        "num_layers": found.num_layers,
        "hidden_size": found.hidden_size,
        "ffn_hidden_size": found.ffn_hidden_size or 4 * found.hidden_size,
        "num_attention_heads": found.num_attention_heads,
        "vocab_size": vocab_size,
        **_positions(found),
        "tie_embeddings": not found.untie_embeddings_and_output_weights,
        "normalization": found.normalization.lower(),
        "norm_eps": found.layernorm_epsilon or found.norm_epsilon or 1e-5,
        "activation": _activation(found, has_bias=has_bias),
        "linear_bias": has_bias,
        "qkv_bias": found.add_qkv_bias and not has_bias,
        "qk_norm": found.qk_layernorm,
        "precision": precision,
    }
    if found.group_query_attention:
        model["num_query_groups"] = _given(found, "num_query_groups")
    if (window := _window(found.window_size)) is not None:
        model["sliding_window"] = window
    others = {field: getattr(found, field) for field in _SAME_NAME}
    if found.swiglu and found.bias_swiglu_fusion:
        others["activation_func_clamp_value"] = None  # the fused function ignores it
    others["layernorm_zero_centered_gamma"] |= found.apply_layernorm_1p
    if found.kv_channels is not None and found.kv_channels * found.num_attention_heads != found.hidden_size:
        others["kv_channels"] = found.kv_channels
    others = {field: value for field, value in others.items() if value != FUNCTION_IN_MEGATRON[field]}
    return {"model": model, "megatron": others} if others else {"model": model}


def _require_divisible(found: ModelArgs) -> None:
    heads = f"num_attention_heads={found.num_attention_heads}"
    if found.kv_channels is None and found.hidden_size % found.num_attention_heads:
        raise ValueError(f"{heads} does not divide hidden_size={found.hidden_size}")
    if found.group_query_attention and found.num_attention_heads % _given(found, "num_query_groups"):
        raise ValueError(f"num_query_groups={found.num_query_groups} does not divide {heads}")
    if None not in (one := found.layernorm_epsilon, other := found.norm_epsilon) and one != other:
        raise ValueError(f"layernorm_epsilon={one} and norm_epsilon={other} contradict each other")


def _positions(found: ModelArgs) -> dict[str, Any]:
    if not found.use_rotary_position_embeddings and found.position_embedding_type == "learned_absolute":
        return {"position_embedding": "learned_absolute", "seq_length": _given(found, "max_position_embeddings")}
    if found.use_rope_scaling and found.rope_scaling_factor != _LLAMA3_FACTOR:
        raise ValueError(
            f"rope_scaling_factor={found.rope_scaling_factor} is ambiguous: pretrain_gpt.py 0.16.1 computes "
            f"with {_LLAMA3_FACTOR} whatever it is; set it to that factor"
        )
    return {
        "position_embedding": "rope",
        "seq_length": _given(found, "seq_length"),
        "rope_base": float(found.rotary_base),
        "rope_scaling_factor": _LLAMA3_FACTOR if found.use_rope_scaling else 1.0,
    }


def _activation(found: ModelArgs, *, has_bias: bool) -> str:
    if found.swiglu:
        return "swiglu"
    if found.quick_geglu:
        return "quick_geglu"
    if found.squared_relu:
        return "squared_relu"
    return "gelu_tanh" if has_bias and found.bias_gelu_fusion else "gelu"


def _window(window: Sequence[int] | None) -> int | None:
    if window is None or tuple(window) == (-1, -1):
        return None
    if len(window) != 2 or window[0] < 0 or window[1] != 0:
        raise ValueError(f"window_size={shown(window)} is not supported here; only windows (N, 0) of the tokens before")
    return window[0] + 1


def _given(found: ModelArgs, name: str) -> int:
    value: int | None = getattr(found, name)
    if value is None:
        raise ValueError(f"{name}=None must be a whole number")
    return value
