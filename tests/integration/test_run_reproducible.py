"""Runs of one seed end with the same bits, and every gradient is that of the full model."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ParamsRecord
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch, dump_file
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    kill,
    losses_of,
    params_of,
    patched_in,
    retries_of,
    tiny_config,
)

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
STAGES = LayoutConfig(num_groups=4, pipeline_parallel=2)
BOTH = LayoutConfig(num_groups=3, tensor_parallel=2, pipeline_parallel=2)

FAULTS_OF_STAGES: dict[str, list[FaultConfig]] = {
    "two in one step": [kill("backward", 1, 0, 1), kill("before_reduce", 1, 3)],
    "both ends of a transfer in one step": [kill("send", 1, 2), kill("receive", 1, 1, 1)],
}
FAULTS_OF_BOTH: dict[str, list[FaultConfig]] = {
    "one after another": [kill("receive", 1, 0, 2), kill("in_reduce", 2, 2, 3)],
    "two in one step": [kill("forward", 2, 1, 1), kill("send", 2, 2)],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "cases"), [(STAGES, FAULTS_OF_STAGES), (BOTH, FAULTS_OF_BOTH)], ids=["stages", "both"]
)
def test_losses_and_parameters_are_bitwise_those_of_the_run_without_failures(
    text_corpus: Path,
    tmp_path: Path,
    fault_free: FaultFreeRuns,
    layout: LayoutConfig,
    cases: dict[str, list[FaultConfig]],
) -> None:
    expected = fault_free(reproducible(text_corpus, layout))
    assert len({record.digest for record in expected.journal.of(ParamsRecord)}) == expected.config.train.steps + 1
    for number, faults in enumerate(cases.values()):
        run = run_of(reproducible(text_corpus, layout, faults), tmp_path / str(number))
        assert losses_of(run.journal) == losses_of(expected.journal)
        assert params_of(run) == params_of(expected)
        assert run.summary.params_sha256 == expected.summary.params_sha256
        assert sum(patched_in(run.journal).values()) > 0


@pytest.mark.timeout(120)
def test_stack_granularity_too_ends_with_the_bits_of_the_run_without_failures(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    config = reproducible(text_corpus, LayoutConfig(num_groups=4), [kill("backward", 1, 1)], granularity="stack")
    expected, run = fault_free(config), run_of(config, tmp_path / "faults")
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert run.summary.params_sha256 == expected.summary.params_sha256


@pytest.mark.timeout(120)
def test_fast_mode_without_failures_repeats_itself(text_corpus: Path, tmp_path: Path) -> None:
    """Unless work is dealt by the paces of a busy machine: sums depend on who adds what."""
    config = tiny_config(text_corpus, STAGES, **DROPOUT)
    config = replace(config, spare=replace(config.spare, deal_by_pace=False))
    one, other = (complete_run(config, tmp_path / name) for name in ("one", "other"))
    for run in (one, other):
        assert_masked(run)
    assert losses_of(one.journal) == losses_of(other.journal)
    assert one.summary.params_sha256 == other.summary.params_sha256


def reproducible(
    corpus: Path, layout: LayoutConfig, faults: Sequence[FaultConfig] = (), granularity: str = "microbatch"
) -> RunConfig:
    return tiny_config(corpus, layout, steps=5, faults=faults, mode="reproducible", granularity=granularity, **DROPOUT)


def run_of(config: RunConfig, run_dir: Path) -> Run:
    run = complete_run(config, run_dir)
    assert_masked(run)
    assert all(len(applied) == 1 for applied in losses_of(run.journal).values())
    return run


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
