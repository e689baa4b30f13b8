"""How a run stands: fed line by line, it comes to what the summary of the whole journal says."""

import io
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.cli import progress as progress_module
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress
from spare_megatron.cli.run_view import NewLines, step_line, view_of
from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.store_space import StoreSpace, shortage
from spare_megatron.journal.files import Line, encode_line, read_journal
from spare_megatron.journal.records import (
    LOST_A_PEER,
    CadenceRecord,
    CulpritRecord,
    EndRecord,
    EntryRecord,
    FaultRecord,
    LossRecord,
    PacesRecord,
    Record,
    RestartRecord,
    UpdateRecord,
)
from spare_megatron.journal.state.follow import Follower, read_run_state
from spare_megatron.journal.state.overview import UNPROVEN, overview_of
from spare_megatron.journal.state.run_state import RunState, SavePlan
from spare_megatron.process.reports import (
    GroupLost,
    GroupRejoined,
    Message,
    RanksReady,
    RunStopped,
    StepCommitted,
    StoreMeasured,
)
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import run_record, summarize

COSTS = CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.1, detect_s=2.0, join_s=4.0, restart_s=120.0, save_s=5.0)
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
RUN = run_record(3, name="shown", redundancy=2, microbatches_per_shard=2, num_steps=20)


def simulated(seed: int, redundancy: int, repair_s: float | None) -> list[Line]:
    """A run with many losses; of few hosts with wipe-outs, too."""
    scenario = Scenario(
        name="shown",
        num_groups=7,
        redundancy=redundancy,
        microbatches_per_shard=3,
        num_steps=60,
        costs=COSTS,
        failures=FailureSpec(kind="system", mean_s=200.0),
        repair_s=repair_s,
    )
    found: list[Line] = []
    simulate(scenario, seed, journal=found.append)
    return found


def line(at_s: float, record: Record, source: str = "test") -> Line:
    return Line(source=source, at_s=at_s, record=record)


def entry(at_s: float, index: int, **fields: Any) -> Line:
    return line(at_s, EntryRecord(group=0, index=index, entry=fields))


def commit(at_s: float, index: int, step: int, **fields: Any) -> Line:
    return entry(at_s, index, entry="commit", step=step, attempt=index, **fields)


def run_state_of(*lines: Line) -> RunState:
    run_state = RunState()
    for item in (line(100.0, RUN), *lines):
        run_state.add_line(item)
    return run_state


def write(folder: Path, lines: list[Line]) -> Path:
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "test.jsonl").write_text("".join(encode_line(item) + "\n" for item in lines))
    return folder


@pytest.mark.parametrize(
    ("seed", "redundancy", "repair_s"), [(1, 6, 300.0), (2, 2, 300.0), (3, 2, None), (4, 6, 300.0)]
)
def test_what_lines_add_up_to_is_what_the_whole_journal_says(
    tmp_path: Path, seed: int, redundancy: int, repair_s: float | None
) -> None:
    lines = simulated(seed, redundancy, repair_s)
    journal = read_journal(write(tmp_path / "whole", lines))
    summary = summarize(journal)
    assert summary.groups_lost > 0
    assert (summary.restarts > 0) == (redundancy == 2)
    # Grown by pieces that end anywhere, looked at after each.
    text = "".join(encode_line(item) + "\n" for item in lines).encode()
    cuts = sorted(random.Random(seed).sample(range(len(text)), 40))
    follower = Follower(tmp_path)
    (tmp_path / "journal").mkdir()
    with (tmp_path / "journal" / "simulator.jsonl").open("wb") as file:
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            file.write(text[begin:end])
            file.flush()
            follower.poll()
    run_state = follower.run_state
    assert follower.damage == ()
    for name, value in run_state.figures():
        assert value == getattr(summary, name), name
    assert run_state.recoveries.found() == summary.recoveries
    goodput, expected = run_state.goodput(now_s=0.0), read_run_state(tmp_path / "whole").goodput(now_s=0.0)
    assert goodput is not None
    assert goodput == expected
    assert goodput.wall_s == pytest.approx(goodput.useful_s + sum(goodput.lost_s.values()))


