"""Copies of state partitions, made in the background over the wire while training goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration.mcore_group import run_group
from tests.integration.repair_group import repair_while_training
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)


def stacked_config(corpus: Path, **settings: str) -> RunConfig:
    config = tiny_config(corpus, LayoutConfig(num_groups=3), steps=1000, **settings)
    config = replace(config, optimizer=replace(config.optimizer, sharding="stacked"))
    prepare_index(config)
    return config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_made_while_training_are_those_of_the_donor(text_corpus: Path, precision: str) -> None:
    config = stacked_config(text_corpus, precision=precision)
    (figures,) = run_group(repair_while_training, config, 500, 1e9)
    assert figures["partitions"] == 2
    assert figures["pieces"] > 10
    assert figures["steps"] >= 1
