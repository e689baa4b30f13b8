"""Groups that compute wrongly without losing precision: audits find them before the step is committed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.main import app
from spare_megatron.config.schema import AuditConfig, FaultConfig, LayoutConfig, RunConfig
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.journal.records import AuditRecord, FaultRecord
from tests.integration.whole_run import Run, complete_run, entries_of, losses_of, tiny_config

pytestmark = pytest.mark.timeout(180)

AUDITED = 2
"""The first step with audits."""


def audited(config: RunConfig) -> RunConfig:
    return replace(config, audit=AuditConfig(every_steps=AUDITED + 1))


def finished(config: RunConfig, run_dir: Path) -> Run:
    run = complete_run(audited(config), run_dir)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert run.summary.steps_committed == config.train.steps
    return run


@pytest.mark.parametrize("num_experts", [None, 4], ids=["dense", "experts"])
def test_a_lane_that_drifts_is_found_in_the_step(text_corpus: Path, tmp_path: Path, num_experts: int | None) -> None:
    """Whichever lane it is; the lanes that divide experts compute rows together, and the one that is wrong is named."""
    layout = LayoutConfig(num_groups=3, data_parallel=2)
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=AUDITED, group=1, rank=1, kind="drift")
    shape = {"num_experts": num_experts, "linear_bias": num_experts is None}
    config = tiny_config(text_corpus, layout, mode="reproducible", num_microbatches=4, faults=[fault], **shape)
    run = finished(config, tmp_path / "run")
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["drift"]
    fences = [entry for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    assert [(fence["group"], fence["is_outvoted"]) for fence in fences] == [(1, True)]
    assert "first wrong at stage 0, forward pass, rank 1" in fences[0]["reason"] or num_experts is None
    records = [record for record in run.journal.of(AuditRecord) if record.step == AUDITED]
    assert {record.num_added for record in records} >= {4}


def test_a_layer_that_drifts_is_found_in_the_step_and_leaves_the_bits_of_a_calm_run(
    text_corpus: Path, tmp_path: Path
) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    config = tiny_config(text_corpus, layout, mode="reproducible")
    calm = finished(config, tmp_path / "calm")
    records = [record for record in calm.journal.of(AuditRecord) if record.digests]
    assert {(record.group, record.step) for record in records} == {(group, AUDITED) for group in range(4)}
    assert all(record.num_added == config.spare.microbatches_per_shard for record in records)
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=AUDITED, group=2, rank=1, kind="drift")
    config = replace(config, faults=replace(config.faults, trace=(fault,)))
    run = finished(config, tmp_path / "run")
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["drift"]
    entries = [entry for entry in entries_of(run.journal) if entry["entry"] != "commit"]
    assert [entry["entry"] for entry in entries] == ["retry", "fence", "retry"]
    asked, fence, again = entries
    assert len(asked["disputes"]) == 2, "as the auditor and as the one audited"
    assert (fence["group"], fence["discard"], fence["is_outvoted"]) == (2, True, True)
    assert "agree on other values; first wrong at stage 1, forward pass, rank 1" in fence["reason"]
    assert again["recompute"]
    assert losses_of(run.journal) == losses_of(calm.journal)
    asked_for = CliRunner().invoke(app, ["audit", str(tmp_path / "run"), "--json"])
    found = json.loads(asked_for.output)
    assert asked_for.exit_code == 1
    assert [(one["group"], one["step"]) for one in found["culprits"]] == [(2, AUDITED)]
    assert (found["compared"], found["audited_steps"], found["halted"]) == (3, AUDITED + 1, "")
    assert {(one["shard"], one["index"]) for one in found["mismatches"]} == {
        tuple(one["microbatch"]) for one in asked["disputes"]
    }
    assert run.summary.params_sha256 == calm.summary.params_sha256
