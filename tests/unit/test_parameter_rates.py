"""Rates by parameter: rules as TOML and on the command line, and the names that they fit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from spare_megatron.config.loader import dump_run_config, load_run_config
from spare_megatron.config.model.model_tensors import parameter_names, rule_of
from spare_megatron.config.schema import ParameterRule, RunConfig
from spare_megatron.mcore.optimizer.optimizer import names_for_rules

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
