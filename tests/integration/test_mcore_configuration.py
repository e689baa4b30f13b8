"""A run's configuration in Megatron's terms: what is passed on, and what is refused before it trains wrong."""

import ast
import dataclasses
import importlib.util
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.requirements import Requirement

import spare_megatron.devices.gpu
from spare_megatron.comm import nccl
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.megatron_fields import COUNTED_WITH, FUNCTION_IN_MEGATRON
from spare_megatron.config.model.model_tensors import padded_vocab_size
from spare_megatron.config.schema import LayoutConfig, ModelConfig, ReduceConfig, RunConfig
from spare_megatron.config.supported_versions import SUPPORTED, check_version, supported
from spare_megatron.mcore.gradients.fixed_point import fixed_point
from spare_megatron.mcore.model import compatibility, rng
from spare_megatron.mcore.model import model as model_module
from spare_megatron.mcore.model.attention import TorchCoreAttention
from spare_megatron.mcore.model.model import (
    DETERMINISTIC_ALGORITHMS,
    choose_deterministic_kernels,
    kernels_of,
    layer_spec,
)
from spare_megatron.mcore.model.transformer import FIELDS, fits, transformer_config
from spare_megatron.rank.bootstrap import choose_device
from spare_megatron.tools.bench.plain_megatron import transfers

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def with_megatron(**megatron: Any) -> RunConfig:
    return RunConfig(megatron=megatron)


# ----------------------------------------------------------------------------------------------------- the versions


@pytest.mark.parametrize(
    ("package", "installed"),
    [
        *(("megatron-core", version) for version in (None, "0.15.3", "0.16.0", "0.20.0", "1.16.1", "0.16.0rc1")),
        *(("torch", version) for version in (None, "2.10.2", "2.16.0", "2.16.0a0+git1234")),
        *(("transformer-engine", version) for version in (None, "1.13.0", "2.8.0", "2.21.0")),
    ],
)
def test_other_versions_are_refused_with_the_remedy(package: str, installed: str | None) -> None:
    with pytest.raises(ImportError, match=rf"pip install '{package}>=\d"):
        check_version(package, installed)


@pytest.mark.parametrize(
    ("package", "installed"),
    [
        *(("megatron-core", version) for version in ("0.16.1", "0.16.2+cu128", "0.16.10", "0.19.2")),
        *(("torch", version) for version in ("2.11.0+cu130", "2.13.0a0+nv26.1", "2.15.0+cu132")),
        *(("transformer-engine", version) for version in ("2.9.0", "2.11+abc")),
    ],
)
def test_supported_versions_are_accepted(package: str, installed: str) -> None:
    check_version(package, installed)


def test_what_is_checked_is_what_is_asked_for_when_it_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["gpu"], *extras["muon"], f"Python{project['requires-python']}"]
    ranges = [text.partition(";")[0] for text in asked]  # without what they depend on
    wanted = {text.partition(">=")[0].partition("[")[0]: ">=" + text.partition(">=")[2] for text in ranges}
    packages = SUPPORTED.keys() - {"NCCL", "RCCL"}  # they come with torch
    # One extra for all versions of megatron-core, of which 0.16 takes the fewest.
    checked = {package: str(supported(package, "0.16.1")) for package in packages}
    assert checked == {package: wanted[package] for package in packages}


def test_transformer_engine_is_of_the_versions_that_megatron_core_asks_for() -> None:
    """It was of any from 2.0 on; Megatron calls what some of them do not have. From 0.17 on it names none."""
    (asked,) = [Requirement(text) for text in requires("megatron-core") or () if text.startswith("transformer-engine")]
    ours = Requirement(f"transformer-engine{supported('transformer-engine')}")
    theirs = asked if asked.specifier else Requirement("transformer-engine>=2.9,<2.21")
    versions = ("2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.20.1", "2.21.0", "3.0.0")
    assert [version in ours.specifier for version in versions] == [version in theirs.specifier for version in versions]


@pytest.mark.parametrize("installed", ["2.25.1", "2.28.3", "2.28.8", "3.0.1"])
def test_another_nccl_is_refused_with_where_it_comes_from(installed: str) -> None:
    text = rf"NCCL {installed} is installed.*>=2\.26,<3 except >=2\.28\.3,<2\.28\.9: it comes with torch"
    with pytest.raises(ImportError, match=text):
        check_version("NCCL", installed)


@pytest.mark.parametrize("installed", ["2.26.0", "2.28.2", "2.28.9", "2.30.7.1"])
def test_nccl_before_and_after_the_releases_that_crash_is_accepted(installed: str) -> None:
    check_version("NCCL", installed)


