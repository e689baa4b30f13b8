"""What `benchmarks/shapes.py` computes from a run."""

from argparse import Namespace

import pytest

from benchmarks.shapes import SmallerScene, median_steps, optimum, stages_admitted
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import EntryRecord


def test_the_optimum_is_that_of_whole_microbatches_of_layers_and_fill() -> None:
    """(17 + 3) x 3 and (13 + 2) x 4 layers in place of (16 + 3) x 3; of 16 groups 15 take 16 or 17 each."""
    options = Namespace(layers=12, groups=4, microbatches=16, machines=4)
    assert optimum(options) == pytest.approx(20 / 19)
    assert optimum(Namespace(layers=12, groups=16, microbatches=16, machines=4)) == pytest.approx(20 / 19)


def test_a_group_that_lacks_a_machine_comes_back_without_another() -> None:
    scene = SmallerScene(groups=4, machines=4, losses=1, rejoins=0, steps_between=12)
    assert (scene.victims, scene.num_returns(1)) == ([(0, 0)], 1)


def test_steps_before_the_loss_and_with_the_smaller_group_leave_out_warm_ups_and_what_is_between() -> None:
    ended_s = [0, 9, 12, 13, 14, 15, 20, 25, 32, 35, 38, 40, 42, 44]
    commits = {step: {0: at_s + 100.0, 1: float(at_s)} for step, at_s in enumerate(ended_s)}
    assert median_steps(commits, 1, killed_at_s=15.5, joined=8) == [1.0, 2.0]


def test_stages_are_those_that_entries_name() -> None:
    entries = [{"entry": "commit", "step": 3}, {"entry": "commit", "step": 4, "admit": [[0, 1]], "stages": [3]}]
    records = [EntryRecord(group=1, index=index, entry=entry) for index, entry in enumerate(entries)]
    journal = Journal(lines=tuple(Line(source="test", at_s=0.0, record=record) for record in records))
    assert stages_admitted(journal) == {3}
