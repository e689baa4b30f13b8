"""Our optimizers, with whole and with partitioned state, against Megatron's own optimizer and scheduler."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig
from spare_megatron.mcore.data import prepare_index
from tests.integration import optimizer_group as group
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

STEPS = 50


def test_50_steps_are_those_of_megatrons_optimizer_and_scheduler_bit_for_bit(text_corpus: Path) -> None:
    settings = OptimizerConfig(learning_rate=3e-3, min_learning_rate=1e-4, warmup_steps=5, clip_grad=0.05)
    schedules = [
        replace(settings, decay_style="wsd", wsd_decay_steps=20, wsd_decay_style="minus_sqrt"),
        replace(settings, decay_style="inverse_square_root"),
    ]
    schedulers = [
        {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "minus_sqrt"},
        {"lr_decay_style": "inverse-square-root"},
    ]
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=STEPS)
    prepare_index(config)
    configs = [replace(config, optimizer=schedule) for schedule in schedules]
    (found,) = run_group(group.train_three_ways, configs[0], configs, schedulers, STEPS)
    ends = []
    for whole, stacked, megatron in found:
        assert whole.rates == stacked.rates == megatron.rates
        assert len(set(megatron.rates)) > 20
        for name, values in megatron.values.items():
            assert np.array_equal(whole.values[name], values), name
            assert np.array_equal(stacked.values[name], values), name
        ends.append(megatron.values["decoder.final_layernorm.weight"])
    assert not np.array_equal(*ends)