def test_the_table_of_versions_in_the_docs_is_that_of_the_code() -> None:
    rows = ["| | supported | because |", "| --- | --- | --- |"]
    for package, newest in SUPPORTED.items():
        ranges = {package: newest}
        if package == "transformer-engine":
            with_0_16 = {f"{package}, with megatron-core 0.16": supported(package, "0.16.1")}
            ranges = with_0_16 | {f"{package}, with later ones": newest}
        for name, wanted in ranges.items():
            gap = f", except {wanted.except_for[0]} to before {wanted.except_for[1]}" if wanted.except_for else ""
            rows.append(f"| {name} | {wanted.first} to before {wanted.before}{gap} | {wanted.reasons} |")
    table = "\n".join(rows)
    assert f"\n\n{table}\n\n" in (ROOT / "docs/gpu.md").read_text(), f"put into docs/gpu.md:\n{table}"


# ------------------------------------------------------------------------------------------------------- the fields


def test_megatrons_fields_are_passed_on_in_its_own_spelling() -> None:
    fields = {"init_method_std": 0.5, "normalization": "RMSNorm", "add_bias_linear": False, "bias_dropout_fusion": True}
    built = transformer_config(with_megatron(**fields), CPU)
    assert {key: getattr(built, key) for key in fields} == fields


def test_names_stand_for_functions_and_enumerations() -> None:
    built = transformer_config(with_megatron(activation_func="silu", attention_backend="fused"), CPU)
    assert built.activation_func is F.silu
    assert built.attention_backend is AttnBackend.fused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_method_sdt": 0.5}, r"megatron\.init_method_sdt is not a field .* did you mean init_method_std"),
        ({"q_lora_rnk": 4}, r"megatron\.q_lora_rnk is not a field of .* did you mean q_lora_rank"),
        ({"attention_backend": "quick"}, "is none of flash, fused, unfused, local, auto; set one of them"),
        ({"num_layers": 2}, r"follows from model\.num_layers"),
        ({"finalize_model_grads_func": "x"}, "after the commit"),
        ({"num_moe_experts": 8}, r"follows from model\.num_experts"),
        ({"moe_aux_loss_coeff": 0.1}, "has no effect without experts"),
        ({"mtp_num_layers": 1}, r"has no effect without model\.position_embedding=rope"),
        ({"mtp_loss_scaling_factor": 0.3}, r"has no effect without megatron\.mtp_num_layers"),
        ({"mtp_use_repeated_layer": True}, "checked here in Megatron's usual form alone"),
        ({"multi_latent_attention": True}, r"has no effect without model\.position_embedding=rope"),
        ({"kv_lora_rank": 4}, r"has no effect without megatron\.multi_latent_attention; remove it, or set that"),
        ({"rotary_percent": 0.5}, r"has no effect without model\.position_embedding=rope"),
        ({"defer_embedding_wgrad_compute": True}, "a patch is a second one"),
        ({"cuda_graph_impl": "local"}, "a patch has another number of microbatches than the graph"),
        ({"qk_l2_norm": True}, "would be ignored"),
        ({"linear_attention_freq": 2}, "would be ignored"),
        ({"attention_backend": "flush"}, "did you mean flash"),
        ({"activation_func": "gelo"}, "not an elementwise function of torch"),
        ({"activation_func": "conv2d"}, "not an elementwise function of torch.nn.functional; try gelu"),
        ({"activation_func": "torch"}, "not an elementwise function of torch"),
        ({"activation_func": 3}, r"megatron\.activation_func=3 must be a function"),
        ({"attention_backend": 1}, r"megatron\.attention_backend=1 must be one of flash, fused, unfused, local, auto"),
        ({"init_method_std": "0.02"}, r"megatron\.init_method_std='0\.02' must be a number; change it"),
        ({"add_bias_linear": 0}, r"megatron\.add_bias_linear=0 must be true or false"),
        ({"kv_channels": 16.0}, r"megatron\.kv_channels=16\.0 must be a whole number"),
        ({"normalization": "LayerNorn"}, r"megatron\.normalization='LayerNorn' must be one of LayerNorm, RMSNorm"),
        (
            {"recompute_granularity": "selective", "recompute_modules": "mlp"},
            r"megatron\.recompute_modules='mlp' must be a list \(each a string\)",
        ),
        ({"window_size": [1]}, r"megatron\.window_size=\[1\] must be the number of tokens before and 0"),
        ({"activation_func": "dropout"}, "not an elementwise function"),
        ({"activation_func": "softmax"}, "not an elementwise function"),
        ({"init_method": "normal"}, r"megatron\.init_method=normal cannot be had: a preset has no functions"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer_config(with_megatron(**fields), CPU)


def test_what_megatron_refuses_is_one_line_that_names_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run showed a traceback of Megatron's."""
    config = RunConfig(model=ModelConfig(position_embedding="rope"), megatron={"no_rope_freq": 3})
    with pytest.raises(ValueError, match=r"^megatron-core refuses megatron\.no_rope_freq=3: .*divisible") as found:
        transformer_config(config, CPU)
    assert "\n" not in str(found.value)

    def refuse(_: TransformerConfig) -> None:
        raise AssertionError

    monkeypatch.setattr(TransformerConfig, "__post_init__", refuse)
    with pytest.raises(ValueError, match=r"no_rope_freq=3: raise AssertionError; change it"):
        transformer_config(config, CPU)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_only_transformer_engine_heeds_is_refused_with_other_layers(device: str) -> None:
    """They trained without such layers, and nothing was reported."""
    config = RunConfig(model=ModelConfig(transformer_impl="local", position_embedding="rope"))
    config = replace(config, megatron={"fused_single_qkv_rope": True})
    transformer = transformer_config(config, torch.device(device))
    with pytest.raises(ValueError, match=r"megatron\.fused_single_qkv_rope=.*only layers of transformer-engine"):
        layer_spec(config, transformer, torch.device(device))


@pytest.mark.parametrize("field", ["sequence_parallel", "layernorm_zero_centered_gamma"])
def test_what_norms_of_torch_refuse_is_refused_before_one_is_built(field: str) -> None:
    """Ranks ended with an assertion deep inside Megatron, where neither apex nor transformer-engine is."""
    gpu, layout = torch.device("cuda"), LayoutConfig(tensor_parallel=2)
    norm = {"normalization": "RMSNorm"}  # torch's also where apex is installed
    config = RunConfig(model=ModelConfig(transformer_impl="local"), layout=layout, megatron={**norm, field: True})
    with pytest.raises(ValueError, match=rf"^megatron\.{field}=true: .* install 'transformer-engine>=2\.9,<2\."):
        layer_spec(config, transformer_config(config, gpu), gpu)
    without = dataclasses.replace(config, megatron=norm)
    layer_spec(without, transformer_config(without, gpu), gpu)


def test_kernels_are_named_with_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "HAVE_TE", False)
    monkeypatch.setattr(model_module, "USING_PYTORCH_OPTIMIZER", True)
    config = with_megatron(bias_dropout_fusion=True, bias_activation_fusion=False)
    assert kernels_of(config, CPU) == {"layers": "megatron-core", "adam": "torch", "fusions": "bias_dropout_fusion"}
    found = kernels_of(RunConfig(), torch.device("cuda"))
    assert found["layers"] == "megatron-core (transformer-engine is not installed)"
    assert found["fusions"] == "none"


