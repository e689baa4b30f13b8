"""Drawing what a trace leaves open, the registry of kinds, and carrying faults out."""

import importlib.util
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.slow_spells import FACTORS, Spell, began_s, draw_spells, write_program
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.checks.validate_faults import survivable_kinds
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver import driver
from spare_megatron.driver.planned_faults import draw_faults, groups_hit, resolve_trace
from spare_megatron.faults import injection
from spare_megatron.faults.injection import InjectedFault, Injector, Slowable
from spare_megatron.faults.kinds import KINDS, Kind
from spare_megatron.faults.points import Fault, FaultKind, FaultPoint
from spare_megatron.mcore.corruption import CORRUPTIONS
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.supervisor import node_faults
from tests.matrix import cells
from tests.unit.configured import CPU, configured

SEEDS = range(200)


def with_faults(trace: str, *overrides: str) -> RunConfig:
    base = ["layout.num_groups=7", "layout.pipeline_parallel=2", "train.steps=60", f"faults.trace={trace}"]
    return load_run_config(None, [*base, *overrides]).config


def traces(trace: str, *overrides: str) -> list[tuple[Fault, ...]]:
    """The trace for many seeds."""
    return [resolve_trace(with_faults(trace, *overrides, f"faults.seed={seed}")) for seed in SEEDS]


def test_no_faults_configured_means_none() -> None:
    assert resolve_trace(RunConfig()) == ()


def test_the_same_configuration_gives_the_same_trace() -> None:
    config = with_faults("[{phase='backward'}, {phase='in_reduce'}]")
    assert resolve_trace(config) == resolve_trace(config)


def test_another_seed_gives_another_trace() -> None:
    assert len(set(traces("[{phase='backward'}, {phase='in_reduce'}]"))) > 100


def test_hosts_of_last_resort_leave_every_group_but_one_to_draw() -> None:
    three = "[{phase='forward'}, {phase='forward'}, {phase='forward'}]"
    sizes = ("layout.num_groups=4", "spare.redundancy=1", "data.access=shared")
    assert all(len({fault.group for fault in faults}) == 3 for faults in traces(three, *sizes))
    with pytest.raises(ValueError, match="leaves its group open"):
        traces(three[:-1] + ", {phase='forward'}]", *sizes)


def test_what_is_stated_stays() -> None:
    text = "[{phase='forward', step=5, group=2, rank=1, kind='raise'}]"
    for (fault,) in traces(text):
        assert (fault.step, fault.group, fault.rank, fault.phase, fault.kind) == (5, 2, 1, FaultPoint.FORWARD, "raise")


def test_a_flip_keeps_its_bit_and_costs_no_group_for_sure() -> None:
    config = with_faults("[{phase='backward', kind='bit_flip', bit=0}, {phase='backward', kind='nan'}]")
    flip, nan = resolve_trace(config)
    assert (flip.bit, nan.bit) == (0, None)
    assert groups_hit(config, flip) == frozenset()
    assert groups_hit(config, nan) == {nan.group}


def test_stating_one_field_leaves_the_others_as_drawn() -> None:
    (drawn,) = resolve_trace(with_faults("[{phase='forward'}]"))
    (stated,) = resolve_trace(with_faults("[{phase='forward', step=5}]"))
    assert (stated.group, stated.rank, stated.ordinal) == (drawn.group, drawn.rank, drawn.ordinal)


def test_drawn_values_cover_their_range_and_stay_in_it() -> None:
    faults = [fault for (fault,) in traces("[{phase='backward'}]")]
    assert {fault.group for fault in faults} == set(range(7))
    assert {fault.rank for fault in faults} == {0, 1}
    assert {fault.ordinal for fault in faults} == {1, 2, 3, 4}
    steps = {fault.step for fault in faults}
    assert min(steps) < 6
    assert 54 <= max(steps) < 60


def test_phases_outside_microbatches_are_hit_the_first_time() -> None:
    assert {fault.ordinal for (fault,) in traces("[{phase='in_reduce'}]")} == {1}


