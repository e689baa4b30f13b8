"""What the comparison with peers makes of recorded runs; nothing is installed, started or measured."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.peers.compare import FAULTS, HIT_STEP, OURS, configure, summarize
from benchmarks.peers.fault_free import Steps, steps_of
from benchmarks.peers.fault_free import summarize as summarize_fault_free
from benchmarks.peers.history import Event, cost_of, events_of_journal, read_events
from benchmarks.peers.processor_time import INTERVAL_S, ProcessorTime
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.planned_faults import resolve_trace
from spare_megatron.journal import records
from spare_megatron.journal.files import JournalWriter, read_journal
from spare_megatron.journal.records import ContributionRecord, EntryRecord, FaultRecord, Record, UpdateRecord
from spare_megatron.journal.state.summary import Summary
from spare_megatron.process.reports import GroupLost, RunEvent
from spare_megatron.tools.bench import bench_throughput
from spare_megatron.tools.bench.bench_throughput import NUM_WARMUP, training_alone

ROOT = Path(__file__).parents[2]

# A run with torchft, times in seconds: group 0 is killed in step 5. Groups 1 and 3 see a reset, group 2 its timeout.
KILLED = """
98.90 1 committed 1 16
99.00 1 committed 2 16
99.10 1 committed 3 16
99.50 1 committed 4 16
99.98 1 computed 5 4
99.99 2 computed 5 4
99.99 0 computed 5 4
100.00 0 fault 5 0
100.01 3 computed 5 4
100.03 1 discarded 5 0
100.03 3 discarded 5 0
100.15 1 computed 5 4
100.16 3 computed 5 4
105.01 2 discarded 5 0
105.07 2 computed 5 4
105.08 1 committed 5 12
105.09 3 committed 5 12
105.10 2 committed 5 12
105.30 1 committed 6 12
105.45 1 committed 7 12
105.65 1 committed 8 12
105.95 1 committed 9 12
"""


def events_of(text: str) -> list[Event]:
    """Lines of time, group, kind, step, microbatches."""
    words = [line.split() for line in text.strip().splitlines()]
    return [
        Event(kind=kind, group=int(group), step=int(step), at_s=float(at_s), num_microbatches=int(number))
        for at_s, group, kind, step, number in words
    ]


def test_a_recorded_run_costs_what_was_counted_by_hand() -> None:
    cost = cost_of(events_of(KILLED), 1)
    assert cost.to_commit_s == pytest.approx(5.1)
    assert (cost.steps_discarded, cost.microbatches_recomputed, cost.microbatches_counted) == (1, 12, 12)
    assert cost.step_before_s == pytest.approx(0.25)  # of 0.1 and 0.4: steps 0 and 1 are warm-up
    assert cost.step_after_s == pytest.approx(0.25)  # of 0.2 and 0.3: step 6 is warm-up again
    assert cost.counted_after == 12


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ("100.00 0 fault 5 0\n", "", "1 faults in one step were to fire"),
        ("100.00 0 fault 5 0\n", "100.00 0 fault 5 0\n100.10 1 fault 6 0\n", "1 faults in one step were to fire"),
        ("105.10 2 committed 5 12\n", "", "not by all survivors"),
        ("105.10 2 committed 5 12\n", "105.10 2 committed 5 16\n", r"survivors counted \[12, 16\]"),
        ("105.65 1 committed 8 12\n105.95 1 committed 9 12\n", "", "let the run be longer"),
    ],
)
def test_a_run_that_proves_nothing_is_refused(was: str, becomes: str, message: str) -> None:
    assert was in KILLED
    with pytest.raises(ValueError, match=message):
        cost_of(events_of(KILLED.replace(was, becomes)), 1)


def test_two_faults_of_one_step_cost_from_the_first_of_them() -> None:
    text = KILLED.replace("105.10 2 committed 5 12\n", "").replace("100.01 3", "100.005 2 fault 5 0\n100.01 3")
    cost = cost_of(events_of(text), 2)
    assert cost.to_commit_s == pytest.approx(5.09)
    assert cost.microbatches_recomputed == 8


def test_a_line_torn_by_a_kill_is_left_out_and_times_are_put_in_order(tmp_path: Path) -> None:
    late, early = events_of("0.5 1 committed 3 16\n0.125 0 fault 3 0")
    for event in (late, early):
        (tmp_path / str(event.group)).write_text(json.dumps(asdict(event)) + '\n{"kind": "comm')
    assert read_events([tmp_path / "1", tmp_path / "0"]) == [early, late]


def contribution(attempt: int, microbatches: dict[str, list[int]]) -> ContributionRecord:
    return ContributionRecord(group=0, step=5, attempt=attempt, epoch=0, members=[0, 1], microbatches=microbatches)


def committed(steps: range) -> Iterator[Record]:
    for step in steps:
        yield EntryRecord(group=0, index=step, entry={"entry": "commit", "step": step, "attempt": step})
        yield UpdateRecord(
            group=0,
            step=step,
            attempt=step,
            num_microbatches=8,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1e-3,
            makespan=4,
            step_s=0.2,
        )


def our_events(run_dir: Path, second: ContributionRecord) -> list[Event]:
    """Group 1 of two is lost in step 5; a record every 0.1 s."""
    records = [
        *committed(range(5)),
        contribution(5, {"0": [0, 1, 2, 3]}),
        FaultRecord(group=1, rank=0, step=5, phase="before_reduce", kind="kill"),
        EntryRecord(group=0, index=5, entry={"entry": "fence", "group": 1, "reason": "rank 0: SIGKILL"}),
        second,
        *committed(range(5, 10)),
    ]
    clock = iter(range(1000, 2000))
    journal = JournalWriter(run_dir, "group-0000-rank-0", lambda: next(clock) / 10)
    for record in records:
        journal.write(record)
    journal.close()
    return events_of_journal(read_journal(run_dir))


def test_our_journal_shows_the_commit_and_the_patch(tmp_path: Path) -> None:
    cost = cost_of(our_events(tmp_path, contribution(6, {"0": [0, 1, 2, 3], "1": [0, 1]})), 1)
    assert cost.to_commit_s == pytest.approx(0.3)  # the fence, the second contribution, the commit
    assert (cost.steps_discarded, cost.microbatches_recomputed, cost.microbatches_counted) == (0, 2, 8)
    assert (cost.step_before_s, cost.step_after_s) == (pytest.approx(0.2), pytest.approx(0.2))


def test_our_own_work_thrown_away_would_be_seen(tmp_path: Path) -> None:
    events = our_events(tmp_path, contribution(6, {"0": [1, 2, 3], "1": [0]}))
    assert cost_of(events, 1).steps_discarded == 1
    assert cost_of(events, 1).microbatches_recomputed == 4


def test_ratios_are_of_medians() -> None:
    cost = cost_of(events_of(KILLED), 1)
    times_s = {"ours": (0.1, 0.2, 9.0), "torchft_1s": (1.0, 0.5, 8.0)}
    summary = summarize({way: [replace(cost, to_commit_s=time_s) for time_s in times_s[way]] for way in times_s})
    assert summary["ratio"] == {"torchft_1s": pytest.approx(0.2)}
    assert summary["ours"]["to_commit_s"] == {"median": 0.2, "min": 0.1, "max": 9.0}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_is_hit_as_its_fault_says_and_each_group_in_turn(fault: str) -> None:
    kind, num_hit = FAULTS[fault]
    groups = []
    for run in range(4):
        trace = resolve_trace(configure(ROOT / "configs/run/demo_cpu.toml", [], fault, run))
        assert [(hit.kind, hit.step, hit.phase) for hit in trace] == [(kind, HIT_STEP, "before_reduce")] * num_hit
        assert len({hit.group for hit in trace}) == num_hit
        groups.append(trace[0].group)
    assert groups == [0, 1, 2, 3]


def test_a_step_without_faults_is_set_against_plain_megatrons_of_the_same_round() -> None:
    found = {
        "plain": [Steps(step_s=[0.1, 0.1, 9.0], processor_s=0.2), Steps(step_s=[0.2, 0.2], processor_s=0.2)],
        "ours": [Steps(step_s=[0.11, 0.11], processor_s=0.2), Steps(step_s=[0.2, 0.2], processor_s=0.3)],
        "torchft_1s": [Steps(step_s=[0.12], processor_s=0.1), Steps(step_s=[0.3], processor_s=0.1)],
    }
    result = summarize_fault_free(found)
    assert result["over_plain"]["ours"]["rounds"] == pytest.approx([1.1, 1.0])
    assert result["over_plain"]["torchft_1s"]["median"] == pytest.approx(1.35)
    assert result["ratio"] == pytest.approx(1.05)
    ours = result["processor_over_plain"]["ours"]
    assert ours["rounds"] == pytest.approx([1.0, 1.5])
    assert (ours["mean"], ours["ci95"]) == pytest.approx((1.25, 12.706 * 0.25), rel=1e-4)


def test_the_processor_time_between_two_moments_is_that_of_all_processes() -> None:
    processors = ProcessorTime()
    code = "import time; end = time.monotonic() + 60\nwhile time.process_time() < 0.5 and time.monotonic() < end: pass"
    code += "\nprint(flush=True); input()"
    with processors.sampling():
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            began_s = time.time()
            assert child.stdout is not None
            child.stdout.readline()
            ended_s = time.time() + 2 * INTERVAL_S
            while processors.last_at_s < ended_s:  # it must be seen before it ends
                time.sleep(INTERVAL_S / 10)
            child.communicate(b"\n")
    assert 0.45 <= processors.between(began_s - 1.0, ended_s) <= 2.0


@pytest.mark.parametrize("groups_lost", [0, 1])
def test_steps_of_a_run_that_masked_a_loss_are_no_fault_free_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups_lost: int
) -> None:
    """Each of them counts all microbatches, as the others took over those of the lost group: they were measured."""

    def train(_: RunConfig, folder: Path, report: Callable[[RunEvent], None]) -> Summary:
        journal = JournalWriter(folder, "group-0000-rank-0", iter(range(100)).__next__)
        for record in committed(range(NUM_WARMUP + 8)):
            journal.write(record)
        journal.close()
        for _ in range(groups_lost):
            report(GroupLost(record=records.LossRecord(group=1, rank=3, cause="SIGKILL", entry_index=0)))
        return Summary(
            verdict="valid",
            reasons=(),
            outcome="finished",
            outcome_reason="",
            steps_committed=NUM_WARMUP + 8,
            groups_lost=groups_lost,
        )

    monkeypatch.setattr(bench_throughput, "start_run", train)
    settings = ["layout.num_groups=2", "spare.redundancy=2", "spare.microbatches_per_shard=4"]
    config = training_alone(load_run_config(ROOT / "configs/run/demo_cpu.toml", settings).config)
    if not groups_lost:
        assert steps_of(OURS, config, tmp_path / "ours-0").step_s == [2.0] * 7
        return
    with pytest.raises(RuntimeError, match=r"groups were lost 1 times, .* group 1: rank 3: SIGKILL"):
        steps_of(OURS, config, tmp_path / "ours-0")