def test_what_is_counted_with_before_megatron_is_there_has_megatrons_types() -> None:
    types = {name: field.type for name, field in FIELDS.items()}
    for key, kind in COUNTED_WITH.items():
        example = {bool: True, int: 1, str: {"recompute_granularity": "full"}.get(key, "RMSNorm")}[kind]
        assert fits(example, types[key]), key
        others = [value for value in (True, 1, "text", 1.5) if type(value) is not kind]
        assert not any(fits(value, types[key]) for value in others), key


def test_fields_that_say_which_model_it_is_have_megatrons_defaults() -> None:
    defaults = {name: field.default for name, field in FIELDS.items()}
    theirs = {name: defaults[name] for name in FUNCTION_IN_MEGATRON}
    assert theirs | {"activation_func": theirs["activation_func"].__name__} == FUNCTION_IN_MEGATRON


def test_the_fp8_recipe_that_is_refused_is_megatrons_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    assert defaults["fp8_recipe"] == "delayed"
    found = problems(with_megatron(fp8="hybrid"), MachineResources(num_gpus=8, num_cores=8, has_corpus=True))
    assert any("megatron.fp8_recipe=delayed, the default" in text for text in found)


@pytest.mark.parametrize(("device", "overlaps"), [("cuda", True), ("cpu", False)])
def test_plain_megatron_overlaps_its_transfers_on_gpus_whatever_ours_do(device: str, overlaps: bool) -> None:
    """It reduced after the backward pass wherever ours did, and gathered parameters before the next step."""
    for mode, is_fp32 in (("fast", True), ("fast_bf16", False)):
        chosen = transfers(RunConfig(reduce=ReduceConfig(mode=mode)), torch.device(device), is_sharded=True)
        assert (chosen.overlap_grad_reduce, chosen.overlap_param_gather) == (overlaps, overlaps)
        assert chosen.bucket_size is None
        assert chosen.grad_reduce_in_fp32 is is_fp32


