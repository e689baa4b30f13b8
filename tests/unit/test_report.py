"""The page of a run: that of a simulated one, whose losses are known, and what is refused."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.cli.main import app
from spare_megatron.core.topology import GroupId
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import Line, RunRecord, encode_line
from spare_megatron.report.figures import MOST_COLUMNS, MOST_ROWS, shrink
from spare_megatron.report.history import History, history_of, presence
from spare_megatron.simulator.costs import CostModel
from spare_megatron.simulator.engine import simulate
from spare_megatron.simulator.failures import FailureSpec, Loss
from spare_megatron.simulator.scenario import Scenario

LOSSES = (Loss(at_s=90.0, groups=(GroupId(1),)), Loss(at_s=260.0, groups=(GroupId(3),)))
SCENARIO = Scenario(
    name="<b>told</b>",
    num_groups=5,
    redundancy=3,
    microbatches_per_shard=3,
    num_steps=8,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.0, detect_s=2.0, join_s=4.0),
    failures=FailureSpec(kind="trace", trace=LOSSES),
    repair_s=100.0,
)


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    found: list[Line] = []
    simulate(SCENARIO, 1, journal=found.append)
    return sorted(found, key=lambda line: line.at_s)


@pytest.fixture(scope="module")
def history(lines: list[Line]) -> History:
    return history_of(Journal(lines=tuple(lines)))


def write_run(folder: Path, lines: list[Line]) -> Path:
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "simulator.jsonl").write_text("".join(encode_line(line) + "\n" for line in lines))
    return folder


def test_a_lost_group_is_training_then_lost_then_away_then_training(history: History) -> None:
    ways = [(item.presence, item.from_s, item.to_s) for item in presence(history) if item.group == 1]
    assert [way for way, _, _ in ways] == ["training", "lost", "away", "training"]
    assert all(end == begin for (_, _, end), (_, begin, _) in itertools.pairwise(ways))
    (_, lost_from_s, lost_to_s) = ways[1]
    assert lost_from_s < 90.0 < lost_to_s
    assert [item.presence for item in presence(history) if item.group == 0] == ["training"]


def test_steps_hold_what_was_counted(history: History) -> None:
    assert [step.step for step in history.steps] == list(range(8))
    assert [sorted(step.lost) for step in history.steps if step.lost] == [[1], [3]]
    for step in history.steps:
        counted = {group: number for group, number in step.load.items() if group in step.members}
        assert sum(counted.values()) == 15
    assert [loss.group for loss in history.losses] == [1, 3]


def test_the_page_needs_no_network_and_escapes_what_people_wrote(tmp_path: Path, lines: list[Line]) -> None:
    folder = write_run(tmp_path / "run", lines)
    (folder / "config.toml").write_text('name = "</pre><script>"')
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    page = (folder / "report.html").read_text()
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|<link", page)
    assert "&lt;b&gt;told&lt;/b&gt;" in page
    assert "&lt;/pre&gt;&lt;script&gt;" in page
    # loss, step time, waterfall, presence, two maps, two losses
    assert page.count("Plotly.newPlot(") - page.split("<body>")[0].count("Plotly.newPlot(") == 8


def test_a_run_that_has_just_begun_and_a_pair_of_runs_have_pages(tmp_path: Path, lines: list[Line]) -> None:
    begun = write_run(tmp_path / "begun", [line for line in lines if isinstance(line.record, RunRecord)])
    whole = write_run(tmp_path / "whole", lines)
    out = tmp_path / "page.html"
    for arguments in ([str(begun)], [str(whole), str(begun)]):
        result = CliRunner().invoke(app, ["report", *arguments, "--out", str(out)])
        assert result.exit_code == 0, result.output
    assert str(whole) in out.read_text()


@pytest.mark.parametrize("number", [0, 3])
def test_what_is_no_run_is_named(tmp_path: Path, number: int) -> None:
    folders = [str(tmp_path / str(index)) for index in range(max(number, 1))]
    result = CliRunner().invoke(app, ["report", *folders])
    assert result.exit_code == 2
    assert ("3 directories" if number else folders[0]) in result.output


def test_a_map_that_is_too_large_keeps_the_largest_of_neighbours() -> None:
    table = np.random.default_rng(1).random((2 * MOST_ROWS + 1, 3 * MOST_COLUMNS - 1))
    table[0] = np.nan
    small, by_row, by_column = shrink(table)
    assert (by_row, by_column) == (3, 3)
    assert small.shape == (-(-table.shape[0] // 3), MOST_COLUMNS)
    assert small[0, 0] == np.nanmax(table[:3, :3])
    assert small[-1, -1] == table[-3:, -2:].max()
