"""What the goodput benchmark makes of recorded runs, and that lost groups of a peer are started again."""

import argparse
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from benchmarks.goodput import OURS, SLOW_WAYS, STEPS_AFTER, Run, configure, print_table, run_all, spells_of, summarize
from benchmarks.goodput_plot import plot_goodput
from benchmarks.outcomes import Commit, commits_of, outcome_of
from benchmarks.peers.history import Event, events_of_journal
from benchmarks.peers.peer_world import run_groups
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.planned_faults import resolve_trace
from spare_megatron.journal.files import JournalWriter, read_journal
from spare_megatron.journal.records import ContributionRecord, EntryRecord, Record, UpdateRecord
from tests.unit.test_peers_benchmark import events_of

ROOT = Path(__file__).parents[2]

# Two groups of 2 microbatches. Group 1 is killed in step 12, which commits without it after 1.5 s; it comes back in
# step 15, for which it computes something else in vain, and is killed again in step 18, after that step is committed.
HIT = """
102.35 0 computed 12 2
102.38 1 computed 12 2
102.40 1 fault 12 0
102.45 0 discarded 12 0
103.85 0 computed 12 2
103.90 0 committed 12 2
104.00 0 committed 13 2
104.10 0 committed 14 2
104.20 0 computed 15 2
104.50 1 computed 0 2
104.60 0 committed 15 2
104.61 1 joined 15 0
104.61 1 committed 15 2
104.80 0 committed 16 4
105.00 0 committed 17 4
105.20 0 committed 18 4
105.25 1 fault 18 0
106.40 0 committed 19 2
106.50 0 committed 20 2
"""


def recorded() -> list[Event]:
    quiet = "\n".join(f"{100 + step / 5:.2f} {group} committed {step} 4" for step in range(12) for group in (0, 1))
    return events_of(quiet + HIT)


def test_a_recorded_run_came_to_what_was_counted_by_hand() -> None:
    outcome = outcome_of(recorded(), 4)
    assert outcome.quiet_s == pytest.approx(0.2)
    assert outcome.wall_s == pytest.approx(6.5)
    assert outcome.counted == 11 + 4 * 0.5 + 3 + 2 * 0.5
    assert outcome.to_commit_s == pytest.approx([1.5, 1.15])  # the step that was hit the second time is no news
    assert outcome.longest_gap_s == pytest.approx([1.7, 1.2])
    assert outcome.pause_s == pytest.approx([0.3])
    assert outcome.thrown_away == 4  # of the survivor and of the newcomer, not of the killed group


def test_a_loss_that_is_noticed_a_step_later_shows_in_the_longest_gap() -> None:
    early = [
        replace(event, at_s=105.1) if event.kind == "fault" and event.step == 18 else event for event in recorded()
    ]
    outcome = outcome_of(sorted(early, key=lambda event: event.at_s), 4)
    assert outcome.to_commit_s[1] == pytest.approx(0.1)
    assert outcome.longest_gap_s[1] == pytest.approx(1.2)


def test_steps_computed_again_after_a_restart_count_once_and_are_thrown_away_once() -> None:
    lines = [f"{100 + step / 5:.2f} 0 {kind} {step} 4" for step in range(14) for kind in ("computed", "committed")]
    again = [f"{110 + step / 5:.2f} 0 {kind} {step} 4" for step in range(12, 16) for kind in ("computed", "committed")]
    fault = "102.65 1 fault 13 0"
    outcome = outcome_of(events_of("\n".join([*lines, fault, *again])), 4)
    assert outcome.thrown_away == 8
    assert outcome.counted == 15
    assert outcome.to_commit_s == pytest.approx([112.8 - 102.65])


def test_work_of_a_step_that_is_never_finished_is_thrown_away() -> None:
    lines = [f"{100 + step / 5:.2f} 0 committed {step} 4" for step in range(12)]
    events = events_of("\n".join([*lines, "103.0 0 computed 12 3", "104.0 0 computed 11 4"]))
    assert outcome_of(events, 4).thrown_away == 3