def test_megatrons_defaults_fit_its_types() -> None:
    """Else a value that Megatron takes could not be set."""
    unfit = {
        field.name
        for field in dataclasses.fields(TransformerConfig)
        if field.default not in (None, dataclasses.MISSING) and not fits(field.default, field.type)
    }
    assert unfit == set()


def test_the_interleaved_schedule_never_batches_its_transfers() -> None:
    layout = LayoutConfig(pipeline_parallel=2, virtual_pipeline=2)
    assert transformer_config(RunConfig(layout=layout), CPU).batch_p2p_comm is False
    # Both transfers of a batch go to the same rank when there are two stages: gradients were wrong, without an error.
    with pytest.raises(ValueError, match="corrupts gradients"):
        transformer_config(RunConfig(layout=layout, megatron={"batch_p2p_comm": True}), CPU)
    with pytest.raises(ValueError, match=r"needs layout\.pipeline_parallel > 1"):
        transformer_config(RunConfig(layout=LayoutConfig(virtual_pipeline=2)), CPU)


def test_outputs_that_are_still_sent_are_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's schedule before 0.18 frees them, and the next stage may receive other values."""
    chunks = LayoutConfig(pipeline_parallel=2, virtual_pipeline=2)
    freeing = RunConfig(layout=chunks, megatron={"deallocate_pipeline_outputs": True})
    for version in ("0.16.1", "0.17.1"):
        monkeypatch.setattr(compatibility, "installed_version", lambda _, version=version: version)
        with pytest.raises(ValueError, match=r"^megatron\.deallocate_pipeline_outputs=true frees outputs .* 0\.18 or"):
            transformer_config(freeing, CPU)
        assert transformer_config(replace(freeing, layout=LayoutConfig(pipeline_parallel=2)), CPU)
    monkeypatch.setattr(compatibility, "installed_version", lambda _: "0.18.0")
    assert transformer_config(freeing, CPU).deallocate_pipeline_outputs


@pytest.mark.parametrize(
    "field",
    [{"gradient_accumulation_fusion": True}, {"cross_entropy_loss_fusion": True}],
    ids=lambda field: next(iter(field)),
)
def test_what_does_not_depend_on_the_microbatch_alone_is_refused_in_reproducible_mode(field: dict[str, Any]) -> None:
    config = RunConfig(reduce=ReduceConfig(mode="reproducible"), megatron=field)
    with pytest.raises(ValueError, match=rf"megatron\.{next(iter(field))}=.*set reduce\.mode=fast"):
        transformer_config(config, CPU)


def test_gpus_initialize_on_the_gpu_and_are_set_to_be_deterministic() -> None:
    reproducible = RunConfig(reduce=ReduceConfig(mode="reproducible"), model=ModelConfig(precision="bf16"))
    gpu = transformer_config(reproducible, torch.device("cuda"))
    assert (gpu.use_cpu_initialization, gpu.deterministic_mode) == (False, True)
    assert gpu.params_dtype is gpu.pipeline_dtype is torch.bfloat16
    cpu = transformer_config(reproducible, CPU)
    assert (cpu.use_cpu_initialization, cpu.deterministic_mode) == (True, False)


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what `choose_deterministic_kernels` sets."""
    for name in DETERMINISTIC:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}


@pytest.mark.usefixtures("_as_before")
def test_gpu_kernels_repeat_their_results_in_reproducible_mode_alone() -> None:
    """Nothing asked for them: attention's backward pass on a GPU gave other bits each time."""
    choose_deterministic_kernels(RunConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    assert not DETERMINISTIC.keys() & os.environ.keys()

    reproducible = RunConfig(reduce=ReduceConfig(mode="reproducible"))
    choose_deterministic_kernels(reproducible)
    # With warnings alone, torch's attention stays as it is.
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert {name: os.environ.get(name) for name in DETERMINISTIC} == {**DETERMINISTIC, "NCCL_ALGO": None}
    choose_deterministic_kernels(replace(reproducible, layout=LayoutConfig(tensor_parallel=2)))
    assert {name: os.environ.get(name) for name in DETERMINISTIC} == DETERMINISTIC


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("algorithm", "is_refused"),
    [
        ("CollnetDirect, Ring", False),
        ("^NVLS", False),
        ("Tree", True),
        ("Ring,Tree", True),
        ("allreduce:tree", True),
        ("", True),
    ],
)
def test_algorithms_of_the_site_must_repeat_sums_in_reproducible_mode(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, is_refused: bool
) -> None:
    """A site's NCCL_ALGO=Tree was taken as it is, and two runs differed without a word."""
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    alone = RunConfig(reduce=ReduceConfig(mode="reproducible"))
    choose_deterministic_kernels(alone)  # it sums integers alone
    wide = replace(alone, layout=LayoutConfig(tensor_parallel=2))
    choose_deterministic_kernels(replace(wide, reduce=ReduceConfig(mode="fast")))
    message = rf"NCCL_ALGO={re.escape(algorithm)} is set .*CollnetChain, CollnetDirect, Ring, \^NVLS.*unset NCCL_ALGO"
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        choose_deterministic_kernels(wide)
    assert os.environ["NCCL_ALGO"] == algorithm


