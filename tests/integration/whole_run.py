"""Whole runs for tests: tiny configurations, a run from start to end, and what its journal says of the faults."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import (
    ClusterConfig,
    ControlConfig,
    FaultConfig,
    FaultsConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ReduceConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.config.schema_sections import CheckpointConfig, DataConfig
from spare_megatron.driver.planned_faults import groups_hit, resolve_trace
from spare_megatron.driver.run import look_at_machine, start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import (
    EntryRecord,
    FaultRecord,
    LossRecord,
    ParamsRecord,
    RecoveryRecord,
    UpdateRecord,
)
from spare_megatron.journal.state.summary import Summary
from spare_megatron.journal.step_values import MEMORY, metrics_of
from spare_megatron.process.reports import RunEvent
from spare_megatron.supervisor.remote_supervisor import Launcher
from tests.integration.watched_rank import Watch, watched_rank
from tests.unit.journal_in_memory import summarize

HEARTBEAT_S, CALM_HEARTBEAT_S = 0.5, 3.0
"""Where a test is about a process that falls silent; and where none does, whatever the machine is busy with."""
CPU = ClusterConfig(device="cpu")
REPLICATED = OptimizerConfig()
MUON = OptimizerConfig(kind="muon", learning_rate=5e-3, warmup_steps=2, clip_grad=0.5, muon_nesterov=True)
needs_muon = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None, reason="emerging-optimizers is not installed; it needs Python 3.12"
)


def kill(phase: FaultPoint | str, step: int, group: int, rank: int = 0) -> FaultConfig:
    return FaultConfig(phase=FaultPoint(phase), step=step, group=group, rank=rank)


def tiny_config(
    corpus: Path,
    layout: LayoutConfig,
    *,
    steps: int = 4,
    faults: Sequence[FaultConfig] = (),
    redundancy: int | None = None,
    num_microbatches: int = 2,
    mode: str = "fast",
    granularity: str = "microbatch",
    groups_per_domain: int = 1,
    cluster: ClusterConfig = CPU,
    rejoins: int = 0,
    spares: int = 0,
    max_restarts: int = 0,
    deal_by_pace: bool = False,
    optimizer: OptimizerConfig = REPLICATED,
    heartbeat_s: float = CALM_HEARTBEAT_S,
    **model: Any,
) -> RunConfig:
    """A run of a GPT with a few thousand parameters; every group hosts every shard unless redundancy says less.

    Its ranks may be late as on a busy machine, where they are slow by turns: who computes what follows from their paces
    only if asked for. Tests of who falls silent take an `alert_config`, and run one by one.
    """
    stages = layout.pipeline_parallel * layout.virtual_pipeline
    shape = {"num_layers": max(2, stages), "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}
    config = RunConfig(
        model=ModelConfig(**{**shape, **model}),
        layout=layout,
        spare=SpareConfig(
            redundancy=redundancy or layout.num_groups,
            microbatches_per_shard=num_microbatches,
            granularity=granularity,
            rejoins=rejoins,
            spares=spares,
            groups_per_domain=groups_per_domain,
            deal_by_pace=deal_by_pace,
        ),
        data=DataConfig(corpus=str(corpus)),
        train=TrainConfig(steps=steps, micro_batch_size=1, params_check_every_steps=1),
        optimizer=optimizer,
        reduce=ReduceConfig(mode=mode, timeout_s=20.0),
        control=ControlConfig(
            startup_timeout_s=60.0,
            decision_timeout_s=60.0,
            group_timeout_s=20.0,
            store_timeout_s=15.0,
            heartbeat_interval_s=heartbeat_s,
        ),
        checkpoint=CheckpointConfig(max_restarts=max_restarts, restart_wait_s=30.0),
        faults=FaultsConfig(trace=tuple(faults)),
        cluster=cluster,
    )
    assert problems(config, look_at_machine(config)) == []
    return config


alert_config = partial(tiny_config, heartbeat_s=HEARTBEAT_S)
"""The same, of a run that finds a stopped process within two heartbeats of half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has ended."""

    config: RunConfig
    run_dir: Path
    summary: Summary
    journal: Journal
    events: tuple[RunEvent, ...]


def complete_run(
    config: RunConfig,
    run_dir: Path,
    watch: Watch | None = None,
    on_event: Callable[[RunEvent], None] = lambda event: None,
    *,
    holds_back: bool = True,
    launcher: Launcher | None = None,
) -> Run:
    """The whole run, with the supervisor in this process. Leaves no process behind.

    A fault inside a reduction strikes while it cannot be complete: so small a sum of one bucket may be everywhere
    otherwise. Without `holds_back` it needs many, of which the last is then in flight nowhere.
    """
    events: list[RunEvent] = []
    inside = frozenset((f.group, f.step, f.phase) for f in config.faults.trace if f.phase is FaultPoint.IN_REDUCE)
    watch = replace(watch or Watch(), unfinished_reduces=inside if holds_back else frozenset())

    def record_event(event: RunEvent) -> None:
        events.append(event)
        on_event(event)

    start_run(config, run_dir, record_event, rank_main=partial(watched_rank, watch), launcher=launcher)
    assert multiprocessing.active_children() == []
    return read_run(config, run_dir, events)


def read_run(config: RunConfig, run_dir: Path, events: Sequence[RunEvent]) -> Run:
    """What a run that has ended left in its directory."""
    journal = read_journal(run_dir)
    return Run(config=config, run_dir=run_dir, summary=summarize(journal), journal=journal, events=tuple(events))


# ----------------------------------------------------------------------------------------------- what a journal says


def assert_masked(run: Run, *found: int) -> None:
    """The run finished, its journal is valid, and every fault of the trace struck and cost what it had to, and the
    groups that were `found` to be wrong.
    """
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert run.summary.steps_committed == run.config.train.steps
    assert run.summary.steps_lost == 0
    struck = sorted((r.step, r.group, r.rank, r.phase) for r in run.journal.of(FaultRecord))
    assert struck == sorted((f.step, f.group, f.rank, str(f.phase)) for f in run.config.faults.trace)
    hit = [groups_hit(run.config, fault) for fault in resolve_trace(run.config)]
    causes = [(loss.group, loss.cause) for loss in run.journal.of(LossRecord)]
    assert fenced_groups(run.journal) == set().union(*hit, found), causes


def entries_of(journal: Journal) -> list[dict[str, Any]]:
    """The decision log."""
    entries = {record.index: record.entry for record in journal.of(EntryRecord)}
    return [entries[index] for index in sorted(entries)]


def evaluations_of(journal: Journal) -> list[tuple[int, list[list[Any]]]]:
    """Committed steps and exact sums of each evaluation."""
    return [(entry["step"], entry["sums"]) for entry in entries_of(journal) if entry["entry"] == "evaluated"]


def fenced_groups(journal: Journal) -> set[int]:
    return {entry["group"] for entry in entries_of(journal) if entry["entry"] == "fence"}


def retries_of(journal: Journal) -> Counter[int]:
    """Step -> how many of its attempts failed."""
    return Counter(entry["step"] for entry in entries_of(journal) if entry["entry"] == "retry")


def patched_in(journal: Journal) -> Counter[int]:
    """Step -> microbatches of lost groups that survivors computed in it."""
    patched: Counter[int] = Counter()
    for record in journal.of(RecoveryRecord):
        patched[record.step] += record.num_patched
    return patched


def values_of(run: Run) -> dict[int, dict[str, float]]:
    """Step -> its metrics, which all groups have journaled alike, without their memory."""
    found: dict[int, dict[str, float]] = {}
    for record in run.journal.of(UpdateRecord):
        values = {key: value for key, value in metrics_of(record).items() if key not in MEMORY}
        assert found.setdefault(record.step, values) == values
    return found


def losses_of(journal: Journal) -> dict[int, set[tuple[float, float]]]:
    """Step -> the mean losses and gradient norms that groups applied; more than one is an error."""
    losses: dict[int, set[tuple[float, float]]] = {}
    for record in journal.of(UpdateRecord):
        losses.setdefault(record.step, set()).add((record.loss, record.grad_norm))
    return losses


def params_of(run: Run) -> dict[int, set[str]]:
    """Committed steps -> digests of the parameters after them, over all groups that survived to report them."""
    digests: dict[int, set[str]] = {}
    for record in run.journal.of(ParamsRecord):
        digests.setdefault(record.step, set()).add(record.digest)
    return digests
