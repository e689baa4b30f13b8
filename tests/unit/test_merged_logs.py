"""`spare logs`: drawn logs of many processes, merged and filtered, against what was drawn."""

import os
import random
import resource
import tracemalloc
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.merged_logs import SEVERITIES, chosen
from spare_megatron.commands import app
from tests.unit.measured_run import BEGAN_S, STEP_S, measured_lines, redone_lines, write_journal

STEPS = 20
PLAIN = (
    "loading",
    "a.py:3 in f",
    "  File x.py, line 3, in f",
    "1234 12:34:56 of nothing",
    "2026-99-99 10:00:00 no date",
)
WORDS = {
    1: ("x.py:3: UserWarning: deprecated", "[WARN] slow"),
    2: ("Traceback (most recent call last):", "ValueError: bad", "torch.distributed.DistBackendError: gone"),
}


def stamped(kind: str, at_s: float, severity: int, text: str) -> str:
    """A line as a library prints it; times have milliseconds."""
    at = datetime.fromtimestamp(at_s)
    letter = "IWE"[severity]
    clock = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
    return {
        "glog": f"[{letter}{at:%m%d} {clock}456789 ProcessGroup.cpp:12] {text}",
        "of a rank": f"[rank3]:[{letter}{at:%m%d} {clock}456789 ProcessGroup.cpp:12] {text}",
        "torch": f"{letter}{at:%m%d} {clock}000 140 torch/x.py:5] {text}",
        "logging": f"{at:%Y-%m-%d} {clock.replace('.', ',')} {['INFO', 'WARNING', 'ERROR'][severity]} {text}",
        "nccl": f"[{at:%Y-%m-%dT}{clock}] host:12:13 [0] {['INFO', 'WARN', 'FATAL'][severity]} {text}",
    }[kind]


def draw(folder: Path, seed: int) -> list[tuple[float, str, int, str]]:
    """Writes drawn logs; all lines in the order of times, each with its log and severity."""
    generator, drawn = random.Random(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"group-{group:04d}-rank-{rank}" for group in range(3) for rank in range(2)] + ["group-0001-rank-0-life-1"]
    for name in (*names, "node-0"):
        lines: list[tuple[float, str, int, str]] = []
        at_s, severity = BEGAN_S + generator.uniform(-3.0, 30.0), 0
        num_first = generator.choice([0, 0, 2])
        first = [(at_s, name, 0, generator.choice(PLAIN)) for _ in range(num_first)]
        for number in range(generator.choice([0, 5, 60])):
            if number == 0 or generator.random() < 0.5:
                at_s = round(at_s + (generator.expovariate(1.0) if number else 0.0), 3)
                severity = generator.choice([0, 0, 0, 1, 2])
                kind = generator.choice(["glog", "of a rank", "torch", "logging", "nccl"])
                lines.append((at_s, name, severity, stamped(kind, at_s, severity, f"text {number}")))
            else:
                own = generator.choice([0, 0, 1, 2])
                severity = max(severity, own)
                lines.append((at_s, name, severity, generator.choice(WORDS.get(own, PLAIN))))
        begin_s = lines[0][0] if lines else round(at_s, 3)
        lines = [(begin_s, *rest) for _, *rest in first] + lines  # type: ignore[misc]
        (folder / f"{name}.log").write_text("".join(f"{line[3]}\n" for line in lines))
        written_s = round(lines[-1][0] + 0.001, 3) if num_first < len(lines) else begin_s
        os.utime(folder / f"{name}.log", (written_s, written_s))
        drawn.append(lines)
    return sorted((line for lines in drawn for line in lines), key=lambda line: line[0])


def ordered(lines: Sequence[tuple[float, str, int, str]]) -> list[tuple[float, str, int, str]]:
    """Lines of equal times by their logs."""
    return sorted(((round(at_s, 3), *rest) for at_s, *rest in lines), key=lambda line: (line[0], line[1]))  # type: ignore[misc]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_journal(tmp_path / "run", measured_lines(STEPS))


def step_at(at_s: float) -> int:
    """Step s of the run is committed 2 (s + 1) seconds after its begin."""
    return next((step for step in range(STEPS) if at_s <= BEGAN_S + STEP_S * (step + 1)), STEPS)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_logs_are_merged_and_filtered_as_they_were_drawn(seed: int, run_dir: Path) -> None:
    drawn, generator = draw(run_dir / "logs", seed), random.Random(seed)
    least, first = generator.randrange(3), generator.randrange(STEPS)
    last = generator.choice([first, generator.randrange(first, STEPS)])
    steps = generator.choice([None, f"{first}..{last}", f"{first}" if first == last else f"{first}..{last}"])
    files = sorted(path for path in (run_dir / "logs").iterdir() if path.stat().st_size)
    found = list(chosen(run_dir, files, SEVERITIES[least], steps))
    assert [line[0] for line in found] == sorted(line[0] for line in found)
    wanted = [line for line in drawn if line[2] >= least and (steps is None or first <= step_at(line[0]) <= last)]
    assert ordered(found) == ordered(wanted)
    for file in files:
        assert [line[3] for line in found if line[1] == file.stem] == [
            line[3] for line in wanted if line[1] == file.stem
        ]


