"""Runs in which shards lose all hosts while others have all state: they pause until a host is back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import ClusterConfig, FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import EvalConfig, ValidationCorpus
from spare_megatron.driver.run import look_at_machine
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import FaultRecord, RestartRecord, UpdateRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.process.reports import RunPaused
from tests.integration.whole_run import Run, complete_run, entries_of, evaluations_of, kill, losses_of, tiny_config

pytestmark = pytest.mark.timeout(180)

LAYOUT = LayoutConfig(num_groups=4)
COMMON = {"steps": 6, "redundancy": 2, "mode": "reproducible", "hidden_dropout": 0.1}
PARTITIONED = OptimizerConfig(sharding="stacked", redundancy=3)


@pytest.fixture(scope="module")
def whole(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return complete_run(config_of(text_corpus), tmp_path_factory.mktemp("pause") / "whole")


def config_of(corpus: Path, faults: Sequence[FaultConfig] = (), **settings: Any) -> RunConfig:
    """A run that evaluates after every second step."""
    config = tiny_config(corpus, LAYOUT, **COMMON, **settings)
    data = replace(config.data, validation=(ValidationCorpus(name="again", corpus=str(corpus)),))
    config = replace(
        config,
        data=data,
        eval=EvalConfig(every_steps=2, sequences=8),
        faults=replace(config.faults, trace=tuple(faults)),
        checkpoint=replace(config.checkpoint, interval_steps=2),
    )
    assert problems(config, look_at_machine(config)) == []
    return config


@pytest.mark.parametrize("kind", ["replicated", "partitioned"])
def test_both_hosts_of_a_shard_return_and_no_committed_step_is_done_again(
    text_corpus: Path, tmp_path: Path, whole: Run, kind: str
) -> None:
    """Shard 1 is hosted by groups 1 and 0 alone. Checkpoints are saved, and none is read.

    In one run their rejoins are used up from the start, and their nodes have no rank left that could inform them; the
    other may not restart from checkpoints.
    """
    faults = [kill(FaultPoint.FORWARD, 3, 0), kill(FaultPoint.BACKWARD, 3, 1)]
    settings: dict[str, Any] = {"rejoins": 0, "max_restarts": 1, "cluster": ClusterConfig(device="cpu", num_nodes=4)}
    if kind == "partitioned":
        faults += [kill(FaultPoint.EVALUATION_COMPUTED, 4, 0), kill(FaultPoint.EVALUATION_COMPUTED, 4, 1)]
        settings = {"rejoins": 3, "granularity": "stack", "optimizer": PARTITIONED}
    config = config_of(text_corpus, faults=faults, **settings)
    run = complete_run(config, tmp_path / "run")
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert len(run.journal.of(FaultRecord)) == len(faults)
    num_pauses = len(faults) // 2
    assert [entry["entry"] for entry in entries_of(run.journal)].count("resume") == num_pauses
    assert (run.summary.steps_lost, run.summary.restarts) == (0, 0)
    assert not run.journal.of(RestartRecord)
    assert run.summary.groups_lost == len(faults)
    applied = [(record.group, record.step) for record in run.journal.of(UpdateRecord)]
    assert len(applied) == len(set(applied))
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert {event.shards for event in run.events if isinstance(event, RunPaused)} == {(1,), ()}
    assert evaluations_of(run.journal) == evaluations_of(whole.journal)
    goodput = read_run_state(run.run_dir).goodput(0.0)
    assert goodput is not None
    assert goodput.lost_s["pause"] > 0
