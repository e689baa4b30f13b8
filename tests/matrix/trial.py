"""One cell of the matrix as a real run, held against the run without faults."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import (
    AuditConfig,
    ClusterConfig,
    FaultConfig,
    LayoutConfig,
    MetricsConfig,
    OptimizerConfig,
    RunConfig,
)
from spare_megatron.config.schema_sections import BlendedCorpus, EvalConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.faults.points import PHASES_OF_AN_EVALUATION, FaultPoint
from spare_megatron.journal.records import FaultRecord, LossRecord, RecoveryRecord, UpdateRecord
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    CALM_HEARTBEAT_S,
    HEARTBEAT_S,
    REPLICATED,
    Run,
    alert_config,
    assert_masked,
    complete_run,
    entries_of,
    evaluations_of,
    losses_of,
    params_of,
    retries_of,
    values_of,
)
from tests.matrix.cells import CAUSES, NUM_GROUPS, NUM_STAGES, NUM_STEPS, PARTITION_REDUNDANCY, STEP, Cell, draw_faults

LAYOUT = LayoutConfig(num_groups=NUM_GROUPS, pipeline_parallel=NUM_STAGES)
OVERLAPPING = {"overlap": True, "bucket_mib": 0.1}
"""Buckets leave in the backward pass; a rank has more than one."""
reduction: dict[str, Any] = {}
"""Settings of `reduce` for all runs, beside the mode."""
AGAIN = "again"
"""The second corpus of the blend."""
SKIPPED = ("10-17", "30")
"""Places in the order of samples, of the second and the fourth step of 8 sequences."""
SLACK_S = 10.0
"""For a machine that is slow, or busy with other things. Every timeout that would find the fault, too, is longer."""
_BEFORE_THE_SUM = (FaultPoint.PATCH, FaultPoint.BEFORE_REDUCE, FaultPoint.IN_REDUCE)
"""Moments of a recovery at which no group holds the part of the second group that is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a cell cost.

    Attributes:
        fenced: Groups that were lost.
        found_s: From the fault to the fence of its victim.
        recovery_s: From the loss, or the end of a survivor's own compute, to a committed step and a new communicator,
            with the time it takes to find the loss; over all groups lost meanwhile.
        num_retries: Failed attempts of the step.
        params_sha256: Digest of the parameters at the end.
    """

    fenced: tuple[int, ...]
    found_s: float
    recovery_s: float
    num_retries: int
    params_sha256: str


def why_not_here(cell: Cell, corpus: Path) -> str:
    """Why this machine cannot run the cell; empty if it can."""
    is_possible = not cell.needs_root or look_at_machine(config_of(corpus, (), isolate=False)).can_isolate
    return "" if is_possible else "networks of their own for the nodes need root and iproute2"


def run_without_faults(corpus: Path, run_dir: Path) -> Run:
    """What every cell has to end like."""
    run = complete_run(config_of(corpus, (), isolate=False), run_dir)
    assert_masked(run)
    return run


def run_cell(cell: Cell, seed: int, corpus: Path, run_dir: Path, expected: Run) -> Outcome:
    """Runs the cell and asserts everything that the matrix promises.

    Args:
        cell: The cell.
        seed: Decides whose the faults are.
        corpus: The corpus of the expected run.
        run_dir: Where it runs.
        expected: The run without faults.
    """
    faults = draw_faults(cell, seed)
    victim = faults[-1]
    moment = (victim.group, victim.step, victim.phase)
    watch = Watch(
        in_second_attempt=frozenset({moment} if cell.moment.is_again else ()),
        whole_copies=frozenset({NUM_STEPS - 1} if cell.moment.phase is FaultPoint.REPAIR else ()),
    )
    config = config_of(corpus, faults, isolate=cell.needs_root, is_stacked=cell.moment.is_stacked)
    if cell.kind == "stop":  # found before its silence could show
        config = replace(config, control=replace(config.control, heartbeat_interval_s=CALM_HEARTBEAT_S))
    run = complete_run(config, run_dir, watch)
    fences = {entry["group"]: entry["reason"] for entry in entries_of(run.journal) if entry["entry"] == "fence"}
    assert fences.keys() == {fault.group for fault in faults}, f"fenced: {fences}"
    assert_masked(run)  # with it, that all faults struck
    checked = CliRunner().invoke(app, ["check", str(run_dir)])
    assert checked.exit_code == 0, checked.output
    assert_same_bits(run, expected)
    causes = [loss.cause for loss in run.journal.of(LossRecord) if loss.group == victim.group]
    assert all(re.match(CAUSES[cell.kind], cause) for cause in causes), causes
    num_retries = retries_of(run.journal)[STEP]
    if cell.moment.in_recovery and cell.moment.phase not in PHASES_OF_AN_EVALUATION:
        for survivor in set(range(NUM_GROUPS)) - fences.keys():
            recoveries = [record for record in run.journal.of(RecoveryRecord) if record.group == survivor]
            assert {group for record in recoveries for group in record.lost} == fences.keys(), recoveries
        # Once the second group's part is in every group's sum, losing it costs no further attempt.
        assert num_retries >= (2 if cell.moment.phase in _BEFORE_THE_SUM else 1), num_retries
    found_s = found_after_s(run, victim)
    limit_s = _found_within_s(run, cell)
    assert found_s <= limit_s, f"found after {found_s:.1f} s, where {limit_s:.1f} s are allowed"
    return Outcome(
        fenced=tuple(sorted(fences)),
        found_s=found_s,
        recovery_s=sum(recovery.total_s for recovery in run.summary.recoveries),
        num_retries=num_retries,
        params_sha256=run.summary.params_sha256,
    )


def assert_same_bits(run: Run, expected: Run) -> None:
    """The run computed what the run without faults did."""
    assert losses_of(run.journal) == losses_of(expected.journal), "losses differ from those of the run without faults"
    assert params_of(run) == params_of(expected), "parameters differ from those of the run without faults"
    assert run.summary.params_sha256 == expected.summary.params_sha256
    assert evaluations_of(run.journal) == evaluations_of(expected.journal) != []
    values = values_of(run)
    assert values == values_of(expected), "metrics differ from those of the run without faults"
    assert {"train/grad_norm/layer_1", "train/params_norm", f"train/loss/{AGAIN}"} <= values[NUM_STEPS - 1].keys()


def config_of(
    corpus: Path, faults: Sequence[FaultConfig], *, isolate: bool, is_stacked: bool = False, num_further: int = 0
) -> RunConfig:
    """`num_further`: groups beyond those that the run begins with, which need data that all can read."""
    stacked = OptimizerConfig(sharding="stacked", redundancy=PARTITION_REDUNDANCY)
    cluster = ClusterConfig(device="cpu", num_nodes=NUM_GROUPS if isolate else 1, isolate_nodes=isolate)
    config = alert_config(
        corpus,
        LAYOUT,
        steps=NUM_STEPS,
        mode="reproducible",
        cluster=cluster,
        optimizer=stacked if is_stacked else REPLICATED,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    config = replace(
        config,
        layout=replace(config.layout, max_groups=NUM_GROUPS + num_further if num_further else None),
        data=replace(
            config.data,
            corpus="",
            blend=(BlendedCorpus(corpus=str(corpus), weight=3.0), BlendedCorpus(corpus=_again(corpus))),
            split="9,1",
            skip=SKIPPED,
            access="shared" if num_further else config.data.access,
        ),
        metrics=MetricsConfig(model_every_steps=1),
        audit=AuditConfig(every_steps=1),  # so that groups are lost in the middle of audits
        eval=EvalConfig(every_steps=STEP),
        reduce=replace(config.reduce, **reduction),
        faults=replace(config.faults, trace=tuple(faults)),
    )
    assert problems(config, look_at_machine(config)) == []
    return config


def _again(corpus: Path) -> str:
    """The same corpus under the name `AGAIN`."""
    for file in map(corpus.with_suffix, (".idx", ".bin")):
        other = file.with_stem(AGAIN)
        if not other.exists():
            other.symlink_to(file)
    return str(corpus.with_name(AGAIN))


def _found_within_s(run: Run, cell: Cell) -> float:
    """Two heartbeats; a rank that beats has ten times as long as it took before to show progress. Step 0 warms up."""
    slowest_s = max(record.step_s for record in run.journal.of(UpdateRecord) if 0 < record.step < STEP)
    patience_s = 10 * slowest_s if cell.kind == "hang" else 0.0
    return max(2 * HEARTBEAT_S, patience_s) + SLACK_S


def found_after_s(run: Run, fault: FaultConfig) -> float:
    """Seconds from the fault to the fence of its group."""
    struck = [
        line.at_s
        for line in run.journal.lines
        if isinstance(line.record, FaultRecord)
        and (line.record.group, line.record.phase, line.record.kind) == (fault.group, fault.phase, fault.kind)
    ]
    fenced = [
        line.at_s
        for line in run.journal.lines
        if isinstance(line.record, LossRecord) and line.record.group == fault.group
    ]
    (struck_at_s,) = struck
    return min(fenced) - struck_at_s
