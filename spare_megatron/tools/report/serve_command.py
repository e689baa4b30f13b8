"""`spare serve`: the page of a run, live, on this machine."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.printing import say
from spare_megatron.machine.interrupts import raising
from spare_megatron.tools.report.report_command import config_of, verdict_of

if TYPE_CHECKING:
    from spare_megatron.tools.report.server import ReportServer


def serve(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, finished or going on.")],
    port: Annotated[int, typer.Option(help="Port on the loopback address; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Serve the live report of a run until Ctrl-C.

    Prints the URL. It contains a random word, and requests without that word get no answer. Only this machine can
    connect; from another one use `ssh -L PORT:127.0.0.1:PORT MACHINE`.
    """
    with explained_errors("serve"), open_server(run_dir, port) as server:
        say(server.url)
        with contextlib.suppress(KeyboardInterrupt), raising():
            server.serve_forever()


def open_server(run_dir: Path, port: int, now_s: Callable[[], float] = time.time) -> "ReportServer":
    """The server, not yet answering. FileNotFoundError: the directory holds no journal. OSError: the port is taken."""
    from spare_megatron.journal.state.follow import Follower
    from spare_megatron.tools.report.history import history_of
    from spare_megatron.tools.report.page import live_content, live_page
    from spare_megatron.tools.report.server import PageContent, ReportServer, Updated

    if not any((run_dir / "journal").glob("*.jsonl")):
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    follower = Follower(run_dir)

    def make(before: PageContent | None) -> PageContent:
        run_state = follower.poll()
        version = run_state.num_lines
        if before is not None and before.version == version:
            return before
        if run_state.run is None:
            return PageContent(version=version, text=NOTHING_YET, is_final=False)
        verdict = "the run goes on" if run_state.end is None else verdict_of(run_dir, run_state)
        history = history_of(run_state, verdict, now_s())
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


NOTHING_YET = '{"head":"<p>The journal has no run yet.</p>","tables":"","plots":[]}'