def test_what_is_read_is_never_read_again_and_a_torn_line_waits(tmp_path: Path) -> None:
    lines = [line(100.0, RUN), *(commit(101.0 + step, step, step) for step in range(4))]
    texts = [encode_line(item) + "\n" for item in lines]
    file = write(tmp_path, lines[:3]) / "journal" / "test.jsonl"
    follower = Follower(tmp_path)
    assert follower.poll().num_committed == 2
    with file.open("r+") as opened:
        opened.write("#" * len("".join(texts[:3]).rstrip()))
        opened.seek(0, 2)
        opened.write(texts[3] + texts[4][:30])
    assert follower.poll().num_committed == 3
    with file.open("a") as opened:
        opened.write(texts[4][30:])
    assert follower.poll().num_committed == 4
    assert follower.damage == ()
    with file.open("a") as opened:
        opened.write('{"record":"what is this"}\n')
    follower.poll()
    assert len(follower.damage) == 1


def test_an_entry_that_is_not_there_is_waited_for_once() -> None:
    run_state = run_state_of(commit(101.0, 0, 0), commit(103.0, 2, 2))
    run_state.settle()
    assert run_state.num_committed == 1
    run_state.add_line(commit(102.0, 1, 1))  # of a slower file
    run_state.settle()
    assert (run_state.num_committed, run_state.damage) == (3, [])
    run_state.add_line(commit(105.0, 4, 4))
    run_state.settle()
    run_state.settle()
    assert run_state.num_committed == 5
    assert run_state.damage == ["log entries 3 to 3 are not in the journal"]


def test_a_loss_that_several_nodes_report_is_one_and_given_up_if_one_of_them_says_so() -> None:
    run_state = run_state_of(commit(101.0, 0, 0))
    first, second = ({"rank": rank, "operation": "transfer", "step": 1} for rank in (0, 1))
    loss = LossRecord(group=1, rank=1, cause="SIGKILL", entry_index=1, pending=[second])
    given_up = replace(loss, pending=[first], is_given_up=True)
    for at_s, record in ((102.1, loss), (102.2, given_up), (102.0, loss)):
        run_state.add_line(line(at_s, record))
    assert run_state.losses == [(102.0, replace(loss, pending=[second, first], is_given_up=True))]
    assert run_state.groups() == ["alive", "given up", "alive"]
    assert [event.text for event in run_state.events()] == [
        "group 1 lost: rank 1: SIGKILL",
        "group 1 given up: it has used up spare.rejoins",
    ]


@pytest.mark.parametrize("is_cause_first", [False, True])
def test_of_several_nodes_of_a_group_the_one_of_the_rank_at_fault_is_believed(*, is_cause_first: bool) -> None:
    run_state = run_state_of(commit(101.0, 0, 0))
    cause = LossRecord(group=1, rank=1, cause="no heartbeat", entry_index=1)
    found = [cause, LossRecord(group=1, rank=0, cause=LOST_A_PEER, entry_index=1)]
    for at_s, record in enumerate(found if is_cause_first else reversed(found)):
        run_state.add_line(line(102.0 + at_s, record))
    assert run_state.losses == [(102.0, cause)]


