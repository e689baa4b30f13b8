"""Why a rank ended, for people and for the fence."""

from spare_megatron.core.topology import GroupId
from spare_megatron.faults.injection import InjectedFault
from spare_megatron.journal.records import LOST_A_PEER
from spare_megatron.runtime.process.processes import describe_exit
from spare_megatron.runtime.process.reports import ExitCode, RankKey, RankRaised

LOSSLESS_EXITS = (ExitCode.FINISHED, ExitCode.WIPE_OUT, ExitCode.HALTED)
"""Ends that all groups come to by themselves: no reason to fence anybody."""

_CAUSES: dict[int, str] = {
    ExitCode.GROUP_BROKEN: LOST_A_PEER,
    ExitCode.JOIN_FAILED: "could not take the state over; its log says why",
    ExitCode.FENCED: "found itself fenced; the log entry says why",
    ExitCode.STORE_LOST: "lost the control store",
}
"""What the exit codes of lost groups mean."""

INJECTED = f"{InjectedFault.__module__}.{InjectedFault.__qualname__}"
"""How the last line of the traceback of an injected fault begins."""

_OF_A_DEVICE = ("ECC error", "NVLink", "hardware stack error")
"""In what CUDA says of a device that has failed, which no other group meets by computing the same."""


def cause_of_end(code: int, traceback: str = "") -> tuple[str, str]:
    """Why the rank ended, and the exception behind it where other groups may meet the same; else empty.

    Args:
        code: The exit code of its process.
        traceback: Of the exception that ended it, if one did.
    """
    error = _error_in(traceback)
    cause = error or _CAUSES.get(code) or describe_exit(code)
    is_its_own = error.startswith(INJECTED) or any(word in error for word in _OF_A_DEVICE)
    return cause, "" if is_its_own else error


class Raised:
    """What ranks of a node have raised, until it is told with the loss of their groups."""

    def __init__(self) -> None:
        self._reports: dict[RankKey, RankRaised] = {}

    def note(self, report: RankRaised) -> None:
        """A rank has raised."""
        self._reports[report.group, report.rank] = report

    def first_rank(self, group: GroupId, ended: int) -> int:
        """The first rank of the group that has raised; the one that has ended, if none has."""
        return min((rank for of, rank in self._reports if of == group), default=ended)

    def cause_of_end(self, key: RankKey, code: int) -> tuple[str, str]:
        """Why the rank ended, as `cause_of_end` has it."""
        report = self._reports.get(key)
        return cause_of_end(code, report.traceback if report else "")

    def take(self, group: GroupId, rank: int) -> RankRaised | None:
        """What the rank has raised, to be told now."""
        return self._reports.pop((group, rank), None)

    def forget(self, group: GroupId) -> None:
        """The group begins its next life."""
        self._reports = {key: report for key, report in self._reports.items() if key[0] != group}


def _error_in(traceback: str) -> str:
    """The last line, where a text of several lines has what others may meet too. CUDA ends with advice instead."""
    lines = traceback.strip().splitlines()
    return next((line for line in reversed(lines) if "CUDA error" in line), lines[-1] if lines else "")
