"""Machines in quarantine: what an examination shows, how it goes on, and what `spare check` says of both."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.core.machines.group_starts import RestartBudget
from spare_megatron.core.machines.places import Quarantine
from spare_megatron.core.slow_machines.examination_rules import (
    LEAST_ANSWER_S,
    LEAST_LIMIT_S,
    LIMIT_INTERVALS,
    Figures,
    judge_examination,
    wait_s,
)
from spare_megatron.faults.points import Fault, FaultPoint
from spare_megatron.journal.proofs.check_machines import check_quarantines
from spare_megatron.journal.records import ExaminationRecord, PlacesRecord, StartRecord
from spare_megatron.machine.timers import Timers
from spare_megatron.process.heartbeats import HeartbeatPage, HeartbeatWriter, between_steps
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.process.specs import NodeSpec
from spare_megatron.slow_machines import device_checks, examination
from spare_megatron.slow_machines.examination import Examinations, ExaminationWanted, Examiner
from spare_megatron.stacking import slowness
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId
from spare_megatron.store import keys
from spare_megatron.store.interface import read_values
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor.places.group_reforming import AssignmentList
from spare_megatron.supervisor.restarts import GroupRestarts
from tests.unit.memory_store import MemoryStore

GOOD = Figures(digests=("a", "a"), product_s=0.1, copy_s=0.01, answer_s=0.001, exchange_s=0.01)
INTERVAL_S = 1.0
WRONG = "2 of 4 values of a product in float32 on cpu are wrong, the first is 1.5 instead of 1.0"
QUARANTINE = Quarantine(MachineId(1), PlaceId(1), "slow", "its link")

# ------------------------------------------------------------------------------------------------------ the judgement


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digests": ("a", "b")}, "its devices compute the same matrix product to different values"),
        ({"linked": ()}, "no transfer of known content"),
        ({"linked": (MachineId(3),)}, "no transfer of known content"),
        ({"linked": (MachineId(2),)}, ""),
        (
            {"reduced": (("cuda:1", "clock 9 of 19 MHz: power cap, thermal slowdown by the driver"),)},
            "load cuda:1 has cl",
        ),
        ({"reduced": (("cuda:1", "clock 9 of 19 MHz: power cap"),)}, ""),
        ({"digests": ("b", "b")}, "differ from those of machines 0, 2"),
        ({"product_s": 0.16}, "matrix product takes 1.6 times"),
        ({"copy_s": 0.02}, "copy in memory takes 2.0 times"),
        ({"answer_s": 0.03}, "answer of the store takes 30.0 times"),
        ({"exchange_s": 0.3}, "exchange with the store takes 30.0 times"),
        ({"product_s": 0.1 * slowness.FAILED, "answer_s": 0.001 * slowness.LINK}, ""),
        ({"answer_s": LEAST_ANSWER_S}, ""),
    ],
)
def test_an_examination_fails_for_what_differs(changes: dict[str, Any], reason: str) -> None:
    found = judge_examination(replace(GOOD, **changes), {MachineId(0): GOOD, MachineId(2): GOOD})
    assert reason in found if reason else not found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, ""), ({"model": "fast"}, "differ from those of machine 2"), ({"answer_s": 0.03}, "answer of the store")],
)
def test_products_and_times_are_compared_on_one_model_of_device(changes: dict[str, Any], reason: str) -> None:
    """A slower model that was drained never came back where groups have several."""
    own = replace(GOOD, model="slow", digests=("s", "s"), product_s=0.3, copy_s=0.1)
    likes = {MachineId(2): replace(GOOD, model="fast")}
    found = judge_examination(replace(own, **changes), likes)
    assert reason in found if reason else not found
    assert judge_examination(own, {MachineId(2): replace(likes[MachineId(2)], wrong=(WRONG,))}).endswith(WRONG)
    passed = replace(PASSED, own=json.loads(json.dumps(asdict(own))), likes={"2": asdict(likes[MachineId(2)])})
    assert findings(BEGUN, passed, ENDED) == []


def test_a_clock_that_is_reduced_on_most_machines_is_no_fault_of_one() -> None:
    hot = replace(GOOD, reduced=(("cuda:0", "clock 9 of 19 MHz: thermal slowdown by the hardware"),))
    likes = {MachineId(number): hot if number else GOOD for number in range(3)}
    assert judge_examination(hot, likes) == ""
    assert "under load cuda:0" in judge_examination(hot, {**likes, MachineId(1): GOOD})


def test_without_an_answer_nothing_passes() -> None:
    assert "did not end in time" in judge_examination(None, {MachineId(0): GOOD})
    assert "no other machine" in judge_examination(GOOD, {})


def test_what_is_known_to_be_wrong_needs_no_other_machine() -> None:
    assert judge_examination(replace(GOOD, wrong=(WRONG, "more")), {}) == WRONG


def test_of_two_different_digests_none_passes_and_a_third_decides() -> None:
    """A helper may be the one that is wrong."""
    wrong = replace(GOOD, digests=("z", "z"))
    assert judge_examination(GOOD, {MachineId(0): GOOD, MachineId(2): wrong})
    assert not judge_examination(GOOD, {MachineId(0): GOOD, MachineId(2): wrong, MachineId(3): GOOD})
    assert not judge_examination(GOOD, {MachineId(0): GOOD, MachineId(2): replace(wrong, wrong=(WRONG,))})


def test_a_machine_whose_content_arrives_wrong_everywhere_does_not_pass_and_the_reason_names_the_transfer() -> None:
    """Those that receive it find it. The reason was once that the others compute different products."""
    text = "1 of 8 values of a transfer between machines 1 and {} on cpu are wrong, the first is 3 instead of 2"
    likes = {MachineId(one): replace(GOOD, wrong=(text.format(one),)) for one in (0, 2, 3)}
    assert judge_examination(GOOD, likes) == f"machine 0 has found that {text.format(0)}"
    assert not judge_examination(GOOD, likes | {MachineId(2): GOOD}), "the receivers may be at fault"
    inconsistent = replace(GOOD, digests=("a", "b"))
    assert not judge_examination(GOOD, {MachineId(0): GOOD, MachineId(2): inconsistent})
    assert judge_examination(GOOD, {MachineId(2): inconsistent})


def test_random_figures_pass_only_if_each_is_within_its_limit() -> None:
    random = Random(7)
    for _ in range(500):
        likes = {
            MachineId(number): replace(
                GOOD, product_s=0.1 * random.uniform(1, 1.3), copy_s=0.01 * random.uniform(1, 1.3)
            )
            for number in (0, 2, 3)
        }
        own = replace(GOOD, product_s=0.1 * random.uniform(1, 3), copy_s=0.01 * random.uniform(1, 3))
        usual = [sorted(getattr(like, name) for like in likes.values())[1] for name in ("product_s", "copy_s")]
        passes = own.product_s <= 1.5 * usual[0] and own.copy_s <= 1.5 * usual[1]
        assert (judge_examination(own, likes) == "") == passes


# ----------------------------------------------------------------------------------------------------- how it goes on


class Machines:
    """Some machines over one store, each with its part in examinations; `figures` are those that each finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num: int = 3) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(examination, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.store: Any = MemoryStore({keys.beat(place): "1" for place in range(num)})
        self.list = AssignmentList(self.store, Layout(num_groups=num, num_nodes=num))
        self.figures = {MachineId(machine): GOOD for machine in range(num)}
        self.silent: set[int] = set()
        self.started: list[tuple[int, ExaminationWanted]] = []
        self.parts = {machine: self.new_part(machine) for machine in self.figures}

    def new_part(self, machine: MachineId) -> Examinations:
        def start(wanted: ExaminationWanted) -> None:
            self.started.append((machine, wanted))
            if machine not in self.silent:
                key = keys.examined(wanted.examined, wanted.number, machine)
                self.store.put(key, json.dumps(asdict(self.figures[machine])))

        return Examinations(machine, INTERVAL_S, start)

    def poll(self, seconds: float = 0.0) -> list[ExaminationRecord]:
        """All of them, until examinations that are there have been seen."""
        self.now_s += seconds
        found = [self.parts[machine].poll(self.store, self.list.read()) for _ in range(2) for machine in self.parts]
        return [one for one in found if one is not None]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(monkeypatch)


def test_no_machine_is_examined_out_of_quarantine(three: Machines) -> None:
    assert three.poll() == []
    assert three.started == []


def test_a_machine_is_examined_again_after_a_longer_wait_each_time_until_it_passes(three: Machines) -> None:
    assert three.list.quarantine(QUARANTINE) is not None
    three.figures[MachineId(1)] = replace(GOOD, digests=("b", "b"))
    (first,) = three.poll()
    assert "differ" in first.reason
    assert set(first.likes) == {"0", "2"}
    assert three.poll(first.wait_s - 0.1) == []
    (second,) = three.poll(0.1)
    assert second.number == 1
    assert (first.wait_s, second.wait_s) == (wait_s(1, INTERVAL_S), wait_s(2, INTERVAL_S))
    three.figures[MachineId(1)] = GOOD
    (third,) = three.poll(second.wait_s)
    assert not third.reason
    assert not [key for key in three.store.values if key.startswith("examined/")]
    assert three.list.release(MachineId(1)) is not None
    assert three.poll(1000.0) == []


def test_an_examination_without_all_answers_is_judged_when_its_time_is_over(three: Machines) -> None:
    three.silent = {0}
    three.list.quarantine(QUARANTINE)
    assert three.poll() == []
    (found,) = three.poll(LIMIT_INTERVALS * INTERVAL_S)
    assert not found.reason
    assert set(found.likes) == {"2"}


def test_the_examined_machine_has_longer_to_answer_than_others(three: Machines) -> None:
    """With heartbeats of a second one with eight GPUs would never pass."""
    three.silent = {1}
    three.list.quarantine(QUARANTINE)
    assert three.poll() == []
    assert three.poll(LIMIT_INTERVALS * INTERVAL_S) == []
    (found,) = three.poll(LEAST_LIMIT_S - LIMIT_INTERVALS * INTERVAL_S)
    assert found.reason == "the examination did not end in time"


def test_what_replaces_a_machine_in_quarantine_is_examined_and_the_count_goes_on(three: Machines) -> None:
    three.list.quarantine(QUARANTINE)
    three.figures[MachineId(1)] = replace(GOOD, product_s=1.0)
    (first,) = three.poll()
    assert first.reason
    del three.parts[MachineId(1)]
    new = MachineId(4)
    three.figures[new] = GOOD
    three.parts[new] = three.new_part(new)
    assert three.list.read().quarantine_of(new) == QUARANTINE
    (found,) = three.poll()
    assert (found.machine, found.number, found.reason) == (4, 1, "")


@pytest.mark.parametrize("knows", [True, False])
def test_machines_that_are_examined_at_the_same_time_have_others_each(
    monkeypatch: pytest.MonkeyPatch, *, knows: bool
) -> None:
    """The second start of a helper ended its first. One in quarantine that is asked, as by one that has not read this
    yet, does not help.
    """
    machines = Machines(monkeypatch, 9)
    machines.list.quarantine(replace_machine(QUARANTINE, 8))
    if not knows:
        machines.parts[MachineId(8)].poll(machines.store, machines.list.read())
    machines.list.quarantine(replace_machine(QUARANTINE, 0))
    machines.poll()
    of = {wanted.examined: wanted.helpers for _, wanted in machines.started if wanted.is_own}
    assert of == {8: (1, 2, 3) if knows else (0, 1, 2), 0: (4, 5, 6)}
    assert [one for by, one in machines.started if by == 0] == [
        ExaminationWanted(examined=MachineId(0), number=0, helpers=of[MachineId(0)], is_own=True)
    ]


def test_one_fence_puts_one_machine_of_a_place_into_quarantine(three: Machines) -> None:
    """A machine that takes the place finds the same fence."""
    outvoted = Quarantine(MachineId(1), PlaceId(1), "outvoted", "audit", (GroupId(1), 0))  # type: ignore[arg-type]
    assert three.list.quarantine(outvoted) is not None
    assert three.list.quarantine(outvoted) is None
    three.list.release(MachineId(1))
    assert three.list.quarantine(replace_machine(outvoted, 4)) is None
    assert three.list.quarantine(outvoted._replace(member=(GroupId(1), 1))) is not None  # type: ignore[arg-type]


def replace_machine(one: Quarantine, machine: int) -> Quarantine:
    return one._replace(machine=MachineId(machine))


def test_groups_of_a_machine_in_quarantine_start_when_it_ends() -> None:
    started: list[int] = []
    timers = Timers()
    restarts = GroupRestarts(
        budget=RestartBudget(1, INTERVAL_S),
        restarts_all=False,
        whole_groups=frozenset({GroupId(0)}),
        timers=timers,
        wait_for_parts=started.append,
        start_ranks=lambda group, _: started.append(group),
    )
    restarts.hold()
    assert restarts.on_fenced(GroupId(0))
    timers.run_due()
    assert started == []
    assert restarts.coming_back == {0}
    assert restarts.awaits_other_nodes, "the link follows the log, or would not learn of the end of the run"
    restarts.release()
    assert started == [0]
    assert not restarts.on_fenced(GroupId(0)), "it counts against the budget like any other"


# ------------------------------------------------------------------------------------------------- the process itself


def node_spec(config: RunConfig, run_dir: Path, node: int = 0) -> NodeSpec:
    return NodeSpec(
        config=config,
        run_dir=run_dir,
        node=node,
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        faults=(),
        rank_main=lambda spec, reports: None,
    )


def test_injected_faults_are_met_for_as_long_as_they_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[examination.ExaminationTask] = []
    now_s = [0.0]
    child = SimpleNamespace(pid=1)
    monkeypatch.setattr(examination, "start_child", lambda *given: tasks.append(given[-1]) or child)
    monkeypatch.setattr(examination, "end_child", lambda _: None)
    monkeypatch.setattr(examination, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    config = RunConfig(layout=LayoutConfig(num_groups=2), cluster=ClusterConfig(device="cpu", num_nodes=2))
    examiner = Examiner(node_spec(config, tmp_path), MachineId(0))
    limited: list[list[int]] = []
    examiner.limit = lambda pids: limited.append(list(pids))
    fault = Fault(step=0, group=GroupId(0), rank=0, phase=FaultPoint.FORWARD, kind="drift", seconds=5.0)
    rare = replace(fault, kind="product_rare", seconds=1.0)
    slow = replace(fault, kind="slow", factor=2.0, seconds=9.0)
    for one in (fault, rare, slow, replace(fault, kind="kill", seconds=None)):
        examiner.note_fault(one)
    for at_s in (4.0, 8.0, 10.0):
        now_s[0] = at_s
        examiner.start(ExaminationWanted(examined=MachineId(0), number=0, is_own=True))
    assert [(task.load.drifts, task.load.factor) for task in tasks] == [(True, 2.0), (False, 2.0), (False, 1.0)]
    assert limited == [[1], [1], [1]], "a host that is slow for its ranks is for this process, too"


def test_a_machine_examines_for_one_other_after_the_other_and_for_itself_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks: list[examination.ExaminationTask] = []
    alive, ended = dict[int, bool](), list[int]()

    def start_child(*given: Any) -> Any:
        if given[-1].wanted.number == 9:
            raise OSError("no more processes")
        tasks.append(given[-1])
        pid = len(tasks)
        alive[pid] = True
        return SimpleNamespace(pid=pid, process=SimpleNamespace(is_alive=lambda: alive[pid]))

    monkeypatch.setattr(examination, "start_child", start_child)
    monkeypatch.setattr(examination, "end_child", lambda child: ended.append(child.pid))
    config = RunConfig(layout=LayoutConfig(num_groups=2), cluster=ClusterConfig(device="cpu", num_nodes=2))
    examiner = Examiner(node_spec(config, tmp_path), MachineId(0))
    for examined in (1, 2, 3):
        examiner.start(ExaminationWanted(examined=MachineId(examined), number=0))
        alive[2] = False
    examiner.start(ExaminationWanted(examined=MachineId(1), number=9))
    examiner.start(ExaminationWanted(examined=MachineId(0), number=0, is_own=True))
    assert [task.after for task in tasks] == [(), (1,), (1,), ()]
    assert ended == [2, 1, 3]
    assert "no examination can be started: no more processes" in capsys.readouterr().err


class Passed(Exception):
    """In place of the end of the process."""


@pytest.fixture
def examined_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figures]:
    """Has this process do an examination over this store, with nothing on the devices but what is asserted."""

    def start(
        store: Any, spec: NodeSpec, wanted: ExaminationWanted, by: MachineId, page: HeartbeatPage | None = None
    ) -> Figures:
        tasks: list[examination.ExaminationTask] = []
        with monkeypatch.context() as patched:
            patched.setattr(
                examination, "start_child", lambda *given: tasks.append(given[-1]) or SimpleNamespace(pid=1)
            )
            examiner = Examiner(spec, by)
            examiner.page = lambda: page
            examiner.start(wanted)
        monkeypatch.setattr(examination, "open_store", lambda _: store)
        monkeypatch.setattr(examination.os, "nice", lambda _: None)

        def end(code: int) -> None:
            raise Passed

        monkeypatch.setattr(examination, "leave", end)
        with pytest.raises(Passed):
            examination._examine(tasks[0], None)  # type: ignore[arg-type]
        (found,) = read_values(store, [keys.examined(wanted.examined, wanted.number, by)], Figures)
        assert found is not None
        return found

    return start


def test_a_machine_is_examined_on_all_devices_of_its_ranks_and_others_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examined_here: Callable[..., Figures]
) -> None:
    """What is found is in the figures with the device, and the clocks that NVML calls reduced."""
    asked: list[tuple[str, bool]] = []

    def multiply(_: object, device: str) -> tuple[str, float, list[str], str]:
        return "a", 1.0, [], "clock 1 of 2 MHz: power brake" if device == "cuda:2" else ""

    def check_memory(device: str, *, is_own: bool) -> list[str]:
        asked.append((device, is_own))
        return []

    def check_links(devices: Sequence[str]) -> list[str]:
        asked.append(("links", len(devices) > 1))
        return []

    monkeypatch.setattr(device_checks, "multiply", multiply)
    monkeypatch.setattr(device_checks, "model_of", lambda device: f"model of {device}")
    monkeypatch.setattr(device_checks, "check_products", lambda _, device: [WRONG] if device == "cuda:3" else [])
    monkeypatch.setattr(device_checks, "check_memory", check_memory)
    monkeypatch.setattr(device_checks, "check_links", check_links)
    monkeypatch.setattr(device_checks, "copy", lambda *_: 1.0)
    monkeypatch.setattr(examination, "_transfers", lambda *_: ((), []))
    cluster = ClusterConfig(device="gpu", num_nodes=2, launcher="hand")
    config = RunConfig(layout=LayoutConfig(num_groups=4, pipeline_parallel=2), cluster=cluster)
    spec = node_spec(config, tmp_path, node=1)
    found = [
        examined_here(MemoryStore(), spec, ExaminationWanted(examined=MachineId(1), number=0, is_own=is_own), by)
        for is_own, by in ((True, MachineId(1)), (False, MachineId(0)))
    ]
    of_all = [(f"cuda:{number}", True) for number in range(4)]
    assert asked == [*of_all, ("links", True), ("cuda:0", False), ("links", False)]
    assert [one.wrong for one in found] == [(WRONG,), ()]
    assert [one.linked for one in found] == [(), None]
    assert [one.model for one in found] == 2 * ["model of cuda:0"]
    assert [one.reduced for one in found] == [(("cuda:2", "clock 1 of 2 MHz: power brake"),), ()]
    assert [len(one.digests) for one in found] == [4, 1]


