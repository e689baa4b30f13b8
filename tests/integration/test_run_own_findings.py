"""Groups whose own checks find their numbers wrong, in whole runs; what the checks find is made up."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import AuditConfig, ClusterConfig, LayoutConfig
from spare_megatron.driver.run import start_run
from spare_megatron.journal.records import AuditRecord, DisputeRecord, PlacesRecord, VoteRecord
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank, train_step
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.whole_run import Run, entries_of, losses_of, read_run, tiny_config

pytestmark = pytest.mark.timeout(180)

STEP = 1
TEXT = "the product of layer 1"


def run_finding_rank(found: Mapping[tuple[int, int], str], spec: RankSpec, reports: Connection) -> None:
    """In step `STEP` these ranks (group, rank) have found something."""
    text, outcome_of = found.get((spec.group, spec.rank), ""), train_step._outcome

    def outcome(ctx: Any, parts: Any, action: Any) -> Any:
        return replace(outcome_of(ctx, parts, action), wrong_numbers=text if action.step == STEP else "")

    train_step._outcome = outcome
    rank.run_rank(spec, reports)


def run_with(corpus: Path, run_dir: Path, found: Mapping[tuple[int, int], str]) -> Run:
    """Three groups of two machines each."""
    config = tiny_config(
        corpus,
        LayoutConfig(num_groups=3, pipeline_parallel=2),
        mode="reproducible",
        cluster=ClusterConfig(device="cpu", num_nodes=6),
    )
    config = replace(config, audit=AuditConfig(every_steps=99))
    start_run(config, run_dir, lambda _: None, rank_main=partial(run_finding_rank, found))
    return read_run(config, run_dir, ())


def test_a_group_that_finds_itself_wrong_is_fenced_with_its_machine_and_no_bit_changes(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    run = run_with(text_corpus, tmp_path / "run", {(1, 1): TEXT})
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    fence, again = [entry for entry in entries_of(run.journal) if entry["entry"] != "commit"]
    assert fence["reason"] == f"its own checks found wrong numbers: rank 1: {TEXT}"
    assert (fence["group"], fence["discard"], fence["is_outvoted"], fence["wrong_positions"]) == (1, True, True, [1])
    assert (again["step"], again["recompute"], again["disputes"]) == (STEP, True, [])
    [evidence] = [vote.evidence for vote in run.journal.of(VoteRecord) if vote.evidence]
    assert evidence == f"own checks found wrong numbers: rank 1: {TEXT}"
    quarantined = [one for record in run.journal.of(PlacesRecord) for one in record.quarantined]
    assert {(machine, cause) for machine, cause, _ in quarantined} == {(3, "outvoted")}
    assert run.journal.of(DisputeRecord) == []
    calm = fault_free(run.config)
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert run.summary.params_sha256 == calm.summary.params_sha256
    assert run.summary.spoiled is not None
    last = [record for record in run.journal.of(AuditRecord) if record.digests]
    assert {(record.step, record.group) for record in last} == {(run.config.train.steps - 1, group) for group in (0, 2)}
    asked_for = CliRunner().invoke(app, ["audit", str(tmp_path / "run")])
    assert asked_for.exit_code == 1
    assert f"step {STEP}: group 1 (incarnation 0) fenced: {fence['reason']}" in asked_for.output


def test_two_groups_that_find_themselves_wrong_in_a_step_halt_the_run(text_corpus: Path, tmp_path: Path) -> None:
    run = run_with(text_corpus, tmp_path / "run", {(0, 0): "a sum", (2, 1): TEXT})
    assert run.summary.outcome == "halted"
    assert f"group 0: rank 0: a sum; group 2: rank 1: {TEXT}" in run.summary.outcome_reason
    assert run.summary.steps_committed == STEP
    assert "halted: own checks found wrong numbers" in CliRunner().invoke(app, ["audit", str(tmp_path / "run")]).output