def test_a_group_is_lost_then_rejoining_then_alive_or_given_up() -> None:
    run_state = run_state_of(commit(101.0, 0, 0))
    assert run_state.groups() == ["alive", "alive", "alive"]
    run_state.add_line(line(102.0, LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=1)))
    assert run_state.groups() == ["alive", "lost", "alive"]
    run_state.add_line(entry(102.1, 1, entry="fence", group=1, incarnation=0))
    run_state.add_sources({"group-0001-rank-0", "group-0002-rank-1", "driver"})
    assert run_state.groups() == ["alive", "lost", "alive"]
    run_state.add_sources({"group-0001-rank-0-life-1"})
    assert run_state.groups() == ["alive", "rejoining", "alive"]
    run_state.add_line(commit(103.0, 2, 1, admit=[[1, 1]]))
    assert run_state.groups() == ["alive", "alive", "alive"]
    again = LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=3, incarnation=1, is_given_up=True)
    run_state.add_line(line(104.0, again))
    assert run_state.groups() == ["alive", "given up", "alive"]
    assert [event.text for event in run_state.events()] == [
        "group 1 lost: rank 0: SIGKILL",
        "group 1 rejoined, and takes part from step 2 on",
        "group 1 lost: rank 0: SIGKILL; given up: it has used up spare.rejoins",
    ]


def test_groups_are_slow_that_are_dealt_less_work_or_named() -> None:
    run_state = run_state_of()
    run_state.add_line(line(200.0, PacesRecord(group=0, step=3, permille={"1": 1500, "2": 800})))
    assert run_state.groups() == ["alive", "slow", "alive"]
    named = CulpritRecord(machine=0, cause="data", of_group=0, excess_s=1.0, factor=2.0)
    run_state.add_line(line(201.0, named))
    assert run_state.groups() == ["slow", "slow", "alive"]
    run_state.add_line(line(202.0, replace(named, is_over=True)))
    assert run_state.groups() == ["alive", "slow", "alive"]


def test_the_next_save_follows_from_the_cadence_or_the_settings() -> None:
    run_state = run_state_of(commit(101.0, 0, 0), commit(102.0, 1, 1), commit(103.0, 2, 2, save=True))
    assert run_state.next_save_s(SavePlan(), 110.0) is None
    assert run_state.next_save_s(SavePlan(interval_s=60.0), 110.0) == 53.0
    assert run_state.next_save_s(SavePlan(interval_steps=10), 110.0) == 7 * 1.0
    cadence = CadenceRecord(
        group=0,
        step=3,
        interval_s=30.0,
        save_s=1.0,
        group_interval_s=1.0,
        absence_s=None,
        time_to_wipe_out_s=1.0,
        num_losses=0,
        exposure_s=1.0,
        num_members=3,
    )
    run_state.add_line(line(104.0, cadence))
    assert run_state.next_save_s(SavePlan(), 110.0) == 24.0
    run_state.add_line(line(112.0, EndRecord(outcome="finished", reason="")))
    assert run_state.next_save_s(SavePlan(), 113.0) is None