def test_a_check_that_raises_is_what_is_wrong_with_the_examined_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examined_here: Callable[..., Figures]
) -> None:
    """It was reported two minutes later, as an examination that did not end in time."""

    def multiply(*_: object) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(device_checks, "multiply", multiply)
    monkeypatch.setattr(examination, "_transfers", lambda *_: ((), []))
    config = RunConfig(layout=LayoutConfig(num_groups=2), cluster=ClusterConfig(device="cpu", num_nodes=2))
    own = ExaminationWanted(examined=MachineId(1), number=0, is_own=True)
    found = examined_here(MemoryStore(), node_spec(config, tmp_path, node=1), own, MachineId(1))
    assert (
        judge_examination(found, {MachineId(0): GOOD})
        == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    with pytest.raises(RuntimeError):
        examined_here(MemoryStore(), node_spec(config, tmp_path), replace(own, is_own=False), MachineId(0))


class Training:
    """A rank that begins one step after another in a thread."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        self.is_in_step = self.is_ending = False
        self.num_steps = 0
        self.left_after: list[int] = []
        self.thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        writer = HeartbeatWriter(self.page, PassTimes(lambda: 0.0, lambda _began, _ended: 0.0))
        while not self.is_ending:
            self.is_in_step = True
            writer.begin_step(self.num_steps)
            self.num_steps += 1
            self.is_in_step = False
            writer.pause(lambda: self.left_after.append(self.num_steps - 1))


def test_a_rank_waits_between_two_steps_while_another_machine_is_examined_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examined_here: Callable[..., Figures]
) -> None:
    training, found = Training(HeartbeatPage()), list[Figures]()
    seen: list[tuple[bool, int]] = []

    def multiply(*_: object) -> tuple[str, float, list[str], str]:
        seen.extend((training.is_in_step, training.num_steps) for _ in range(10_000))
        return "a", 1.0, [], ""

    for name in ("check_products", "check_memory", "check_links"):
        monkeypatch.setattr(device_checks, name, lambda *_, **__: [])
    monkeypatch.setattr(device_checks, "multiply", multiply)
    monkeypatch.setattr(examination, "_transfers", lambda *_: ((), []))
    config = RunConfig(layout=LayoutConfig(num_groups=2), cluster=ClusterConfig(device="cpu", num_nodes=2))
    spec = node_spec(config, tmp_path)
    training.thread.start()
    for number in range(3):
        wanted = ExaminationWanted(examined=MachineId(1), number=number, is_own=number == 2)
        found.append(examined_here(MemoryStore(), spec, wanted, MachineId(0), training.page))
        while training.page.is_paused:
            time.sleep(0.001)
    training.is_ending = True
    training.thread.join()
    first, second, own = (figures.after_step for figures in found)
    assert training.left_after == [first, second], "no rank waits for the machine that is examined"
    assert (0 <= first < second < training.num_steps, own) == (True, -1)
    assert set(seen[:20_000]) == {(False, first + 1), (False, second + 1)}


def test_neither_waits_for_the_other_for_ever() -> None:
    """No rank trains; the examination dies; the run is to end."""
    page = HeartbeatPage()
    page.step = 7
    with between_steps(page, 0.02) as after_step:
        assert (after_step, page.pause_until_s) == (-1, 0.0)
    writer = HeartbeatWriter(page, PassTimes(lambda: 0.0, lambda _began, _ended: 0.0))
    left: list[float] = []
    for page.pause_until_s, page.end_asked in ((time.monotonic() + 0.1, 0), (time.monotonic() + 1000.0, 1)):
        writer.pause(lambda: left.append(time.monotonic()))
        assert not page.is_paused
        assert page.end_asked or time.monotonic() >= page.pause_until_s
    assert len(left) == 2


def test_the_store_is_asked_and_left_as_it_was() -> None:
    store: Any = MemoryStore()
    began_s = time.perf_counter()
    answer_s, exchange_s = examination._exchange(store, "here")
    assert 0 < answer_s + exchange_s < time.perf_counter() - began_s
    assert store.values == {}


# --------------------------------------------------------------------------------------------------- what check finds

BEGUN = PlacesRecord(index=0, num_places=4, holdings=[], quarantined=[[1, "outvoted", "audit"]])
FIGURES: Any = json.loads(json.dumps(asdict(GOOD)))
PASSED = ExaminationRecord(machine=1, number=0, reason="", wait_s=0.0, own=FIGURES, likes={"0": FIGURES})
ENDED = PlacesRecord(index=1, num_places=4, holdings=[], released=[1])
STARTED = StartRecord(group=1, incarnation=1, num_ranks=1, num_spares=0)


def findings(*records: Any) -> list[str]:
    view: Any = SimpleNamespace(rare=[SimpleNamespace(source="supervisor-1", record=record) for record in records])
    return [finding.reason for finding in check_quarantines(view)]


def test_a_quarantine_that_ends_with_an_examination_is_valid() -> None:
    assert findings(BEGUN, PASSED, ENDED, STARTED) == []
    assert findings(BEGUN, PASSED, replace(ENDED, holdings=[[5, 1, 1]], released=[5]), STARTED) != []
    assert findings(PASSED, ENDED) == [], "the record of the entry before is missing"
    of_next = replace(PASSED, machine=5)
    assert findings(BEGUN, of_next, replace(ENDED, holdings=[[5, 1, 1]], released=[5])) == []


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([BEGUN, STARTED], "machine 1 starts group 1 (life 1) in quarantine"),
        ([BEGUN, ENDED], "lacks an examination that machine 1 has passed"),
        ([BEGUN, replace(PASSED, reason="it is slow"), ENDED], "lacks an examination that machine 1 has passed"),
        ([replace(ENDED, index=0)], "which is in none"),
        ([BEGUN, replace(ENDED, released=[], holdings=[[5, 2, 1]])], "gives place 2 to machine 5, which is in"),
        ([BEGUN, replace(PASSED, own={**FIGURES, "wrong": [WRONG]}), ENDED], "has passed with wrong values"),
        ([BEGUN, replace(PASSED, likes={"0": {**FIGURES, "digests": ["b"]}}), ENDED], "no other machine has computed"),
        ([BEGUN, replace(PASSED, likes={}), ENDED], "no other machine has computed"),
    ],
)
def test_a_machine_that_comes_back_from_quarantine_too_early_is_found(records: list[Any], found: str) -> None:
    assert any(found in reason for reason in findings(*records))