def spare(*words: object, expected: int = 0) -> str:
    result = CliRunner().invoke(app, ["logs", *map(str, words)])
    assert result.exit_code == expected, result.output
    return result.output


def test_the_command_prints_the_last_lines_of_a_group_with_their_times(run_dir: Path) -> None:
    drawn = draw(run_dir / "logs", 3)
    of_group = [line for line in drawn if line[1].startswith("group-0001-")]
    assert len(of_group) > 8
    expected = [
        f"{datetime.fromtimestamp(at_s):%m-%d %H:%M:%S.%f}"[:-3] + f" {name}: {text}"
        for at_s, name, _, text in of_group[-5:]
    ]
    assert spare(run_dir, 1, "--lines", 5).splitlines() == expected
    assert len(spare(run_dir, "--lines", 0).splitlines()) == len(drawn)


def test_a_step_that_was_done_again_after_a_restart_has_the_lines_of_both_times(tmp_path: Path) -> None:
    lines = measured_lines(10)
    run_dir = write_journal(tmp_path / "run", [*lines[:-1], *redone_lines(10, 4, {}, {})])
    (run_dir / "logs").mkdir()
    times = [BEGAN_S + after_s for after_s in (11.0, 13.0, 23.5, 25.0, 29.0)]
    texts = [stamped("logging", at_s, 0, f"after {at_s - BEGAN_S:g}") for at_s in times]
    (run_dir / "logs/group-0000-rank-0.log").write_text("\n".join(texts) + "\n")
    # Steps 4 to 9 are committed 10 to 20 s after the begin; from step 4 on again 22 to 34 s after it, with the restart.
    assert [line.rpartition(" ")[2] for line in spare(run_dir, "--steps", 5).splitlines()] == ["11", "25"]


def test_the_step_under_way_after_a_restart_is_the_one_that_is_done_again(tmp_path: Path) -> None:
    """It was the one after the last commit."""
    restart = redone_lines(10, 4, {}, {})[:2]
    run_dir = write_journal(tmp_path / "run", [*measured_lines(10)[:-1], *restart])
    (run_dir / "logs").mkdir()
    (run_dir / "logs/node-0.log").write_text(stamped("logging", BEGAN_S + 21.0, 0, "under way") + "\n")
    assert "under way" in spare(run_dir, "--steps", 4)
    assert "has steps 0 to 9 so far" in spare(run_dir, "--steps", 10, expected=2)


def test_steps_that_there_are_not_are_refused_with_those_that_there_are(run_dir: Path) -> None:
    draw(run_dir / "logs", 0)
    refused = spare(run_dir, "--steps", "90..99", expected=2)
    assert f"--steps 90..99: the run has steps 0 to {STEPS} so far; name one of them" in refused
    assert "--steps 3-4: name a step, as in 12, or several, as in 12..15" in spare(
        run_dir, "--steps", "3-4", expected=2
    )
    spare(run_dir, "--steps", f"3..{10**9 - 1}")


def test_stamps_without_a_year_are_of_the_last_one(tmp_path: Path) -> None:
    """A log that was written on from December into January."""
    files = []
    for name, day in (("a", "1231 23:59:58.5"), ("b", "0101 00:00:01.25"), ("c", "0229 00:00:00.0")):
        (file := tmp_path / f"{name}.log").write_text(f"W{day} x\n")
        os.utime(file, (datetime(2027, 1, 1, 9).timestamp(),) * 2)
        files.append(file)
    found = {line[1]: datetime.fromtimestamp(line[0]) for line in chosen(tmp_path, files, "info", None)}
    assert found["a"] == datetime(2026, 12, 31, 23, 59, 58, 500_000)
    assert found["b"] == datetime(2027, 1, 1, 0, 0, 1, 250_000)
    assert found["c"] == datetime(2027, 1, 1, 9)  # neither year has that day


def test_a_time_to_come_is_no_stamp(tmp_path: Path) -> None:
    """A line that named one was printed then, with all that came after it."""
    at_s = datetime(2027, 1, 1, 9).timestamp()
    (file := tmp_path / "a.log").write_text(
        "2027-01-01 08:00:00 a\nvalid until 2036-01-01 00:00:00\n2027-01-01 08:30:00 b\n"
    )
    os.utime(file, (at_s, at_s))
    found = [datetime.fromtimestamp(line[0]) for line in chosen(tmp_path, [file], "info", None)]
    assert found == [datetime(2027, 1, 1, 8), datetime(2027, 1, 1, 8), datetime(2027, 1, 1, 8, 30)]


def test_large_logs_of_many_processes_are_neither_held_in_memory_nor_open(tmp_path: Path) -> None:
    text = "".join(stamped("glog", BEGAN_S + number / 1000, 0, "x" * 400) + "\n" for number in range(500))
    files = [tmp_path / f"{number}.log" for number in range(12)]
    for file in files:
        file.write_text(text if file.stem != "0" else text * 60)
        os.utime(file, (BEGAN_S + 100, BEGAN_S + 100))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
    tracemalloc.start()
    try:
        count = sum(1 for _ in chosen(tmp_path, files, "info", None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert count == 500 * (11 + 60)
    assert peak < 3e6  # blocks of 64 KiB
    assert sum(file.stat().st_size for file in files) > 15e6
