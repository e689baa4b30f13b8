"""Microbatches with suspect losses: another group computes them before the step is committed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import AuditConfig, LayoutConfig
from spare_megatron.core.audits.suspects import LEAST_STEPS
from spare_megatron.driver.run import start_run
from spare_megatron.journal.records import SuspicionRecord
from tests.integration.suspect_rank import Spoiled, suspect_ranks
from tests.integration.whole_run import Run, entries_of, losses_of, read_run, tiny_config

pytestmark = pytest.mark.timeout(180)

UNUSUAL = Spoiled(step=LEAST_STEPS, shard=0)
FLEETING = Spoiled(step=LEAST_STEPS + 1, shard=1, group=1, is_transient=True)
LASTING = Spoiled(step=LEAST_STEPS + 2, shard=2, group=2)


def finished(corpus: Path, run_dir: Path, *spoiled: Spoiled, every_steps: int) -> Run:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    config = tiny_config(corpus, layout, steps=LEAST_STEPS + 4, mode="reproducible")
    reduce = replace(config.reduce, bucket_mib=0.05)
    config = replace(config, audit=AuditConfig(every_steps=every_steps), reduce=reduce)
    start_run(config, run_dir, lambda _: None, rank_main=suspect_ranks(*spoiled))
    run = read_run(config, run_dir, ())
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    return run


def test_suspects_are_computed_again_and_only_those_of_wrong_groups_cost_a_group(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Unusual data stay, and the step keeps its sum; a group with a wrong loss is fenced before the commit."""
    calm = finished(text_corpus, tmp_path / "calm", UNUSUAL, every_steps=0)
    assert [entry["entry"] for entry in entries_of(calm.journal)] == ["commit"] * (LEAST_STEPS + 4)
    [suspect] = calm.journal.of(SuspicionRecord)
    assert (suspect.step, suspect.shard, suspect.group) == (UNUSUAL.step, UNUSUAL.shard, 0)

    run = finished(text_corpus, tmp_path / "run", UNUSUAL, FLEETING, LASTING, every_steps=99)
    entries = [entry for entry in entries_of(run.journal) if entry["entry"] != "commit"]
    assert [(entry["entry"], entry.get("step")) for entry in entries] == [
        ("retry", UNUSUAL.step),
        *[("retry", FLEETING.step), ("fence", None), ("retry", FLEETING.step)],
        *[("retry", LASTING.step)] * 2,
        *[("fence", None), ("retry", LASTING.step)],
    ]
    unusual, fleeting, contradicts, anew, lasting, third, outvoted, again = entries
    assert all(number > 0 for number in unusual["kept"])
    assert (unusual["disputes"][0]["asked"], not unusual.get("recompute")) == ([1, 0], True)
    assert (contradicts["group"], "it contradicts itself" in contradicts["reason"]) == (1, True)
    assert (outvoted["group"], contradicts["discard"], outvoted["discard"]) == (2, True, True)
    assert "agree on other values; first wrong at stage 1, forward pass, rank 1" in outvoted["reason"]
    assert (anew["recompute"], again["recompute"], third["disputes"][0]["asked"]) == (True, True, [3])
    assert fleeting["disputes"][0]["statements"][0][0] == 1
    assert lasting["disputes"][0]["statements"][0][0] == 2

    assert losses_of(run.journal) == losses_of(calm.journal)
    assert run.summary.params_sha256 == calm.summary.params_sha256
    asked_for = CliRunner().invoke(app, ["audit", str(tmp_path / "run"), "--json"])
    found = json.loads(asked_for.output)
    assert [(one["group"], one["step"]) for one in found["culprits"]] == [(1, FLEETING.step), (2, LASTING.step)]
    assert {(one["step"], one["shard"]) for one in found["mismatches"]} == {(LASTING.step, LASTING.shard)}
    suspects = {(one["step"], one["shard"], one["is_data"], bool(one["samples"])) for one in found["suspects"]}
    assert suspects == {
        (UNUSUAL.step, UNUSUAL.shard, True, True),
        (FLEETING.step, FLEETING.shard, False, True),
        (LASTING.step, LASTING.shard, False, True),
    }
