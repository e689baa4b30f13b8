"""The fields of Hugging Face's config.json, by family: types and defaults are those of `transformers`.

Every field that changes which function of the tokens a model of these families is, or what is stored, is in one place:
in a class, which `hf_config` translates, or in `ONLY`, whose other values no model here has. Others have no effect.
Loads without torch.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from spare_megatron.config.foreign_fields import NumberFromOne, read_fields, require_kinds, require_values, shown
from spare_megatron.config.limits import Limit, NonNegativeInt, PositiveFloat, PositiveInt

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gpt2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFields:
    """What Llama, Qwen and Mixtral have in common; the defaults are Llama's."""

    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFields(RopeFields):
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Literal[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Fields(RopeFields):
    vocab_size: PositiveInt = 151936
    intermediate_size: PositiveInt = 22016
    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Fields(Qwen2Fields):
    head_dim: PositiveInt = 128
    attention_bias: Literal[False] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeFields(RopeFields):
    vocab_size: PositiveInt = 151936
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 6144
    moe_intermediate_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 24
    num_key_value_heads: PositiveInt = 4
    max_position_embeddings: PositiveInt = 32768
    attention_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    sliding_window: int | None = 4096
    num_local_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralFields(RopeFields):
    intermediate_size: PositiveInt = 14336
    num_key_value_heads: PositiveInt = 8
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    num_local_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2
    sliding_window: Literal[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekFields(RopeFields):
    vocab_size: PositiveInt = 129280
    hidden_size: PositiveInt = 7168
    intermediate_size: PositiveInt = 18432
    moe_intermediate_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 61
    num_attention_heads: PositiveInt = 128
    num_key_value_heads: PositiveInt | None = 128
    n_shared_experts: PositiveInt = 1
    n_routed_experts: PositiveInt = 256
    routed_scaling_factor: PositiveFloat = 2.5
    kv_lora_rank: PositiveInt = 512
    q_lora_rank: PositiveInt = 1536
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    qk_nope_head_dim: PositiveInt = 128
    n_group: PositiveInt = 8
    topk_group: PositiveInt = 4
    num_experts_per_tok: PositiveInt = 8
    first_k_dense_replace: int = 3
    norm_topk_prob: Literal[True] = True
    max_position_embeddings: PositiveInt = 4096
    rope_interleave: Literal[True] = True
    attention_bias: Literal[False] = False
    num_nextn_predict_layers: NonNegativeInt = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssFields(RopeFields):
    vocab_size: PositiveInt = 201088
    hidden_size: PositiveInt = 2880
    intermediate_size: PositiveInt = 2880
    num_hidden_layers: PositiveInt = 36
    num_attention_heads: PositiveInt = 64
    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt = 64
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    num_local_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 4
    sliding_window: int | None = 128
    swiglu_limit: PositiveFloat = 7.0
    attention_bias: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Fields:
    vocab_size: PositiveInt = 50257
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu"] = "gelu_new"
    layer_norm_epsilon: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    sliding_window: Literal[None] = None


FIELDS: Mapping[str, type[RopeFields | Gpt2Fields]] = {
    "llama": LlamaFields,
    "qwen2": Qwen2Fields,
    "qwen3": Qwen3Fields,
    "qwen3_moe": Qwen3MoeFields,
    "mixtral": MixtralFields,
    "deepseek_v3": DeepSeekFields,
    "gpt_oss": GptOssFields,
    "gpt2": Gpt2Fields,
}

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
"""Second names of fields (`attribute_map` of the configurations)."""

DEFAULT_ROPE_BASE = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"), 1e4),
    "mixtral": 1e6,
    "gpt_oss": 1.5e5,
}

TOKEN_IDS: Mapping[str, Any] = {
    "bos_token_id": int | None,
    "eos_token_id": int | list[int] | None,
    "pad_token_id": int | None,
}

ONLY: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(("dtype", "torch_dtype"), (None, "float32", "bfloat16", "float16")),
    **dict.fromkeys(("quantization_config", "compression_config", "quantization"), (None,)),
    **dict.fromkeys(("kv_sharing_modes", "attention_chunk_size", "transformers_weights"), (None,)),
    **dict.fromkeys(("per_layer_config", "pruned_heads", "fusion_config"), (None, {})),
    "configuration_files": (None, []),
    "partial_rotary_factor": (None, 1.0),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "swiglu_alpha": (1.702,),
    # Fields of other families, and of code that comes with the weights: `transformers` passes over them here.
    "auto_map": (None, {}),
    **dict.fromkeys(("no_rope_layers", "mlp_only_layers"), (None, [])),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_multiplier", "scale_depth", "clip_qkv"), (None,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (None, 1.0)),
    **dict.fromkeys(("scale_emb", "rotary_pct"), (None, 1.0)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "use_qk_norm"), (None, False)),
    **dict.fromkeys(("rope_interleaved", "attn_temperature_tuning", "use_bidirectional_attention"), (None, False)),
    **dict.fromkeys(("use_parallel_residual", "alibi"), (None, False)),
}
"""Fields that change the function or what is stored, and the values with which they do not."""