def without_colours(console: RunConsole) -> str:
    """What the console has written to its file, without what colours it and moves the cursor."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_the_view_can_be_read_without_colours() -> None:
    run_state = run_state_of(
        commit(101.0, 0, 0),
        line(102.0, LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=1)),
        entry(102.1, 1, entry="fence", group=1, incarnation=0),
        commit(103.0, 2, 1),
    )
    console = RunConsole(file=io.StringIO(), force_terminal=True)
    with console.live() as show:
        overview = overview_of(run_state, 104.0, UNPROVEN, window_s=math.inf)
        show(view_of(run_state, SavePlan(interval_s=60.0), overview, notes=["starting"]))
    text = without_colours(console)
    assert re.search(r"^step 1 \(2/20\)", text, re.MULTILINE), "the bar has a line of its own"
    for part in (
        "groups ALA",
        "A alive 2, L lost 1",
        "recovery",
        "next save in 56 s",
        "SIGKILL",
        "starting",
    ):
        assert part in text, part


def test_training_in_a_terminal_shows_what_the_journal_has(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [line(100.0, RUN), commit(101.0, 0, 0)])
    console = RunConsole(file=io.StringIO(), force_terminal=True)
    with RunProgress(RunConfig(), console, run_dir) as progress:
        progress.on_event(Message(text="starting: a test"))
        progress.on_event(Message(text="layers: megatron-core, fusions: none"))
    text = without_colours(console)
    for part in ("step 0 (1/20)", "groups AAA", "starting: a test", "layers: megatron-core, fusions: none"):
        assert part in text, part


UPDATE = UpdateRecord(
    group=0,
    step=1,
    attempt=2,
    num_microbatches=6,
    loss=2.34561,
    grad_norm=1.2341,
    learning_rate=3e-4,
    makespan=4,
    step_s=0.5,
)
LOST = LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=1)
STORY = [
    line(100.0, replace(RUN, tokens_per_step=6000, flops_per_step=3e12, peak_tflops=4.0, ranks_per_group=2)),
    commit(101.0, 0, 0),
    line(101.5, FaultRecord(group=1, rank=0, step=1, phase="backward", kind="kill")),
    line(102.0, LOST),
    entry(102.1, 1, entry="fence", group=1, incarnation=0),
    commit(103.0, 2, 1, admit=[[1, 1]]),
    line(103.1, UPDATE),
]
SHOWN = [
    "fault injected: kill of group 1 rank 0 in step 1, backward",
    "group 1 lost: rank 0: SIGKILL",
    "group 1 is up again and waits for the end of a step",
    "group 1 rejoined, and takes part from step 2 on",
]


def follow_story(run_dir: Path, *, is_terminal: bool) -> str:
    """What is shown of it, with all that its processes report."""
    group, lost = GroupId(1), GroupLost(record=LOST)
    console = RunConsole(file=io.StringIO(), force_terminal=is_terminal)
    write(run_dir, STORY[:5])
    with RunProgress(RunConfig(), console, run_dir) as progress:
        for event in (lost, lost, RanksReady(group=group)):
            progress.on_event(event)
            progress.refresh()
        with (run_dir / "journal" / "test.jsonl").open("a") as file:
            file.write("".join(encode_line(item) + "\n" for item in STORY[5:]))
        for event in (GroupRejoined(member=Member(group, 1), step=2), RunStopped(group=group, step=2, reason="halt")):
            progress.on_event(event)
            progress.refresh()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_piped_each_event_is_shown_once_with_its_time_and_the_number_of_the_journal(tmp_path: Path) -> None:
    """A group rejoined from step 16 on by the journal, and right below from step 17 on by its own report."""
    lines = follow_story(tmp_path / "run", is_terminal=False).splitlines()
    assert all(re.match(STAMP, text) for text in lines)
    shown_lines = [text[len("2026-11-23 12:00:00 ") :] for text in lines]
    assert [text for text in shown_lines if not text.startswith("step ")] == SHOWN


def test_while_the_journal_is_behind_what_is_reported_is_shown_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the screen would stand still until the end."""
    now_s = 110.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(time=lambda: now_s))
    run_dir = write(tmp_path / "run", STORY[:2])
    console = RunConsole(file=io.StringIO())
    step = StepCommitted(
        update=UPDATE,
        num_alive=2,
        split_s={},
        head=3,
        epoch=1,
        num_recomputed=0,
        recoveries=(),
    )
    lost = GroupLost(record=LOST)
    rejoined = GroupRejoined(member=Member(GroupId(1), 1), step=2)
    with RunProgress(RunConfig(), console, run_dir) as progress:
        for event in (step, lost, rejoined):
            progress.on_event(event)
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue() == "", "the journal will show these"
        now_s += 11.0
        later = [replace(step, update=replace(UPDATE, step=number)) for number in (9, 10)]
        for event in (*later, lost, rejoined):
            progress.on_event(event)
        with (run_dir / "journal" / "test.jsonl").open("a") as file:
            file.write("".join(encode_line(item) + "\n" for item in STORY[2:]))
        progress.refresh()
    shown_lines = [text[len("2026-11-23 12:00:00 ") :] for text in console.file.getvalue().splitlines()]
    assert shown_lines[0].startswith(
        "step 9 (10/20)  loss 2.3456  lr 3.00e-04  grad norm 1.234  12k tokens/s  MFU 37.5%"
    )
    assert shown_lines[1:4] == [SHOWN[1], SHOWN[3], SHOWN[0]]
    assert [text[:13] for text in shown_lines[4:]] == ["step 1 (2/20)"]