def test_steps_come_in_the_order_given() -> None:
    for faults in traces("[{phase='forward'}, {phase='in_reduce'}, {phase='after_vote'}]", "spare.redundancy=4"):
        steps = [fault.step for fault in faults]
        assert steps == sorted(set(steps))
        assert steps[0] < 20


def test_open_steps_fall_between_the_stated_ones() -> None:
    for faults in traces("[{phase='forward', step=10}, {phase='forward'}, {phase='forward', step=14}]"):
        assert 10 < faults[1].step < 14


def test_open_steps_without_room_still_fall_into_the_run() -> None:
    for faults in traces("[{phase='forward', step=59}, {phase='forward'}]"):
        assert [fault.step for fault in faults] == [59, 59]


@pytest.mark.parametrize("phase", ["patch", "rebuild"])
def test_a_fault_that_needs_a_loss_shares_the_step_of_the_loss(phase: str) -> None:
    for first, second in traces(f"[{{phase='forward'}}, {{phase='{phase}'}}]"):
        assert first.step == second.step
        assert first.group != second.group


def test_groups_are_distinct_and_leave_every_shard_a_host() -> None:
    placement = make_placement("golomb", 7, 3)
    text = "[{phase='forward'}, {phase='forward', group=3}, {phase='forward'}, {phase='forward'}]"
    for faults in traces(text):
        lost = {fault.group for fault in faults}
        assert len(lost) == 4
        assert placement.uncovered(frozenset(map(GroupId, range(7))) - lost) == ()


def test_drawn_groups_leave_every_shard_a_host_of_the_placement_with_domains() -> None:
    def drawn(*overrides: str) -> set[int]:
        stated = "[{phase='forward', step=3, group=2}, {phase='forward'}]"
        sizes = ("layout.num_groups=4", "spare.redundancy=2", *overrides)
        return {resolve_trace(with_faults(stated, *sizes, f"faults.seed={seed}"))[1].group for seed in range(20)}

    assert drawn() == {0}  # hosts are neighbours
    assert drawn("spare.groups_per_domain=2") == {1, 3}  # hosts are groups 0 and 2, or 1 and 3


def test_a_drawn_wipe_out_is_refused() -> None:
    config = with_faults("[{phase='forward'}]", "spare.redundancy=1")
    with pytest.raises(ValueError, match=r"faults\.trace\[0\] leaves its group open.*wipes out a shard"):
        resolve_trace(config)


def test_a_stated_wipe_out_is_allowed() -> None:
    (fault,) = resolve_trace(with_faults("[{phase='forward', group=2}]", "spare.redundancy=1"))
    assert fault.group == 2


# --------------------------------------------------------------------------------------------------- injection


def make_fault(
    phase: FaultPoint = FaultPoint.BACKWARD, *, step: int = 3, kind: str = "raise", ordinal: int = 1
) -> Fault:
    assert kind in ("kill", "raise")
    return Fault(
        step=step, group=GroupId(0), rank=0, phase=phase, kind="kill" if kind == "kill" else "raise", ordinal=ordinal
    )


def run_steps(probe: Injector, num_steps: int) -> list[tuple[int, FaultPoint, int]]:
    """Probes each phase three times in each step and lists the moments at which a fault was raised."""
    hits = []
    for step in range(num_steps):
        probe.step = step
        for phase in FaultPoint:
            for ordinal in (1, 2, 3):
                try:
                    probe(phase)
                except InjectedFault:
                    hits.append((step, phase, ordinal))
    return hits


def test_a_fault_is_carried_out_once_at_its_moment() -> None:
    reported: list[Fault] = []
    faults = [make_fault(ordinal=2), make_fault(FaultPoint.IN_REDUCE, step=5)]
    probe = Injector(faults, reported.append, reported.append)
    assert probe.phases == {FaultPoint.BACKWARD, FaultPoint.IN_REDUCE}
    assert run_steps(probe, 8) == [(3, FaultPoint.BACKWARD, 2), (5, FaultPoint.IN_REDUCE, 1)]
    assert reported == faults


