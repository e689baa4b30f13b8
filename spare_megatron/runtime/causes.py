"""Why a rank ended, for people and for the fence."""

from spare_megatron.faults.injection import InjectedFault
from spare_megatron.runtime.processes import describe_exit
from spare_megatron.runtime.reports import ExitCode

LOSSLESS_EXITS = (ExitCode.FINISHED, ExitCode.WIPE_OUT, ExitCode.HALTED)
"""Ends that all groups come to by themselves: no reason to fence anybody."""

_CAUSES: dict[int, str] = {
    ExitCode.GROUP_BROKEN: "lost a peer in its group",
    ExitCode.JOIN_FAILED: "could not take the state over; its log says why",
    ExitCode.FENCED: "found itself fenced; the log entry says why",
    ExitCode.STORE_LOST: "lost the control store",
}
"""What the exit codes of lost groups mean."""

INJECTED = f"{InjectedFault.__module__}.{InjectedFault.__qualname__}"
"""How the last line of the traceback of an injected fault begins."""


def cause_of_end(code: int, traceback: str = "") -> tuple[str, str]:
    """Why the rank ended, and the exception behind it where other groups may meet the same; else empty.

    Args:
        code: The exit code of its process.
        traceback: Of the exception that ended it, if one did.
    """
    lines = traceback.strip().splitlines()
    error = lines[-1] if lines else ""
    cause = error or _CAUSES.get(code) or describe_exit(code)
    return cause, "" if error.startswith(INJECTED) else error
