"""Runs of one seed end with the same bits, whatever is lost, also amid the buckets of a reduction."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.core.log.bucket_window import MAX_STAGED
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, ParamsRecord, VoteRecord
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.reference import assert_exact
from tests.integration.test_run_corruption import wrong
from tests.integration.watched_rank import Watch, dump_file
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    entries_of,
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


def bucketed(
    corpus: Path,
    faults: Sequence[FaultConfig] = (),
    *,
    mode: str = "reproducible",
    layout: LayoutConfig = STAGES,
    overlap: bool = False,
    **settings: Any,
) -> RunConfig:
    config = tiny_config(corpus, layout, steps=5, faults=faults, mode=mode, **DROPOUT, **settings)
    bucket_mib = 1 / 128 if mode == "reproducible" else 1 / 256
    # No rank stops here without dying, and a busy machine shall not make one look so.
    config = replace(config, control=replace(config.control, heartbeat_interval_s=4.0))
    return replace(config, reduce=replace(config.reduce, bucket_mib=bucket_mib, overlap=overlap))


def run_through(config: RunConfig, run_dir: Path, dump_steps: Sequence[int] = ()) -> Run:
    run = complete_run(config, run_dir, Watch(dump_steps=frozenset(dump_steps)), holds_back=False)
    assert run.summary.verdict == "valid", run.summary.reasons
    return run


def kept_by(run: Run) -> dict[int, list[list[int]]]:
    """Step -> what each retry of it kept."""
    kept: dict[int, list[list[int]]] = {}
    for entry in entries_of(run.journal):
        if entry["entry"] == "retry":
            kept.setdefault(entry["step"], []).append(list(entry["kept"]))
    return kept


@pytest.mark.timeout(120)
def test_buckets_that_all_survivors_hold_are_kept_and_the_bits_are_those_of_the_run_without_failures(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    """Of one bucket."""
    expected = fault_free(bucketed(text_corpus))
    faults = [
        kill(FaultPoint.IN_REDUCE, 1, 1, 1),
        kill(FaultPoint.IN_REDUCE, 2, 2, 0),
        kill(FaultPoint.PATCH, 2, 0, 1),
    ]
    for overlap in (False, True):
        run = run_through(bucketed(text_corpus, faults, overlap=overlap), tmp_path / f"faults-{overlap}")
        assert_masked(run)
        assert_kept(run)
        assert losses_of(run.journal) == losses_of(expected.journal)
        assert params_of(run) == params_of(expected)


def assert_kept(run: Run) -> None:
    first, second = kept_by(run)[1], kept_by(run)[2]
    assert len(first) == 1
    num_buckets = max(vote.num_complete[1] for vote in run.journal.of(VoteRecord))
    middle = num_buckets // 2
    assert middle > MAX_STAGED
    # It dies when it has posted the middle one. Then at most that and MAX_STAGED - 1 before it are not complete on all,
    # and no rank ever completes what comes after.
    assert middle - MAX_STAGED < first[0][1] <= middle + 1
    assert len(second) == 2, "the first loss, and the one in its patch"
    assert 0 < second[0][0] <= second[1][0]
    assert patched_in(run.journal)[2] > patched_in(run.journal)[1] > 0
    assert any(record.kept for record in run.journal.of(ContributionRecord))


@pytest.mark.timeout(120)
def test_float_sums_of_buckets_kept_and_reduced_again_are_the_gradient_of_the_whole_batch(
    text_corpus: Path, tmp_path: Path
) -> None:
    faults = [kill(FaultPoint.IN_REDUCE, 1, 1, 1), kill(FaultPoint.IN_REDUCE, 3, 2, 0)]
    config = bucketed(text_corpus, faults, mode="fast")
    config = replace(config, model=replace(config.model, hidden_dropout=0.0, attention_dropout=0.0))
    run = run_through(config, tmp_path / "run", range(5))
    assert_masked(run)
    assert_exact(run, range(5))
    assert all(max(kept[0]) > 0 for kept in kept_by(run).values())
    assert kept_by(run).keys() == {1, 3}


@pytest.mark.timeout(120)
def test_sums_in_bf16_count_more_microbatches_than_bf16_can(text_corpus: Path, tmp_path: Path) -> None:
    """261 of them, which it would round to 260."""
    faults = [kill(FaultPoint.IN_REDUCE, 1, 1)]
    settings = {"num_microbatches": 87, "precision": "bf16"}
    for lanes, overlap in ((1, False), (2, True)):
        layout = LayoutConfig(num_groups=3, data_parallel=lanes)
        config = bucketed(text_corpus, faults, mode="fast_bf16", overlap=overlap, layout=layout, **settings)
        config = replace(config, train=replace(config.train, steps=2))
        run = run_through(config, tmp_path / f"overlap-{overlap}")
        assert_masked(run)
        assert max(kept_by(run)[1][0]) > 0
        [(loss, _)] = losses_of(run.journal)[0]
        assert loss == pytest.approx(math.log(256), rel=0.1)


@pytest.mark.timeout(120)
def test_a_discarded_step_is_computed_again_though_its_sums_stand_where_local_sums_were(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    layout = LayoutConfig(num_groups=4)
    expected = fault_free(bucketed(text_corpus, layout=layout))
    fault = wrong("param_flip", FaultPoint.AFTER_COMMIT, 1, 3, bit=10)
    run = run_through(bucketed(text_corpus, [fault], layout=layout), tmp_path / "run")
    [retry] = [entry for entry in entries_of(run.journal) if entry["entry"] == "retry"]
    assert (retry["step"], retry["recompute"], retry["kept"]) == (2, True, [])
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert run.summary.params_sha256 == expected.summary.params_sha256


@pytest.mark.timeout(120)
def test_a_gradient_that_is_not_a_number_costs_its_group_also_where_buckets_leave_early(
    text_corpus: Path, tmp_path: Path
) -> None:
    faults = [wrong("nan", FaultPoint.BACKWARD, 1, 2, 1), wrong("nan", FaultPoint.BEFORE_REDUCE, 3, 0, 0)]
    config = bucketed(text_corpus, faults, mode="fast", overlap=True)
    config = replace(config, model=replace(config.model, hidden_dropout=0.0, attention_dropout=0.0))
    run = run_through(config, tmp_path / "run", range(5))
    assert run.summary.outcome == "finished"
    assert_exact(run, range(5))
    reasons = {entry["group"]: entry["error"] for entry in entries_of(run.journal) if entry["entry"] == "fence"}
    assert reasons.keys() == {0, 2}
    assert all("is not finite" in reason for reason in reasons.values())
    assert_survivors_received_it(run)


@pytest.mark.timeout(120)
def test_sums_that_arrive_unsound_leave_the_bits_of_the_run_without_faults(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    expected = fault_free(bucketed(text_corpus))
    faults = [wrong("nan", FaultPoint.BACKWARD, 1, 2, 1), wrong("nan", FaultPoint.BEFORE_REDUCE, 3, 0, 0)]
    run = run_through(bucketed(text_corpus, faults, overlap=True), tmp_path / "run")
    assert_survivors_received_it(run)
    assert {step: len(kept) for step, kept in kept_by(run).items()} == {1: 1, 3: 1}
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert params_of(run) == params_of(expected)


def assert_survivors_received_it(run: Run) -> None:
    """A vote on a failed attempt says so: no survivor needed to be torn off by the loss."""
    evidence = [vote.evidence for vote in run.journal.of(VoteRecord) if not vote.is_complete]
    assert any(re.fullmatch(r"bucket \d+: the gradients of 1 groups are unsound", text) for text in evidence), evidence