def test_deterministic_algorithms_are_those_of_megatron() -> None:
    found = importlib.util.find_spec("megatron.training")
    file = Path(found.origin).with_name("determinism.py") if found and found.origin else None
    if file is None or not file.exists():
        pytest.skip("this megatron-core comes without megatron.training.determinism")
    (names,) = re.findall(r"ACCEPTED_NCCL_ALGO_TOKENS: .*frozenset\((\{.*\})\)", file.read_text())
    assert ast.literal_eval(names) == DETERMINISTIC_ALGORITHMS


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_a_rank_on_a_gpu_chooses_its_kernels_first_of_all(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """cuBLAS and NCCL read their settings once."""
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(nccl, "check_nccl", lambda: None)
    monkeypatch.setattr(
        spare_megatron.devices.gpu,
        "set_device",
        lambda _: seen.append((torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ)),
    )
    config = RunConfig(reduce=ReduceConfig(mode=mode))
    assert choose_device(config, "cuda:0", 0) == torch.device("cuda:0")
    assert seen == [(mode == "reproducible", mode == "reproducible")]


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "padded"), [(256, 1, 256), (256, 2, 256), (257, 1, 384), (1, 4, 512)]
)
def test_the_vocabulary_is_padded_for_every_tensor_rank(size: int, tensor_parallel: int, padded: int) -> None:
    assert padded_vocab_size(size, tensor_parallel) == padded


def test_layers_that_need_a_gpu_are_refused_without_one() -> None:
    config = RunConfig(model=ModelConfig(transformer_impl="transformer_engine"))
    with pytest.raises(ValueError, match=r"needs GPUs .* set it to auto or local"):
        layer_spec(config, transformer_config(config, CPU), CPU)


# ------------------------------------------------------------------------------------------------- small machinery


def test_fixed_point_cannot_overflow_and_uses_what_there_is() -> None:
    for num_tokens, num_microbatches in [(1, 1), (128, 16), (100, 17), (8192, 2048)]:
        fixed = fixed_point(num_tokens, num_microbatches)
        assert num_microbatches * fixed.largest <= 2.0**62
        assert fixed.largest / fixed.scale >= 2.0**12 * num_tokens
        assert 2 * num_microbatches * fixed.largest > 2.0**62
        # At the precision of the mean gradient per token.
        assert 1.0 / (fixed.scale * num_tokens) < 2.0**-37


def test_random_numbers_depend_on_the_work_and_the_stage_alone() -> None:
    def draw(step: int, number: int, stage: int) -> float:
        rng.seed_microbatch(7, step, number, stage, 0, CPU)
        return float(torch.rand(()))

    addresses = [(step, number, stage) for step in range(2) for number in range(4) for stage in range(2)]
    drawn = [draw(*address) for address in addresses]
    assert len(set(drawn)) == len(addresses)
    assert [draw(*address) for address in reversed(addresses)] == drawn[::-1]


@pytest.mark.parametrize("num_key_heads", [4, 2], ids=["one key per head", "grouped queries"])
def test_attention_is_causal_softmax_attention(num_key_heads: int) -> None:
    config = transformer_config(RunConfig(), CPU)
    groups = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0), cp=SimpleNamespace(size=lambda: 1))
    attention = TorchCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(6, 2, heads, 16, generator=generator) for heads in (4, num_key_heads, num_key_heads)
    )
    every_key, every_value = (tensor.repeat_interleave(4 // num_key_heads, dim=2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, every_key) / 4.0
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), every_value).reshape(6, 2, 64)
    torch.testing.assert_close(attention(query, key, value, None), expected)
