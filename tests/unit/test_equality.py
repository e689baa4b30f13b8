"""Whether two runs computed the same bits, by their journals."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import ParamsRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.tools.report.equality import compare
from spare_megatron.tools.report.history import History
from spare_megatron.tools.report.page import curves_of
from tests.unit.journal_in_memory import summarize
from tests.unit.measured_run import loss_at, measured_lines, redone_lines, run_record, valid_history, write_journal

SAME, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def histories(tmp_path: Path) -> "Histories":
    return Histories(tmp_path)


class Histories:
    """Reads histories of journals, each from a directory of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def __call__(self, lines: list[Line]) -> History:
        self._number += 1
        run_dir = write_journal(self._folder / f"run-{self._number}", lines)
        return valid_history(read_run_state(run_dir, with_params=True))


def described(first: History, second: History) -> str:
    equality = compare(first, second)
    assert equality is not None
    return equality.describe()


def test_equal_runs_are_reported_as_bitwise_equal(histories: Histories) -> None:
    assert described(histories(measured_lines(8)), histories(measured_lines(8))) == (
        "Bitwise equal: loss and gradient norm of all 8 steps are the same to the last bit. "
        f"Parameters after 8 steps: sha256 {SAME} in both."
    )


def test_the_first_step_that_differs_in_the_last_bit_is_named_with_both_values(histories: Histories) -> None:
    left, right = loss_at(3), math.nextafter(loss_at(3), 9.0)
    assert f"{left:.12f}" == f"{right:.12f}"
    text = described(histories(measured_lines(8)), histories(measured_lines(8, losses={3: right, 5: 1.0})))
    assert text.startswith(f"Not bitwise equal: the runs first differ in step 3: loss {left} and {right}.")


def test_runs_with_equal_losses_and_other_parameters_are_not_equal(histories: Histories) -> None:
    first = histories(measured_lines(8, params={4: SAME, 6: SAME, 8: SAME}))
    second = histories(measured_lines(8, params={4: SAME, 6: OTHER, 8: OTHER}))
    assert described(first, second) == (
        "Not bitwise equal: loss and gradient norm of all 8 steps are the same to the last bit. "
        f"Parameters differ after 6 steps: sha256 {SAME} and {OTHER}."
    )


def test_a_shorter_run_is_compared_as_far_as_it_goes(histories: Histories) -> None:
    first = histories(measured_lines(8, params={4: SAME, 8: OTHER}))
    second = histories(measured_lines(6, params={4: SAME, 6: OTHER}))
    assert described(first, second) == (
        "Bitwise equal: loss and gradient norm of the 6 steps that both journals hold (of 8 and 6) are the same to the "
        f"last bit. Parameters after 4 steps: sha256 {SAME} in both."
    )


def test_without_digests_of_the_same_steps_nothing_is_claimed(histories: Histories) -> None:
    first, second = histories(measured_lines(8, params={8: SAME})), histories(measured_lines(8, params={6: SAME}))
    equality = compare(first, second)
    assert equality is not None
    assert not equality.is_bitwise
    assert equality.describe() == (
        "Loss and gradient norm of all 8 steps are the same to the last bit. Parameters cannot be compared: the "
        "journals have no digests of them after the same number of steps."
    )


def test_runs_of_this_version_are_compared_by_digests_and_by_sha256_at_the_end(histories: Histories) -> None:
    """Earlier versions knew SHA-256 alone, at every comparison."""
    first, second = (histories(of_this_version({4: SAME, 8: SAME}, SAME)) for _ in range(2))
    assert f"Parameters after 8 steps: sha256 {SAME} in both." in described(first, second)
    assert f"Parameters after 8 steps: sha256 {SAME} in both." in described(
        first, histories(measured_lines(8, params={4: OTHER, 8: SAME}))
    )
    other = histories(of_this_version({4: OTHER, 8: SAME}, SAME))
    assert f"Parameters differ after 4 steps: digest {SAME} and {OTHER}." in described(first, other)


def of_this_version(digests: dict[int, str], sha256: str) -> list[Line]:
    """A run with digests after some steps, and SHA-256 of the parameters at the end."""
    lines = [
        replace(line, record=replace(line.record, digest=line.record.sha256, sha256=""))
        if isinstance(line.record, ParamsRecord)
        else line
        for line in measured_lines(8, params=digests)
    ]
    ends = [ParamsRecord(group=group, step=8, digest=digests[8], sha256=sha256) for group in (0, 1)]
    return [*lines, *(Line(source=f"group-{end.group:04}-rank-0", at_s=20.0, record=end) for end in ends)]


def test_the_summary_has_the_sha256_of_the_end_alone() -> None:
    lines = of_this_version({4: SAME, 8: SAME}, OTHER)
    assert summarize(Journal(lines=tuple(lines))).params_sha256 == OTHER
    before = [line for line in lines if not (isinstance(line.record, ParamsRecord) and line.record.sha256)]
    assert summarize(Journal(lines=tuple(before))).params_sha256 is None
    assert summarize(Journal(lines=tuple(measured_lines(8)))).params_sha256 == "ab" * 32


def test_what_a_restart_undid_is_not_compared(histories: Histories) -> None:
    """The second run computes two steps wrongly, goes back before them, and computes them as the first one does."""
    params = {4: SAME, 6: SAME, 8: SAME}
    first = histories(measured_lines(8, params=params))
    wrong = measured_lines(8, losses={6: 1.0, 7: 1.0}, params={4: SAME, 7: OTHER})
    second = histories(wrong + redone_lines(8, kept=6, losses={}, params={8: SAME}))
    assert second.params == {(4, "sha256"): {SAME}, (8, "sha256"): {SAME}}
    equality = compare(first, second)
    assert equality is not None
    assert equality.is_bitwise


def test_digests_in_which_the_groups_of_a_run_differ_are_left_out(histories: Histories) -> None:
    lines = measured_lines(8, params={4: SAME, 8: SAME})
    lines.append(Line(source="group-0001-rank-0", at_s=0.0, record=ParamsRecord(group=1, step=8, sha256=OTHER)))
    text = described(histories(lines), histories(measured_lines(8, params={4: SAME, 8: SAME})))
    assert f"Parameters after 4 steps: sha256 {SAME} in both." in text


def test_a_simulated_run_is_compared_with_nothing(histories: Histories) -> None:
    measured = histories(measured_lines(8))
    lines = measured_lines(8)
    simulated = histories([replace(lines[0], record=replace(run_record(8), reduce_mode="simulated")), *lines[1:]])
    assert compare(measured, simulated) is None
    assert compare(simulated, measured) is None


def test_both_of_two_equal_curves_can_be_seen(histories: Histories) -> None:
    """The first is drawn below the second, wider and in another colour."""
    history = histories(measured_lines(8))
    drawn = {plot.title: plot.figure for plot in curves_of({"one": history, "two": history})}
    assert len(drawn) == 5
    for figure in drawn.values():
        below, above = (trace for trace in figure.data if trace.mode == "lines")
        assert (below.name, above.name) == ("one", "two")
        assert list(below.y)[1:] == list(above.y)[1:]
        assert below.line.width >= 3 * above.line.width
        assert below.line.color != above.line.color
        assert figure.layout.showlegend


def test_the_page_of_two_runs_says_it_and_reads_digests(tmp_path: Path) -> None:
    first, second = (write_journal(tmp_path / name, measured_lines(8)) for name in ("one", "two"))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(first), str(second), "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert "Bitwise equal: loss and gradient norm of all 8 steps" in page.read_text()
