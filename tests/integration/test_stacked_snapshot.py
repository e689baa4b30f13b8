"""Snapshots of optimizer state in partitions: a group that begins with one goes on in the same bits."""

from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig
from tests.integration import snapshot_groups as snapshots
from tests.integration.mcore_group import run_group
from tests.integration.test_stacked_checkpoint import config_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_snapshot_requested_before_the_parameters_are_there_has_them(text_corpus: Path, precision: str) -> None:
    config = config_of(text_corpus, LayoutConfig(num_groups=3), precision=precision)
    ((answers, records),) = run_group(snapshots.go_on_from_memory, config, 2, 3)
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == 1
    assert [(record.group, record.is_kept, record.has_params) for record in records] == [
        (0, True, True),
        (1, True, False),
        (2, True, False),
    ]
    assert sorted(number for record in records for number in record.slices) == [0, 1, 2]
