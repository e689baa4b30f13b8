"""Our optimizers, with whole and with partitioned state, against Megatron's own optimizer and scheduler."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, ParameterRule
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import optimizer_group as group
from tests.integration.mcore_group import run_group, update_several
from tests.integration.whole_run import tiny_config

STEPS = 50


def test_50_steps_are_those_of_megatrons_optimizer_and_scheduler_bit_for_bit(text_corpus: Path) -> None:
    """With two schedules, one of them with rates by parameter, which Megatron has as overrides of its own making."""
    settings = OptimizerConfig(learning_rate=3e-3, min_learning_rate=1e-4, warmup_steps=5, clip_grad=0.05)
    rules = (
        ParameterRule(pattern="decoder.layers.1.mlp.*", learning_rate_factor=0.5),
        ParameterRule(pattern="*.mlp.*", learning_rate_factor=0.0),
        ParameterRule(
            pattern="embedding.*", learning_rate_factor=0.25, min_learning_rate_factor=0.5, weight_decay_factor=0.0
        ),
        ParameterRule(pattern="*layernorm.weight", weight_decay_factor=2.0),
        ParameterRule(pattern="*.linear_proj.bias", weight_decay_factor=1.0),
    )
    wsd = replace(settings, decay_style="wsd", wsd_decay_steps=20, wsd_decay_style="minus_sqrt", rules=rules)
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=STEPS)
    prepare_index(config)
    (found,) = run_group(
        group.train_three_ways,
        config,
        [
            (wsd, {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "minus_sqrt"}, True),
            (replace(settings, decay_style="inverse_square_root"), {"lr_decay_style": "inverse-square-root"}, False),
        ],
        STEPS,
    )
    ends = []
    for whole, stacked, megatron in found:
        assert whole.rates == stacked.rates == megatron.rates
        assert len(set(megatron.rates)) > 20
        for name, values in megatron.values.items():
            assert np.array_equal(whole.values[name], values), name
            assert np.array_equal(stacked.values[name], values), name
        ends.append(megatron.values)
    with_rules, without = ends
    assert with_rules.keys() == without.keys()
    assert not any(np.array_equal(with_rules[name], without[name]) for name in without)
    assert not with_rules["decoder.layers.0.mlp.linear_fc2.bias"].any()
    assert with_rules["decoder.layers.1.mlp.linear_fc2.bias"].all()


def test_both_copies_of_a_tied_table_have_the_rule_of_the_embedding(text_corpus: Path) -> None:
    """The last stage has one as its output layer; a rule for that name would make them differ."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2, pipeline_parallel=2), steps=3)
    rules = (
        ParameterRule(pattern="embedding.word_embeddings.*", learning_rate_factor=0.25),
        ParameterRule(pattern="*", learning_rate_factor=2.0),
    )
    config = replace(config, optimizer=OptimizerConfig(rules=rules))
    prepare_index(config)
    first, last = run_group(update_several, config, 3)
    tables = [values["embedding.word_embeddings.weight"] for values in first]
    assert not np.array_equal(tables[0], tables[-1])
    for table, values in zip(tables, last, strict=True):
        assert np.array_equal(table, values["output_layer.weight"])
