"""Groups that are slow for some seconds: what is drawn, and how long the passes of a run's program sleep then."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.slow_spells import FACTORS, Spell, began_s, draw_spells, write_program


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
