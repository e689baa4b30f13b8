"""`spare report`, `serve` and `timeline`: what happened in a run, as a page, a live page, and a trace of all ranks."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.check import proof_so_far
from spare_megatron.cli.folders import check_output_file, is_run_dir
from spare_megatron.cli.printing import say
from spare_megatron.cli.status import SINCE, SinceOption, find_overview
from spare_megatron.formats.output import whole_file
from spare_megatron.formats.quantities import parse_duration_s
from spare_megatron.machine.interrupts import raising

if TYPE_CHECKING:
    from spare_megatron.tools.report.server import ReportServer

REPORT, TIMELINE = "report.html", "timeline.json"
_PROOF_S, _PROOF_SHARE = 10.0, 0.05
"""Longest time of a proof, and the largest share of the time that proofs for a served page may take."""
_NOTHING_YET = '{"head":"<p>The journal has no run yet.</p>","tables":"","plots":[]}'


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Directory of a run, or of two runs to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: report.html in the first directory]")
    ] = None,
    since: SinceOption = SINCE,
) -> None:
    """Write an HTML report of a run, or of two runs side by side.

    The page is one file and needs no network. For a run that goes on it shows what has happened so far. Prints the
    path of the file.
    """
    from spare_megatron.journal.state.follow import read_run_state
    from spare_megatron.tools.report.history import history_of
    from spare_megatron.tools.report.page import comparison
    from spare_megatron.tools.report.page import report as page_of

    if len(run_dirs) > 2:
        raise ValueError(f"{len(run_dirs)} directories: a page holds one run, or two to compare")
    window_s = parse_duration_s("--since", since)
    target = out or run_dirs[0] / REPORT
    if out is not None or run_dirs[0].is_dir():  # else that is what is wrong
        check_output_file("--out", target)
    is_pair = len(run_dirs) == 2
    standings = [(folder, read_run_state(folder, with_params=is_pair)) for folder in run_dirs]
    now_s = time.time()
    histories = [
        history_of(
            run_state, find_overview(folder, run_state, now_s, window_s, proof_so_far(folder, run_state, _PROOF_S))
        )
        for folder, run_state in standings
    ]
    if is_pair:
        page = comparison({str(folder): history for folder, history in zip(run_dirs, histories, strict=True)})
    else:
        page = page_of(histories[0], config_of(run_dirs[0]))
    with whole_file("--out", target) as file:
        file.write_text(page)
    say(str(target))


def config_of(run_dir: Path) -> str:
    """The resolved configuration as text, without what it exports; empty where there is none to be read."""
    from spare_megatron.config.loader import without_exports

    try:
        return without_exports((run_dir / "config.toml").read_text())
    except (FileNotFoundError, PermissionError):  # a simulated run has none; another user's may be private
        return ""


def serve(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, finished or going on.")],
    port: Annotated[int, typer.Option(help="Port on the loopback address; 0 takes a free one.", min=0, max=65535)] = 0,
    since: SinceOption = SINCE,
) -> None:
    """Serve the live report of a run until Ctrl-C.

    Prints the URL. It contains a random word, and requests without that word get no answer. Only this machine can
    connect; from another one use `ssh -L PORT:127.0.0.1:PORT MACHINE`.
    """
    with open_server(run_dir, port, window_s=parse_duration_s("--since", since)) as server:
        say(server.url)
        with contextlib.suppress(KeyboardInterrupt), raising():
            server.serve_forever()


def open_server(
    run_dir: Path, port: int, now_s: Callable[[], float] = time.time, window_s: float = math.inf
) -> "ReportServer":
    """The server, not yet answering. FileNotFoundError: the directory holds no journal. OSError: the port is taken."""
    from spare_megatron.journal.state.follow import Follower
    from spare_megatron.journal.state.overview import UNPROVEN
    from spare_megatron.tools.report.history import history_of
    from spare_megatron.tools.report.page import live_content, live_page
    from spare_megatron.tools.report.server import PageContent, ReportServer, Updated

    if not any((run_dir / "journal").glob("*.jsonl")):
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    follower = Follower(run_dir)
    proof, next_proof_s = UNPROVEN, 0.0

    def make(before: PageContent | None) -> PageContent:
        nonlocal proof, next_proof_s
        run_state = follower.poll()
        began_s = time.monotonic()
        if began_s >= next_proof_s or run_state.end is not None:
            proof = proof_so_far(run_dir, run_state, _PROOF_S)
            next_proof_s = began_s + (time.monotonic() - began_s) / _PROOF_SHARE
        overview = find_overview(run_dir, run_state, now_s(), window_s, proof)
        version = hash((run_state.num_lines, len(overview.alarms), proof))
        if before is not None and before.version == version:
            return before
        if run_state.run is None:
            return PageContent(version=version, text=_NOTHING_YET, is_final=False)
        history = history_of(run_state, overview)
        return PageContent(
            version=version,
            text=live_content(history),
            is_final=run_state.end is not None,
            newest_at_s=None if history.began_s is None else run_state.newest_at_s,
        )

    page = live_page(run_dir.resolve().name, config_of(run_dir))
    try:
        return ReportServer(page, Updated(make), port, now_s)
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror}; choose another, or 0 for a free one") from error


def timeline(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    step: Annotated[
        int | None,
        typer.Option(help="Write only this step and its neighbours. [default: all events and the last steps]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: timeline.json in the run's directory]")
    ] = None,
) -> None:
    """Write a trace of all ranks around losses and rejoins.

    Open it at ui.perfetto.dev or chrome://tracing. It has forward and backward passes of each microbatch, transfers
    between stages, reductions, votes, updates and recoveries, for all ranks on one time axis; for a lost rank also the
    operation that it did not finish. Prints the path of the file.
    """
    from spare_megatron.journal.files import read_journal
    from spare_megatron.journal.spans import read_spans_of
    from spare_megatron.tools.report.trace import trace_of

    if not is_run_dir(run_dir):
        raise ValueError(f"{run_dir} is the folder of a job; name one of its runs, attempt-NNN in it")
    target = out or run_dir / TIMELINE
    check_output_file("--out", target)
    steps = None if step is None else range(step - 1, step + 2)
    trace = trace_of(read_spans_of(run_dir), read_journal(run_dir), steps)
    with whole_file("--out", target) as file:
        file.write_text(json.dumps(trace))
    say(str(target))
