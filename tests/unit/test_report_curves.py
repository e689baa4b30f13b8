"""What the page of a trained run has beyond that of a simulated one: curves, checkpoints, and where it comes from."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.journal.files import Line
from spare_megatron.journal.records import CheckpointRecord, PacesRecord, UpdateRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.tools.report.history import History
from spare_megatron.tools.report.page import Plot, curves_of, live_content, plots_of, report
from tests.unit.measured_run import (
    BEGAN_S,
    FLOPS,
    ORIGIN,
    PEAK_TFLOPS,
    STEP_S,
    TOKENS,
    loss_at,
    measured_lines,
    redone_lines,
    valid_history,
    write_journal,
)

NUM_STEPS = 8


def history_from(run_dir: Path, lines: list[Line]) -> History:
    return valid_history(read_run_state(write_journal(run_dir, lines)))


@pytest.fixture
def history(tmp_path: Path) -> History:
    return history_from(tmp_path, measured_lines(NUM_STEPS))


def plots(history: History) -> dict[str, Plot]:
    return {plot.title: plot for plot in plots_of(history)}


def head_rows(history: History) -> dict[str, str]:
    page = report(history, "")
    return dict(re.findall(r"<tr><th>([^<]*)</th><td>([^<]*)</td></tr>", page))


def values_of(plot: Plot) -> tuple[list[float], list[float]]:
    (curve,) = plot.figure.data
    return list(curve.x), list(curve.y)


def test_learning_rate_and_gradient_norm_are_drawn_over_steps(history: History) -> None:
    drawn = plots(history)
    steps, rates = values_of(drawn["Learning rate"])
    assert steps == list(range(NUM_STEPS))
    assert rates == [1e-3 / (step + 1) for step in range(NUM_STEPS)]
    assert values_of(drawn["Gradient norm"]) == (steps, [loss_at(step) / 2 for step in range(NUM_STEPS)])


def test_tokens_per_second_and_utilization_are_those_of_the_time_between_commits(history: History) -> None:
    """The first step is left out: its time includes the start of the run."""
    drawn = plots(history)
    _, speed = values_of(drawn["Tokens per second"])
    assert np.isnan(speed[0])
    assert speed[1:] == pytest.approx([TOKENS / STEP_S] * (NUM_STEPS - 1))
    _, percent = values_of(drawn["Model FLOPs utilization"])
    share = FLOPS / STEP_S / 2 / (PEAK_TFLOPS * 1e12)
    assert percent[1:] == pytest.approx([100 * share] * (NUM_STEPS - 1))
    rows = head_rows(history)
    assert rows["tokens/s of the median step"] == f"{TOKENS / STEP_S:.0f}"
    assert rows["MFU of the median step"] == f"{share:.1%}"


def test_the_head_says_when_where_and_with_what_the_run_trained(history: History) -> None:
    rows = head_rows(history)
    assert rows["began"] == "2026-11-18 11:06:40 UTC"
    assert rows["wall time"] == f"{NUM_STEPS * STEP_S + 1:.0f} s"
    assert rows["host"] == "node-7"
    assert rows["version, commit"] == "1.2.3, 0123456789abcdef"
    assert rows["checkpoints"] == "2 saved"


def test_what_an_earlier_journal_does_not_know_is_left_out(tmp_path: Path) -> None:
    history = history_from(tmp_path, measured_lines(NUM_STEPS, origin={}))
    assert {"Loss", "Gradient norm", "Learning rate"} <= plots(history).keys()
    assert not {"Tokens per second", "Model FLOPs utilization"} & plots(history).keys()
    rows = head_rows(history)
    assert not {"host", "version, commit", "tokens/s of the median step"} & rows.keys()
    assert rows["began"] == "2026-11-18 11:06:40 UTC"


def test_without_a_peak_there_is_no_utilization(tmp_path: Path) -> None:
    history = history_from(tmp_path, measured_lines(NUM_STEPS, origin={**ORIGIN, "peak_tflops": None}))
    assert "Tokens per second" in plots(history)
    assert "Model FLOPs utilization" not in plots(history)
    assert "MFU of the median step" not in head_rows(history)


def test_checkpoints_are_marked_over_time_and_listed(tmp_path: Path) -> None:
    failed: dict[str, Any] = {"outcome": "failed", "reason": "No space left on device: <disk>"}
    lines = measured_lines(NUM_STEPS)
    record = CheckpointRecord(group=1, step=6, num_bytes=0, stall_s=0.5, write_s=0.25, **failed)
    lines.append(Line(source="group-0001-rank-0", at_s=BEGAN_S + 13.0, record=record))
    history = history_from(tmp_path, lines)
    marks = {trace.name: list(trace.x) for trace in plots(history)["Step time"].figure.data}
    assert marks["checkpoint saved"] == [9.0, 17.0]
    assert marks["checkpoint failed"] == [13.0]
    page = report(history, "")
    assert head_rows(history)["checkpoints"] == "1 failed, 2 saved"
    assert "No space left on device: &lt;disk&gt;" in page
    (table,) = re.findall(r"<h2>Checkpoints</h2>(.*?)</table>", page, re.DOTALL)
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert [row[:7] for row in rows] == [
        ["9 s", "4", "saved", "12 MB", "1.5 s", "20 ms", "0"],
        ["13 s", "6", "failed", "0 B", "250 ms", "500 ms", "1"],
        ["17 s", "8", "saved", "12 MB", "1.5 s", "20 ms", "0"],
    ]


def test_a_run_without_checkpoints_has_no_list_of_them(tmp_path: Path) -> None:
    lines = [line for line in measured_lines(NUM_STEPS) if not isinstance(line.record, CheckpointRecord)]
    history = history_from(tmp_path, lines)
    assert "Checkpoints" not in report(history, "")
    assert "checkpoints" not in head_rows(history)
    assert {trace.name for trace in plots(history)["Step time"].figure.data} == {"from commit to commit, s", "groups"}


def test_steps_that_a_restart_undid_are_not_in_the_curves(tmp_path: Path) -> None:
    lines = measured_lines(4) + redone_lines(4, kept=2, losses={2: 9.0, 3: 9.5}, params={})
    history = history_from(tmp_path, lines)
    drawn = plots(history)
    loss = drawn["Loss"].figure.data[0]
    assert list(zip(loss.x, loss.y, strict=True)) == [(0, loss_at(0)), (1, loss_at(1)), (2, 9.0), (3, 9.5)]
    assert values_of(drawn["Tokens per second"])[0] == [0, 1, 2, 3]


def test_the_content_of_a_served_run_has_the_same_curves(history: History) -> None:
    content = live_content(history)
    assert all(title in content for title in ("Learning rate", "Gradient norm", "Tokens per second", "node-7"))


def paced(step: int, permille: dict[str, int], group: int) -> Line:
    return Line(
        source=f"group-{group:04}-rank-0",
        at_s=BEGAN_S + STEP_S * step + 0.5,
        record=PacesRecord(group=group, step=step, permille=permille),
    )


def in_time(lines: list[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line.at_s)


def test_paces_by_which_work_is_dealt_are_drawn_with_the_steps_where_they_change(tmp_path: Path) -> None:
    changes = [paced(2, {"1": 2000}, 0), paced(2, {"1": 2000}, 1), paced(5, {"0": 900, "1": 1500}, 0)]
    lines = in_time([*measured_lines(NUM_STEPS), *changes])
    drawn = plots(history_from(tmp_path, lines))["Pace of each group"].figure
    first, second, anew = drawn.data
    assert (first.name, list(first.x), list(first.y)) == ("group 0", [0, 2, 5, NUM_STEPS], [1.0, 1.0, 0.9, 0.9])
    assert (second.name, list(second.x), list(second.y)) == ("group 1", [0, 2, 5, NUM_STEPS], [1.0, 2.0, 1.5, 1.5])
    assert (first.line.shape, list(anew.x)) == ("hv", [2, 5])


def test_after_a_restart_all_groups_are_as_fast_as_most_and_commits_go_on(tmp_path: Path) -> None:
    kept = 3
    lines = in_time([*measured_lines(NUM_STEPS), paced(2, {"1": 2000}, 0)])
    again = [*redone_lines(NUM_STEPS, kept, {}, {})]
    late = Line(
        source="group-0000-rank-0",
        at_s=BEGAN_S + STEP_S * 3 * NUM_STEPS,
        record=PacesRecord(group=0, step=kept + 4, permille={"0": 1250}),
    )
    history = history_from(tmp_path, [*lines, *again, late])
    assert history.pace_changes == [
        (2, {1: 2.0}),
        (NUM_STEPS, {}),
        (NUM_STEPS + 4, {0: 1.25}),
    ]


def test_a_run_whose_work_was_never_dealt_anew_has_no_plot_of_paces(history: History) -> None:
    assert "Pace of each group" not in plots(history)


def logged(lines: list[Line], step: int, group: int, terms: Mapping[str, float]) -> list[Line]:
    """The lines, with terms of the last update of a step by a group."""
    place = max(
        place
        for place, line in enumerate(lines)
        if isinstance(line.record, UpdateRecord) and (line.record.step, line.record.group) == (step, group)
    )
    record = lines[place].record
    assert isinstance(record, UpdateRecord)
    return [*lines[:place], replace(lines[place], record=replace(record, terms=dict(terms))), *lines[place + 1 :]]


def test_further_values_have_a_line_each_where_they_are_known(tmp_path: Path) -> None:
    lines = measured_lines(NUM_STEPS)
    for step in range(NUM_STEPS):
        lines = logged(lines, step, 0, {"loss/web": 2.0 - step, **({"loss/a & b": 3.0} if step % 2 else {})})
    lines = logged(lines, 3, 1, {"loss/web": 2.5})  # the largest counts
    drawn = plots(history_from(tmp_path, lines))["Loss by corpus"].figure
    web, other = drawn.data
    assert (web.name, list(web.x)) == ("web", list(range(NUM_STEPS)))
    assert list(web.y) == [2.5 if step == 3 else 2.0 - step for step in range(NUM_STEPS)]
    assert (other.name, list(other.x), set(other.y)) == ("a & b", [1, 3, 5, 7], {3.0})


def test_further_values_of_undone_steps_are_not_drawn(tmp_path: Path) -> None:
    lines = measured_lines(NUM_STEPS, params={})
    for step in range(NUM_STEPS):
        lines = logged(lines, step, 0, {"loss/web": 1.0})
    lines = [*lines[:-1], *redone_lines(NUM_STEPS, 5, {}, {})]
    for step in range(5, NUM_STEPS):
        lines = logged(lines, step, 0, {"loss/web": 2.0})
    _, values = values_of(plots(history_from(tmp_path, lines))["Loss by corpus"])
    assert values == [1.0] * 5 + [2.0] * (NUM_STEPS - 5)


def test_many_further_values_are_a_map(tmp_path: Path) -> None:
    lines = measured_lines(NUM_STEPS)
    names = [f"part {number}" for number in range(40)]
    for step in (0, 4):
        lines = logged(
            lines, step, 0, {f"loss/{name}": number + step for number, name in enumerate(names[: 40 - step])}
        )
    (drawn,) = plots(history_from(tmp_path, lines))["Loss by corpus"].figure.data
    assert (list(drawn.x), list(drawn.y)) == ([0, 4], names)
    assert list(drawn.z[:, 0]) == list(range(40))
    np.testing.assert_array_equal(drawn.z[:, 1], [*range(4, 40), *[np.nan] * 4])


def test_two_runs_have_their_further_values_in_one_plot(tmp_path: Path) -> None:
    lines = logged(measured_lines(NUM_STEPS), 2, 0, {"loss/web": 1.0})
    runs = {name: history_from(tmp_path / name, lines) for name in ("one", "other")}
    drawn = {plot.title: plot for plot in curves_of(runs)}["Loss by corpus"].figure
    assert [line.name for line in drawn.data] == ["one: web", "other: web"]
