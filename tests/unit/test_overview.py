"""The three answers of a morning, compared with counting by hand; never `healthy` where something is wrong."""

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import (
    CheckpointRecord,
    CulpritRecord,
    EndRecord,
    EntryRecord,
    LossRecord,
    PlacesRecord,
    StorageRecord,
    UpdateRecord,
)
from spare_megatron.journal.state import overview as overview_module
from spare_megatron.journal.state.follow import run_state_of
from spare_megatron.journal.state.overview import UNPROVEN, Overview, overview_of
from spare_megatron.journal.state.run_state import RunState
from tests.unit.journal_in_memory import check_journal, run_record
from tests.unit.test_run_state import commit, entry, line, simulated, write

ALERTS = Path(__file__).parents[2] / "launch/prometheus/alerts.yml"
RUN = run_record(3, num_steps=8)
VALID = ("valid", ())


def lost(at_s: float, group: int, index: int, incarnation: int = 0, **fields: bool) -> list[Line]:
    record = LossRecord(
        group=group, rank=0, cause="SIGKILL", entry_index=index, incarnation=incarnation, is_given_up="gone" in fields
    )
    return [line(at_s, record), entry(at_s, index, entry="fence", group=group, incarnation=incarnation)]


def saved(at_s: float, step: int, outcome: str = "saved") -> Line:
    record = CheckpointRecord(
        group=0,
        step=step,
        outcome=outcome,
        reason="",
        num_bytes=9,
        stall_s=0.25,
        write_s=1.0,  # type: ignore[arg-type]
    )
    return line(at_s, record)


NIGHT = [
    line(100.0, RUN),
    *(commit(104.0 + step, step, step) for step in range(3)),
    *lost(106.2, group=1, index=3),
    commit(109.0, 4, 3),
    commit(110.0, 5, 4, admit=[[1, 1]]),
    commit(112.0, 6, 5, save=True),
    saved(112.5, 6),
    commit(113.0, 7, 6),
    *lost(113.5, group=0, index=8),
    *lost(113.6, group=1, index=9, incarnation=1),
    *lost(113.7, group=2, index=10),
    entry(115.0, 11, entry="restart", step=6, members=[[0, 1], [1, 2], [2, 1]]),
    commit(118.0, 12, 6),
    commit(119.0, 13, 7),
    line(119.5, EndRecord(outcome="finished", reason="")),
]
"""A masked loss; a return; a wipe-out, which undoes the step after the checkpoint. A quiet step takes 1 s."""


def overview(lines: list[Line], now_s: float = 0.0, window_s: float = math.inf, proof: tuple = VALID) -> Overview:  # type: ignore[type-arg]
    return overview_of(state(lines), now_s, proof, window_s=window_s)


def state(lines: list[Line]) -> RunState:
    return run_state_of(Journal(lines=tuple(lines)))


def counted(found: Overview) -> dict[str, tuple[int, int | None, float | None]]:
    return {one.kind: (one.count, one.num_masked, one.cost_s) for one in found.happened}


def test_a_night_is_what_counting_by_hand_says() -> None:
    found = overview(NIGHT)
    assert counted(found) == {
        "loss": (4, 1, pytest.approx(2.0)),
        "return": (1, None, pytest.approx(1.0)),
        "checkpoint": (1, None, 0.25),
        "restart": (1, None, pytest.approx(1.0 + 4.0)),
        "end": (1, None, None),
    }
    losses = found.happened[0]
    assert (losses.first_at_s, losses.last.at_s, losses.last.text) == (106.2, 113.7, "group 2 lost: rank 0: SIGKILL")
    assert (found.since_s, found.until_s, found.health, found.alarms) == (100.0, 119.5, "healthy", ())
    assert found.goodput is not None
    assert (found.goodput.wall_s, found.goodput.useful_s) == pytest.approx((19.5, 8.0))
    lost_s = {"start": 3.0, "rework": 1.0, "recovery": 2.0, "admission": 1.0, "restart": 4.0, "end": 0.5}
    assert {cause: spent for cause, spent in found.goodput.lost_s.items() if spent} == pytest.approx(lost_s)
    assert (found.device, found.device_hours) == ("GPU", pytest.approx(3 * 19.5 / 3600))


