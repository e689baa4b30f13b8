"""`spare simulate`: how long training takes through losses, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.folders import check_output_file, check_plot_file, check_writable, do_each
from spare_megatron.cli.printing import message, say, say_json
from spare_megatron.formats.quantities import format_bytes, parse_duration_s, parse_redundancies
from spare_megatron.machine.interrupts import INTERRUPTED, raising
from spare_megatron.tools.plan.plan_command import Join, Machines, Reform, Repair

if TYPE_CHECKING:
    from spare_megatron.tools.simulate.scenario import Scenario
    from spare_megatron.tools.simulate.simulate_calibrate import Measured
    from spare_megatron.tools.simulate.sweep import SweepFigures

DEFAULT_PRESET = "paper_n600"
PLOTTED_REDUNDANCIES = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20)
MOST_JOURNAL_BYTES = 10**9
"""A journal has every group in every step; larger ones take too long to write."""
MOST_CASES = 1_000_000
"""All are listed before the first is simulated, and a second each keeps 100 processors busy for three hours."""
ALL_POLICIES = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """What the user asked: the options as they were written, None where absent."""

    preset: str
    settings: dict[str, str | int | None]
    """Scenario setting -> value of the option of its own that it has."""
    durations: dict[str, tuple[str, str | None]]
    """Scenario setting -> option and duration."""
    overrides: tuple[str, ...]
    policy: str | None
    sweep: str | None
    seeds: int
    jobs: int | None
    out: Path | None
    journal: Path | None
    plot: Path | None
    calibrate: Path | None
    replay: Path | None
    as_json: bool


_Preset = Annotated[
    str, typer.Option(help="Preset (paper_n600, llama3_16k, meta_rsc1, ...) or TOML file of the scenario.")
]
_PolicyName = Annotated[str | None, typer.Option(help="spare, replication or checkpoint_only; all compares them.")]
_Granularity = Annotated[
    str | None, typer.Option(help="Unit of reordering: stack (whole shards, as in the paper) or microbatch.")
]
_Redundancy = Annotated[int | None, typer.Option(help="Hosts per shard.")]
_Microbatches = Annotated[int | None, typer.Option(help="Microbatches per shard.")]
_Steps = Annotated[int | None, typer.Option(help="Number of steps to commit.")]
_Seeds = Annotated[int, typer.Option(help="Number of simulations of each scenario, with seeds from 0.")]
_SharedData = Annotated[
    bool | None, typer.Option("--shared-data", help="All groups can read all data, so that any computes any shard.")
]
_Save = Annotated[str | None, typer.Option(help="Time that training stalls for one save, as in 60s.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of the scenario, as in failures.shape=1.0. Repeatable.",
    ),
]
_Calibrate = Annotated[
    Path | None,
    typer.Option(metavar="RUN_DIR", help="Take costs from the journal of this run, and predict its own times."),
]
_Replay = Annotated[
    Path | None, typer.Option(metavar="RUN_DIR", help="Predict the times of this run instead; needs --calibrate.")
]
_Sweep = Annotated[
    str | None, typer.Option(metavar="FROM..TO", help="Simulate these redundancies, as in 2..20 or 3,4,6.")
]
_Out = Annotated[
    Path | None, typer.Option(help="JSON-lines file that keeps each result; results in it are not simulated again.")
]
_Jobs = Annotated[int | None, typer.Option(help="Number of processes.", show_default="one per processor")]
_Journal = Annotated[
    Path | None, typer.Option(help="Write the journal of seed 0 to this directory, for `spare check`.")
]
_Plot = Annotated[
    Path | None, typer.Option(help="Draw every policy over the redundancy, and a timeline, into this PNG file.")
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print the figures as JSON; ci95 is half of the 95% confidence interval.")
]


def simulate(
    preset: _Preset = DEFAULT_PRESET,
    policy: _PolicyName = None,
    granularity: _Granularity = None,
    redundancy: _Redundancy = None,
    microbatches: _Microbatches = None,
    steps: _Steps = None,
    seeds: _Seeds = 5,
    repair: Repair = None,
    reform: Reform = None,
    machines_per_group: Machines = None,
    shared_data: _SharedData = None,
    save: _Save = None,
    join: Join = None,
    overrides: _Overrides = None,
    calibrate: _Calibrate = None,
    replay: _Replay = None,
    sweep_redundancy: _Sweep = None,
    out: _Out = None,
    jobs: _Jobs = None,
    journal: _Journal = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Simulate training under losses of groups.

    The simulation runs the same controller as real runs, in virtual time. All figures are simulated, not measured; with
    --calibrate their costs are measured. Options override the preset; with --reform detection and rebuild take 2 s each
    unless set. Progress goes to stderr.

    Example: `spare simulate --preset paper_n600 --policy all --seeds 5 --steps 2000`

    Exit codes: 2 invalid input, 130 interrupted.
    """
    own: dict[str, str | int | None] = {"granularity": granularity, "redundancy": redundancy, "num_steps": steps}
    own |= {"microbatches_per_shard": microbatches, "machines_per_group": machines_per_group}
    own["last_resort"] = "true" if shared_data else None
    request = SimulateRequest(
        preset=preset,
        settings=own,
        durations={
            "repair_s": ("--repair", repair),
            "reform_s": ("--reform", reform),
            "costs.save_s": ("--save", save),
            "costs.join_s": ("--join", join),
        },
        overrides=tuple(overrides or ()),
        policy=policy,
        sweep=sweep_redundancy,
        seeds=seeds,
        jobs=jobs,
        out=out,
        journal=journal,
        plot=plot,
        calibrate=calibrate,
        replay=replay,
        as_json=as_json,
    )
    with explained_errors("simulate"):
        _simulate(request)


