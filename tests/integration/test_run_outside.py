"""Processes of a run killed from outside, and traces drawn at random."""

import json
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import ClusterConfig, LayoutConfig
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.driver.run import start_run
from spare_megatron.driver.telemetry import split_of_step
from spare_megatron.journal.records import LOST_A_PEER, LossRecord, RecoveryRecord, UpdateRecord
from spare_megatron.journal.spans import RECOVERY_NAMES, RankSpans, Span, read_spans_of
from spare_megatron.process.reports import GroupLost, RanksStarted, RunEvent, StepCommitted
from spare_megatron.process.span_ring import BACKWARD, FORWARD
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch
from tests.integration.perfetto import loaded_in_perfetto
from tests.integration.reference import assert_exact
from tests.integration.test_report_browser import browser
from tests.integration.watched_rank import Watch, watched_rank
from tests.integration.whole_run import Run, alert_config, assert_masked, complete_run, kill, read_run, tiny_config
from tests.matrix.cells import PHASES_OF_EVERY_STEP

__all__ = ["browser"]

pytestmark = pytest.mark.timeout(150)

QUICK_S = 30.0
"""Far below every other timeout of the run; the machine may be slow."""
LAYOUT = LayoutConfig(num_groups=3, pipeline_parallel=2)


class Killer:
    """Kills a process of the run when a step has been committed, and keeps the events of the driver.

    Args:
        victim: Group and rank, or the name of a process that the driver started.
        step: The step.
    """

    def __init__(self, victim: tuple[int, int] | str, step: int) -> None:
        self._victim = victim
        self._step = step
        self.events: list[RunEvent] = []
        self.has_struck = False
        self.struck_at_s = 0.0

    def __call__(self, event: RunEvent) -> None:
        self.events.append(event)
        if isinstance(event, StepCommitted) and event.step == self._step and not self.has_struck:
            os.kill(self._pid(), signal.SIGKILL)
            self.has_struck = True
            self.struck_at_s = time.monotonic()

    def _pid(self) -> int:
        if isinstance(self._victim, str):
            (pid,) = [child.pid for child in multiprocessing.active_children() if child.name == self._victim]
            assert pid is not None
            return pid
        key = GroupId(self._victim[0]), self._victim[1]
        started = [event for event in self.events if isinstance(event, RanksStarted)]
        (pid,) = [event.pids[key] for event in started if key in event.pids]
        return pid