_WHERE = "config.json: "


def fields_in(content: Mapping[str, Any]) -> RopeFields | Gpt2Fields:
    """The fields of a config.json, checked one by one. Raises ValueError."""
    family = content.get("model_type")
    if not isinstance(family, str) or family not in FIELDS:
        raise ValueError(f"{_WHERE}model_type={shown(family)} cannot be imported; only {', '.join(FIELDS)} can")
    require_values(ONLY, content, _WHERE)
    schema, other_names = FIELDS[family], OTHER_NAMES.get(family, {})
    kinds = get_type_hints(schema, include_extras=True)
    require_kinds({other: kinds[usual] for other, usual in other_names.items()}, content, _WHERE)
    return read_fields(schema, _by_usual_names(content, other_names), _WHERE)


def _by_usual_names(content: Mapping[str, Any], other_names: Mapping[str, str]) -> Mapping[str, Any]:
    found = dict(content)
    for other, usual in other_names.items():
        if other in content and found.setdefault(usual, content[other]) != content[other]:
            raise _contradiction(_WHERE, content, other, usual)
    return found


def token_ids_in(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The ids of special tokens that a config.json or generation_config.json names. Raises ValueError."""
    require_kinds(TOKEN_IDS, content, f"{file}: ")
    return {name: content[name] for name in TOKEN_IDS if name in content}


# ----------------------------------------------------------------------------------------------------------- RoPE

_FromZero = Annotated[int | float, Limit(lambda value: 0 <= value <= sys.float_info.max, "must be at least 0")]
_ROPE_KINDS: Mapping[str, Any] = {"rope_theta": NumberFromOne, "factor": NumberFromOne}
_ROPE_VALUES: Mapping[str, Collection[Any]] = {
    "rope_type": ("default", "llama3", "yarn"),
    "partial_rotary_factor": (1.0,),
}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
YARN: Mapping[str, str] = {"factor": "rotary_scaling_factor", "truncate": "correction_range_round_to_int"} | {
    name: name for name in (_ORIGINAL_LENGTH, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}
"""Constants of YaRN, and Megatron's names."""
_YARN_USUAL = dict(zip(YARN, (1.0, True, 4096, 32.0, 1.0, 1.0, 0.0), strict=True))
_YARN_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("rope_theta", "factor", "beta_fast", "beta_slow"), NumberFromOne),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _FromZero),
    _ORIGINAL_LENGTH: PositiveInt,
    "truncate": bool,
}
_YARN_VALUES: Mapping[str, Collection[Any]] = {
    "rope_type": ("default", "yarn"),
    "partial_rotary_factor": (1.0,),
    "attention_factor": (None,),
}
_OF_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "truncate": False, _ORIGINAL_LENGTH: 4096}
"""Its rotations where a file has none."""
LLAMA3_CONSTANTS: Mapping[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL_LENGTH: 8192}
"""Of the scaling of Llama 3.1: what megatron-core fixes; only the factor can be chosen."""


class Rope(NamedTuple):
    """Rotary position encoding: its base, Llama 3's factor, and the constants of YaRN if it stretches."""

    base: float
    factor: float
    yarn: dict[str, Any]


