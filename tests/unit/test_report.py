"""The page of a run: that of a simulated one, whose losses are known, and what is refused."""

import base64
import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs_version
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import Line, encode_line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.report import figures
from spare_megatron.tools.report.figures import (
    MOST_COLUMNS,
    MOST_ROWS,
    Unit,
    extremes,
    group_map,
    presence_map,
    shrink,
)
from spare_megatron.tools.report.history import History, presence
from spare_megatron.tools.report.page import plots_of, report
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.long_run import HIGHEST_LOSS, long_history
from tests.unit.measured_run import valid_history

LOSSES = (Loss(at_s=90.0, groups=(GroupId(1),)), Loss(at_s=260.0, groups=(GroupId(3),)))
SCENARIO = Scenario(
    name="<b>named</b>",
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
    run_state = RunState()
    for line in lines:
        run_state.add_line(line)
    return valid_history(run_state)


def write_run(folder: Path, lines: list[Line]) -> Path:
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "simulator.jsonl").write_text("".join(encode_line(line) + "\n" for line in lines))
    return folder


def content_of(page: str) -> dict[str, Any]:
    """What the page draws, unpacked as it does."""
    packed = re.search(r'id="content">([^<]*)<', page)
    assert packed is not None
    return dict(json.loads(gzip.decompress(base64.b64decode(packed[1]))))


def test_a_lost_group_is_training_then_lost_then_away_then_training(history: History) -> None:
    ways = [(item.presence, item.from_s, item.to_s) for item in presence(history) if item.group == 1]
    assert [way for way, _, _ in ways] == ["training", "lost", "away", "training"]
    assert all(end == begin for (_, _, end), (_, begin, _) in itertools.pairwise(ways))
    (_, lost_from_s, lost_to_s) = ways[1]
    assert lost_from_s < 90.0 < lost_to_s
    assert [item.presence for item in presence(history) if item.group == 0] == ["training"]


@pytest.mark.parametrize(
    ("longest_s", "name", "value"),
    [(599.0, "s", 599.0), (6720.0, "min", 112.0), (9e4, "h", 25.0), (432000.0, "d", 5.0)],
)
def test_axes_of_time_have_short_numbers(longest_s: float, name: str, value: float) -> None:
    unit = Unit.for_up_to(longest_s)
    assert (unit.name, unit.values([longest_s]).tolist()) == (name, [value])


def test_all_plots_have_groups_in_one_order_and_no_bar_is_wider_than_its_row(history: History) -> None:
    groups = history.run.num_groups
    drawn = presence_map(history)
    for figure in (drawn, group_map(history, "load"), group_map(history, "step_s")):
        assert list(figure.layout.yaxis.range) == [groups - 0.5, -0.5]
    widths = [trace.width for trace in drawn.data if trace.type == "bar"]
    assert widths
    assert all(width is not None and width < 1 for width in widths)


def test_steps_hold_what_was_counted(history: History) -> None:
    steps = history.steps
    assert steps.step.tolist() == list(range(8))
    assert [sorted(lost) for lost in steps.lost if lost] == [[1], [3]]
    for load, members in zip(steps.load, steps.members, strict=True):
        assert load[sorted(members)].sum() == 15
    assert [loss.group for _, loss in history.losses] == [1, 3]


def test_the_page_needs_no_network_and_escapes_what_people_wrote(tmp_path: Path, lines: list[Line]) -> None:
    folder = write_run(tmp_path / "run", lines)
    (folder / "config.toml").write_text('name = "</pre><script>"')
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    page = (folder / "report.html").read_text()
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|<link (?!rel=.icon. href=.data:)", page)
    assert "&lt;b&gt;named&lt;/b&gt;" in page
    assert "&lt;/pre&gt;&lt;script&gt;" in page
    # step time, waterfall, presence, two maps, two losses; a simulated run has no loss to draw
    assert len(content_of(page)["plots"]) == 7


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


@pytest.mark.parametrize("number", [0, 1, 9, 10, 11, 1000, 1003])
def test_a_line_that_is_too_long_keeps_its_ends_and_the_extremes_of_neighbours(number: int) -> None:
    values = np.random.default_rng(number).normal(size=number)
    values[3:200:7] = np.nan
    drawn = extremes(values, 10)
    assert len(drawn) <= max(min(number, 10), 12)
    assert (np.diff(drawn) > 0).all()
    if number:
        assert (drawn[0], drawn[-1]) == (0, number - 1)
        assert np.nanmax(values[drawn]) == np.nanmax(values)
        assert np.nanmin(values[drawn]) == np.nanmin(values)


def test_presence_of_many_intervals_is_a_map_of_the_worst(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_INTERVALS", 3)
    (heat,) = [trace for trace in figures.presence_map(history).data if trace.type == "heatmap"]
    for item in presence(history):
        middle = int((item.from_s + item.to_s) / 2 / history.steps.ended_s[-1] * MOST_COLUMNS)
        assert heat.z[item.group, middle] == {"training": 0, "away": 1, "lost": 2}[item.presence]


def test_the_page_of_a_long_run_is_small_and_holds_its_extremes() -> None:
    page = report(long_history(20_000, 260), "")
    assert len(page) < 5_000_000
    assert "The last 300 of 2000" in page
    plots = content_of(page)["plots"]
    y = plots[0]["figure"]["data"][0]["y"]
    assert HIGHEST_LOSS in np.frombuffer(base64.b64decode(y["bdata"]), y["dtype"])


def test_no_line_of_a_long_run_has_more_points_than_a_screen_shows() -> None:
    """Two for each column of a plot, which is at most 1100 wide."""
    for plot in content_of(report(long_history(100_000, 8), ""))["plots"]:
        for trace in plot["figure"]["data"]:
            if trace["type"] == "scatter":
                assert len(decoded(trace["y"])) <= 2200
            elif trace["type"] == "bar":
                assert len(decoded(trace["y"])) <= 500
            else:
                height, width = map(int, trace["z"]["shape"].split(","))
                assert (height <= 250, width <= 1000) == (True, True)


def decoded(values: Any) -> Any:
    """An array as the page has it: a list, or packed."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    return values


def test_the_library_is_the_small_one_and_draws_what_the_package_makes(history: History) -> None:
    """Its parsing is most of what a page takes to open. The bundle has no other kinds of traces."""
    packed = re.search(r'id="library">([^<]*)<', report(history, ""))
    assert packed is not None
    library = gzip.decompress(base64.b64decode(packed[1])).decode()
    assert len(library) < 1_600_000
    version = re.match(r"/\*\*\s*\* plotly\.js \(cartesian - minified\) v(\d+)\.", library)
    assert version is not None
    assert version[1] == get_plotlyjs_version().partition(".")[0]
    kinds = {trace.type for plot in plots_of(history) for trace in plot.figure.data}
    assert kinds == {"scatter", "bar", "heatmap"}