def test_going_through_the_step_again_does_not_hit_again() -> None:
    probe = Injector([make_fault()], lambda fault: None, lambda fault: None)
    assert len(run_steps(probe, 5)) == 1
    assert run_steps(probe, 5) == []


def test_the_count_goes_on_when_the_same_step_is_set_again() -> None:
    probe = Injector([make_fault(ordinal=2)], lambda fault: None, lambda fault: None)
    probe.step = 3
    probe(FaultPoint.BACKWARD)
    probe.step = 3
    with pytest.raises(InjectedFault, match="backward of step 3"):
        probe(FaultPoint.BACKWARD)


@pytest.mark.parametrize(("num_microbatches", "strikes_at"), [(9, 3), (3, 3), (2, 2), (1, 1), (0, 0)])
def test_a_rank_that_computes_less_than_was_drawn_is_hit_at_its_last_microbatch(
    num_microbatches: int, strikes_at: int
) -> None:
    """It was slow, got one microbatch of four, and the fault at its third forward pass never struck."""
    probe = Injector([make_fault(FaultPoint.FORWARD, ordinal=3)], lambda fault: None, lambda fault: None)
    probe.step = 3
    if not strikes_at:
        with pytest.raises(InjectedFault):
            probe.begin_passes(num_microbatches)
        return
    probe.begin_passes(num_microbatches)
    for _ in range(strikes_at - 1):
        probe(FaultPoint.FORWARD)
    with pytest.raises(InjectedFault):
        probe(FaultPoint.FORWARD)


def test_a_fault_of_a_later_step_outlasts_one_without_work() -> None:
    probe = Injector([make_fault(FaultPoint.FORWARD, ordinal=2)], lambda fault: None, lambda fault: None)
    probe.step = 2
    probe.begin_passes(0)
    probe.step = 3
    probe.begin_passes(1)
    with pytest.raises(InjectedFault, match="forward of step 3"):
        probe(FaultPoint.FORWARD)


def test_a_rank_without_faults_has_nothing_to_probe() -> None:
    probe = Injector([], lambda fault: None, lambda fault: None)
    assert probe.phases == frozenset()
    assert run_steps(probe, 3) == []


def test_a_kill_is_reported_before_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[object] = []

    def kill(pid: int, number: int) -> None:
        story.append((pid, number))
        raise SystemExit  # nothing runs after the signal

    monkeypatch.setattr(os, "kill", kill)
    report: Callable[[Fault], None] = story.append
    fault = make_fault(kind="kill")
    probe = Injector([fault], report, story.append)
    probe.step = 3
    with pytest.raises(SystemExit):
        probe(FaultPoint.BACKWARD)
    assert story == [fault, (os.getpid(), signal.SIGKILL)]


