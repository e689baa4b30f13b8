"""`spare simulate`: how long training takes through losses, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from spare_megatron.cli.command import do_each, option, same_option, with_options
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.folders import check_output_file, check_plot_file, check_writable
from spare_megatron.cli.printing import message, say, say_json
from spare_megatron.formats.quantities import format_bytes, parse_duration_s, parse_redundancies
from spare_megatron.machine.interrupts import INTERRUPTED, raising
from spare_megatron.tools.plan.plan_options import PlanOptions

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
_SETTINGS = ("granularity", "redundancy", "num_steps", "microbatches_per_shard", "machines_per_group", "least_machines")
"""Settings of the scenario whose options have their names in `SimulateOptions`."""
_DURATIONS = {"repair_s": "repair", "reform_s": "reform", "costs.save_s": "save", "costs.join_s": "join"}
"""Setting of the scenario -> option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `spare simulate` as the user wrote them; None where absent."""

    preset: str = option(
        "Preset (paper_n600, llama3_16k, meta_rsc1, ...) or TOML file of the scenario.", default=DEFAULT_PRESET
    )
    policy: str | None = option("spare, replication or checkpoint_only; all compares them.")
    granularity: str | None = option("Unit of reordering: stack (whole shards, as in the paper) or microbatch.")
    redundancy: int | None = option("Hosts per shard.")
    microbatches_per_shard: int | None = option("Microbatches per shard.", "--microbatches")
    num_steps: int | None = option("Number of steps to commit.", "--steps")
    seeds: int = option("Number of simulations of each scenario, with seeds from 0.", default=5)
    repair: str | None = same_option(PlanOptions, "repair")
    reform: str | None = same_option(PlanOptions, "reform")
    machines_per_group: int | None = same_option(PlanOptions, "machines_per_group")
    least_machines: int | None = same_option(PlanOptions, "least_machines")
    shared_data: bool | None = option("All groups can read all data, so that any computes any shard.", "--shared-data")
    trace: Path | None = option("Trace of losses, instead of the scenario's; see `spare import-trace`.", metavar="FILE")
    save: str | None = option("Time that training stalls for one save, as in 60s.")
    join: str | None = same_option(PlanOptions, "join")
    overrides: list[str] | None = option(
        "Override a setting of the scenario, as in failures.shape=1.0. Repeatable.", "--set", metavar="KEY=VALUE"
    )
    calibrate: Path | None = option(
        "Take costs from the journal of this run, and predict its own times.", metavar="RUN_DIR"
    )
    replay: Path | None = option("Predict the times of this run instead; needs --calibrate.", metavar="RUN_DIR")
    sweep: str | None = option(
        "Simulate these redundancies, as in 2..20 or 3,4,6.", "--sweep-redundancy", metavar="FROM..TO"
    )
    out: Path | None = option("JSON-lines file that keeps each result; results in it are not simulated again.")
    jobs: int | None = option("Number of processes.", shown="one per processor")
    journal: Path | None = option("Write the journal of seed 0 to this directory, for `spare check`.")
    plot: Path | None = option("Draw every policy over the redundancy, and a timeline, into this PNG file.")
    as_json: bool = option(
        "Print the figures as JSON; ci95 is half of the 95% confidence interval.", "--json", default=False
    )


@with_options(SimulateOptions)
def simulate(given: SimulateOptions) -> None:
    """Simulate training under losses of groups.

    The simulation runs the same controller as real runs, in virtual time. All figures are simulated, not measured; with
    --calibrate their costs are measured. Options override the preset; with --reform detection and rebuild take 2 s each
    unless set. Progress goes to stderr.

    Example: `spare simulate --preset paper_n600 --policy all --seeds 5 --steps 2000`

    Exit codes: 2 invalid input, 130 interrupted.
    """
    from spare_megatron.tools.simulate.simulate_jobs import ResultFile, default_jobs, simulate_all
    from spare_megatron.tools.simulate.sweep import Case, cases_of, given_up, summarize

    _check_options(given)
    measured = _measured(given)
    base = scenario_of(given, measured)
    wanted, drawn = asked_for(given, base), for_the_plot(given, base)
    if given.policy == ALL_POLICIES or given.plot is not None:
        _name_left_out(base)
    journaled = () if given.journal is None else (base,)
    if given.journal is not None:
        _check_journal(given.journal, base)
    scenarios = dict.fromkeys((*wanted, *drawn, *journaled))
    _check_cases(len(scenarios), given.seeds)
    cases = cases_of(scenarios, given.seeds)
    out = None if given.out is None else ResultFile(given.out)
    try:
        with raising():
            results = simulate_all(
                cases, num_jobs=given.jobs or default_jobs(), console=RunConsole(stderr=True), out=out
            )
    except KeyboardInterrupt:
        kept = "" if out is None else f"; finished cases are in {given.out}: the same command goes on from there"
        message("simulate", f"interrupted{kept}")
        raise Exit(INTERRUPTED) from None
    figures, reasons = summarize(wanted, given.seeds, results), given_up(results.values())
    if not figures:
        raise ValueError(reasons[0])
    for reason in reasons:
        message("simulate", f"given up: {reason}")
    outputs: list[Callable[[], None]] = [partial(_show, given, figures, measured)]
    if given.journal is not None:
        rework = results[Case(scenario=base, seed=0).digest].terms.get("rework", 0.0)
        outputs.append(partial(_write_journal, given, base, base.num_steps * (1 + rework)))
    if given.plot is not None:
        outputs.append(partial(_draw, given, base, summarize(drawn, given.seeds, results)))
    do_each(outputs)


def _measured(given: SimulateOptions) -> "Measured | None":
    if given.calibrate is None:
        if given.replay is not None:
            raise ValueError(f"--replay {given.replay} needs the costs of a run: add --calibrate RUN_DIR")
        return None
    from spare_megatron.tools.simulate.simulate_calibrate import measured_by

    return measured_by(given.calibrate, given.replay)


def scenario_of(given: SimulateOptions, measured: "Measured | None") -> "Scenario":
    """The scenario of preset, measured costs, overrides and options; the later wins. Raises ValueError."""
    from spare_megatron.tools.simulate.scenario_presets import load_scenario

    settings: list[str] = []
    if measured is not None:
        from spare_megatron.tools.simulate.simulate_calibrate import costs_elsewhere

        settings += [f"costs.{name}={value!r}" for name, value in costs_elsewhere(measured.calibration).items()]
    if given.trace is not None:
        settings += ["failures.kind=trace", f"failures.trace_file={given.trace.absolute()}"]
    settings += given.overrides or ()
    own = {name: getattr(given, name) for name in _SETTINGS}
    own["last_resort"] = "true" if given.shared_data else None
    settings += [f"{name}={value}" for name, value in own.items() if value is not None]
    for name, own_name in _DURATIONS.items():
        if (text := getattr(given, own_name)) is not None:
            settings.append(f"{name}={parse_duration_s(f'--{own_name}', text, is_zero_fine=True)!r}")
    if given.policy is not None and given.policy != ALL_POLICIES:
        settings.append(f"policy={given.policy.replace('-', '_')}")
    return load_scenario(given.preset, settings)


def asked_for(given: SimulateOptions, base: "Scenario") -> tuple["Scenario", ...]:
    from spare_megatron.tools.simulate.sweep import VARIANTS, grid

    if given.policy != ALL_POLICIES and given.sweep is None:
        return (base,)
    variants = VARIANTS if given.policy == ALL_POLICIES else ((base.policy, base.granularity),)
    return grid(base, variants, _redundancies(given, base, (base.redundancy,)))


def for_the_plot(given: SimulateOptions, base: "Scenario") -> tuple["Scenario", ...]:
    """What the curves of a plot need: every policy over the redundancy."""
    from spare_megatron.tools.simulate.sweep import VARIANTS, grid

    if given.plot is None:
        return ()
    default = tuple(r for r in PLOTTED_REDUNDANCIES if r <= base.num_groups)
    return grid(base, VARIANTS, _redundancies(given, base, default))


def _name_left_out(base: "Scenario") -> None:
    from spare_megatron.tools.simulate.sweep import VARIANTS, unsimulated, variant_name

    found = {
        variant_name(policy, granularity): what
        for policy, granularity in VARIANTS
        if (what := unsimulated(base, policy))
    }
    if found:
        message(
            "simulate", "left out: " + ", ".join(f"{name}, not simulated with {what}" for name, what in found.items())
        )


def _redundancies(given: SimulateOptions, base: "Scenario", default: tuple[int, ...]) -> tuple[int, ...]:
    return default if given.sweep is None else parse_redundancies(given.sweep, most=base.num_groups)


def _check_options(given: SimulateOptions) -> None:
    """What can be wrong before anything is simulated, so that no hour of simulation is lost to it."""
    for name, count in (("seeds", given.seeds), ("jobs", given.jobs)):
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count} is below 1")
    if given.out is not None:
        check_output_file("--out", given.out)
    if given.plot is not None:
        check_plot_file(given.plot)


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


def _write_journal(given: SimulateOptions, scenario: "Scenario", num_steps: float) -> None:
    """Simulates seed 0 once more, and writes what a real run of the same history would have written."""
    from spare_megatron.formats.output import named_errors, whole_file
    from spare_megatron.journal.files import encode_line
    from spare_megatron.tools.simulate.engine import simulate as simulate_one

    assert given.journal is not None
    _check_journal_size(given.journal, scenario, num_steps)
    folder = given.journal / "journal"
    with named_errors("--journal", given.journal):
        folder.mkdir(parents=True)
        with whole_file("--journal", folder / "simulator.jsonl") as path, path.open("w") as file:
            simulate_one(scenario, 0, journal=lambda line: file.writelines((encode_line(line), "\n")))
    _print_path(given, "journal", given.journal)


def _draw(given: SimulateOptions, base: "Scenario", drawn: "Sequence[SweepFigures]") -> None:
    from spare_megatron.tools.simulate.engine import timeline_of
    from spare_megatron.tools.simulate.simulate_plot import write_plot

    assert given.plot is not None
    write_plot(given.plot, base, drawn, timeline_of(base, seed=0))
    _print_path(given, "curves", given.plot)


def _print_path(given: SimulateOptions, what: str, path: Path) -> None:
    if not given.as_json:
        say(f"{what} in {path}")


def _show(given: SimulateOptions, figures: "Sequence[SweepFigures]", measured: "Measured | None") -> None:
    if given.as_json:
        say_json(as_json_figures(figures, measured))
        return
    from spare_megatron.tools.simulate.simulate_table import print_figures

    console = RunConsole()
    if measured is not None:
        from spare_megatron.tools.simulate.simulate_calibrate import print_measured

        print_measured(measured, console)
    print_figures(figures, console)
    if given.out is not None:
        _print_path(given, "results", given.out)


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
