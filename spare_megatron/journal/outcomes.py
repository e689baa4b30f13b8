"""How runs end: outcomes in journal, `summary.json` and `spare status`, and the exit codes of `spare train`."""

from collections.abc import Mapping
from typing import Literal

Outcome = Literal["finished", "stopped", "wipe_out", "halted", "failed", "interrupted"]

EXIT_CODES: Mapping[Outcome, int] = {
    "finished": 0,
    "stopped": 5,
    "wipe_out": 3,
    "halted": 4,
    "failed": 1,
    "interrupted": 130,
}
"""Of a run that is proven, or where nothing more can be proven."""

MEANINGS: Mapping[int, str] = {
    0: "all steps are committed and the journal is valid, or --resume found a finished training",
    1: "the run failed, its journal does not prove it, or its last checkpoint is missing",
    2: "the configuration cannot run",
    3: "wipe-out",
    4: "halted, because groups disagreed or training diverged",
    5: "stopped with steps left, by SIGTERM or another signal that asks for it",
    130: "interrupted by Ctrl-C or a second SIGTERM, or during the start",
}


def exit_code(outcome: str, verdict: str) -> int:
    """What `spare train` ends with, but for a missing checkpoint; `verdict` is that of `spare check`, if it has run.

    >>> exit_code("finished", "valid"), exit_code("finished", "unknown"), exit_code("stopped", "unknown")
    (0, 1, 5)
    """
    doubts = {"finished": ("invalid", "unknown"), "stopped": ("invalid",)}
    if verdict in doubts.get(outcome, ()):
        return 1
    return next((code for name, code in EXIT_CODES.items() if name == outcome), 1)  # the journal may have no end
