"""Groups that compute wrongly: found by audits, by suspect losses, and by their own checks."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config, load_run_config
from spare_megatron.config.schema import AuditConfig, ClusterConfig, FaultConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import SnapshotConfig
from spare_megatron.core.audits.suspects import LEAST_STEPS
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.proofs.audit_history import UndoneSteps
from spare_megatron.journal.records import (
    AuditRecord,
    ContributionRecord,
    DisputeRecord,
    FaultRecord,
    PlacesRecord,
    RestartRecord,
    SuspicionRecord,
    UpdateRecord,
    VoteRecord,
)
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank, train_step
from spare_megatron.state.checkpoint.audited_checkpoints import go_back_to_audited
from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints
from spare_megatron.state.checkpoint.start_checkpoint import resumed
from spare_megatron.state.checkpoint.verification import read_manifest, refusal_of
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.suspect_rank import Spoiled, suspect_ranks
from tests.integration.whole_run import Run, complete_run, entries_of, losses_of, read_run, tiny_config

AUDITED = 2
"""The first step with audits."""


def audited(config: RunConfig) -> RunConfig:
    return replace(config, audit=AuditConfig(every_steps=AUDITED + 1))


def finished(config: RunConfig, run_dir: Path) -> Run:
    run = complete_run(audited(config), run_dir)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert run.summary.steps_committed == config.train.steps
    return run


@pytest.mark.timeout(300)
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
    found = json.loads(
        CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "--step", str(AUDITED), "--json"]).output
    )
    assert found["is_confirmed"]
    differing = {group["group"] for one in found["microbatches"] for group in one["groups"] if not group["agrees"]}
    assert differing == {1}
    for one in found["microbatches"]:
        assert one["number"] == 4 * one["shard"] + config.row_size * one["index"]
        assert len(one["samples"]) == config.row_size * config.train.micro_batch_size


@pytest.mark.timeout(300)
def test_a_layer_that_drifts_is_found_in_the_step_and_leaves_the_bits_of_a_calm_run(
    text_corpus: Path, tmp_path: Path
) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    config = tiny_config(text_corpus, layout, mode="reproducible")
    calm = finished(config, tmp_path / "calm")
    records = [record for record in calm.journal.of(AuditRecord) if record.digests]
    audited_in = {AUDITED, config.train.steps - 1}
    assert {(record.group, record.step) for record in records} == {(g, step) for g in range(4) for step in audited_in}
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
    assert run.summary.spoiled is not None
    last_attempts = [
        r for r in run.journal.of(ContributionRecord) if r.step == AUDITED and r.attempt > again["attempt"]
    ]
    again_by_group = {r.group: sum(map(len, r.microbatches.values())) for r in last_attempts}
    assert sorted(again_by_group) == [0, 1, 3]
    assert run.summary.microbatches_recomputed == sum(again_by_group.values()), (
        "the whole step, and not what it grew by"
    )
    assert losses_of(run.journal) == losses_of(calm.journal)
    asked_for = CliRunner().invoke(app, ["audit", str(tmp_path / "run"), "--json"])
    found = json.loads(asked_for.output)
    assert asked_for.exit_code == 1
    assert [(one["group"], one["step"]) for one in found["culprits"]] == [(2, AUDITED)]
    assert (found["compared"], found["audited_steps"], found["halted"]) == (3 * len(audited_in), 0, "")
    assert {(one["shard"], one["index"]) for one in found["mismatches"]} == {
        tuple(one["microbatch"]) for one in asked["disputes"]
    }
    assert run.summary.params_sha256 == calm.summary.params_sha256
    found = replay_names_the_culprit(run, tmp_path / "run", {tuple(one["microbatch"]) for one in asked["disputes"]})
    machines_of_a_group_replay_the_same(tmp_path / "run", found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_lanes", [1, 2], ids=["one lane", "state divided over lanes"])
def test_steps_that_a_group_has_spoiled_are_undone_and_computed_again(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns, num_lanes: int
) -> None:
    """In place, from memory: the snapshot of audited steps is older than the newest one, which holds a wrong step."""
    begins, found_in = AUDITED + 1, 2 * AUDITED + 1
    layout = LayoutConfig(num_groups=3 + (num_lanes == 1), data_parallel=num_lanes)
    config = audited(tiny_config(text_corpus, layout, steps=8, mode="reproducible", num_microbatches=2 * num_lanes))
    checkpoint = replace(config.checkpoint, folder=str(tmp_path / "kept"), interval_steps=1, keep_last=1)
    config = replace(config, checkpoint=checkpoint, snapshot=SnapshotConfig(every_steps=2))
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=begins, group=2, kind="drift")
    run = complete_run(replace(config, faults=replace(config.faults, trace=(fault,))), tmp_path / "run")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["drift"]
    [undo] = [entry for entry in entries_of(run.journal) if entry["entry"] == "undo"]
    assert undo["step"] == AUDITED
    assert run.summary.undone == (UndoneSteps(first=AUDITED, end=found_in, groups=[2]),)
    assert (run.summary.spoiled, run.summary.steps_lost, run.summary.restarts) == (None, found_in - AUDITED, 0)
    went_back = {(record.group, record.is_undo) for record in run.journal.of(RestartRecord)}
    assert went_back == {(group, True) for group in range(layout.num_groups) if group != 2}
    calm = fault_free(config)
    assert run.summary.params_sha256 == calm.summary.params_sha256
    updates = sorted(run.journal.of(UpdateRecord), key=lambda record: record.attempt)
    last = {record.step: {(record.loss, record.grad_norm)} for record in updates}
    assert last == losses_of(calm.journal)
    manifests = [read_manifest(one) for one in all_checkpoints(tmp_path / "kept") if not refusal_of(one)]
    assert max(manifest.step for manifest in manifests) == config.train.steps
    assert all(manifest.epoch for manifest in manifests if manifest.step > AUDITED), "saved since the fence"
    text = f"steps {AUDITED} to {found_in - 1} were undone and computed again without group 2"
    for command in ("audit", "check"):
        assert text in CliRunner().invoke(app, [command, str(tmp_path / "run")]).output
    assert "goes back to the snapshot" in CliRunner().invoke(app, ["status", str(tmp_path / "run")]).output


@pytest.mark.timeout(300)
def test_a_training_that_goes_back_to_the_newest_audited_checkpoint_ends_as_if_nothing_had_been_wrong(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    """Group 2 spoils a step before the next audit finds it, and all later checkpoints hold that."""
    begins, found_in = AUDITED + 2, 2 * AUDITED + 1
    config = audited(tiny_config(text_corpus, LayoutConfig(num_groups=3), steps=7, mode="reproducible"))
    config = replace(
        config, checkpoint=replace(config.checkpoint, folder=str(tmp_path / "kept"), interval_steps=1, keep_last=1)
    )
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=begins, group=2, kind="drift")
    spoiled = complete_run(replace(config, faults=replace(config.faults, trace=(fault,))), tmp_path / "spoiled")
    assert (spoiled.summary.outcome, spoiled.summary.verdict) == ("finished", "valid"), spoiled.summary
    assert [record.kind for record in spoiled.journal.of(FaultRecord)] == ["drift"]
    [fence] = [entry for entry in entries_of(spoiled.journal) if entry["entry"] == "fence"]
    assert (fence["group"], fence["is_outvoted"]) == (2, True)
    calm = fault_free(config)
    assert spoiled.summary.params_sha256 != calm.summary.params_sha256
    listed = json.loads(CliRunner().invoke(app, ["checkpoint", "list", config.checkpoint.folder, "--json"]).output)
    assert [(one["step"], one["audited_steps"]) for one in listed if one["is_audited"]] == [(AUDITED + 1, AUDITED + 1)]
    assert max(one["step"] for one in listed) == config.train.steps
    assert {one["audited_steps"] for one in listed if one["step"] > found_in} == {AUDITED + 1}, "though all have agreed"
    history = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path / "spoiled"), "--json"]).output)
    assert history["audited_steps"] == AUDITED + 1
    expected = {"audited_steps": AUDITED + 1, "num_steps": config.train.steps, "groups": [2]}
    status = json.loads(CliRunner().invoke(app, ["status", str(tmp_path / "spoiled"), "--json"]).output)
    assert history["spoiled"] == status["spoiled"] == asdict(spoiled.summary.spoiled) == expected
    line = f"the first {AUDITED + 1} of {config.train.steps} steps are audited; what group 2 computed since is in the"
    for command in ("status", "audit"):
        assert line in CliRunner().invoke(app, [command, str(tmp_path / "spoiled")]).output
    went_back = go_back_to_audited(Path(config.checkpoint.folder), config)
    assert went_back is not None
    run = complete_run(resumed(config, Path(config.checkpoint.folder)), tmp_path / "again")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert run.summary.steps_committed == config.train.steps - AUDITED - 1
    assert run.summary.params_sha256 == calm.summary.params_sha256


def replay_names_the_culprit(run: Run, run_dir: Path, disputed: set[tuple[int, int]]) -> dict[str, Any]:
    [saved] = run.journal.of(DisputeRecord)
    assert (saved.step, saved.outcome, saved.reason) == (AUDITED, "saved", "")
    assert saved.group != 2, "another group can save what is right"
    asked_for = CliRunner().invoke(app, ["replay", str(run_dir), "--step", str(AUDITED), "--json"])
    assert asked_for.exit_code == 0, asked_for.output
    found = json.loads(asked_for.output)
    assert found["is_confirmed"]
    assert len(found["params"]) == 4
    assert len(set(found["params"].values())) == 1
    assert {(one["shard"], one["index"]) for one in found["microbatches"]} == disputed
    for one in found["microbatches"]:
        assert {(kind, stage) for kind, stage, _, _ in one["boundaries"]} == {
            (kind, stage) for kind in ("forward", "backward", "gradients") for stage in (0, 1)
        }
        differing = [(group["group"], group["differs_at"]) for group in one["groups"] if not group["agrees"]]
        assert differing == [(2, "stage 1, forward pass, rank 1")]
        assert len(one["groups"]) == 3
    for arguments, message in (
        (["--step", "0"], f"choose one whose parameters were saved: {AUDITED}"),
        (
            ["--step", str(AUDITED), "--microbatch", "0.7"],
            "--microbatch=0.7 is not in dispute in step 2; choose one",
        ),
    ):
        refused = CliRunner().invoke(app, ["replay", str(run_dir), *arguments])
        assert (refused.exit_code, message in refused.output) == (2, True), refused.output
    return found  # type: ignore[no-any-return]


def machines_of_a_group_replay_the_same(run_dir: Path, found: dict[str, Any]) -> None:
    """As if each rank had had a machine of its own, started by hand: two processes compute a stage each."""
    config = load_run_config(run_dir / "config.toml").config
    cluster = replace(config.cluster, num_nodes=config.parallel.num_ranks, launcher="hand")
    (run_dir / "config.toml").write_text(dump_run_config(replace(config, cluster=cluster)))
    command = [sys.executable, "-m", "spare_megatron", "replay", str(run_dir), "--node", "5"]
    other = subprocess.Popen(command)
    try:
        words = ["replay", str(run_dir), "--step", str(AUDITED), "--group", "2", "--json"]
        asked_for = CliRunner().invoke(app, words)
        assert asked_for.exit_code == 0, asked_for.output
        assert f"on node 5: spare replay {run_dir} --node 5" in asked_for.stderr
        assert other.wait(20.0) == 0
    finally:
        other.kill()
        other.wait()
    host = socket.gethostname()
    machines = [{"node": node, "host": host} for node in (4, 5)]
    assert json.loads(asked_for.stdout) == {**found, "group": 2, "machines": machines}


UNUSUAL = Spoiled(step=LEAST_STEPS, shard=0)
FLEETING = Spoiled(step=LEAST_STEPS + 1, shard=1, group=1, is_transient=True)
LASTING = Spoiled(step=LEAST_STEPS + 2, shard=2, group=2)


def finished_with_suspects(corpus: Path, run_dir: Path, *spoiled: Spoiled, every_steps: int) -> Run:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    config = tiny_config(corpus, layout, steps=LEAST_STEPS + 4, mode="reproducible")
    reduce = replace(config.reduce, bucket_mib=0.05)
    config = replace(config, audit=AuditConfig(every_steps=every_steps), reduce=reduce)
    start_run(config, run_dir, lambda _: None, rank_main=suspect_ranks(*spoiled))
    run = read_run(config, run_dir, ())
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    return run


@pytest.mark.timeout(180)
def test_suspects_are_computed_again_and_only_those_of_wrong_groups_cost_a_group(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Unusual data stay, and the step keeps its sum; a group with a wrong loss is fenced before the commit."""
    calm = finished_with_suspects(text_corpus, tmp_path / "calm", UNUSUAL, every_steps=0)
    assert [entry["entry"] for entry in entries_of(calm.journal)] == ["commit"] * (LEAST_STEPS + 4)
    [suspect] = calm.journal.of(SuspicionRecord)
    assert (suspect.step, suspect.shard, suspect.group) == (UNUSUAL.step, UNUSUAL.shard, 0)

    run = finished_with_suspects(text_corpus, tmp_path / "run", UNUSUAL, FLEETING, LASTING, every_steps=99)
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


@pytest.mark.timeout(180)
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


@pytest.mark.timeout(180)
def test_two_groups_that_find_themselves_wrong_in_a_step_halt_the_run(text_corpus: Path, tmp_path: Path) -> None:
    run = run_with(text_corpus, tmp_path / "run", {(0, 0): "a sum", (2, 1): TEXT})
    assert run.summary.outcome == "halted"
    assert f"group 0: rank 0: a sum; group 2: rank 1: {TEXT}" in run.summary.outcome_reason
    assert run.summary.steps_committed == STEP
    assert "halted: own checks found wrong numbers" in CliRunner().invoke(app, ["audit", str(tmp_path / "run")]).output