def _simulate(request: SimulateRequest) -> None:
    from spare_megatron.tools.simulate.simulate_jobs import ResultFile, default_jobs, simulate_all
    from spare_megatron.tools.simulate.sweep import Case, cases_of, given_up, summarize

    _check_options(request)
    measured = _measured(request)
    base = scenario_of(request, measured)
    wanted, drawn = asked_for(request, base), for_the_plot(request, base)
    journaled = () if request.journal is None else (base,)
    if request.journal is not None:
        _check_journal(request.journal, base)
    scenarios = dict.fromkeys((*wanted, *drawn, *journaled))
    _check_cases(len(scenarios), request.seeds)
    cases = cases_of(scenarios, request.seeds)
    out = None if request.out is None else ResultFile(request.out)
    try:
        with raising():
            results = simulate_all(
                cases, num_jobs=request.jobs or default_jobs(), console=RunConsole(stderr=True), out=out
            )
    except KeyboardInterrupt:
        kept = "" if out is None else f"; finished cases are in {request.out}: the same command goes on from there"
        message("simulate", f"interrupted{kept}")
        raise typer.Exit(INTERRUPTED) from None
    figures, reasons = summarize(wanted, request.seeds, results), given_up(results.values())
    if not figures:
        raise ValueError(reasons[0])
    for reason in reasons:
        message("simulate", f"given up: {reason}")
    outputs: list[Callable[[], None]] = [partial(_show, request, figures, measured)]
    if request.journal is not None:
        rework = results[Case(scenario=base, seed=0).digest].terms.get("rework", 0.0)
        outputs.append(partial(_write_journal, request, base, base.num_steps * (1 + rework)))
    if request.plot is not None:
        outputs.append(partial(_draw, request, base, summarize(drawn, request.seeds, results)))
    do_each(outputs)


def _measured(request: SimulateRequest) -> "Measured | None":
    if request.calibrate is None:
        if request.replay is not None:
            raise ValueError(f"--replay {request.replay} needs the costs of a run: add --calibrate RUN_DIR")
        return None
    from spare_megatron.tools.simulate.simulate_calibrate import measured_by

    return measured_by(request.calibrate, request.replay)


def scenario_of(request: SimulateRequest, measured: "Measured | None") -> "Scenario":
    """The scenario of preset, measured costs, overrides and options; the later wins. ValueError: unknown or out of
    range.
    """
    from spare_megatron.tools.simulate.scenario_presets import load_scenario

    settings: list[str] = []
    if measured is not None:
        from spare_megatron.tools.simulate.simulate_calibrate import costs_elsewhere

        settings += [f"costs.{name}={value!r}" for name, value in costs_elsewhere(measured.calibration).items()]
    settings += request.overrides
    settings += [f"{name}={value}" for name, value in request.settings.items() if value is not None]
    for name, (option, text) in request.durations.items():
        if text is not None:
            settings.append(f"{name}={parse_duration_s(option, text, is_zero_fine=True)!r}")
    if request.policy is not None and request.policy != ALL_POLICIES:
        settings.append(f"policy={request.policy.replace('-', '_')}")
    return load_scenario(request.preset, settings)


def asked_for(request: SimulateRequest, base: "Scenario") -> tuple["Scenario", ...]:
    from spare_megatron.tools.simulate.sweep import VARIANTS, Variant, grid

    if request.policy != ALL_POLICIES and request.sweep is None:
        return (base,)
    own = Variant(policy=base.policy, granularity=base.granularity)
    return grid(
        base, VARIANTS if request.policy == ALL_POLICIES else (own,), _redundancies(request, base, (base.redundancy,))
    )


def for_the_plot(request: SimulateRequest, base: "Scenario") -> tuple["Scenario", ...]:
    """What the curves of a plot need: every policy over the redundancy."""
    from spare_megatron.tools.simulate.sweep import VARIANTS, grid

    if request.plot is None:
        return ()
    default = tuple(r for r in PLOTTED_REDUNDANCIES if r <= base.num_groups)
    return grid(base, VARIANTS, _redundancies(request, base, default))


