"""Fields of config.json: those of the pinned transformers, with its types and defaults, and what it builds of them."""

import copy
import json
import random
import re
import sys
import types
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import transformers
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from spare_megatron.config.foreign_fields import require_kinds
from spare_megatron.tools.weights.hf_config import Architecture, architecture_in, config_json
from spare_megatron.tools.weights.hf_fields import (
    DEFAULT_ROPE_BASE,
    FIELDS,
    LLAMA3_CONSTANTS,
    ONLY,
    OTHER_NAMES,
    YARN,
    token_ids_in,
)

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "deepseek_v3": DeepseekV3Config,
    "gpt_oss": GptOssConfig,
    "gpt2": GPT2Config,
}

WITHOUT_EFFECT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "architectures", "output_hidden_states",
    "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "initializer_range",
    "use_cache", "pretraining_tp", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "summary_first_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "reorder_and_upcast_attn",
}  # fmt: skip
"""Fields that do not change which function of the tokens a model of these families is: of other tasks, of a training
(dropout, jitter, losses of routers), of how something is computed."""

ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}

transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def known(family: str) -> set[str]:
    rope = set() if family == "gpt2" else ROPE_FIELDS
    return {*get_type_hints(FIELDS[family]), *ONLY, *WITHOUT_EFFECT, *OTHER_NAMES.get(family, {}), *rope}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_field_of_the_configuration_is_in_one_table_with_its_default(family: str) -> None:
    theirs = {field.name: field for field in fields(CONFIGS[family])}
    ours = {field.name: field for field in fields(FIELDS[family])}
    assert theirs.keys() <= known(family)
    assert len({*ours, *ONLY, *WITHOUT_EFFECT}) == len(ours) + len(ONLY) + len(WITHOUT_EFFECT)
    assert {name: field.default for name, field in ours.items() if name in theirs} == {
        name: theirs[name].default for name in ours if name in theirs
    }
    # What it has beside its dataclass: read as an attribute, or taken apart before.
    more = {
        "llama": {"layer_types", "rope_scaling", "sliding_window"},
        "qwen2": {"head_dim", "rope_scaling"},
        "qwen3": {"rope_scaling"},
        "qwen3_moe": {"head_dim", "layer_types", "num_local_experts", "rope_scaling"},
        "mixtral": {"layer_types", "rope_scaling"},
        "deepseek_v3": {"head_dim", "layer_types", "num_nextn_predict_layers", "rope_scaling"},
        "gpt_oss": {"rope_scaling"},
        "gpt2": {"sliding_window"},
    }
    assert ours.keys() - theirs.keys() == more[family]
    assert all(theirs[name].default in ONLY[name] for name in theirs.keys() & ONLY)
    if family != "gpt2":
        assert DEFAULT_ROPE_BASE[family] == CONFIGS[family].default_theta
    assert OTHER_NAMES.get(family, {}) == CONFIGS[family].attribute_map


@pytest.mark.parametrize("family", CONFIGS)
def test_types_are_those_of_the_configuration(family: str) -> None:
    def plain(kind: Any) -> set[Any]:
        """The types of which a value is one; an argument of a list or dict counts as its type."""
        if get_origin(kind) in (Union, types.UnionType):
            return {base for member in get_args(kind) for base in plain(member)}
        if get_origin(kind) is Annotated:
            return plain(get_args(kind)[0])
        if get_origin(kind) is Literal:
            return {type(choice) for choice in get_args(kind)}
        return {dict} if getattr(kind, "__name__", "") == "RopeParameters" else {get_origin(kind) or kind}

    theirs = {field.name: field.type for field in fields(CONFIGS[family])}
    for name, kind in get_type_hints(FIELDS[family], include_extras=True).items():
        assert name not in theirs or plain(kind) <= plain(theirs[name]), name


OF_OTHER_TASKS = {"num_labels", "problem_type", "classifier_dropout", "hidden_dropout", "summary_last_dropout"}
"""Attributes that heads for classification and the like read, and GPT-2's older summary."""