def test_a_step_that_came_before_an_event_is_shown_before_it() -> None:
    """It was held back for two seconds after the one before, and came behind with an earlier time."""
    lines, update = NewLines(has_steps=True), replace(UPDATE, step=0, attempt=0)
    run_state = run_state_of(commit(101.0, 0, 0), line(101.1, update))
    (shown_line,) = lines.poll(run_state, 101.2)
    assert " step 0 (1/20) " in shown_line
    for item in (commit(102.0, 1, 1), line(102.1, replace(UPDATE, attempt=1))):
        run_state.add_line(item)
    assert lines.poll(run_state, 102.2) == [], "too soon"
    run_state.add_line(line(102.5, LOST))
    step, loss = lines.poll(run_state, 102.6)
    assert (" step 1 (2/20) " in step, loss.endswith(SHOWN[1])) == (True, True)
    assert lines.poll(run_state, 999.0) == []


def test_on_a_terminal_each_event_stands_once_in_the_lines_above_the_view(tmp_path: Path) -> None:
    """The newest was in the lines, in the list of events and in the note."""
    shown = follow_story(tmp_path / "run", is_terminal=True)
    assert "step 1 (2/20)" in shown
    assert [shown.count(text) for text in SHOWN] == [1, 1, 1, 1]


def test_a_step_is_shown_in_the_same_line_everywhere(tmp_path: Path) -> None:
    text = (
        "step 1 (2/20)  loss 2.3456  lr 3.00e-04  grad norm 1.234  12k tokens/s  MFU 37.5%  groups 2/3  load 4  500 ms"
        "  left 36 s"
    )
    assert f" {text}\n" in follow_story(tmp_path / "run", is_terminal=False)
    assert f"{text}  (going on)\n" in CliRunner().invoke(app, ["status", str(tmp_path / "run")]).output
    run_state = run_state_of(commit(101.0, 0, 0), line(101.1, replace(UPDATE, step=0, attempt=0)))
    assert "loss 2.3456  lr 3.00e-04  grad norm 1.234  groups 3/3" in step_line(run_state, 102.0), "nothing is known"


def test_the_time_left_follows_the_recent_steps_and_their_recoveries() -> None:
    run_state = run_state_of(*(commit(101.0 + step, step, step) for step in range(4)))
    assert run_state.left_s(104.0) == pytest.approx(16 * 1.0)
    run_state.add_line(commit(109.0, 4, 4))  # a recovery
    assert run_state.left_s(109.0) == pytest.approx(15 * (3 * 1.0 + 5.0) / 4)
    run_state.add_line(commit(1109.0, 5, 5))  # a restart, of a minute for each of the other steps
    assert run_state.left_s(1109.0) == pytest.approx(14 * (3 * 1.0 + 5.0 + 10 * 1.0) / 5)
    run_state.add_line(line(1110.0, EndRecord(outcome="finished", reason="")))
    assert run_state.left_s(1110.0) is None


def test_no_more_time_is_left_than_the_run_is_to_take() -> None:
    run_state = RunState()
    assert run_state.left_s(100.0) is None
    for item in (line(100.0, replace(RUN, max_minutes=0.2)), *(commit(101.0 + step, step, step) for step in range(4))):
        run_state.add_line(item)
    assert run_state.left_s(104.0) == pytest.approx(112.0 - 104.0)


