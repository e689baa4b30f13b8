"""Spans of ranks: kept in a ring, written around events, shown as a trace with the clocks of machines aligned."""

import itertools
import multiprocessing
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.failure_detector import OPERATIONS, Operation
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import LOST_A_PEER, EntryRecord, LossRecord
from spare_megatron.journal.spans import RECOVERY_NAMES, RankSpans, Span, SpansFile, read_spans_of
from spare_megatron.process.heartbeats import HeartbeatPage, HeartbeatWriter, new_page
from spare_megatron.process.reports import GroupRejoined, RankKey, StepCommitted, StoreAway
from spare_megatron.process.span_ring import NUM_SPANS, PassTimes, Ring, SpanRecorder, read_spans
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.supervisor.span_files import Timeline
from spare_megatron.tools.report.trace import clock_offsets, trace_of
from tests.unit.test_metrics import committed


class Clock:
    """A monotonic clock that is a second later at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> tuple[Ring, SpanRecorder]:
    monkeypatch.setattr("spare_megatron.process.span_ring.time", SimpleNamespace(monotonic=Clock()))
    ring = Ring()
    return ring, SpanRecorder(ring, PassTimes(Clock(), lambda began_s, ended_s: ended_s - began_s))


def microbatch(shard: int, index: int) -> Microbatch:
    return Microbatch(ShardId(shard), index)


def test_a_backward_pass_ends_when_the_rank_turns_to_something_else(recorder: tuple[Ring, SpanRecorder]) -> None:
    ring, spans = recorder
    spans.step = 7
    with spans.forward(microbatch(3, 1)):
        pass
    spans.backward(microbatch(3, 1))
    with spans.during(Operation.TRANSFER):
        pass
    assert spans.passes.total_s() == 2.0
    found, following = read_spans(ring, 0)
    assert following == 3
    assert [(span.name, span.step, span.began_s, span.ended_s, span.shard, span.microbatch) for span in found] == [
        ("forward", 7, 1.0, 2.0, 3, 1),
        ("backward", 7, 3.0, 4.0, 3, 1),
        ("transfer", 7, 4.0, 5.0, -1, -1),
    ]


class Brackets:
    """Ranges as nested brackets."""

    def __init__(self) -> None:
        self.text = ""

    def push(self, name: str, /) -> None:
        self.text += f"{name}("

    def pop(self) -> None:
        self.text += ")"


def test_ranges_are_nested_as_the_spans_are(recorder: tuple[Ring, SpanRecorder]) -> None:
    _, spans = recorder
    ranges = Brackets()
    with spans.during(Operation.VOTE):
        pass
    spans.ranges = ranges
    with spans.forward(microbatch(3, 1)):
        with spans.during(Operation.STORAGE):
            pass
    spans.backward(microbatch(3, 1))
    with spans.during(Operation.REDUCE, in_backward=True):
        pass
    with pytest.raises(ValueError, match="lost"), spans.during(Operation.UPDATE):
        raise ValueError("lost")
    spans.ranges = None
    with spans.during(Operation.VOTE):
        pass
    forward, backward = (f"{kind} of shard 3, microbatch 1" for kind in ("forward", "backward"))
    assert ranges.text == f"{forward}(storage()){backward}()reduce(){backward}()update()"


def test_a_backward_pass_goes_on_after_a_wait_in_it_that_does_not_count_as_computing(
    recorder: tuple[Ring, SpanRecorder],
) -> None:
    ring, spans = recorder
    spans.backward(microbatch(3, 1))
    with spans.during(Operation.REDUCE, in_backward=True):
        pass
    with spans.during(Operation.SETTLE):
        pass
    assert spans.passes.total_s() == spans.passes.usual_s() == 2.0, "one pass, though in two pieces"
    assert [span.name for span in read_spans(ring, 0)[0]] == ["backward", "reduce", "backward", "settle"]


def test_what_raises_inside_leaves_its_span(recorder: tuple[Ring, SpanRecorder]) -> None:
    ring, spans = recorder
    with pytest.raises(RuntimeError), spans.during(Operation.REDUCE):
        raise RuntimeError
    assert [span.name for span in read_spans(ring, 0)[0]] == ["reduce"]


def test_spans_add_up_to_what_a_step_is_spent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, now_s, expected = random.Random(1), [0.0], dict.fromkeys(OPERATIONS, 0.0)
    for module in ("heartbeats", "span_ring"):
        clock = SimpleNamespace(monotonic=lambda: now_s[0])
        monkeypatch.setattr(f"spare_megatron.process.{module}.time", clock)
    page = new_page(multiprocessing.get_context("fork"))
    heartbeat = HeartbeatWriter(page, PassTimes(lambda: now_s[0], lambda began_s, ended_s: ended_s - began_s))

    def spend(operation: Operation) -> None:
        spent_s = rng.random()
        now_s[0] += spent_s
        expected[operation] += spent_s

    with heartbeat.during(Operation.COMPUTE):
        for _ in range(200):
            outer, inner = rng.choices([each for each in OPERATIONS if each is not Operation.COMPUTE], k=2)
            spend(Operation.COMPUTE)
            with heartbeat.during(outer):
                spend(outer)
                with heartbeat.during(inner):
                    spend(inner)
                spend(outer)
        split = heartbeat.take_split()
    found = dict.fromkeys(map(str, OPERATIONS), 0.0)
    spans = read_spans(page.ring, 0)[0]
    for inside, around in zip(spans[::2], spans[1::2], strict=True):  # in the order in which they end
        found[inside.name] += inside.ended_s - inside.began_s
        found[around.name] += (around.ended_s - around.began_s) - (inside.ended_s - inside.began_s)
    for operation, spent_s in expected.items():
        assert split.get(operation, 0.0) == pytest.approx(spent_s)
        assert operation is Operation.COMPUTE or found[operation] == pytest.approx(spent_s)


@pytest.mark.parametrize("first", [0, 10, NUM_SPANS + 3])
def test_the_ring_holds_the_last_spans_and_nothing_is_read_twice(
    recorder: tuple[Ring, SpanRecorder], first: int
) -> None:
    ring, spans = recorder
    for step in range(NUM_SPANS + 5):
        spans.step = step
        with spans.during(Operation.VOTE):
            pass
    found, following = read_spans(ring, first)
    # The oldest one might be overwritten by the next at this very moment.
    assert [span.step for span in found] == list(range(max(first, 6), NUM_SPANS + 5))
    assert read_spans(ring, following) == ([], following)


class Ranks:
    """One rank of group 0 on a node that has not its leader."""

    key = GroupId(0), 1

    def __init__(self) -> None:
        self.shared = new_page(multiprocessing.get_context("fork"))
        self.pids = {self.key: 1}

    def page(self, key: RankKey) -> HeartbeatPage:
        assert key == self.key
        return self.shared

    def member(self, group: GroupId) -> Member:
        return Member(group)


@pytest.mark.parametrize(
    "event",
    [committed(5, num_alive=3), StoreAway(limit_s=9.0), GroupRejoined(member=Member(GroupId(1)), step=5)],
    ids=["a group is lost elsewhere", "a pause of the store", "a return"],
)
def test_a_window_is_on_disk_two_steps_after_its_event_and_nothing_before(tmp_path: Path, event: object) -> None:
    ranks, spec = Ranks(), SimpleNamespace(config=RunConfig(), run_dir=tmp_path, node=0)
    recorder = SpanRecorder(ranks.shared.ring, PassTimes(Clock(), lambda began_s, ended_s: ended_s - began_s))
    timeline = Timeline(spec, ranks)  # type: ignore[arg-type]
    kept = []
    for step in range(10):
        recorder.step = step
        with recorder.during(Operation.VOTE):
            pass
        if step == 5:
            timeline.on_event(event)
        for reported in (step, step - 1, step):  # the group that reports second is a step behind
            timeline.on_event(
                committed(reported, num_alive=3 if reported >= 5 and isinstance(event, StepCommitted) else 4)
            )
        kept.append([[span.step for span in part.spans] for part in read_spans_of(tmp_path)])
    assert kept == [[]] * 7 + [[[2, 3, 4, 5, 6, 7]]] * 3
    timeline.close()
    assert [[span.step for span in part.spans] for part in read_spans_of(tmp_path)] == [[2, 3, 4, 5, 6, 7], [8, 9]]


def part(group: int, stage: int, *spans: Span, machine: str = "a", wall_s: float = 1000.0) -> RankSpans:
    return RankSpans(group=group, rank=stage, incarnation=0, stage=stage, machine=machine, wall_s=wall_s, spans=spans)


def span(name: str, began_s: float, ended_s: float, step: int = 0, place: tuple[int, int] = (0, 0)) -> Span:
    return Span(name=name, step=step, began_s=began_s, ended_s=ended_s, shard=place[0], microbatch=place[1])


def read(group: int, index: int, at_s: float, life: str = "") -> Line:
    source = f"group-{group:04d}-rank-0{life}"
    return Line(source=source, at_s=at_s, record=EntryRecord(group=group, index=index, entry={}))


def events(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    vote = span("vote", 3.0, 3.5, place=(-1, -1))
    parts = [part(1, 0, span("forward", 1.25, 2.5), vote), part(1, 1, span("backward", 1.0, 2.0, place=(2, 5)))]
    file = SpansFile(tmp_path, 0)
    for one in parts:
        file.write(one)
    head = '"group":2,"rank":0,"incarnation":0,"stage":0,"machine":"a","wall_s":1e3'
    file.append(f'{{{head},"spans":[["vote",0,3.0,3.5],["forward",0,2.0,2.5,3,1]]}}\n')  # as earlier versions did
    file.close()
    parts.append(part(2, 0, vote, span("forward", 2.0, 2.5, place=(3, 1))))
    assert read_spans_of(tmp_path) == [replace(one, spans=list(one.spans)) for one in parts]


def test_passes_of_a_microbatch_are_joined_from_stage_to_stage() -> None:
    forward = [part(0, stage, span("forward", 10.0 + stage, 10.9 + stage)) for stage in range(3)]
    backward = [part(0, stage, span("backward", 16.0 - stage, 16.9 - stage)) for stage in range(3)]
    trace = trace_of([*forward, *backward], Journal(lines=()))
    starts = {event["id"]: event for event in events(trace, "s")}
    stage_of = {event["tid"]: int(event["args"]["name"][-1]) for event in events(trace, "M") if "stage" in str(event)}
    joined = [(stage_of[starts[event["id"]]["tid"]], stage_of[event["tid"]]) for event in events(trace, "f")]
    assert joined == [(0, 1), (1, 2), (2, 1), (1, 0)]
    for event in events(trace, "f"):
        assert starts[event["id"]]["ts"] < event["ts"]
    assert min(event["ts"] for event in events(trace, "X")) == 0.0


def test_every_rank_is_a_thread_of_its_own_and_spans_lie_whole_inside_others() -> None:
    """Perfetto drops what is otherwise. Of a run whose group 1 had rank 1 it showed both ranks as one thread."""
    rng = random.Random(1)
    parts = []
    for group, stage in itertools.product(range(3), range(2)):
        spans, now_s = [], 54321.0
        for _ in range(200):
            began_s = now_s
            passes_end_s = began_s + rng.random() * 1e-3
            spans.append(span("forward", round(began_s, 6), round(passes_end_s, 6)))
            now_s = passes_end_s + rng.choice([0.0, 1e-7, 1e-4])
            spans.append(span("join", round(began_s, 6), round(now_s, 6), place=(-1, -1)))
        parts.append(part(group, stage, *spans, machine="ab"[stage], wall_s=1.76e9 + 0.123456789 * stage))
    complete = events(trace_of(parts, Journal(lines=())), "X")
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in complete:
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 6
    assert not set(threads) & {event["pid"] for event in complete} | {0}.intersection(threads)
    for found in threads.values():
        around: list[tuple[int, int]] = []
        for began, ended in found:  # in the order of the file
            while around and around[-1][1] <= began:
                around.pop()
            assert not around or (around[-1][0] <= began and ended <= around[-1][1])
            around.append((began, ended))


def test_a_row_goes_from_stage_to_stage_on_each_lane() -> None:
    """The lanes compute microbatches of one row, and none of them sends the other anything."""
    passes = [
        replace(part(0, stage, span("forward", 10.0 + stage + lane / 2, 10.4 + stage + lane / 2)), rank=rank, lane=lane)
        for rank, (stage, lane) in enumerate(itertools.product(range(2), range(2)))
    ]
    trace = trace_of(passes, Journal(lines=()))
    starts = {event["id"]: event["tid"] for event in events(trace, "s")}
    rank_of = {event["tid"]: int(event["args"]["name"][5]) for event in events(trace, "M") if "stage" in str(event)}
    assert {(rank_of[starts[event["id"]]], rank_of[event["tid"]]) for event in events(trace, "f")} == {(0, 2), (1, 3)}


def test_stages_of_a_recovery_have_a_thread_of_their_own() -> None:
    """They begin and end in the middle of what the rank did, which Perfetto shows on one thread as nothing."""
    stages = [span(name, 10.5 + at, 11.5 + at, place=(-1, -1)) for at, name in enumerate(RECOVERY_NAMES.values())]
    trace = trace_of([part(0, 0, span("vote", 10.0, 11.0, place=(-1, -1)), *stages), part(1, 0)], Journal(lines=()))
    thread_of = {event["name"]: event["tid"] for event in events(trace, "X")}
    (recovery,) = {thread_of[name] for name in RECOVERY_NAMES.values()}
    assert recovery != thread_of["vote"]
    names = {event["tid"]: event["args"]["name"] for event in events(trace, "M") if event["name"] == "thread_name"}
    assert names == {thread_of["vote"]: "rank 0, stage 0", recovery: "recovery"}


def test_clocks_of_machines_are_aligned_by_the_entries_that_all_read() -> None:
    """The second machine started 500 s later, and its wall clock is 30 s ahead."""
    parts = [part(0, 0, span("vote", 100.0, 101.0)), part(1, 0, span("vote", 600.0, 601.0), machine="b", wall_s=530.0)]
    lines = [read(0, index, 1100.0 + index) for index in range(5)]
    lines += [read(1, index, 1130.0 + index + late_s) for index, late_s in enumerate([0.0, 0.001, 0.0, 2.0, 0.0])]
    assert clock_offsets(parts, Journal(lines=tuple(lines))) == {"a": 1000.0, "b": 500.0}
    first, second = events(trace_of(parts, Journal(lines=tuple(lines))), "X")
    assert (first["ts"], second["ts"]) == (0.0, 0.0)


def test_entries_align_the_clock_of_the_machine_that_has_read_them() -> None:
    """Group 0 leaves machine a, 8 s behind, for c, 30 s ahead; its second stage is on d, which reads none."""
    parts = [part(0, 1, machine="d"), part(0, 0, wall_s=992.0), part(1, 0, machine="b")]
    parts.append(replace(part(0, 0, machine="c", wall_s=1030.0), incarnation=1))
    lines = [read(1, index, 1100.0 + index) for index in range(8)]
    lines += [read(0, index, 1092.0 + index) for index in range(3)]
    lines += [read(0, index, 1130.0 + index, "-life-1") for index in range(3, 8)]
    assert clock_offsets(parts, Journal(lines=tuple(lines))) == dict.fromkeys("dabc", 1000.0)


def test_a_loss_is_marked_with_its_cause_and_what_ranks_were_about() -> None:
    pending = [{"rank": 1, "operation": "transfer", "step": 0}]
    loss = LossRecord(group=1, rank=1, cause="no heartbeat", entry_index=3, pending=pending)
    journal = Journal(lines=(Line(source="supervisor-0", at_s=1010.5, record=loss),))
    (mark,) = events(trace_of([part(0, 0, span("reduce", 10.0, 12.0, place=(-1, -1)))], journal), "i")
    assert mark["name"] == "group 1 lost: rank 1: no heartbeat"
    assert mark["ts"] == pytest.approx(0.5e6)
    assert mark["args"] == {"pending": pending}


def test_a_loss_that_two_nodes_report_is_marked_once_where_it_was_found_first() -> None:
    """The node of the rank at fault is the second; a later incarnation of the group is another loss."""
    losses = [
        LossRecord(group=1, rank=0, cause=LOST_A_PEER, entry_index=3, pending=[{"rank": 0}]),
        LossRecord(group=1, rank=1, cause="SIGKILL", entry_index=3, pending=[{"rank": 1}]),
        LossRecord(group=1, rank=0, cause="SIGSEGV", entry_index=9, incarnation=1),
    ]
    lines = [Line(source=f"supervisor-{node}", at_s=1010.5 + node, record=loss) for node, loss in enumerate(losses)]
    journal = Journal(lines=tuple(lines))
    marks = events(trace_of([part(0, 0, span("reduce", 10.0, 14.0, place=(-1, -1)))], journal), "i")
    assert [mark["name"] for mark in marks] == ["group 1 lost: rank 1: SIGKILL", "group 1 lost: rank 0: SIGSEGV"]
    assert [mark["ts"] for mark in marks] == pytest.approx([0.5e6, 2.5e6])
    assert marks[0]["args"] == {"pending": [{"rank": 0}, {"rank": 1}]}


def test_steps_that_were_not_kept_are_refused_with_those_that_were(tmp_path: Path) -> None:
    parts = [part(0, 0, *(span("vote", 1.0, 2.0, step=step, place=(-1, -1)) for step in (3, 4, 5, 9)))]
    with pytest.raises(ValueError, match="nothing was kept of steps 6 to 8; what was: steps 3 to 5, 9"):
        trace_of(parts, Journal(lines=()), range(6, 9))
    with pytest.raises(FileNotFoundError, match="holds no timeline"):
        read_spans_of(tmp_path)
