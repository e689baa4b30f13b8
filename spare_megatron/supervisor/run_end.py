"""Ends a run whose driver is lost: its supervisors determine and journal the outcome."""

import contextlib
import time
from collections.abc import Collection, Mapping

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import FinishRun, StopHalted, StopWipeOut
from spare_megatron.core.machines.failure_detector import ENDED
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EndRecord, Outcome
from spare_megatron.process.processes import say
from spare_megatron.process.reports import ExitCode, RankKey
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.log_follower import LogFollower, controller_setup, why_wiped_out

_SILENT_INTERVALS = 4.0
"""A node whose heartbeat stands still for so many intervals is not waited for."""

_GOOD_ENDS: Mapping[frozenset[int], Outcome] = {
    frozenset({ExitCode.FINISHED}): "finished",
    frozenset({ExitCode.STOPPED}): "stopped",
}


def codes_of(exits: Mapping[RankKey, int], absent: Collection[GroupId]) -> set[int]:
    """Exit codes that say how the run has ended: those of groups that take part, and of `absent` ones that had started
    again and read in the log that nothing can go on.

    >>> sorted(codes_of({(0, 0): ExitCode.FINISHED, (1, 0): ExitCode.GROUP_BROKEN}, [1])) == [ExitCode.FINISHED]
    True
    """
    codes = {code for (group, _), code in exits.items() if group not in absent or code == ExitCode.WIPE_OUT}
    return codes - {ExitCode.LEFT}


def outcome_of(codes: Collection[int]) -> Outcome:
    """The outcome of a run, by the exit codes of ranks in groups that were not lost and have not left it."""
    if ExitCode.HALTED in codes:
        return "halted"
    if ExitCode.WIPE_OUT in codes:
        return "wipe_out"
    return _GOOD_ENDS.get(frozenset(codes), "failed")


def end_without_driver(exits: Mapping[RankKey, int], lost: Collection[GroupId]) -> EndRecord | None:
    """The end of the run as one node has seen it; None if all of its groups were lost or left, and none knows it."""
    codes = codes_of(exits, lost)
    if not codes:
        return None
    outcome = outcome_of(codes)
    if outcome == "stopped":
        return stopped()
    return EndRecord(outcome=outcome, reason="" if outcome == "finished" else f"exit codes {sorted(codes)}")


def end_in_log(store: ControlStore, config: RunConfig) -> EndRecord | None:
    """The end of a run of which no group is left that knows it, by the log; None if that goes on. StoreLost."""
    stop = LogFollower(DecisionLog(store), controller_setup(config)).stop()
    match stop:
        case StopHalted(reason=reason):
            return EndRecord(outcome="halted", reason=reason)
        case StopWipeOut():
            return EndRecord(outcome="wipe_out", reason=why_wiped_out(stop))
        case FinishRun(is_asked=is_asked):
            return stopped() if is_asked else EndRecord(outcome="finished", reason="")
    return None


def stopped(trouble: str = "", by: str = "", steps: str = "") -> EndRecord:
    """The end of a run that was asked to end: by what, after which steps, and what kept it from ending in order."""
    by, steps, trouble = by and f" by {by}", steps and f" after {steps}", trouble and f"; {trouble}"
    return EndRecord(outcome="stopped", reason=f"asked to end{by}{steps}{trouble}")


def write_end(spec: NodeSpec, end: EndRecord | None) -> None:
    """Appends the end of the run to the node's journal file, which must be closed. A full disk loses the record."""
    if end is None:
        return
    try:
        with contextlib.closing(JournalWriter(spec.run_dir, spec.name)) as journal:
            journal.write(end)
    except OSError as error:
        say(f"the end of the run ({end.outcome}) is not in the journal: {error}")


def wait_for_others(store: ControlStore, node: int, num_nodes: int, interval_s: float) -> None:
    """Returns when every other supervisor has ended or is silent. StoreLost: the store does not answer."""
    others = [other for other in range(num_nodes) if other != node]
    last: dict[int, tuple[str | None, float]] = {}
    while others:
        now_s = time.monotonic()
        for other, beat in zip(others, store.get([keys.beat(other) for other in others]), strict=True):
            if last.get(other, ("", 0.0))[0] != beat:
                last[other] = beat, now_s
        others = [
            other
            for other in others
            if last[other][0] not in (None, ENDED) and now_s - last[other][1] < _SILENT_INTERVALS * interval_s
        ]
        time.sleep(interval_s / 2)
