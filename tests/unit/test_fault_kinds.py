"""The registry of faults: each kind has one handler, and a new one needs a row, a handler and a cell of the matrix."""

from collections import Counter

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.checks.validate_faults import survivable_kinds
from spare_megatron.driver import driver
from spare_megatron.driver.planned_faults import draw_faults, groups_hit, resolve_trace
from spare_megatron.faults import injection
from spare_megatron.faults.injection import Injector
from spare_megatron.faults.kinds import KINDS, Kind
from spare_megatron.faults.points import Fault, FaultKind
from spare_megatron.mcore.corruption import CORRUPTIONS
from spare_megatron.supervisor import node_faults
from tests.matrix import cells
from tests.unit.configured import CPU, configured

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
