"""What a supervisor does when a rank exits: the consequence for its group and the run, and the cause of the loss."""

from collections.abc import Sequence
from enum import Enum

from spare_megatron.faults.injection import InjectedFault
from spare_megatron.journal.records import LOST_A_PEER
from spare_megatron.machine.gpus.device_errors import (
    FAILED_DEVICE,
    describe_xid,
    error_line,
    find_device_error,
    name_of_code,
)
from spare_megatron.process.processes import describe_exit
from spare_megatron.process.reports import ExitCode, RankKey, RankRaised
from spare_megatron.stacking.layout import GroupId

_ENDS_OF_THE_RUN = (ExitCode.FINISHED, ExitCode.STOPPED, ExitCode.WIPE_OUT, ExitCode.HALTED)


class Consequence(Enum):
    """What follows from the exit of a rank."""

    NONE = "the loss of its group is known, or the run ends for want of a store"
    GROUP_LOST = "its group is fenced, and the rest of it killed"
    GROUP_LOST_LATER = "as GROUP_LOST a heartbeat interval later, unless the store is given up until then"
    GROUP_LEFT = "its group takes no part any more, as it was asked to, and may be asked for again"
    RUN_RESTARTS = "a wipe-out: the groups of the node are started again as soon as they have ended"
    RUN_ENDS = "no group is started again"


def consequence_of(code: int, *, is_group_lost: bool, is_store_given_up: bool) -> Consequence:
    """The consequence of the exit code of a rank whose group is or is not lost already."""
    if code in _ENDS_OF_THE_RUN:
        return Consequence.RUN_ENDS
    if code == ExitCode.LEFT:
        return Consequence.GROUP_LEFT
    if code == ExitCode.RESTART and not is_group_lost:
        return Consequence.RUN_RESTARTS
    if is_group_lost or is_store_given_up:
        return Consequence.NONE
    # All nodes may have lost the store; an interval later the supervisor's own connection has noticed.
    return Consequence.GROUP_LOST_LATER if code == ExitCode.STORE_LOST else Consequence.GROUP_LOST


FOUND_FENCED = "found itself fenced"
"""Cause of a loss that an entry of the log declares; the loss is reported with the entry's reason."""

_CAUSES: dict[int, str] = {
    ExitCode.GROUP_BROKEN: LOST_A_PEER,
    ExitCode.JOIN_FAILED: "could not copy the state",
    ExitCode.FENCED: FOUND_FENCED,
    ExitCode.STORE_LOST: "lost the control store",
    ExitCode.ABORT_HUNG: "an abort of NCCL did not return within reduce.timeout_s",
}
"""Causes of loss by exit code."""

INJECTED = f"{InjectedFault.__module__}.{InjectedFault.__qualname__}"
"""Start of the last traceback line of an injected fault."""


def cause_of_end(code: int, traceback: str = "", device_code: int | None = None) -> tuple[str, str]:
    """Why a rank ended, and the exception behind it if other groups may raise the same one; else an empty string.
    `device_code`: of the error of CUDA that ended it, if torch has given it.
    """
    error = error_line(traceback)
    if code == ExitCode.JOIN_FAILED:  # others may fail for the same donor, which is no fault of the program
        return ": ".join(filter(None, (_CAUSES[code], error))), ""
    cause = error or _CAUSES.get(code) or describe_exit(code)
    of_device = find_device_error(error, device_code)
    is_its_own = error.startswith(INJECTED) or (of_device is not None and of_device.kind == "certain")
    if device_code is not None:
        cause += f" ({name_of_code(device_code, error)})"
    return cause, "" if is_its_own else error


def with_xid_events(cause: str, error: str, machine: int, events: Sequence[tuple[str, int]]) -> tuple[str, str]:
    """The cause and error of a group's loss, with recent Xid events of its GPUs (UUID, Xid) added to the cause. If one
    shows a failed device, the error is empty, so that it is never compared with errors of other groups.

    >>> with_xid_events("CUDA error: launch failure", "CUDA error: launch failure", 3, [("GPU-aa", 79)])
    ('Xid 79 (fallen off the bus) of GPU-aa on machine 3: CUDA error: launch failure', '')
    """
    has_failed = any(xid in FAILED_DEVICE for _, xid in events)
    if not events or cause == FOUND_FENCED or (cause == LOST_A_PEER and not has_failed):
        return cause, error
    found = ", ".join(f"{describe_xid(xid)} of {uuid}" for uuid, xid in events)
    return f"{found} on machine {machine}: {cause}", "" if has_failed else error


class RaisedExceptions:
    """Exceptions that ranks of the node have raised, kept until they are reported with the losses of their groups."""

    def __init__(self) -> None:
        self._reports: dict[RankKey, RankRaised] = {}

    def note(self, report: RankRaised) -> None:
        self._reports[report.group, report.rank] = report

    def first_rank(self, group: GroupId, ended: int) -> int:
        """The lowest rank of the group that has raised; `ended` if none has."""
        return min((rank for of, rank in self._reports if of == group), default=ended)

    def cause_of_end(self, key: RankKey, code: int) -> tuple[str, str]:
        """`cause_of_end` with the traceback that the rank has reported, if any."""
        report = self._reports.get(key)
        return cause_of_end(code, report.traceback, report.device_code) if report else cause_of_end(code)

    def concerns_all(self, group: GroupId, rank: int) -> bool:
        """Whether the rank has raised what holds for all groups."""
        report = self._reports.get((group, rank))
        return report is not None and report.concerns_all

    def pop(self, group: GroupId, rank: int) -> RankRaised | None:
        return self._reports.pop((group, rank), None)

    def forget(self, group: GroupId) -> None:
        self._reports = {key: report for key, report in self._reports.items() if key[0] != group}