def _redundancies(request: SimulateRequest, base: "Scenario", default: tuple[int, ...]) -> tuple[int, ...]:
    return default if request.sweep is None else parse_redundancies(request.sweep, most=base.num_groups)


def _check_options(request: SimulateRequest) -> None:
    """What can be wrong before anything is simulated, so that no hour of simulation is lost to it."""
    for option, count in (("--seeds", request.seeds), ("--jobs", request.jobs)):
        if count is not None and count < 1:
            raise ValueError(f"{option} {count} is below 1")
    if request.out is not None:
        check_output_file("--out", request.out)
    if request.plot is not None:
        check_plot_file(request.plot)


def _check_cases(num_scenarios: int, num_seeds: int) -> None:
    if num_scenarios * num_seeds > MOST_CASES:
        raise ValueError(
            f"--seeds {num_seeds}: each of {num_scenarios} scenarios with so many seeds makes "
            f"{num_scenarios * num_seeds} simulations, more than {MOST_CASES}; lower it or sweep fewer redundancies"
        )


def _check_journal(folder: Path, scenario: "Scenario") -> None:
    """Refuses a journal that cannot be, or would be too large even without restarts."""
    if (folder / "journal").exists():
        raise ValueError(f"--journal {folder} holds a journal already; name another directory")
    if scenario.policy == "replication":
        raise ValueError(f"--journal {folder}: the policy replication keeps no decision log to journal")
    check_writable("--journal", folder.absolute())
    _check_journal_size(folder, scenario, scenario.num_steps)


def _check_journal_size(folder: Path, scenario: "Scenario", num_steps: float) -> None:
    """Refuses a journal that would be too large. The names of members are most of a line."""
    size = int(scenario.num_groups * num_steps * (4 * scenario.num_groups + 750))
    if size > MOST_JOURNAL_BYTES:
        again = "" if num_steps == scenario.num_steps else f", {num_steps / scenario.num_steps:.1f} times each,"
        raise ValueError(
            f"--journal {folder}: a journal of {scenario.num_steps} steps{again} of {scenario.num_groups} groups has "
            f"about {format_bytes(size)}, more than {format_bytes(MOST_JOURNAL_BYTES)}; lower --steps"
        )


def _write_journal(request: SimulateRequest, scenario: "Scenario", num_steps: float) -> None:
    """Simulates seed 0 once more, and writes what a real run of the same history would have written."""
    from spare_megatron.formats.output import named_errors, whole_file
    from spare_megatron.journal.lines import encode_line
    from spare_megatron.tools.simulate.engine import simulate as simulate_one
    from spare_megatron.tools.simulate.world import Stalled

    assert request.journal is not None
    _check_journal_size(request.journal, scenario, num_steps)
    folder = request.journal / "journal"
    try:
        with named_errors("--journal", request.journal):
            folder.mkdir(parents=True)
            with whole_file("--journal", folder / "simulator.jsonl") as path, path.open("w") as file:
                simulate_one(scenario, 0, journal=lambda line: file.writelines((encode_line(line), "\n")))
    except Stalled as stalled:
        raise ValueError(str(stalled)) from stalled
    _print_path(request, "journal", request.journal)


def _draw(request: SimulateRequest, base: "Scenario", drawn: "Sequence[SweepFigures]") -> None:
    from spare_megatron.tools.simulate.engine import timeline_of
    from spare_megatron.tools.simulate.simulate_plot import write_plot
    from spare_megatron.tools.simulate.world import Stalled

    assert request.plot is not None
    try:
        write_plot(request.plot, base, drawn, timeline_of(base, seed=0))
    except Stalled as stalled:
        raise ValueError(str(stalled)) from stalled
    _print_path(request, "curves", request.plot)


def _print_path(request: SimulateRequest, what: str, path: Path) -> None:
    if not request.as_json:
        say(f"{what} in {path}")


def _show(request: SimulateRequest, figures: "Sequence[SweepFigures]", measured: "Measured | None") -> None:
    if request.as_json:
        say_json(as_json_figures(figures, measured))
        return
    from spare_megatron.tools.simulate.simulate_table import print_figures

    console = RunConsole()
    if measured is not None:
        from spare_megatron.tools.simulate.simulate_calibrate import print_measured

        print_measured(measured, console)
    print_figures(figures, console)
    if request.out is not None:
        _print_path(request, "results", request.out)


def as_json_figures(figures: "Sequence[SweepFigures]", measured: "Measured | None") -> dict[str, Any]:
    """What `--json` prints: the figures of the scenario, of several those of the best and under `cases` all."""
    best = min(figures, key=lambda one: one.time_to_train_ratio.mean)
    found: dict[str, Any] = asdict(best)
    if len(figures) > 1:
        found["cases"] = [asdict(one) for one in figures]
    if measured is not None:
        from spare_megatron.tools.simulate.simulate_calibrate import as_json

        found |= as_json(measured)
    return found