def rope_in(content: Mapping[str, Any], family: str, seq_length: int) -> Rope:
    """Raises ValueError for other scalings than the family has here, and as `_rope_of` does."""
    if family == "gpt_oss" and not (content.get("rope_scaling") or content.get("rope_parameters")):
        content = {**content, "rope_parameters": _OF_GPT_OSS}
    table, where = _rope_of(content, family, seq_length)
    if family == "deepseek_v3":
        require_values({"truncate": (True,)}, table, where)
    if table["rope_type"] == "yarn" or (table["rope_type"] != "default" and family == "deepseek_v3"):
        return _yarn_in(table, where)
    return Rope(*_checked(table, where), {})


def _yarn_in(table: Mapping[str, Any], where: str) -> Rope:
    require_values(_YARN_VALUES, table, where)
    require_kinds(_YARN_KINDS, {"factor": None, **table}, where)
    if unknown := sorted(table.keys() - {*_YARN_VALUES, *_YARN_KINDS}):
        raise ValueError(f"{where}{unknown[0]}={shown(table[unknown[0]])} is not supported here")
    found = {name: table.get(name, usual) for name, usual in _YARN_USUAL.items()}
    if not (found["mscale_all_dim"] and table.get("mscale")):  # transformers reads either with the other alone
        require_values({"mscale_all_dim": (0,)}, found, where)
        found["mscale"] = 1.0
    return Rope(float(table["rope_theta"]), 1.0, {YARN[name]: value for name, value in found.items()})


def _rope_of(content: Mapping[str, Any], family: str, seq_length: int) -> tuple[dict[str, Any], str]:
    """The table of rotations, and its name for messages: of `rope_parameters`, or of `rope_scaling` and `rope_theta`,
    as older files have it. Raises ValueError for fields that contradict each other.
    """
    require_kinds(_ROPE_KINDS, content, _WHERE)
    usual = {"rope_theta": content.get("rope_theta", DEFAULT_ROPE_BASE[family]), _ORIGINAL_LENGTH: seq_length}
    found = {
        name: _rope_table(content, name, usual) for name in ("rope_scaling", "rope_parameters") if content.get(name)
    }
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise _contradiction(_WHERE, content, *found)
    for name, table in found.items():
        return table, f"{_WHERE}{name}."
    return {"rope_type": "default", "rope_theta": usual["rope_theta"]}, _WHERE


def _rope_table(content: Mapping[str, Any], name: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The table under its current names, with what `transformers` takes from other fields."""
    table = dict(content[name])
    kind = table.setdefault("rope_type", table.get("type", "default"))
    if table.pop("type", kind) != kind:
        raise _contradiction(f"{_WHERE}{name}.", content[name], "rope_type", "type")
    for field in ("rope_theta", _ORIGINAL_LENGTH) if kind in ("llama3", "yarn") else ("rope_theta",):
        value = table.setdefault(field, content.get(field, usual[field]))
        if field in content and content[field] != value:
            raise _contradiction(_WHERE, {**content, f"{name}.{field}": value}, f"{name}.{field}", field)
    return table


def _checked(table: Mapping[str, Any], where: str) -> tuple[float, float]:
    require_values(_ROPE_VALUES, table, where)
    require_kinds(_ROPE_KINDS, table, where)
    scaling = ("factor", *LLAMA3_CONSTANTS) if table["rope_type"] == "llama3" else ()
    if missing := [field for field in scaling if field not in table]:
        raise ValueError(f"{where}{missing[0]} is missing, which rope_type={table['rope_type']} needs")
    if unknown := sorted(table.keys() - {"rope_theta", *_ROPE_VALUES, *scaling}):
        raise ValueError(f"{where}{unknown[0]}={shown(table[unknown[0]])} is not supported here")
    require_values({field: (value,) for field, value in LLAMA3_CONSTANTS.items()}, table, where)
    return float(table["rope_theta"]), float(table.get("factor", 1.0))


def _contradiction(where: str, values: Mapping[str, Any], one: str, other: str) -> ValueError:
    return ValueError(
        f"{where}{one}={shown(values[one])} and {other}={shown(values[other])} contradict each other; make them equal, "
        f"or remove one"
    )