def our_records() -> list[Record]:
    """Step 3 is computed twice, with a restart between; group 1 comes back in step 4."""
    contribution = ContributionRecord(group=0, step=3, attempt=3, epoch=0, members=[0], microbatches={"0": [0, 1]})
    commit = {"entry": "commit", "step": 3, "attempt": 3}
    update = UpdateRecord(
        group=0,
        step=3,
        attempt=3,
        num_microbatches=2,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        makespan=2,
        step_s=0.1,
    )
    return [
        contribution,
        EntryRecord(group=0, index=3, entry=commit),
        update,
        contribution,
        EntryRecord(group=0, index=5, entry={**commit, "admit": [[1, 1]]}),
    ]


def test_our_journal_records_returns_and_rework(tmp_path: Path) -> None:
    clock = iter(range(1000, 2000))
    journal = JournalWriter(tmp_path, "group-0000-rank-0", lambda: next(clock) / 10)
    for record in our_records():
        journal.write(record)
    journal.close()
    events = [
        (event.kind, event.group, event.step, event.num_microbatches)
        for event in events_of_journal(read_journal(tmp_path))
    ]
    step = [("computed", 0, 3, 2), ("committed", 0, 3, 2)]
    assert events == [*step, *step, ("joined", 1, 4, 0)]


def run_of(goodput: float, slowness: float = 1.0) -> Run:
    """One whose steps take 0.2 s without kills, all of it so many times as long."""
    outcome = outcome_of(recorded(), 4)
    slow = replace(outcome, wall_s=outcome.counted * 0.2 / goodput * slowness, quiet_s=0.2 * slowness)
    return Run(outcome=slow, commits=commits_of(recorded(), 4))


def test_goodputs_are_put_beside_ours_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = summarize({OURS: [run_of(0.9), run_of(0.8), run_of(0.1)], "torchft": [run_of(0.4)], "nvrx": []})
    assert list(result["ways"]) == [OURS, "torchft"]
    assert result["ways"]["torchft"]["ratio"] == pytest.approx(2.0)
    assert result["ways"][OURS]["kills"] == 6
    assert result["ways"][OURS]["to_commit_s"]["max"] == pytest.approx(1.5)
    assert result["ways"]["torchft"]["goodputs_by_own_steps"] == pytest.approx([0.4])
    print_table(result)
    assert "40.0%" in capsys.readouterr().out
    curve = [Commit(step=step, at_s=float(step), share=1.0) for step in range(3)]
    plot_goodput(tmp_path / "drawn.png", {OURS: curve}, {OURS: [0.9]}, 0.2, "drawn by hand")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_slow_minute_is_in_one_goodput_and_not_in_the_other() -> None:
    found = summarize({OURS: [run_of(0.9), run_of(0.9, slowness=1.5), run_of(0.9)]})["ways"][OURS]
    assert found["goodputs"] == pytest.approx([0.9, 0.6, 0.9])
    assert found["goodputs_by_own_steps"] == pytest.approx([0.9, 0.9, 0.9])


def options(**changed: object) -> argparse.Namespace:
    given = {
        "steps": 60,
        "quiet_steps": 10,
        "kills": 4,
        "mean_steps": 5.0,
        "save_every": 20,
        "set": [],
        "slow": False,
        "mean_gap": 2.0,
        "mean_spell": 8.0,
        "config": ROOT / "configs/run/demo_cpu.toml",
    }
    return argparse.Namespace(**{**given, **changed})


def test_every_way_meets_the_same_kills_which_leave_one_group_alone() -> None:
    traces = [resolve_trace(configure(options(), way, 3)) for way in (OURS, "torchft", "nvrx", "checkpoint_only")]
    assert all(trace == traces[0] for trace in traces[:3])
    assert len(traces[0]) == 4
    assert len({fault.group for fault in traces[0]}) == 3
    # Where every loss restarts from a checkpoint, each kill strikes all groups.
    moments = [(fault.step, fault.phase, group) for fault in traces[0] for group in range(4)]
    assert sorted((fault.step, fault.phase, fault.group) for fault in traces[3]) == sorted(moments)