def test_a_window_ends_with_the_run_and_begins_with_a_whole_step() -> None:
    found = overview(NIGHT, now_s=5000.0, window_s=8.0)
    assert (found.since_s, found.until_s) == (111.5, 119.5)
    assert counted(found)["loss"] == (3, 0, None)
    assert "return" not in counted(found)
    assert found.goodput is not None
    assert (found.goodput.wall_s, found.goodput.useful_s) == pytest.approx((9.5, 3.0))  # from the commit at 110
    assert found.goodput.longest_pause_s == pytest.approx(5.0)
    lost_s = {"rework": 1.0, "admission": 1.0, "restart": 4.0, "end": 0.5}
    assert {cause: spent for cause, spent in found.goodput.lost_s.items() if spent} == pytest.approx(lost_s)


def test_a_window_without_a_commit_has_lost_all_of_its_time() -> None:
    found = overview(NIGHT[:4], now_s=606.0, window_s=100.0)
    assert found.goodput is not None
    assert (found.goodput.wall_s, found.goodput.goodput, found.goodput.lost_s) == (500.0, 0.0, {"end": 500.0})


def test_ranks_that_share_processors_have_spent_the_hours_of_those() -> None:
    found = overview([line(100.0, dataclasses.replace(RUN, num_processors=2)), *NIGHT[1:]])
    assert (found.device, found.device_hours) == ("CPU", pytest.approx(2 * 19.5 / 3600))


def test_a_loss_that_ended_in_a_pause_was_not_masked() -> None:
    """Two groups host each of four shards: without groups 0 and 1, shard 1 has none."""
    lines = [
        line(0.0, run_record(4, redundancy=2, placement="golomb")),
        *(commit(step + 1.0, step, step) for step in range(3)),
    ]
    lines += [*lost(3.2, group=3, index=3), commit(4.0, 4, 3, admit=[[3, 1]])]
    lines += [*lost(4.2, group=0, index=5), *lost(4.3, group=1, index=6)]
    paused = overview(lines, now_s=9.0)
    assert "paused: no group left hosts shard 1" in paused.alarms
    lines += [
        entry(5.0, 7, entry="retry", step=4, attempt=5),
        entry(60.0, 8, entry="resume", step=4, attempt=6, admit=[[0, 1], [1, 1]]),
        commit(61.0, 9, 4),
    ]
    found = overview(lines, now_s=61.0)
    assert counted(found)["loss"][:2] == (3, 1)
    assert counted(found)["pause"] == (1, None, pytest.approx(56.0))


# -------------------------------------------------------------------------------------------------------------- health

UNDER_WAY = [line(0.0, run_record(4, redundancy=3)), *(commit(step + 1.0, step, step) for step in range(3))]
RESTART = entry(3.5, 4, entry="restart", step=0, members=[[group, 1] for group in range(4)])
OPEN: dict[str, tuple[list[Line], float]] = {
    "SpareNextLossMayPause": ([*lost(3.2, 0, 3), *lost(3.3, 1, 4), commit(4.0, 5, 3)], 5.0),
    "SpareRunPaused": ([*lost(3.2, 0, 3), *lost(3.3, 1, 4), *lost(3.4, 2, 5)], 5.0),
    "SpareRestarted": ([*lost(3.2, 0, 3), RESTART, *(commit(4.0 + step, 5 + step, step) for step in range(3))], 500.0),
    "SpareSaveNotSaved": (
        [saved(3.2, 3, "failed"), saved(3.3, 3), *(commit(900.0 * k, 2 + k, 2 + k) for k in (1, 2, 3))],
        3000.0,
    ),
    "SpareNoStep": ([], 700.0),
    "SpareMachineQuarantined": (
        [line(3.2, PlacesRecord(index=0, num_places=4, holdings=[], quarantined=[[2, "slow", "its link"]]))],
        5.0,
    ),
}
"""For each alert of Prometheus on the journal, lines with which it is open at a time."""
FURTHER: dict[str, list[Line]] = {
    "held back": [line(3.2, CulpritRecord(machine=3, cause="compute", of_group=2, rank=1, excess_s=0.12, factor=2.0))],
    "incomplete": [line(3.2, StorageRecord(outcome="held", path="journal", reason="full"))],
    "group 3 given up": lost(3.2, 3, 3, gone=True),
    "the run ended: halted": [line(3.2, EndRecord(outcome="halted", reason="it diverged"))],
    "damaged": [line(3.2, LossRecord(group=9, rank=0, cause="SIGKILL", entry_index=9))],
}


