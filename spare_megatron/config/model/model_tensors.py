"""The tensors of the whole model as a checkpoint names them: Megatron's names, no rows that pad the vocabulary; and
what follows from them: parameters per layer and stage, and FLOPs per token.

Exports and imports of all formats go through this list. Names and shapes depend neither on the layout nor on the
implementation of the layers; so do the names that `optimizer.rules` match. Loads without torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from spare_megatron.config.model_fields import head_widths, is_latent, model_fields, num_future_tokens
from spare_megatron.config.program_file import judge_program
from spare_megatron.config.schema import ParameterRule, RunConfig
from spare_megatron.stacking.layout import Slabs

LAYERS = "decoder.layers."
"""Prefix of the layers' tensors, which a checkpoint stacks along a first dimension."""

WORDS = "embedding.word_embeddings.weight"

_MLP_NORM = "mlp.linear_fc1.layer_norm_"

LATENT_NORMS = {
    _MLP_NORM: "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
_LOCAL_NORMS = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", **LATENT_NORMS}
"""Norms as transformer-engine and checkpoints name them, in the linear layer that follows, and as other layers do; the
first are those of layers with latent attention.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor; of one layer if `layer` is set, with the shape and the key of all layers' stack without its number.

    Layers that are not all alike have no stack: their number is in the key, and `layer` is not set.
    """

    key: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter but the biases of experts, which are fp32 in every model."""
        return self.key.endswith(".expert_bias")

    @property
    def key_in_layer(self) -> str:
        return self.key if self.layer is None else self.key.replace(LAYERS, f"{LAYERS}{self.layer}.", 1)


def with_local_norms(name: str) -> str:
    """The name of a tensor in layers that do not fuse norms."""
    for fused, norm in _LOCAL_NORMS.items():
        name = name.replace(fused, norm)
    return name


_ONE_EXPERT = re.compile(r"\.experts\.(?:local_experts\.\d+\.(.+)|(linear_fc\d\.(?:weight|bias))\d+)")


def of_all_experts(name: str) -> str:
    """The name of the tensor that an expert's parameter is part of, for that of a rank's module.

    >>> of_all_experts("mlp.experts.local_experts.3.linear_fc1.weight")
    'mlp.experts.experts.linear_fc1.weight'
    >>> of_all_experts("mlp.experts.linear_fc2.weight11")
    'mlp.experts.experts.linear_fc2.weight'
    """
    return _ONE_EXPERT.sub(lambda found: f".experts.experts.{found[1] or found[2]}", name)


def model_tensors(config: RunConfig) -> Iterator[ModelTensor]:
    """All tensors, in the order of the layers."""
    model = config.model
    hidden = model.hidden_size
    yield ModelTensor(key=WORDS, shape=(model.vocab_size, hidden))
    if model.position_embedding == "learned_absolute":
        yield ModelTensor(key="embedding.position_embeddings.weight", shape=(model.seq_length, hidden))
    for layer in range(model.num_layers):
        for name, shape in _with_biases(config, layer):
            if model.num_dense_layers:
                yield ModelTensor(key=f"{LAYERS}{layer}.{name}", shape=shape)
            else:
                yield ModelTensor(key=LAYERS + name, shape=shape, layer=layer)
    for part in norm_parts(config):
        yield ModelTensor(key=f"decoder.final_layernorm.{part}", shape=(hidden,))
    for depth in range(num_future_tokens(config)):
        for name, shape in future_tensors(config):
            yield ModelTensor(key=f"mtp.layers.{depth}.{name}", shape=shape)
    if not model.tie_embeddings:
        yield ModelTensor(key="output_layer.weight", shape=(model.vocab_size, hidden))


def future_tensors(config: RunConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a module of multi-token prediction, whose layer is like the last one."""
    hidden, norm = config.model.hidden_size, norm_parts(config)
    yield "eh_proj.weight", (hidden, 2 * hidden)
    yield from ((f"{name}.{part}", (hidden,)) for name in ("enorm", "hnorm", "final_layernorm") for part in norm)
    for name, shape in _with_biases(config, config.model.num_layers - 1):
        yield f"transformer_layer.{name}", shape


def norm_parts(config: RunConfig) -> tuple[str, ...]:
    return ("weight",) if model_fields(config)["normalization"] == "RMSNorm" else ("weight", "bias")


def layer_has_experts(config: RunConfig, layer: int) -> bool:
    return config.model.num_experts is not None and layer >= config.model.num_dense_layers


def _with_biases(config: RunConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As `layer_tensors`, and the biases of experts."""
    has_experts = layer_has_experts(config, layer)
    yield from layer_tensors(config, has_experts=has_experts)
    if has_experts and config.megatron.get("moe_router_enable_expert_bias"):
        yield "mlp.router.expert_bias", (config.model.num_experts or 0,)


def layer_tensors(config: RunConfig, *, has_experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a layer; those of all experts are stacked along a first dimension."""
    model, fields, norm = config.model, model_fields(config), norm_parts(config)
    hidden, ffn = model.hidden_size, model.ffn_width
    per_width = 2 if fields["gated_linear_unit"] else 1
    has_bias = fields["add_bias_linear"]
    linear = _latent_projections(config) if is_latent(config) else _projections(config)
    linear += (("self_attention.linear_proj", hidden, model.num_attention_heads * head_widths(config)[1], has_bias),)
    if has_experts:
        yield from _expert_tensors(config, per_width)
    else:
        linear += (("mlp.linear_fc1", ffn * per_width, hidden, has_bias), ("mlp.linear_fc2", hidden, ffn, has_bias))
    if config.megatron.get("softmax_type") == "learnable":
        yield "self_attention.core_attention.softmax_offset", (model.num_attention_heads,)
    for name, num_outputs, num_inputs, is_biased in linear:
        yield f"{name}.weight", (num_outputs, num_inputs)
        if is_biased:
            yield f"{name}.bias", (num_outputs,)
    # A norm has the name of the layer that it precedes, where that is one.
    first = "input_layernorm." if is_latent(config) else "self_attention.linear_qkv.layer_norm_"
    widths = {first: hidden, "pre_mlp_layernorm." if has_experts else _MLP_NORM: hidden}
    if fields["qk_layernorm"] and is_latent(config):
        latent = {"q": fields["q_lora_rank"], "kv": fields["kv_lora_rank"]}
        widths |= {f"self_attention.linear_{one}_up_proj.layer_norm_": rank for one, rank in latent.items()}
    elif fields["qk_layernorm"]:
        widths |= {f"self_attention.{one}_layernorm.": head_widths(config)[0] for one in ("q", "k")}
    for name, width in widths.items():
        yield from ((name + part, (width,)) for part in norm)


_Linear = tuple[str, int, int, bool]
"""Name, outputs, inputs, and whether it has a bias."""


def _projections(config: RunConfig) -> tuple[_Linear, ...]:
    model, fields = config.model, model_fields(config)
    head, _ = head_widths(config)
    heads, keys = model.num_attention_heads * head, (fields["num_query_groups"] or model.num_attention_heads) * head
    queries = 2 * heads if fields.get("attention_output_gate") else heads
    has_bias = fields["add_bias_linear"] or fields["add_qkv_bias"]
    return (("self_attention.linear_qkv", queries + 2 * keys, model.hidden_size, has_bias),)


def _latent_projections(config: RunConfig) -> tuple[_Linear, ...]:
    model, fields = config.model, model_fields(config)
    rank, kv_rank, heads = fields["q_lora_rank"], fields["kv_lora_rank"], model.num_attention_heads
    shapes = {
        "q_down_proj": (rank, model.hidden_size),
        "q_up_proj": (heads * head_widths(config)[0], rank),
        "kv_down_proj": (kv_rank + fields["qk_pos_emb_head_dim"], model.hidden_size),
        "kv_up_proj": (heads * (fields["qk_head_dim"] + fields["v_head_dim"]), kv_rank),
    }
    return tuple((f"self_attention.linear_{name}", *shape, False) for name, shape in shapes.items())


def _expert_tensors(config: RunConfig, per_width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    model, fields = config.model, model_fields(config)
    hidden, num_experts = model.hidden_size, fields["num_moe_experts"]
    ffn, shared = fields["moe_ffn_hidden_size"], model.shared_expert_ffn_hidden_size
    of_experts = {
        "router": (num_experts, hidden),
        "experts.experts.linear_fc1": (num_experts, ffn * per_width, hidden),
        "experts.experts.linear_fc2": (num_experts, hidden, ffn),
    }
    for name, shape in of_experts.items():
        yield f"mlp.{name}.weight", shape
        if fields["add_bias_linear"]:
            yield f"mlp.{name}.bias", shape[:-1]
    if shared is not None:
        yield "mlp.shared_experts.linear_fc1.weight", (shared * per_width, hidden)
        yield "mlp.shared_experts.linear_fc2.weight", (hidden, shared)
        if fields.get("moe_shared_expert_gate"):
            yield "mlp.shared_experts.gate_weight", (1, hidden)


def parameter_names(config: RunConfig) -> Iterator[str]:
    """All parameters: layers count from 0 over all stages, tied tables are one, norms are modules of their own."""
    return (with_local_norms(tensor.key_in_layer) for tensor in model_tensors(config) if not tensor.is_buffer)


def rule_of(name: str, rules: Sequence[ParameterRule]) -> ParameterRule | None:
    """The first rule whose pattern matches the name; None if there is none."""
    return next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)


def rule_problems(config: RunConfig) -> Iterator[str]:
    """Factors outside their limits, and rules that no parameter of the settings' model has."""
    if not config.optimizer.rules:
        return
    # Only the model of a program knows the names of its parameters.
    is_ours = "model_provider" not in judge_program(config.program)[0]
    is_shaped = config.model.num_attention_heads > 0  # else reported with the model
    names = list(parameter_names(config)) if is_ours and is_shaped else []
    taken: set[str] = set()
    for number, rule in enumerate(config.optimizer.rules):
        key = f"optimizer.rules[{number}]"
        for field in ("learning_rate_factor", "min_learning_rate_factor", "weight_decay_factor"):
            factor = getattr(rule, field)
            if factor is not None and not 0.0 <= factor < math.inf:
                yield f"{key}.{field}={factor} must be at least 0 and finite; change it"
        if rule.min_learning_rate_factor is not None and rule.learning_rate_factor == 1.0:
            yield f"{key}.min_learning_rate_factor has no effect without learning_rate_factor; set both, or neither"
        if not names:
            continue
        matched = {name for name in names if fnmatchcase(name, rule.pattern)}
        if not matched:
            yield (
                f"{key}.pattern={rule.pattern!r} matches no parameter of this model; names are like "
                f"{names[0]} and decoder.layers.0.mlp.linear_fc1.weight: change it, or remove the rule"
            )
        elif matched <= taken:
            yield f"{key}.pattern={rule.pattern!r} matches only parameters of earlier rules; move or remove the rule"
        taken |= matched


_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary of each tensor-parallel rank to a multiple of this."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table.

    >>> padded_vocab_size(257, 2)
    512
    """
    multiple = _VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Parameter counts of a layer, summed over the ranks that share it.

    Attributes:
        experts: Of `num_parameters`, those of the experts that a router chooses from.
        idle: Of `experts`, those by which a token is not multiplied.
        matrices: The matrices by which each token is multiplied.
    """

    num_parameters: int
    experts: int
    idle: int
    matrices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameter counts of a GPT, summed over the ranks of a stage.

    Attributes:
        is_tied: The output layer shares the embedding table.
    """

    embedding: int
    positions: int
    layers: tuple[LayerShape, ...]
    final_norm: int
    is_tied: bool
    future: tuple[LayerShape, ...] = ()
    """Modules of multi-token prediction, on the last stage."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a shared table counts once."""
        tables = self.embedding * (1 if self.is_tied else 2)
        layers = sum(layer.num_parameters for layer in (*self.layers, *self.future))
        return tables + self.positions + layers + self.final_norm

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in the computation of a token."""
        return self.num_parameters - sum(layer.idle for layer in (*self.layers, *self.future))

    def of_stages(self, num_stages: int) -> list[int]:
        """Parameters of each pipeline stage; with tied tables the last stage holds a copy, as with future tokens."""
        stages = [sum(layer.num_parameters for layer in layers) for layers in self._stages(num_stages)]
        stages[0] += self.embedding + self.positions
        stages[-1] += self.final_norm + (0 if num_stages == 1 and self.is_tied else self.embedding)
        if self.future and num_stages > 1:
            stages[-1] += self.embedding
        return stages

    def experts_of_stages(self, num_stages: int) -> list[int]:
        """The part of `of_stages` that is divided over expert-parallel ranks."""
        return [sum(layer.experts for layer in layers) for layers in self._stages(num_stages)]

    def _stages(self, num_stages: int) -> list[tuple[LayerShape, ...]]:
        *others, last = (self.layers[own.start : own.stop] for own in Slabs(len(self.layers), (num_stages,)).layers)
        return [*others, (*last, *self.future)]


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that Megatron builds, including the effect of `[megatron]` fields."""
    model = config.model
    kinds = {kind: _layer_shape(config, has_experts=kind) for kind in (False, model.num_experts is not None)}
    return ModelShape(
        embedding=padded_vocab_size(model.vocab_size, config.layout.tensor_parallel) * model.hidden_size,
        positions=model.seq_length * model.hidden_size if model.position_embedding == "learned_absolute" else 0,
        layers=tuple(kinds[layer_has_experts(config, layer)] for layer in range(model.num_layers)),
        final_norm=model.hidden_size * len(norm_parts(config)),
        is_tied=model.tie_embeddings,
        future=(_shape_of(config, future_tensors(config)),) * num_future_tokens(config),
    )


def _layer_shape(config: RunConfig, *, has_experts: bool) -> LayerShape:
    return _shape_of(config, layer_tensors(config, has_experts=has_experts))


def _shape_of(config: RunConfig, named: Iterable[tuple[str, tuple[int, ...]]]) -> LayerShape:
    tensors = [(name, shape) for name, shape in named if not name.endswith(".expert_bias")]
    experts = {name: prod(shape) for name, shape in tensors if ".experts." in name}
    num_experts = config.model.num_experts or 1
    num_idle = num_experts - config.model.experts_per_token
    idle = {name: size // num_experts * num_idle for name, size in experts.items()}
    matrices = [(name, shape) for name, shape in tensors if len(shape) > 1 and not name.endswith("bias")]
    return LayerShape(
        num_parameters=sum(prod(shape) for _, shape in tensors),
        experts=sum(experts.values()),
        idle=sum(idle.values()),
        matrices=sum(prod(shape) - idle.get(name, 0) for name, shape in matrices),
    )


def flops_per_token(config: RunConfig) -> float:
    """Floating-point operations to train on one token: a forward pass, and twice as many backward.

    A forward pass takes 2 per element of each matrix that the token is multiplied by and 2 s (k + v) per layer for
    attention, with s tokens in a sequence and k and v the widths of all heads' keys and values (Narayanan et al., arXiv
    2104.04473, appendix), also with a sliding window. Norms, activations, softmax, recomputation and redundant
    microbatches do not count.
    """
    shape, model = model_shape(config), config.model
    matrices = sum(layer.matrices for layer in (*shape.layers, *shape.future))
    scores = 2 * model.seq_length * sum(head_widths(config)) * model.num_attention_heads
    heads, layers = 1 + len(shape.future), len(shape.layers) + len(shape.future)
    forward: float = 2 * (matrices + heads * shape.embedding) + layers * scores
    return 3.0 * forward
