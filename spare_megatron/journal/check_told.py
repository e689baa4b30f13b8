"""What rare records say of the log, or of the run's faults, is compared with these."""

from collections.abc import Iterator

from spare_megatron.journal.evidence import Evidence
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import FaultRecord, LossRecord, RecoveryRecord, RestartRecord, RunRecord


def check_told(evidence: Evidence, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Losses, recoveries, restarts and injected faults are those of the log and of the run record."""
    wanted = {(f["step"], f["group"], f["rank"], f["phase"], f["kind"]) for f in run.faults}
    restarts = [entry for entry in fold.entries.values() if entry["entry"] == "restart"]
    for line in evidence.rare:
        match line.record:
            case LossRecord() as loss:
                yield from _check_loss(loss, fold)
            case RecoveryRecord() as recovery:
                yield from _check_recovery(recovery, fold)
            case RestartRecord() as restart:
                if not any(_is_of(restart, entry) for entry in restarts):
                    what = f"group {restart.group} started again after {restart.step} steps in life"
                    reason = f"{what} {restart.incarnation}, and no entry says so"
                    yield Finding(severity=fold.severity(is_known=fold.known.is_over), reason=reason)
            case FaultRecord() as fault:
                if (fault.step, fault.group, fault.rank, fault.phase, fault.kind) not in wanted:
                    what = f"{fault.kind} of group {fault.group} rank {fault.rank} in step {fault.step}, {fault.phase}"
                    reason = f"a fault was injected that the run record does not have: {what}"
                    yield Finding(severity="invalid", reason=reason)


def _check_loss(loss: LossRecord, fold: Fold) -> Iterator[Finding]:
    entry = fold.entries.get(loss.entry_index)
    if entry is None:
        return
    is_fence = entry["entry"] == "fence" and entry["group"] == loss.group
    if not is_fence or entry.get("incarnation", 0) < loss.incarnation:
        what = f"log entry {loss.entry_index} does not fence group {loss.group} in its life {loss.incarnation}"
        yield Finding(severity="invalid", reason=f"{what}, and a supervisor says that it does")


def _check_recovery(recovery: RecoveryRecord, fold: Fold) -> Iterator[Finding]:
    strangers = sorted({group for group in recovery.lost if group not in fold.last_fenced_at})
    if strangers:
        what = f"group {recovery.group} recovered from the loss of groups {strangers} in step {recovery.step}"
        severity = fold.severity(is_known=fold.known.is_over)
        yield Finding(severity=severity, reason=f"{what}, and no entry fences them")


def _is_of(restart: RestartRecord, entry: dict[str, object]) -> bool:
    members = {tuple(member) for member in entry["members"]}  # type: ignore[attr-defined]
    return entry["step"] == restart.step and (restart.group, restart.incarnation) in members