def test_each_alert_of_prometheus_is_an_alarm_here_and_has_its_limits() -> None:
    alerts = {
        rule["alert"]: rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    }
    assert {*OPEN, "SpareStoreNearQuota"} == {*alerts}
    assert overview(UNDER_WAY, now_s=5.0).health == "healthy"
    for name, (lines, now_s) in OPEN.items():
        assert overview([*UNDER_WAY, *lines], now_s=now_s).health == "not healthy", name
    module = overview_module
    assert alerts["SpareNoStep"].endswith(f"> {module.NO_STEP_S:.0f}")
    assert f"[{module.RESTART_S / 60:.0f}m]" in alerts["SpareRestarted"]
    assert f"[{module.NOT_SAVED_S / 3600:.0f}h]" in alerts["SpareSaveNotSaved"]


@pytest.mark.parametrize("name", FURTHER)
def test_what_else_a_person_should_look_at_is_an_alarm(name: str) -> None:
    found = overview([*UNDER_WAY, *FURTHER[name]], now_s=5.0)
    assert found.health == "not healthy"
    assert any(alarm.startswith(name) for alarm in found.alarms), found.alarms


def test_alarms_are_over_when_their_time_is() -> None:
    for name in ("SpareRestarted", "SpareSaveNotSaved"):
        lines, now_s = OPEN[name]
        later = commit(4000.0, 6, 6) if name == "SpareSaveNotSaved" else commit(1000.0, 8, 3)
        found = overview([*UNDER_WAY, *lines, later], now_s=now_s + 1000.0)
        assert found.health == "healthy", (name, found.alarms)


def test_what_is_not_proven_is_not_called_healthy() -> None:
    assert overview(UNDER_WAY, 5.0, proof=UNPROVEN).health == "unproven"
    assert overview(UNDER_WAY, 5.0, proof=("unknown", ("the journal has no end",))).health == "healthy"
    assert overview(NIGHT, proof=("unknown", ("a line is missing",))).alarms == (
        "spare check: unknown; a line is missing",
    )


@cache
def lines_of(seed: int) -> list[Line]:
    return simulated(seed, 2 if seed % 2 else 5, 300.0)


def miscounted(record: UpdateRecord) -> UpdateRecord:
    return dataclasses.replace(record, num_microbatches=record.num_microbatches + 1)


def another_step(record: EntryRecord) -> EntryRecord:
    return dataclasses.replace(record, entry={**record.entry, "step": record.entry.get("step", 0) + 1})


DOCTORED: tuple[Callable[[list[Line], int], None], ...] = (
    lambda lines, place: None,
    lambda lines, place: _change(lines, place, UpdateRecord, miscounted),
    lambda lines, place: _change(lines, place, EntryRecord, another_step),
    lambda lines, place: lines.pop(1 + place % (len(lines) - 1)) and None,
)


def _change(lines: list[Line], place: int, kind: type, change: Callable) -> None:  # type: ignore[type-arg]
    found = [index for index, one in enumerate(lines) if isinstance(one.record, kind)]
    if found:
        index = found[place % len(found)]
        lines[index] = dataclasses.replace(lines[index], record=change(lines[index].record))


