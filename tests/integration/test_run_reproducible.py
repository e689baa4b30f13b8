"""Runs of one seed end with the same bits, whichever groups are lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.journal.records import ParamsRecord
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    kill,
    losses_of,
    params_of,
    patched_in,
    tiny_config,
)

pytestmark = pytest.mark.timeout(120)

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


def test_stack_granularity_too_ends_with_the_bits_of_the_run_without_failures(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    config = reproducible(text_corpus, LayoutConfig(num_groups=4), [kill("backward", 1, 1)], granularity="stack")
    expected, run = fault_free(config), run_of(config, tmp_path / "faults")
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert run.summary.params_sha256 == expected.summary.params_sha256


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