def test_every_way_meets_the_same_slow_groups_and_no_kill(tmp_path: Path) -> None:
    given = options(slow=True)
    configs = {way: configure(given, way, 3, tmp_path / "run.py") for way in SLOW_WAYS}
    assert all(resolve_trace(config) == () for config in configs.values())
    assert {config.program.file for config in configs.values()} == {str(tmp_path / "run.py")}
    assert {config.spare.deal_by_pace for config in configs.values()} == {True}
    assert not configure(given, "dealt_evenly", 3, tmp_path / "run.py").spare.deal_by_pace
    assert spells_of(given, 3) == spells_of(given, 3) != spells_of(given, 4)


def test_steps_are_quiet_until_a_group_is_slow_for_the_first_time() -> None:
    lines = [f"{100 + step / 5:.2f} 0 committed {step} 4" for step in range(12)]
    lines += [f"{104 + step:.2f} 0 committed {12 + step} 4" for step in range(20)]
    assert outcome_of(events_of("\n".join(lines)), 4, quiet_until_s=102.5).quiet_s == pytest.approx(0.2)
    assert outcome_of(events_of("\n".join(lines)), 4).quiet_s == pytest.approx(1.0)


def test_a_run_too_short_for_its_kills_is_refused() -> None:
    with pytest.raises(SystemExit, match="--steps 20 is too short"):
        configure(options(steps=20), OURS, 3)


def test_no_run_is_measured_where_a_later_one_would_be_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draws its own kills: the last of several hours would else be the first to be refused."""
    monkeypatch.setattr("benchmarks.goodput.run_once", lambda *_: pytest.fail("measured"))
    last_of_the_first = resolve_trace(configure(options(steps=1000), OURS, 0))[-1].step
    steps = last_of_the_first + STEPS_AFTER + 1
    configure(options(steps=steps), OURS, 0)
    with pytest.raises(SystemExit, match=f"--steps {steps} is too short"):
        run_all(options(steps=steps, runs=20, ways=[OURS]))


def test_a_run_with_an_unexpected_error_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the sixth hour took the results of all runs before it along."""

    def run_once(_options: argparse.Namespace, way: str, number: int, _folder: Path) -> Run:
        if (way, number) == (OURS, 1):
            raise KeyError("an unknown record")
        return run_of(0.9)

    monkeypatch.setattr("benchmarks.goodput.run_once", run_once)
    runs, failed = run_all(options(steps=1000, runs=3, ways=[OURS, "without_rejoin"]))
    assert {way: len(found) for way, found in runs.items()} == {OURS: 2, "without_rejoin": 3}
    [message] = failed
    assert message.startswith("run 1, ours: Traceback")
    assert message.endswith("KeyError: 'an unknown record'")
    assert "in run_once" in message


def die_once(folder: Path, victim: int, group: int, up: Barrier | None) -> None:
    """The victim dies in its first incarnation, the others end after its second has begun."""
    mark = folder / "second-incarnation"
    if group == victim and up is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    elif group == victim:
        mark.touch()
        signal.pause()
    while not mark.exists():
        time.sleep(0.01)


def fail(_group: int, _up: Barrier | None) -> None:
    raise SystemExit(3)


def config_with_a_victim() -> tuple[RunConfig, int]:
    config = configure(options(kills=1), OURS, 0)
    return config, resolve_trace(config)[0].group


def test_a_group_that_ends_early_is_started_again(tmp_path: Path) -> None:
    config, victim = config_with_a_victim()
    run_groups(config, partial(die_once, tmp_path, victim), tmp_path, restarts=True)
    assert (tmp_path / "second-incarnation").exists()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_that_fails_without_an_injected_fault_ends_the_run(tmp_path: Path, restarts: bool) -> None:
    train: Callable[..., None] = fail
    with pytest.raises(RuntimeError, match="ended with 3"):
        run_groups(config_with_a_victim()[0], train, tmp_path, restarts=restarts)
