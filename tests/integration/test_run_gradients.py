"""What a run commits while groups are killed in every phase, against one process that holds the full model."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.faults.points import FaultPoint
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch, dump_file
from tests.integration.whole_run import assert_masked, complete_run, kill, patched_in, retries_of, tiny_config

COMPUTE = (FaultPoint.FORWARD, FaultPoint.BACKWARD)
TRANSFER = (FaultPoint.SEND, FaultPoint.RECEIVE)
AGREE = (FaultPoint.BEFORE_REDUCE, FaultPoint.IN_REDUCE, FaultPoint.AFTER_REDUCE, FaultPoint.AFTER_VOTE)
SUM_IS_COMPLETE = (FaultPoint.AFTER_REDUCE, FaultPoint.AFTER_VOTE)
"""Once all survivors hold the sum, which the victim is made to wait for, the loss costs no microbatch."""

CASES = {
    "one_rank": (LayoutConfig(num_groups=8), (*COMPUTE, *AGREE)),
    "tensor_compute": (LayoutConfig(num_groups=4, tensor_parallel=2), (*COMPUTE, FaultPoint.BEFORE_REDUCE)),
    "tensor_agree": (LayoutConfig(num_groups=4, tensor_parallel=2), AGREE[1:]),
    "stages_compute": (LayoutConfig(num_groups=5, pipeline_parallel=2), (*COMPUTE, *TRANSFER)),
    "stages_agree": (LayoutConfig(num_groups=5, pipeline_parallel=2), AGREE),
    "both_compute": (LayoutConfig(num_groups=3, tensor_parallel=2, pipeline_parallel=2), COMPUTE),
    "both_transfer": (LayoutConfig(num_groups=3, tensor_parallel=2, pipeline_parallel=2), TRANSFER),
    "both_before": (LayoutConfig(num_groups=3, tensor_parallel=2, pipeline_parallel=2), AGREE[:2]),
    "both_after": (LayoutConfig(num_groups=3, tensor_parallel=2, pipeline_parallel=2), AGREE[2:]),
}
UNTIED = ("one_rank", "tensor_agree", "stages_compute", "both_transfer", "both_after")
"""Each layout is there with and without tied embeddings, which make no difference to the phases of a loss."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("case", "is_tied"),
    [("one_rank", True), *((case, case not in UNTIED) for case in CASES)],
    ids=lambda value: value if isinstance(value, str) else "tied" if value else "untied",
)
def test_gradients_committed_after_a_loss_are_those_of_the_full_model(
    text_corpus: Path, tmp_path: Path, case: str, is_tied: bool
) -> None:
    """Step 0 loses nothing; each later step loses a group in the next phase, hit in another of its ranks."""
    layout, phases = CASES[case]
    num_ranks = layout.tensor_parallel * layout.pipeline_parallel
    faults = [kill(phase, index + 1, index, index % num_ranks) for index, phase in enumerate(phases)]
    config = tiny_config(text_corpus, layout, steps=len(phases) + 2, faults=faults, tie_embeddings=is_tied)
    if layout.tensor_parallel > 1:  # padded to 512, so that the second rank has more padding than tokens
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=300))
    after = frozenset((f.group, f.step, f.phase) for f in faults if f.phase in SUM_IS_COMPLETE)
    steps = range(config.train.steps)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(steps), after_other_votes=after))
    assert_masked(run)
    assert_exact(run, steps)
    for fault in faults:
        is_free = fault.phase in SUM_IS_COMPLETE
        assert (retries_of(run.journal)[fault.step] == 0) == is_free, fault
        assert (patched_in(run.journal)[fault.step] == 0) == is_free, fault


@pytest.mark.timeout(150)
def test_the_comparison_sees_gradients_that_are_off_by_a_hundred_thousandth(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=1)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset({0})))
    assert_exact(run, [0])
    for group in range(2):
        file = dump_file(run.run_dir, 0, group, 0)
        with np.load(file) as saved:
            arrays = {key: saved[key] * np.float32(1.00001) if "gradient/" in key else saved[key] for key in saved}
        np.savez(file, **arrays)
    with pytest.raises(AssertionError, match="from those of the full model"):
        assert_exact(run, [0])