NOT_OF_A_FILE = {
    "__class__", "_attn_implementation", "default_theta", "get_text_config", "json", "nested_rope_parameter_keys",
    "number_of_conv_states", "standardize_rope_params", "validate_rope",
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_every_field_that_the_model_reads_is_in_a_table(family: str) -> None:
    folder = Path(str(sys.modules[CONFIGS[family].__module__].__file__)).parent
    shared = [folder.parents[1] / name for name in ("cache_utils.py", "masking_utils.py", "modeling_rope_utils.py")]
    read = set()
    for file in (folder / f"modeling_{family}.py", *shared):
        text = file.read_text()
        read |= set(re.findall(r"\bconfig\.(\w+)", text)) | set(re.findall(r'getattr\(\s*[\w.]*config, "(\w+)"', text))
    assert {"vocab_size", "is_causal", "attention_chunk_size"} <= read
    assert read - {name for one in CONFIGS for name in known(one)} - NOT_OF_A_FILE - OF_OTHER_TASKS == set()


# ------------------------------------------------------------------------------------------------------ drawn files

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 10**9, 10**40, -(10**400), 2.0, 0.5, -0.0, float("nan"), float("inf"), 1e-300,
    "", "2", "silu", "default", "bad\n\ud800\u00e9", [], [1], ["full_attention"] * 2, ["sliding_attention"] * 2, {},
    {"a": {"b": [1]}}, [[[[[[]]]]]],
]  # fmt: skip

USUAL: dict[str, list[Any]] = {
    "rope_theta": [10000, 10000.0, 500000.0, 7],
    "max_window_layers": [0, 1, 2, 28, -3],
    "sliding_window": [4, 1, None],
    "use_sliding_window": [True, False],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"], None],
    "num_key_value_heads": [1, 2, 4, None],
    "head_dim": [8, 2, 5, None],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "rms_norm_eps": [1e-5, 1e-6, 0.1],
    "layer_norm_epsilon": [1e-5, 0.1],
    "n_inner": [48, None],
    "activation_function": ["gelu", "gelu_new", "relu"],
    "eos_token_id": [2, [2, 3], None],
    "num_local_experts": [2, 3, 1],
    "original_max_position_embeddings": [8192, 4096],
    "partial_rotary_factor": [1.0, 0.5],
    "dtype": ["float32", "bfloat16", "int8"],
}


