"""The terms of a program's loss: one backward pass per microbatch gives the gradient of the sum of their means."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer import MegatronModule
from torch.utils.checkpoint import checkpoint

from spare_megatron.config.program_file import LossTerm
from spare_megatron.config.schema import (
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ProgramConfig,
    ReduceConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.mcore.gradients.flat_gradients import ScatterRange
from spare_megatron.mcore.held_slabs import ReadyBuckets
from spare_megatron.mcore.loss_terms import LossTerms
from spare_megatron.mcore.model.model import checked
from tests.integration.mcore_group import run_group
from tests.integration.program_group import each_of, written

ONE_COUNT = "{'z': LossTerm(weight=0.3), 'hits': LossTerm()}"
LOSS = "'loss': ((output.square() * mask).sum(), count)"

EXACT = {
    "one count that varies, and a metric with another": (
        ONE_COUNT,
        f"count = mask.count_nonzero(); z = output.abs().sum(); return {{{LOSS}, 'z': (z, count), 'hits': (z, 12)}}",
    ),
    "two numbers in one ratio": (
        "{'z': LossTerm(weight=0.5)}",
        "return {'loss': (output.square().sum(), 12), 'z': (output.abs().sum(), 5)}",
    ),
    "one term": ("{}", f"count = mask.count_nonzero(); return {{{LOSS}}}"),
}
REFUSED = {
    "a number beside a count that varies": (
        "{'z': LossTerm(weight=0.5)}",
        f"count = mask.count_nonzero(); return {{{LOSS}, 'z': (output.abs().sum(), 5)}}",
        "return the count of 'loss' for both",
    ),
    "numbers in a ratio that varies": (
        "{'z': LossTerm(weight=0.5)}",
        "return {'loss': (output.sum(), 12), 'z': (output.sum(), 1 + context.first_sequence)}",
        "is not the same in all microbatches",
    ),
    "a term that is not declared": (
        "{}",
        "return {'loss': (output.sum(), 12), 'z': (output.sum(), 12)}",
        "forward_step returned the terms ['loss', 'z'], and loss_terms declares ['loss']",
    ),
    "a count of none": (
        "{'hits': LossTerm()}",
        "return {'loss': (output.sum(), 12), 'hits': (output.sum(), 2.5)}",
        "the count of 'hits' is 2.5",
    ),
}


def config_of(file: str, mode: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(seq_length=6, hidden_size=16, num_attention_heads=1),
        layout=LayoutConfig(num_groups=2),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=3),
        train=TrainConfig(steps=1, micro_batch_size=2),
        optimizer=OptimizerConfig(clip_grad=0.0),
        reduce=ReduceConfig(mode=mode),
        program=ProgramConfig(file=file),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What a rank found of each program in each mode of reduction, beside the reference; all in one process."""
    folder = tmp_path_factory.mktemp("programs")
    configs: dict[str, RunConfig] = {}
    for name, (declared, terms, *_) in {**EXACT, **REFUSED}.items():
        config = config_of(written(folder, name.replace(" ", "_"), declared, terms), "fast")
        configs[f"{name}, fast"] = config
        if name in EXACT:
            configs[f"{name}, reproducible"] = replace(config, reduce=ReduceConfig(mode="reproducible"))
    (answers,) = run_group(each_of, config, list(configs.values()))
    return dict(zip(configs, answers, strict=True))


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_the_means_over_the_global_batch(
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]], name: str, mode: str
) -> None:
    ours, reference = found[f"{name}, {mode}"]
    assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert ours["terms"] == pytest.approx(reference["terms"], rel=1e-5)
    assert ours["gradients"].keys() == reference["gradients"].keys()
    for parameter, gradient in reference["gradients"].items():
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose(ours["gradients"][parameter].reshape(gradient.shape), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_normaliser_that_is_not_known_before_the_backward_pass_is_refused(
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]], name: str
) -> None:
    assert REFUSED[name][2] in found[f"{name}, fast"][0]["error"]


def test_counts_in_another_ratio_in_another_group_are_refused_once_they_are_added() -> None:
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    declared = {"z": LossTerm(weight=0.5), "hits": LossTerm()}
    terms = LossTerms(config_of("program.py", "fast"), declared, groups, torch.device("cpu"))
    one = torch.tensor(1.0)
    assert float(terms.weighted({"loss": (one, 12), "z": (one, 4), "hits": (one, 1)})) == 1.0 + 0.5 * 3
    terms.check_totals(LossSum(0.0, 24), (LossSum(0.0, 8), LossSum(0.0, 5)))
    with pytest.raises(ValueError, match="24 to 9 over all groups"):
        terms.check_totals(LossSum(0.0, 24), (LossSum(0.0, 9), LossSum(0.0, 5)))


class OneStage(MegatronModule):
    def __init__(self, *, has_frozen: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.table = torch.nn.Parameter(torch.zeros(1), requires_grad=not has_frozen)


@pytest.mark.parametrize(
    ("model", "num_stages", "reason"),
    [
        (torch.nn.Linear(1, 1), 1, "model_provider returned Linear; return a subclass of MegatronModule"),
        (OneStage().requires_grad_(requires_grad=False), 1, "has no parameters to train in stage 0"),
        (OneStage(has_frozen=True), 1, "table of the model of model_provider has requires_grad=False; make"),
        (OneStage(), 2, "OneStage has no set_input_tensor and no pre_process and no share_embeddings"),
        (OneStage(), 1, ""),
    ],
)
def test_a_model_that_the_schedule_cannot_run_is_refused(model: Any, num_stages: int, reason: str) -> None:
    context: Any = SimpleNamespace(stage=0, num_stages=num_stages)
    if reason:
        with pytest.raises(ValueError, match=reason):
            checked(model, context)
    else:
        assert checked(model, context) is model


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_gradient_in_parts_is_refused_where_buckets_are_sent_early(*, is_reentrant: bool) -> None:
    """The first part was sent as the whole."""
    layer, reported = torch.nn.Linear(2, 2, bias=False), list[int]()
    node: Any = layer.weight.expand_as(layer.weight).grad_fn
    buffer = SimpleNamespace(grad_data=torch.zeros(4), param_index_map={layer.weight: (0, 4, 0)})
    module: Any = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], grad_accs=[node.next_functions[0][0]])
    module.named_parameters = layer.named_parameters
    chunk: Any = SimpleNamespace(module=module)
    values = torch.ones(2, requires_grad=True)
    for _ in range(2):
        values = checkpoint(layer, values, use_reentrant=is_reentrant)
    refused = pytest.raises(RuntimeError, match=r"^weight gets its gradient in parts .* set reduce\.overlap=false")
    with (
        refused if is_reentrant else nullcontext(),
        ReadyBuckets([chunk], [ScatterRange(start=0, stop=4)]).reporting(1, reported.append),
    ):
        values.sum().backward()
    assert reported == [1]
