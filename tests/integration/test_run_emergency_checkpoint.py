"""A run goes on from what ranks have saved by themselves, when the control store was gone for good."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.state.checkpoint.start_checkpoint import resumed
from tests.integration.whole_run import REPLICATED, Run, complete_run, losses_of, tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS, LOST_IN = 4, 2
LAYOUT = LayoutConfig(num_groups=2)
TERMS = {"steps": STEPS, "mode": "reproducible", "hidden_dropout": 0.1}


@pytest.fixture(scope="module")
def whole(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return complete_run(tiny_config(text_corpus, LAYOUT, **TERMS), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    ("lanes", "optimizer"),
    [(1, REPLICATED), (1, OptimizerConfig(sharding="stacked", redundancy=2)), (2, REPLICATED)],
    ids=["replicated", "stacked", "divided over lanes"],
)
def test_a_run_goes_on_bitwise_from_what_its_ranks_have_saved(
    text_corpus: Path, tmp_path: Path, whole: Run, lanes: int, optimizer: OptimizerConfig
) -> None:
    """The checkpoint after one step, which was taken before, is older."""
    fault = FaultConfig(phase=FaultPoint.BEFORE_REDUCE, step=LOST_IN, group=1, rank=0, kind="kill_store")
    config = tiny_config(text_corpus, replace(LAYOUT, data_parallel=lanes), **TERMS, optimizer=optimizer)
    saving = replace(config.checkpoint, interval_steps=1, asynchronous=False, folder=str(tmp_path / "shared"))
    config = replace(config, checkpoint=saving)
    lost = complete_run(replace(config, faults=replace(config.faults, trace=(fault,))), tmp_path / "lost")
    assert lost.summary.outcome == "failed"
    path = tmp_path / "shared" / f"step-{LOST_IN:08d}.state"
    assert f"the state is in {path}" in lost.summary.outcome_reason

    run = complete_run(resumed(config, tmp_path / "shared"), tmp_path / "resumed")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    [record] = run.journal.of(RunRecord)
    assert record.first_step == LOST_IN
    assert losses_of(run.journal) == {step: losses_of(whole.journal)[step] for step in range(LOST_IN, STEPS)}
    if lanes == 1:  # otherwise it is of another number of ranks
        assert run.summary.params_sha256 == whole.summary.params_sha256
