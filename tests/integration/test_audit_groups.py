"""Groups played by the ranks of one: what the benchmark of audits counts as a false alarm is seen if there is one."""

from pathlib import Path
from random import Random

import pytest

from benchmarks.audit_groups import Case, Played, PlayedGroups
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration.mcore_group import run_ranks
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS = 12


def play(config: RunConfig, case: Case | None) -> Played:
    return PlayedGroups(config, seed=5).through_losses(0, STEPS, Random(5), case)


@pytest.mark.parametrize("kind", ["", "drift"])
def test_steps_through_losses_show_a_dispute_exactly_if_a_layer_drifts(text_corpus: Path, kind: str) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), redundancy=3, mode="reproducible", steps=STEPS)
    prepare_index(config)
    case = Case(step=0, group=2, rank=0, kind=kind, bit=0) if kind else None
    (played,) = run_ranks(1, play, config, case, timeout_s=60.0)
    assert (played.num_steps, played.num_losses > 0, played.num_compared > 0) == (STEPS, True, True)
    assert played.num_disputes == 0 if case is None else played.num_disputes > 0
    assert {int(fence.group) for fence in played.fences} == ({2} if case else set())
