"""GPT-2: a run's settings to and from Hugging Face's config.json, as `hf_config` has the other families."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON
from spare_megatron.config.model_fields import as_written, computed_activation, model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.tools.weights.hf_fields import Gpt2Fields

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Of config.json, and its setting; the first name of a function is the one that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2:
    """A GPT-2: learned positions, LayerNorm, and biases of all linear layers."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int
    is_tied: bool
    norm_eps: float
    activation: str

    @property
    def num_query_groups(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def gpt2_of(config: RunConfig) -> Gpt2:
    """The GPT-2 that the settings describe. Raises ValueError if it is none, with every reason."""
    model, fields = config.model, model_fields(config)
    if reasons := list(_not_of_gpt2(config, fields)):
        what = "Hugging Face's GPT-2, the family with learned positions, has no model like this one:"
        raise ValueError("\n  - ".join([what, *reasons]))
    return Gpt2(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        num_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        is_tied=model.tie_embeddings,
        norm_eps=fields["layernorm_epsilon"],
        activation=computed_activation(config),
    )


def _not_of_gpt2(config: RunConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    model = config.model
    usual = {
        "add_bias_linear": (True,),
        "kv_channels": (None, model.hidden_size // model.num_attention_heads),
        "normalization": ("LayerNorm",),
        "num_query_groups": (None, model.num_attention_heads),
    }
    chosen = ("activation_func", "gated_linear_unit", "layernorm_epsilon", "add_qkv_bias")
    if computed_activation(config) not in _ACTIVATIONS.values():
        yield f"{as_written(config, 'activation_func')}: it has gelu_tanh and gelu alone"
    for field, default in FUNCTION_IN_MEGATRON.items():
        value = fields.get(field, default)
        if field not in chosen and value not in usual.get(field, (default,)):
            yield f"{as_written(config, field)}: it has nothing that equals it"


def gpt2_settings(found: Gpt2, precision: str) -> dict[str, dict[str, Any]]:
    model = {
        "num_layers": found.num_layers,
        "hidden_size": found.hidden_size,
        "ffn_hidden_size": found.ffn_hidden_size,
        "num_attention_heads": found.num_heads,
        "seq_length": found.seq_length,
        "vocab_size": found.vocab_size,
        "position_embedding": "learned_absolute",
        "tie_embeddings": found.is_tied,
        "normalization": "layernorm",
        "norm_eps": found.norm_eps,
        "activation": found.activation,
        "linear_bias": True,
        "precision": precision,
    }
    return {"model": model}


def gpt2_json(found: Gpt2, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": dtype,
        "vocab_size": found.vocab_size,
        "n_positions": found.seq_length,
        "n_embd": found.hidden_size,
        "n_layer": found.num_layers,
        "n_head": found.num_heads,
        "n_inner": found.ffn_hidden_size,
        "activation_function": next(name for name, ours in _ACTIVATIONS.items() if ours == found.activation),
        "layer_norm_epsilon": found.norm_eps,
        "tie_word_embeddings": found.is_tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def gpt2_in(fields: Gpt2Fields) -> Gpt2:
    """The GPT-2 that a config.json describes. Raises ValueError."""
    if fields.n_embd % fields.n_head:
        raise ValueError(f"config.json: n_head={fields.n_head} does not divide n_embd={fields.n_embd}")
    return Gpt2(
        num_layers=fields.n_layer,
        hidden_size=fields.n_embd,
        ffn_hidden_size=fields.n_inner or 4 * fields.n_embd,
        num_heads=fields.n_head,
        seq_length=fields.n_positions,
        vocab_size=fields.vocab_size,
        is_tied=fields.tie_word_embeddings,
        norm_eps=fields.layer_norm_epsilon,
        activation=_ACTIVATIONS[fields.activation_function],
    )
