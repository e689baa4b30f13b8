"""Learning rate and weight decay of every step against Megatron's scheduler, and by parameter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from spare_megatron.config.loader import dump_run_config, load_run_config
from spare_megatron.config.model.model_tensors import parameter_names, rule_of
from spare_megatron.config.schema import OptimizerConfig, ParameterRule, RunConfig, TrainConfig
from spare_megatron.mcore.optimizer.optimizer import make_schedule, names_for_rules

PEAK, LEAST, WEIGHT_DECAY, WARMUP, STEPS = 3e-3, 2e-4, 0.1, 7, 50

DECAYS = {
    "inverse_square_root": ({}, {"lr_decay_style": "inverse-square-root"}),
    "cosine": ({"decay_steps": 40}, {"lr_decay_style": "cosine", "lr_decay_steps": 40}),
} | {
    f"wsd, {shape}": (
        {"wsd_decay_steps": 15, "wsd_decay_style": shape, "decay_steps": end},
        {"lr_decay_style": "WSD", "wsd_decay_steps": 15, "lr_wsd_decay_style": shape, "lr_decay_steps": end or STEPS},
    )
    for shape, end in {"exponential": None, "linear": 45, "cosine": None, "minus_sqrt": 50}.items()
}


@pytest.mark.parametrize("style", DECAYS)
def test_every_step_has_the_rates_of_megatrons_scheduler(style: str) -> None:
    ours, theirs = DECAYS[style]
    settings = OptimizerConfig(
        learning_rate=PEAK,
        min_learning_rate=LEAST,
        weight_decay=WEIGHT_DECAY,
        warmup_steps=WARMUP,
        decay_style=style.partition(",")[0],
        **ours,
    )
    config = RunConfig(optimizer=settings, train=TrainConfig(steps=STEPS))
    found = rates(make_schedule(config, some_optimizer()))
    arguments: dict[str, Any] = {"lr_decay_steps": STEPS, **theirs}
    scheduler = OptimizerParamScheduler(
        some_optimizer(),
        init_lr=0.0,
        max_lr=PEAK,
        min_lr=LEAST,
        lr_warmup_steps=WARMUP,
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=1000,
        wd_incr_style="constant",
        **arguments,
    )
    expected = rates(scheduler)
    assert found == expected
    assert len({rate for rate, _ in expected[WARMUP:]}) > 10
    assert max(expected)[0] == PEAK


@pytest.mark.parametrize("shape", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_a_run_that_is_extended_in_its_stable_part_goes_on_at_the_peak(shape: str) -> None:
    """The reason for wsd: only the decay has to know where the training ends."""

    def of_run(steps: int) -> list[float]:
        settings = OptimizerConfig(
            learning_rate=PEAK, warmup_steps=WARMUP, decay_style="wsd", wsd_decay_steps=10, wsd_decay_style=shape
        )
        config = RunConfig(optimizer=settings, train=TrainConfig(steps=steps))
        return [rate for rate, _ in rates(make_schedule(config, some_optimizer()))]

    shorter, longer = of_run(30), of_run(45)
    assert shorter[:21] == longer[:21]
    assert set(longer[WARMUP:36]) == {PEAK}
    assert shorter[20:31] == longer[35:46]
    assert shorter[30] == pytest.approx(1e-5)


def some_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(schedule: OptimizerParamScheduler) -> list[tuple[float, float]]:
    """Learning rate and weight decay at each step, and at one more."""
    found = []
    for _ in range(STEPS + 1):
        (group,) = schedule.optimizer.param_groups
        found.append((group["lr"], group["weight_decay"]))
        schedule.step(increment=1)
    return found


RULES = (ParameterRule(pattern="embedding.*", learning_rate_factor=0.5), ParameterRule(pattern="*"))


def test_rules_are_read_from_both_and_survive_the_file_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[optimizer.rules]]\npattern = "embedding.*"\nlearning_rate_factor = 0.5\n[[optimizer.rules]]\npattern = "*"\n'
    )
    set_rules = 'optimizer.rules=[{pattern="embedding.*", learning_rate_factor=0.5}, {pattern="*"}]'
    for config in (load_run_config(file).config, load_run_config(None, [set_rules]).config):
        assert config.optimizer.rules == RULES
        file.write_text(dump_run_config(config))
        assert load_run_config(file).config == config


def test_the_first_rule_that_fits_counts() -> None:
    names = list(parameter_names(RunConfig()))
    assert [rule_of(name, RULES) for name in names[:3]] == [RULES[0], RULES[0], RULES[1]]
    assert rule_of(names[2], RULES[:1]) is None


def test_norms_that_transformer_engine_fuses_have_the_names_that_they_have_elsewhere() -> None:
    """The second layer of a model, on a stage that begins with it."""

    def module(**parts: Any) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    def linear(*kinds: str) -> torch.nn.Module:
        parameters = {kind: torch.nn.Parameter(torch.zeros(1)) for kind in kinds}
        for parameter in parameters.values():
            parameter.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
        return module(**parameters)

    layer = module(
        layer_number=2,
        self_attention=module(linear_qkv=linear("layer_norm_weight", "weight"), q_layernorm=linear("weight")),
        mlp=module(linear_fc1=linear("layer_norm_weight", "layer_norm_bias", "weight")),
    )
    model = GPTModel.__new__(GPTModel)  # without its constructor, which needs process groups
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(mtp_num_layers=None)
    model.decoder = module(layers=torch.nn.ModuleList([layer]))
    model.pre_process = model.share_embeddings_and_output_weights = False
    chunk: Any = SimpleNamespace(module=model, is_first=False, is_last=True)
    found = {name.removeprefix("decoder.layers.1.") for name, _ in names_for_rules([chunk])}
    assert found == {
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.bias",
        "mlp.linear_fc1.weight",
    }
