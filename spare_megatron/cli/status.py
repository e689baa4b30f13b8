"""`spare status`: how a run stands, or a job of Slurm with its runs; once, or for as long as it goes on."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.check import proof_so_far, way_back
from spare_megatron.cli.console import LiveView, RunConsole
from spare_megatron.cli.folders import is_run_dir
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_duration, format_steps, parse_duration_s
from spare_megatron.machine.interrupts import raising

if TYPE_CHECKING:
    from spare_megatron.journal.state.overview import Overview, Proof
    from spare_megatron.journal.state.run_state import RunState, SavePlan

SINCE = "12h"
SinceOption = Annotated[str, typer.Option(help="Window of events and costs, before now or the end of the run.")]
_POLLS_PER_S = 4
_NUM_EVENTS = 20
_PROOF_S = 2.0
"""Longest time to prove the journal, for which the user waits."""
_NEAR_QUOTA = 0.9
"""Share of etcd's quota in use from which on there is an alarm."""
_SILENCE_S = 5.0
"""Age of the newest journal line from which on the driver is looked for."""
_TAIL_BYTES = 1 << 16
_STORE_BYTES, _STORE_LIMIT_BYTES = "spare/store_bytes", "spare/store_limit_bytes"


def status(
    folder: Annotated[Path, typer.Argument(help="Directory of a run, or folder of a job.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the run, or the newest run of a job, until it ends or Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    since: SinceOption = SINCE,
) -> None:
    """Show the state of a run or job.

    Is it healthy, what happened, and what did it cost; committed steps, loss, each group and the last events; for a job
    its state in Slurm. Each group is a letter: A alive, S slow, R rejoining, D drained, L lost, X given up.
    """
    if watch and as_json:
        raise ValueError("--watch is for people and --json for programs: choose one of them")
    window_s = parse_duration_s("--since", since)
    is_run = is_run_dir(folder)
    if watch:
        _watch(folder if is_run else _newest_run(folder), window_s)
    elif is_run:
        _print_run(folder, window_s, as_json=as_json)
    else:
        _print_job(folder, as_json=as_json)


def save_plan(run_dir: Path) -> "SavePlan":
    """When the run takes checkpoints, if its directory says so; that of a simulated run may not."""
    from spare_megatron.config.loader import ConfigError, load_run_config
    from spare_megatron.journal.state.run_state import SavePlan

    try:
        checkpoint = load_run_config(run_dir / "config.toml").config.checkpoint
    except ConfigError:
        return SavePlan()
    return SavePlan(interval_s=checkpoint.interval_s or 0.0, interval_steps=checkpoint.interval_steps or 0)


def _newest_run(folder: Path) -> Path:
    runs = [run_dir for run_dir in sorted(folder.glob("attempt-*")) if (run_dir / "journal").is_dir()]
    if not runs:
        raise FileNotFoundError(
            f"{folder} holds no journal, nor a run that does: name a run, or wait until it has begun"
        )
    return runs[-1]


def _print_run(run_dir: Path, window_s: float, *, as_json: bool) -> None:
    from spare_megatron.cli.run_view import lines_of
    from spare_megatron.journal.state.follow import read_run_state

    run_state, plan, now_s = read_run_state(run_dir), save_plan(run_dir), time.time()
    overview = find_overview(run_dir, run_state, now_s, window_s, proof_so_far(run_dir, run_state, _PROOF_S))
    if as_json:
        say_json(_as_json(run_dir, run_state, plan, overview))
    else:
        say(*lines_of(_view(run_dir, run_state, plan, overview)))


def find_overview(run_dir: Path, run_state: "RunState", now_s: float, window_s: float, proof: "Proof") -> "Overview":
    """The overview, with the alarms that the journal does not have."""
    from spare_megatron.formats.store_space import usage
    from spare_megatron.journal.state.overview import overview_of

    used, limit = store_bytes(run_dir) or (0, None)
    store = f"etcd is nearly full: {usage(used, limit)}" if limit and used > _NEAR_QUOTA * limit else ""
    further = [alarm for alarm in (driverless(run_dir, run_state, now_s), store) if alarm and run_state.end is None]
    return overview_of(run_state, now_s, proof, further=further, window_s=window_s)


def _view(run_dir: Path, run_state: "RunState", plan: "SavePlan", overview: "Overview") -> LiveView:
    from spare_megatron.cli.run_view import view_of
    from spare_megatron.formats.store_space import usage

    found = store_bytes(run_dir)
    store = "" if found is None else f"etcd holds {usage(*found)}, as the run last read it"
    back = "" if run_state.spoiled is None else way_back(run_state.spoiled, run_dir)
    return view_of(run_state, plan, overview, [note for note in (back, store) if note])


def store_bytes(run_dir: Path) -> tuple[int, int | None] | None:
    """Bytes that etcd held when the run last asked, and its quota if known; None with the embedded store. Read from the
    last lines of the metrics: etcd itself needs credentials and a connection.
    """
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            skipped = file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:  # a simulated run, or one that has not begun
        return None
    for line in reversed(lines[1 if skipped else 0 : -1]):  # the last one has no end yet, or is empty
        if _STORE_BYTES in line:
            figures = json.loads(line)
            return figures[_STORE_BYTES], figures.get(_STORE_LIMIT_BYTES)
    return None


def driverless(run_dir: Path, run_state: "RunState", now_s: float) -> str:
    """A sentence if an unfinished run has no driver; empty if it has one, or if that is unknown."""
    from spare_megatron.machine.lock import is_held, is_locked

    silent_s = now_s - run_state.newest_at_s
    if run_state.run is None or run_state.end is not None or silent_s < _SILENCE_S or is_locked(run_dir) is not False:
        return ""
    return (
        f"its driver is gone, and has not written how the run ended: it was killed, or its machine is lost. The last "
        f"line of the journal is {format_duration(round(silent_s))} old; on other nodes the run "
        f"{'goes' if is_held(run_dir) else 'may go'} on"
    )


def _as_json(run_dir: Path, run_state: "RunState", plan: "SavePlan", overview: "Overview") -> dict[str, Any]:
    from spare_megatron.journal.event_texts import describe_storage

    now_s = overview.until_s
    goodput, store = run_state.goodput(now_s), store_bytes(run_dir) or (None, None)
    stages = {} if run_state.folding is None else run_state.folding.stages
    return {
        **dict(run_state.figures()),
        **({"stages": stages} if stages else {}),  # of groups that have fewer than the whole pipeline
        "name": None if run_state.run is None else run_state.run.name,
        "num_steps": None if run_state.run is None else run_state.run.num_steps,
        "groups": run_state.groups(),
        "paces": {group: pace / 1000 for group, pace in run_state.paces.items()},
        "goodput": None if goodput is None else goodput.goodput,
        "wall_s": None if goodput is None else goodput.wall_s,
        "lost_s": {} if goodput is None else goodput.lost_s,
        "next_save_s": run_state.next_save_s(plan, now_s),
        "culprit": None if run_state.culprit is None else dataclasses.asdict(run_state.culprit),
        "quarantined": {machine: dataclasses.asdict(one) for machine, one in run_state.quarantined.items()},
        "events": [dataclasses.asdict(event) for event in run_state.events()[-_NUM_EVENTS:]],
        "overview": dataclasses.asdict(overview),
        "spoiled": None if run_state.spoiled is None else dataclasses.asdict(run_state.spoiled),
        "damage": run_state.damage,
        "incomplete": "" if run_state.storage is None else describe_storage(run_state.storage),
        "store_bytes": store[0],
        "store_limit_bytes": store[1],
        "driverless": driverless(run_dir, run_state, now_s),
    }


def _watch(run_dir: Path, window_s: float) -> None:
    from spare_megatron.cli.run_view import lines_of
    from spare_megatron.journal.state.follow import Follower
    from spare_megatron.journal.state.overview import UNPROVEN

    follower, plan, console = Follower(run_dir), save_plan(run_dir), RunConsole()
    with contextlib.suppress(KeyboardInterrupt), raising():
        if not console.is_terminal:
            _watch_plainly(run_dir, follower.poll)
            return
        with console.live() as show:
            while follower.poll().end is None:
                overview = find_overview(run_dir, follower.run_state, time.time(), window_s, UNPROVEN)
                show(_view(run_dir, follower.run_state, plan, overview))
                time.sleep(1 / _POLLS_PER_S)
    proof = proof_so_far(run_dir, follower.run_state, _PROOF_S)
    overview = find_overview(run_dir, follower.run_state, time.time(), window_s, proof)
    for text in lines_of(_view(run_dir, follower.run_state, plan, overview)):
        console.line(text)


def _watch_plainly(run_dir: Path, poll: Callable[[], "RunState"]) -> None:
    """Without a terminal: a line when steps have been committed, and one for each event as it is known."""
    from spare_megatron.cli.run_view import NewLines

    lines, is_left = NewLines(has_steps=True), False
    while True:
        run_state, now_s = poll(), time.time()
        for text in lines.poll(run_state, now_s):
            say(text)
        if run_state.end is not None:
            return
        note = driverless(run_dir, run_state, now_s)
        if note and not is_left:
            say(lines.stamped(note, now_s))
        is_left = bool(note)
        time.sleep(1 / _POLLS_PER_S)


def _print_job(folder: Path, *, as_json: bool) -> None:
    from spare_megatron.driver.slurm.slurm_commands import job_of, tasks_of

    tasks = tasks_of(folder)
    jobs = {task: _job(folder / task) for task in tasks} if tasks else {"": _job(folder)}
    if as_json and tasks:
        say_json({"job_id": job_of(folder), "tasks": jobs})
    elif as_json:
        say_json(jobs[""])
    else:
        for task, job in jobs.items():
            if task:
                say(f"{task}: {tasks[task]}")
            _print_one_job(job)


def _job(folder: Path) -> dict[str, Any]:
    from spare_megatron.driver.slurm.slurm_commands import job_fields, job_of
    from spare_megatron.journal.state.follow import read_run_state

    job_id = job_of(folder)
    fields = job_fields(job_id)
    runs = {
        run_dir.name: {name: value for name, value in read_run_state(run_dir).figures() if name in _FIGURES}
        for run_dir in sorted(folder.glob("attempt-*"))
        if any(run_dir.glob("journal/*.jsonl"))
    }
    return {"job_id": job_id, **{name: fields.get(key, "") for name, key in _STATE.items()}, "runs": runs}


def _print_one_job(job: Mapping[str, Any]) -> None:
    facts = [f"{name} {job[name]}" for name in ("reason", "nodes") if job[name] not in ("", "None", "(null)")]
    say(", ".join((f"job {job['job_id']}: {job['state'] or 'unknown to Slurm'}", *facts)))
    for name, run in job["runs"].items():
        say(f"  {name}: {_describe(run)}")


_STATE = {"state": "JobState", "reason": "Reason", "nodes": "NodeList"}
_FIGURES = ("outcome", "outcome_reason", "steps_committed", "final_loss", "groups_lost", "groups_rejoined")


def _describe(run: Mapping[str, Any]) -> str:
    outcome = run["outcome"]
    loss = "none" if run["final_loss"] is None else f"{run['final_loss']:.4f}"
    reason = f": {run['outcome_reason']}" if outcome not in ("going on", "finished") else ""
    return (
        f"{outcome}, {format_steps(run['steps_committed'])} committed, loss {loss}, groups lost {run['groups_lost']}, "
        f"rejoined {run['groups_rejoined']}{reason}"
    )