@given(
    seed=st.integers(1, 6),
    cut=st.integers(30, 1500),
    doctor=st.sampled_from(DOCTORED),
    place=st.integers(0, 10**6),
    after_s=st.floats(0, 4000),
)
@example(seed=2, cut=10**6, doctor=DOCTORED[0], place=0, after_s=0.0)
@example(seed=2, cut=10**6, doctor=DOCTORED[1], place=7, after_s=0.0)
def test_no_run_is_healthy_that_is_invalid_or_has_an_alarm(
    seed: int, cut: int, doctor: Callable[[list[Line], int], None], place: int, after_s: float
) -> None:
    """Alarms as Prometheus would find them, from the state of the groups and the log alone."""
    lines = sorted(lines_of(seed), key=lambda one: one.at_s)[:cut]
    doctor(lines, place)
    journal = Journal(lines=tuple(lines))
    verdict = check_journal(journal)
    run_state = run_state_of(journal)
    fold = run_state.folding
    assert fold is not None
    now_s = lines[-1].at_s + after_s
    found = overview_of(run_state, now_s, (verdict.verdict, verdict.reasons), window_s=math.inf)
    is_wrong = verdict.verdict == "invalid"
    if run_state.end is None:
        hosts = min(len(set(hosts) & set(fold.members)) for hosts in fold.terms.placement.hosts)
        restarts = [
            one.at_s for one in lines if isinstance(one.record, EntryRecord) and one.record.entry["entry"] == "restart"
        ]
        is_wrong |= hosts <= 1 or bool(run_state.awaited) or now_s - run_state.committed_at_s > 600.0
        is_wrong |= any(at_s >= now_s - 900.0 for at_s in restarts)
    else:
        is_wrong |= verdict.verdict == "unknown" or run_state.end.outcome not in ("finished", "stopped")
    is_wrong |= bool(run_state.damage)
    assert (found.health == "healthy") == (not is_wrong), found


# ------------------------------------------------------------------------------------------------- where it is shown


def test_status_and_report_answer_first(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", NIGHT)
    result = CliRunner().invoke(app, ["status", str(run_dir), "--since", "8s"])
    assert result.exit_code == 0, result.output
    first, *others = result.stdout.splitlines()
    assert first.startswith("not healthy: 1 alarm is open, spare check: "), "the journal lacks what the groups computed"
    assert sum("3 losses, 0 masked" in text and "group 2 lost: rank 0: SIGKILL" in text for text in others) == 1
    assert sum(text.startswith("goodput 31.6% of 9.5 s; lost: restart 4 s") for text in others) == 1
    answer = json.loads(CliRunner().invoke(app, ["status", str(run_dir), "--json", "--since", "8s"]).stdout)
    assert answer["overview"]["health"] == "not healthy"
    assert answer["overview"]["goodput"]["wall_s"] == pytest.approx(9.5)
    assert answer["wall_s"] == pytest.approx(19.5), "of the whole run"
    assert CliRunner().invoke(app, ["report", str(run_dir), "--since", "8s"]).exit_code == 0
    page = (run_dir / "report.html").read_text()
    assert '<p class="verdict not-healthy">not healthy: 1 alarm is open' in page
    assert "<td>3 losses, 0 masked</td>" in page
    result = CliRunner().invoke(app, ["status", str(run_dir), "--since", "8"])
    assert result.exit_code == 2
    assert "--since 8: no unit" in result.output


def test_a_journal_of_two_runs_is_unknown_to_check(tmp_path: Path) -> None:
    """It was an error of unpacking."""
    run_dir = write(tmp_path / "run", [*NIGHT, NIGHT[0]])
    result = CliRunner().invoke(app, ["check", str(run_dir)])
    assert result.exit_code == 3, result.output
    assert "2 run records, expected 1" in result.stdout