@pytest.fixture(scope="module")
def outlived(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One of whose ranks was killed, whatever it was doing at that time. Each group has a supervisor of its own."""
    run_dir = tmp_path_factory.mktemp("outlived") / "run"
    config = alert_config(text_corpus, LAYOUT, steps=60, cluster=ClusterConfig(device="cpu", num_nodes=3))
    killer = Killer((1, 1), step=2)
    watch = Watch(dump_steps=frozenset({0, 30, 59}))
    start_run(config, run_dir, killer, rank_main=partial(watched_rank, watch))
    assert killer.has_struck
    return read_run(config, run_dir, killer.events)


@pytest.mark.alone
def test_a_rank_killed_from_outside_is_masked_like_any_other_loss(outlived: Run) -> None:
    run = outlived
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert [(record.group, record.cause) for record in run.journal.of(LossRecord)] in (
        [(1, "SIGKILL")],
        [(1, LOST_A_PEER)],  # the other rank of the group was seen to end first
    )
    assert [event.record.group for event in run.events if isinstance(event, GroupLost)] == [1]
    assert {r.group for r in run.journal.of(UpdateRecord) if r.step == 59} == {0, 2}
    assert_exact(run, [0, 30, 59])
    parts = read_spans_of(run.run_dir)
    placement = make_placement("golomb", run.config.layout.num_groups, run.config.spare.redundancy)
    work = initial_order(placement, run.config.spare.microbatches_per_shard, "microbatch").work
    assert_timeline(parts, lost=1, of_group_0=work.of(GroupId(0)))
    metrics = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert_spans_add_up(parts, metrics)
    assert_recovery(metrics, run.journal.of(RecoveryRecord))


SPENT = """
select process.name as process, thread.name as thread, slice.name as name,
    extract_arg(slice.arg_set_id, 'args.step') as step, sum(slice.dur) / 1e9 as spent_s
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
group by process, thread, slice.name, step
"""
"""What each rank of each group spent on what, by steps, for Perfetto."""


@pytest.mark.alone
def test_perfetto_finds_the_recovery_of_a_run_and_what_its_journal_says_of_times(
    browser: Browser, outlived: Run, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["timeline", str(outlived.run_dir), "--out", str(tmp_path / "trace.json")])
    assert result.exit_code == 0, result.output
    with loaded_in_perfetto(browser, tmp_path / "trace.json") as query:
        rows = query(SPENT, "process", "thread", "name", "step", "spent_s")
        marks = query("select name, dur from slice where name glob 'group * lost: *'", "name", "dur")
    (loss,) = outlived.journal.of(LossRecord)
    assert marks == [(f"group 1 lost: rank {loss.rank}: {loss.cause}", 0)]
    spent_s = {(process, thread, name, step): value for process, thread, name, step, value in rows if value}
    assert_whole(spent_s, read_spans_of(outlived.run_dir))
    assert_stages(spent_s, outlived.journal.of(RecoveryRecord))
    assert_passes(spent_s, outlived.journal.of(UpdateRecord))


Spent = Mapping[tuple[str, str, str, int], float]


def assert_whole(spent_s: Spent, parts: Sequence[RankSpans]) -> None:
    """Everything that the ranks wrote is there, each rank in a thread of its own."""
    expected_s: dict[tuple[str, str, str, int], float] = defaultdict(float)
    for part in parts:
        for span in part.spans:
            thread = "recovery" if span.name.startswith("recovery") else f"rank {part.rank}, stage {part.stage}"
            expected_s[f"group {part.group}", thread, span.name, span.step] += span.ended_s - span.began_s
    for key in set(spent_s) | set(expected_s):
        assert spent_s.get(key, 0.0) == pytest.approx(expected_s[key], rel=0.02, abs=5e-5), key


def assert_stages(spent_s: Spent, records: Sequence[RecoveryRecord]) -> None:
    """Both survivors have the recovery, and each of its stages as long as the journal says."""
    assert [record.group for record in sorted(records, key=lambda record: record.group)] == [0, 2]
    for record in records:
        assert record.agree_s > 0
        for stage, name in RECOVERY_NAMES.items():
            found_s = sum(
                value
                for (process, _, named, _), value in spent_s.items()
                if (process, named) == (f"group {record.group}", name)
            )
            assert found_s == pytest.approx(getattr(record, f"{stage}_s"), rel=0.02, abs=1e-5), (record.group, stage)


def assert_passes(spent_s: Spent, records: Sequence[UpdateRecord]) -> None:
    """What ranks recorded of their passes is in the trace, which also has what they left out: the time that they waited
    for a processor, which groups on one machine take from each other.
    """
    shares = []
    for record in records:
        for rank, recorded_s in enumerate(record.compute_s):
            place = f"group {record.group}", f"rank {rank}, stage {rank}"
            found_s = sum(spent_s.get((*place, name, record.step), 0.0) for name in (FORWARD, BACKWARD))
            shares += [recorded_s / found_s] if found_s else []
    assert len(shares) >= 3 * 2 * 2, "steps, groups, ranks"
    assert 0.05 < median(shares) < 1.02


def assert_timeline(parts: list[RankSpans], lost: int, of_group_0: Sequence[Microbatch]) -> None:
    """It shows what the lost ranks did not come to the end of, and each pass of a quiet step once on every stage."""
    unfinished = {(part.group, part.rank) for part in parts for span in part.spans if span.name.startswith("lost in")}
    assert unfinished == {(lost, 0), (lost, 1)}
    before = min(span.step for part in parts for span in part.spans if part.group != lost) + 1
    for stage in range(2):
        spans = [
            span
            for part in parts
            for span in part.spans
            if (part.group, part.stage) == (0, stage) and span.name not in RECOVERY_NAMES.values()
        ]
        for name in ("forward", "backward"):
            passes = [(span.shard, span.microbatch) for span in spans if (span.name, span.step) == (name, before)]
            assert sorted(passes) == sorted(of_group_0)
        assert all(earlier.ended_s <= later.ended_s for earlier, later in pairwise(spans))


def around(inside: Span, spans: Sequence[Span]) -> Span | None:
    """The shortest operation that the span lies in."""
    outer = [
        span
        for span in spans
        if span.step == inside.step
        and span.name in set(Operation) - {Operation.STORAGE}
        and span.began_s <= inside.began_s
        and inside.ended_s <= span.ended_s
    ]
    return min(outer, key=lambda span: span.ended_s - span.began_s, default=None)


def assert_recovery(metrics: Sequence[Mapping[str, Any]], records: Sequence[RecoveryRecord]) -> None:
    """The metrics have the recovery as one of the groups wrote it down, and what all groups computed for it."""
    assert sum(values["spare/microbatches_recomputed"] for values in metrics) == sum(r.num_patched for r in records)
    [values] = [values for values in metrics if "fault/recovery_agree_s" in values]
    parts = ("agree_s", "patch_s", "rebuild_s", "reduce_s")
    split = [values[f"fault/recovery_{part}"] for part in parts]
    assert split in [[pytest.approx(getattr(record, part), abs=1e-6) for part in parts] for record in records]
    assert (metrics[0]["spare/epoch"], metrics[-1]["spare/epoch"]) == (0, 1)
    assert metrics[-1]["perf/lost_recovery_s"] > 0


def assert_spans_add_up(parts: list[RankSpans], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Spans of the leader that reported a step are what it reported, in the median over steps within 2% of the step."""
    sums: dict[tuple[int, int], dict[Operation, float]] = defaultdict(lambda: defaultdict(float))
    for part in parts:
        for span in part.spans if part.rank == 0 else ():
            if span.name in set(Operation):
                sums[span.step, part.group][Operation(span.name)] += span.ended_s - span.began_s
                if span.name == Operation.STORAGE and (outer := around(span, part.spans)):
                    sums[span.step, part.group][Operation(outer.name)] -= span.ended_s - span.began_s
    apart = []
    for values in metrics:
        found = [split_of_step(by_name) for (step, _), by_name in sums.items() if step == values["step"]]
        off_s = [
            sum(abs(split[name] - values[f"perf/{name}_s"]) for name in ("transfer", "reduce", "vote", "optimizer"))
            for split in found
        ]
        apart += [min(off_s) / values["perf/step_s"]] if off_s else []
    assert len(apart) >= 3
    assert median(apart) < 0.02


def test_a_run_whose_control_store_dies_ends_at_once_and_says_so(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LAYOUT, steps=5000)
    killer = Killer("control-store", step=2)
    summary = start_run(config, tmp_path / "run", killer)
    assert killer.has_struck
    assert time.monotonic() - killer.struck_at_s < QUICK_S
    assert multiprocessing.active_children() == []
    assert summary.outcome == "failed"
    assert "control store" in summary.outcome_reason
    assert summary.verdict == "unknown"
    assert summary.groups_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_losses_are_masked(text_corpus: Path, tmp_path: Path, seed: int) -> None:
    """Four of five groups are lost at random moments of random steps, several of them in one step now and then."""
    layout = LayoutConfig(num_groups=5, pipeline_parallel=2)
    generator = np.random.default_rng([20, seed])
    phases = list(PHASES_OF_EVERY_STEP)
    faults = [
        kill(
            phases[generator.integers(len(phases))], int(generator.integers(4)), int(group), int(generator.integers(2))
        )
        for group in generator.permutation(5)[:4]
    ]
    steps = 5
    config = tiny_config(text_corpus, layout, steps=steps, faults=faults)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(steps))))
    assert_masked(run)
    assert_exact(run, range(steps))