def test_checkpoints_that_no_group_could_use_are_shown_once_for_each_restart() -> None:
    record = RestartRecord(group=0, incarnation=1, step=1, rework_steps=1, restart_s=1.0, rejected=["step 2: damaged"])
    restarts: list[Line] = []
    for index in (1, 2):
        restarts.append(entry(102.0, index, entry="restart", step=1, members=[[0, index], [1, index]]))
        restarts += [line(103.0, replace(record, group=group)) for group in (0, 1)]
    run_state = run_state_of(commit(101.0, 0, 0, save=True), *restarts)
    shown_lines = [event.text for event in run_state.events()]
    kinds = {event.kind for event in run_state.events() if event.text == "step 2: damaged"}
    assert kinds == {"rejected checkpoint"}, "and no failed save, which is an alarm for an hour"
    assert (
        shown_lines.count("step 2: damaged")
        == shown_lines.count("training starts again from the checkpoint after 1 step")
        == 2
    )


def test_why_a_run_was_halted_is_shown_once() -> None:
    end = EndRecord(outcome="halted", reason="it diverged")
    halt = {"entry": "halt", "step": 0, "reason": "it diverged", "discard": True}
    run_state = run_state_of(entry(101.0, 0, **halt), line(102.0, end))
    run_state.settle()  # a halt over wrong state names no group
    assert [event.text for event in run_state.events()] == ["halted: it diverged", "the run ended: halted"]


def test_a_wipe_out_before_a_restart_is_shown_once_though_each_group_reports_it(tmp_path: Path) -> None:
    console = RunConsole(file=io.StringIO())
    stopped = RunStopped(group=GroupId(0), step=3, reason="shard 1 has no host", is_final=False)
    with RunProgress(RunConfig(), console, tmp_path) as progress:
        for _ in range(2):
            progress.on_event(stopped)
            progress.on_event(replace(stopped, group=GroupId(1)))
            progress.on_event(RestartRecord(group=0, incarnation=1, step=3, rework_steps=0, restart_s=1.0))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("wiped out after 3 committed steps: shard 1 has no host") == 2


def test_a_traceback_is_shown_below_the_loss_that_it_explains(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", STORY[:5])
    console = RunConsole(file=io.StringIO())
    with RunProgress(RunConfig(), console, run_dir) as progress:
        progress.on_event(GroupLost(record=LOST, traceback="Traceback:\n  x[/b]\n"))
    assert isinstance(console.file, io.StringIO)
    lines = [text[len("2026-11-23 12:00:00 ") :] for text in console.file.getvalue().splitlines()]
    assert lines[1:] == [SHOWN[1], "group 1 rank 0 raised:", "Traceback:", "  x[/b]"]


def test_that_a_group_is_up_again_is_shown_once_though_each_of_its_nodes_reports_it(tmp_path: Path) -> None:
    console = RunConsole(file=io.StringIO())
    with RunProgress(RunConfig(), console, tmp_path) as progress:
        for incarnation in (0, 1):
            progress.on_event(GroupLost(record=replace(LOST, incarnation=incarnation)))
            for _ in range(2):
                progress.on_event(RanksReady(group=GroupId(1)))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("group 1 is up again") == 2


def test_that_etcd_fills_up_is_shown_once_though_it_is_measured_again_and_again(tmp_path: Path) -> None:
    console = RunConsole(file=io.StringIO())
    full, wide = (StoreSpace(used_bytes=9, limit_bytes=limit, is_full=False) for limit in (10, 1 << 30))
    with RunProgress(RunConfig(), console, tmp_path) as progress:
        for space in (wide, full, full, wide, full):
            progress.on_event(StoreMeasured(space=space, shortage=shortage(space, 0)))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("warning: etcd holds 9 B of the 10 B") == 2


def test_a_loss_in_a_trace_is_known_by_its_group() -> None:
    found: list[Line] = []
    scenario = Scenario(
        name="shown",
        num_groups=5,
        redundancy=3,
        microbatches_per_shard=3,
        num_steps=8,
        costs=COSTS,
        failures=FailureSpec(kind="trace", trace=(Loss(at_s=90.0, groups=(GroupId(1),)),)),
    )
    simulate(scenario, 1, journal=found.append)
    run_state = RunState()
    for item in found:
        run_state.add_line(item)
    assert run_state.groups() == ["alive", "lost", "alive", "alive", "alive"]