def drawn_rope(draw: random.Random) -> dict[str, Any]:
    whole = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_CONSTANTS, "rope_theta": draw.choice([1e4, 5e5, 10000])}
    if draw.random() < 0.3:
        whole = {"rope_type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 1, "beta_fast": 16}
    table = whole if draw.random() < 0.5 else {"rope_theta": 1e4, "rope_type": "default"}
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        name = draw.choice([*whole, "type", "partial_rotary_factor", "full_attention", "mscale"])
        if draw.random() < 0.4:
            table.pop(name, None)
        else:
            table[name] = draw.choice(["llama3", "default", "linear", 1.0, 8, 8.0, 8192, *ODD])
    return table


def drawn(draw: random.Random) -> tuple[dict[str, Any], set[str]]:
    """A config.json of some family, and the fields in which it is not an ordinary one of it."""
    family = draw.choice(list(CONFIGS))
    sizes = [name for name in get_type_hints(FIELDS[family]) if name in ("vocab_size", "n_positions")]
    content: dict[str, Any] = {"model_type": family, **dict.fromkeys(sizes, 64)}
    if family == "gpt2":
        content |= {"n_embd": 32, "n_layer": 2, "n_head": 4}
    else:
        content |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        content |= {"num_key_value_heads": 2, "max_position_embeddings": 8192}
    if family == "deepseek_v3":
        content |= {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    changed = set()
    for _ in range(draw.choice([0, 1, 1, 2, 3, 6])):
        name = draw.choice(sorted({*known(family), "unheard_of", "model_type"}))
        changed.add(name)
        if draw.random() < 0.15:
            content.pop(name, None)
        elif name in ("rope_scaling", "rope_parameters") and draw.random() < 0.8:
            content[name] = drawn_rope(draw)
        else:
            content[name] = draw.choice(USUAL[name] if name in USUAL and draw.random() < 0.7 else ODD)
    return content, changed


def built(content: dict[str, Any]) -> PreTrainedConfig | None:
    """What transformers makes of the file, as its models read it."""
    try:
        config = CONFIGS[content["model_type"]].from_dict(copy.deepcopy(content))
        if hasattr(config, "rope_parameters"):
            config.standardize_rope_params()
    except Exception:  # noqa: BLE001 - whatever it refuses a file with
        return None
    return config


def assert_same(ours: Architecture, theirs: PreTrainedConfig) -> None:
    model, family = ours.model, theirs.model_type
    sizes = {"num_layers": "num_hidden_layers", "seq_length": "max_position_embeddings"}
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"):
        assert model[name] == getattr(theirs, sizes.get(name, name)), name
    assert (ours.family, ours.is_tied) == (family, theirs.tie_word_embeddings)
    if family == "deepseek_v3":
        assert_same_deepseek(ours, theirs)
        return
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    if family == "gpt2":
        assert model["norm_eps"] == theirs.layer_norm_epsilon
        assert model["ffn_hidden_size"] == (4 * theirs.n_embd if theirs.n_inner is None else theirs.n_inner)
        names = {"gelu_tanh": {"gelu_new", "gelu_pytorch_tanh"}, "gelu": {"gelu"}}
        assert theirs.activation_function in names[model["activation"]]
        return
    assert (model["ffn_hidden_size"], ours.num_query_groups) == (theirs.intermediate_size, theirs.num_key_value_heads)
    assert (model["norm_eps"], theirs.hidden_act) == (theirs.rms_norm_eps, "silu")
    assert_same_positions(ours, theirs)
    has_bias = family == "gpt_oss" or (family == "llama" and theirs.mlp_bias)
    assert model["linear_bias"] == (has_bias and theirs.attention_bias)
    if family == "gpt_oss":
        assert (theirs.swiglu_alpha, theirs.swiglu_limit) == (1.702, ours.megatron["activation_func_clamp_value"])
    if family == "qwen3_moe":
        assert model["expert_ffn_hidden_size"] == theirs.moe_intermediate_size
        assert ours.megatron.get("moe_router_pre_softmax", False) is not theirs.norm_topk_prob
        assert (theirs.mlp_only_layers, theirs.decoder_sparse_step, theirs.attention_bias) == ([], 1, False)
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        experts = (model["num_experts"], model["experts_per_token"])
        assert experts == (theirs.num_local_experts, theirs.num_experts_per_tok)
        assert family == "gpt_oss" or theirs.sliding_window is None


def assert_same_deepseek(ours: Architecture, theirs: PreTrainedConfig) -> None:
    written = config_json(ours, "float32")
    apart = {
        "architectures",
        "torch_dtype",
        "attention_dropout",
        "rope_theta",
        "rope_scaling",
        "num_nextn_predict_layers",
    }
    assert {name: getattr(theirs, name) for name in written.keys() - apart} == {
        name: written[name] for name in written.keys() - apart
    }
    assert ours.model["rope_base"] == float(theirs.rope_parameters["rope_theta"])
    assert_same_yarn(ours, theirs.rope_parameters)


def assert_same_yarn(ours: Architecture, theirs: dict[str, Any]) -> None:
    rope = {"beta_fast": 32, "beta_slow": 1, "truncate": True, **theirs}
    is_yarn = ours.megatron.get("rope_type") == "yarn"
    assert is_yarn == (rope["rope_type"] == "yarn")
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        rope |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    assert all(ours.megatron[field] == rope[name] for name, field in YARN.items() if is_yarn)


def assert_same_positions(ours: Architecture, theirs: PreTrainedConfig) -> None:
    rope, factor = theirs.rope_parameters, ours.model["rope_scaling_factor"]
    assert (ours.model["rope_base"], rope.get("partial_rotary_factor", 1.0)) == (float(rope["rope_theta"]), 1.0)
    assert_same_yarn(ours, rope)
    if rope["rope_type"] != "llama3":
        assert factor == 1.0
    else:
        assert {name: rope[name] for name in LLAMA3_CONSTANTS} == LLAMA3_CONSTANTS
        assert (rope["rope_type"], float(rope["factor"])) == ("llama3", factor)
    window, every = ours.model.get("sliding_window"), ours.megatron.get("window_attn_skip_freq", ours.num_layers + 1)
    if theirs.model_type in ("qwen2", "qwen3", "gpt_oss"):
        windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        layers = every if isinstance(every, list) else [number % every for number in range(1, ours.num_layers + 1)]
        assert windows == [window if has_window else None for has_window in layers]
    else:
        assert window is None


def test_drawn_files_are_what_transformers_builds_or_refused_by_the_name_of_a_field() -> None:
    draw = random.Random(39)
    refused, accepted, of_family = 0, 0, dict.fromkeys(CONFIGS, 0)
    for _ in range(2000):
        content, changed = drawn(draw)
        try:
            ours = architecture_in(content)
            token_ids_in(content, "config.json")
        except ValueError as error:
            message = str(error)
            assert message.isprintable(), message
            assert len(message) < 400
            assert any(name in message for name in changed), (message, changed)
            refused += 1
            continue
        if ours.num_layers > 1000:
            continue  # transformers lists them
        theirs = built({name: value for name, value in content.items() if name not in WITHOUT_EFFECT})
        assert theirs is not None, {name: content.get(name) for name in changed}
        assert_same(ours, theirs)
        accepted += 1
        of_family[content["model_type"]] += 1
    assert refused > 500
    assert accepted > 500
    assert min(of_family.values()) > 50


@pytest.mark.parametrize("family", CONFIGS)
def test_the_configuration_that_transformers_writes_by_default_is_read(family: str) -> None:
    theirs = CONFIGS[family]()
    assert_same(architecture_in(json.loads(theirs.to_json_string(use_diff=False))), theirs)
    assert_same(architecture_in({"model_type": family}), theirs)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, **LLAMA3_CONSTANTS}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 32.0}}, ("rope_scaling", "rope_parameters")),
        ({"rope_theta": 5e5, "rope_parameters": LLAMA3}, ("rope_parameters.rope_theta", "rope_theta=500000.0")),
        ({"rope_scaling": {**LLAMA3, "type": "linear"}}, ("rope_type='llama3'", "type='linear'")),
        (
            {"rope_parameters": LLAMA3, "original_max_position_embeddings": 4096},
            ("rope_parameters.original_max_position_embeddings=8192", "original_max_position_embeddings=4096"),
        ),
        ({"model_type": "gpt2", "n_embd": 768, "hidden_size": 16}, ("hidden_size=16", "n_embd=768")),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts": 4}, ("num_experts=4", "num_local_experts=8")),
    ],
)
def test_fields_that_contradict_each_other_are_both_named(changes: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="contradict each other") as error:
        architecture_in({"model_type": "llama", **changes})
    assert all(name in str(error.value) for name in names)
    agreeing = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3, "rope_theta": 10000, "model_type": "llama"}
    assert architecture_in(agreeing) == architecture_in({"model_type": "llama", "rope_parameters": LLAMA3})


def test_every_field_with_a_default_has_one_of_its_own_kind() -> None:
    for schema in FIELDS.values():
        kinds = get_type_hints(schema, include_extras=True)
        defaults = {field.name: field.default for field in fields(schema)}
        assert MISSING not in defaults.values()
        require_kinds(kinds, defaults, "")