def test_what_is_slowed_takes_its_factor_as_long_until_the_fault_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, num_moves = [0.0], [0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    def progress() -> None:
        num_moves[0] += 1

    def taken_s(kind: Slowable, seconds: float) -> float:
        began_s = now_s[0]
        now_s[0] += seconds
        injector.stretch(kind, seconds, progress)
        return now_s[0] - began_s

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    fault = replace(make_fault(), kind="slow", factor=2.5, seconds=10.0)
    struck: list[Fault] = []
    injector = Injector([fault], struck.append, struck.append)
    assert injector.can_slow == {"slow"}
    assert taken_s("slow", 2.0) == 2.0
    assert run_steps(injector, 4) == []
    assert struck == [fault]
    assert taken_s("slow", 2.0) == pytest.approx(5.0)
    assert num_moves[0] >= 3.0 / 0.05, "slow is not lost"
    assert taken_s("slow_data", 2.0) == 2.0
    now_s[0] += 5.1
    assert taken_s("slow", 2.0) == pytest.approx(2.0), "it is over"


def test_a_rank_stays_slow_if_no_time_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    injector = Injector([replace(make_fault(), kind="slow_data", factor=3.0)], lambda _: None, lambda _: None)
    run_steps(injector, 4)
    now_s[0] = 1e5
    injector.stretch("slow_data", 0.01, lambda: None)
    assert sum(slept_s) == pytest.approx(0.02)


DOZE = FaultKind("doze")


def test_every_kind_has_one_handler() -> None:
    tables = (injection.HANDLERS, injection.JOURNAL_HANDLERS, CORRUPTIONS, node_faults.HANDLERS, driver.HANDLERS)
    assert Counter(kind for table in tables for kind in table) == Counter(KINDS.keys())


def test_a_new_kind_needs_a_row_a_handler_and_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    dozed: list[Fault] = []
    monkeypatch.setitem(KINDS, DOZE, Kind(costs="group"))
    monkeypatch.setitem(injection.HANDLERS, DOZE, lambda _, fault: dozed.append(fault))
    cell = cells.Cell(kind=DOZE, moment=cells.MOMENTS[0])
    monkeypatch.setattr(cells, "CELLS", (*cells.CELLS, cell))

    (aimed,) = cells.draw_faults(cell, seed=1)
    table = f"{{phase='{aimed.phase}', step={aimed.step}, group={aimed.group}, kind='{aimed.kind}'}}"
    config = configured(f"faults.trace=[{table}]")
    assert problems(config, CPU) == []
    (fault,) = resolve_trace(config)
    assert groups_hit(config, fault) == {aimed.group}
    injector = Injector([fault], lambda _: None, lambda _: None)
    injector.step = fault.step
    for _ in range(fault.ordinal):
        injector(fault.phase)
    assert dozed == [fault]
    (text,) = problems(configured("faults.trace=[{phase='forward', kind='doze', bit=3}]"), CPU)
    assert "faults.trace[0].bit=3 has no effect on kind=doze" in text
    often = configured("train.steps=400", "faults.mean_steps=5", "faults.kinds=['doze']", "spare.rejoins=1000")
    assert problems(often, CPU) == []
    assert {(fault.kind, fault.seconds is None) for fault in draw_faults(often)} == {(DOZE, True), (DOZE, False)}
    assert DOZE in survivable_kinds(often)


def test_spells_follow_one_another_and_the_same_seed_draws_the_same() -> None:
    spells = draw_spells(1, num_groups=4, quiet_s=5.0, mean_gap_s=2.0, mean_s=8.0)
    assert spells[0].from_s > 5.0
    assert all(before.to_s < after.from_s for before, after in itertools.pairwise(spells))
    assert all(4.0 <= spell.to_s - spell.from_s <= 12.0 for spell in spells)
    assert all(FACTORS[0] <= spell.factor <= FACTORS[1] for spell in spells)
    assert {spell.group for spell in spells} == set(range(4))
    assert spells[-1].to_s > 900.0, "longer than a run"
    assert spells == draw_spells(1, num_groups=4, quiet_s=5.0, mean_gap_s=2.0, mean_s=8.0)
    assert spells != draw_spells(2, num_groups=4, quiet_s=5.0, mean_gap_s=2.0, mean_s=8.0)


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_passes_of_a_slow_group_sleep_for_longer_until_the_spell_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.py"
    write_program(file, sleep_s=0.5, spells=[Spell(1, 10.0, 20.0, 3.0), Spell(0, 12.0, 20.0, 2.0)])
    now_s, slept_s = [1000.0], list[float]()
    clock = SimpleNamespace(time=lambda: now_s[0], sleep=slept_s.append)
    for group in (0, 1):
        program = load(file)
        monkeypatch.setattr(program, "time", clock)  # not of the whole process: other threads sleep, too
        monkeypatch.setattr(program, "gpt_forward_step", lambda *_: None)
        monkeypatch.setattr(program, "_group", lambda group=group: group)
        for past_s in (0.0, 11.0, 13.0, 20.0):
            now_s[0] = 1000.0 + past_s
            program.forward_step(None, None, SimpleNamespace(step=0))
    assert slept_s == [0.5, 0.5, 1.0, 0.5, 0.5, 1.5, 1.5, 0.5]
    assert began_s(file) == 1000.0, "the first pass of any group"
