"""`spare simulate --calibrate`: costs measured in a real run, and what they predict for it or another run."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal.files import read_journal
from spare_megatron.tools.simulate.calibrate import Calibration, calibrate
from spare_megatron.tools.simulate.run_replay import Prediction, RunReplay, replay
from spare_megatron.tools.simulate.scenario import CostModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Costs measured in a run, and the replay of its losses or of another run's."""

    calibration: Calibration
    replay: RunReplay


def measured_by(run_dir: Path, replayed_dir: Path | None) -> Measured:
    """Calibrates costs on a run and replays the losses of `replayed_dir`, or else of the run itself. ValueError: A
    journal has too little to calibrate on or to replay. OSError: A journal cannot be read.
    """
    found = _explained("--calibrate", run_dir, lambda: calibrate(read_journal(run_dir)))
    costs, scatter, replayed = CostModel(**found.costs), found.scatter, replayed_dir or run_dir
    option = "--calibrate" if replayed_dir is None else "--replay"
    return Measured(
        calibration=found, replay=_explained(option, replayed, lambda: replay(read_journal(replayed), costs, scatter))
    )


def costs_elsewhere(found: Calibration) -> dict[str, float]:
    """The costs that hold for other scenarios: without processor sharing, which belongs to the run's machine."""
    return {name: value for name, value in found.costs.items() if name != "full_speed_groups"}


def as_json(measured: Measured) -> dict[str, Any]:
    """`calibration` and `replay` of the JSON figures; an infinite `full_speed_groups` is null."""
    found = asdict(measured)
    if found["calibration"]["full_speed_groups"] == float("inf"):
        found["calibration"]["full_speed_groups"] = None
    return found


def print_measured(measured: Measured, console: RunConsole) -> None:
    """Prints the costs, their fit, what the run could not measure, and predictions beside measurements."""
    rows = list(_calibration_rows(measured.calibration))
    console.tables(Table(title=f"measured in the run {measured.calibration.name}", rows=rows))
    for what in measured.calibration.unmeasured:
        console.line(f"The run does not show {what}.")
    title = f"the losses of the run {measured.replay.name} again"
    columns = ("", "measured", "predicted", "error")
    console.tables(Table(title=title, columns=columns, rows=list(_replay_rows(measured.replay)), has_numbers=True))


def _explained(option: str, run_dir: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{option} {run_dir}: {error}") from error


def _calibration_rows(found: Calibration) -> Iterator[tuple[str, str]]:
    yield "steps without a loss", str(found.num_steps)
    yield "losses recovered from", str(found.num_recoveries)
    yield "admissions of groups", str(found.num_joins)
    yield "compute of one shard, alone", f"{format_duration(found.compute_s)}, spread {found.jitter:.0%}"
    yield "pipeline fill", f"{found.pipeline_fill:.2f} microbatches"
    if found.full_speed_groups < found.num_groups:
        yield "groups at full speed", f"{found.full_speed_groups:.3g} at a time: they share processors"
    yield "reduction, alone", format_duration(found.reduce_s)
    yield "update, alone", format_duration(found.update_s)
    stages = {"detect": found.detect_s, "agree": found.agree_s, "rebuild": found.rebuild_s, "retry": found.retry_s}
    stages["join"] = found.join_s
    for name, seconds in stages.items():
        yield name, "not measured" if seconds is None else format_duration(seconds)
    scatter = found.scatter
    beyond = {"step": scatter.step_s, "step of a warm-up": scatter.warm_up_s, "recovery": scatter.recovery_s}
    for name, seconds in beyond.items():
        yield f"slow ones add to a {name}", f"{'-' if seconds < 0 else ''}{format_duration(abs(seconds))} on average"
    worst = max(found.fit.states, key=lambda state: abs(state.residual))
    where = f"{worst.load} microbatches in a {worst.what} of {', '.join(map(str, worst.loads))}"
    yield "largest misfit of compute", f"{worst.residual:+.0%}: {where}"


def _replay_rows(found: RunReplay) -> Iterator[tuple[str, str, str, str]]:
    for step in found.steps:
        yield f"median of {step.num_steps} steps of {step.num_alive} groups", *_prediction_cells(step.time)
    for recovery in found.recoveries:
        during = "" if recovery.phase is None else f", {recovery.phase}"
        yield f"recovery in step {recovery.step}{during}", *_prediction_cells(recovery.time)
    for join in found.joins:
        groups = ", ".join(map(str, join.groups))
        yield f"admission of groups {groups} before step {join.step}", *_prediction_cells(join.time)
    for name, time in (("median recovery", found.median_recovery), ("median admission", found.median_join)):
        if time is not None:
            yield name, *_prediction_cells(time)
    yield "from the first commit to the last", *_prediction_cells(found.wall)


def _prediction_cells(time: Prediction) -> tuple[str, str, str]:
    if time.predicted_s is None or time.error is None:
        return format_duration(time.measured_s), "no prediction", ""
    return format_duration(time.measured_s), format_duration(time.predicted_s), f"{time.error:+.1%}"
