"""User-visible texts of run events, one line each: losses, returns, restarts, saves, the end. Steps count from 0."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spare_megatron.core.log.loss_sums import losses_of
from spare_megatron.formats.quantities import format_bytes, format_duration, format_steps
from spare_megatron.journal import records
from spare_megatron.stacking.layout import GroupId

EventKind = Literal[
    "loss", "injected fault", "return", "departure", "re-form", "pause", "restart", "undo", "checkpoint",
    "failed save", "rejected checkpoint", "evaluation", "dealing", "slow machine", "quarantine", "round",
    "missed round", "halt", "end", "step",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """An event text and its time in seconds since the epoch."""

    at_s: float
    text: str
    kind: EventKind


def groups_named(groups: Collection[int]) -> str:
    """Formats group ids.

    >>> groups_named([3]), groups_named({6, 3})
    ('group 3', 'groups 3, 6')
    """
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, sorted(groups)))}"


def shards_named(shards: Collection[int]) -> str:
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"


def text_of_audited(num_audited: int, num_steps: int | None = None) -> str:
    """Says how many steps are audited, of the committed ones if their number is given.

    >>> text_of_audited(6), text_of_audited(1, 12), text_of_audited(0)
    ('the first 6 steps are audited', 'the first of 12 steps is audited', 'no step is audited')
    """
    of = "" if num_steps is None else f"of {num_steps} "
    if num_audited == 0:
        return f"none {of}steps is audited" if of else "no step is audited"
    if num_audited == 1:
        return f"the first {of}{'steps' if of else 'step'} is audited"
    return f"the first {num_audited} {of}steps are audited"


def text_of_stages(stages: Mapping[GroupId, int], num_stages: int) -> str:
    """Text of groups with fewer pipeline stages than `num_stages`; empty if there are none.

    >>> text_of_stages({GroupId(3): 2, GroupId(1): 3}, 4)
    'group 1 runs with 3 of 4 stages, group 3 with 2'
    """
    first, *others = [f"group {group}{{}} with {number}{{}}" for group, number in sorted(stages.items())] or [""]
    return ", ".join((first.format(" runs", f" of {num_stages} stages"), *(one.format("", "") for one in others)))


def fault_named(fault: Any) -> str:
    """Formats a fault: that of a record, or one in the configuration."""
    return f"{fault.kind} of group {fault.group} rank {fault.rank} in step {fault.step}, {fault.phase}"


def texts_of_record(record: records.Record) -> Iterator[tuple[EventKind, str]]:
    """Yields the events of a record, except losses and the end of the run."""
    match record:
        case records.FaultRecord():
            yield "injected fault", f"fault injected: {fault_named(record)}"
        case records.CulpritRecord():
            yield "slow machine", text_of_culprit(record)
        case records.LadderRecord(rule="drain"):
            yield "slow machine", text_of_drain(record)
        case records.ExaminationRecord():
            yield "quarantine", text_of_examination(record)
        case records.RestartRecord():
            yield from (("rejected checkpoint", text) for text in record.rejected)
        case records.CheckpointRecord(outcome="saved"):
            figures = f"{format_bytes(record.num_bytes)} by group {record.group} in {format_duration(record.write_s)}"
            end = f"; {record.reason}" if record.reason else ""
            figures += f", {format_duration(record.stall_s)} of it without training"
            yield "checkpoint", f"checkpoint after {format_steps(record.step)} saved: {figures}{end}"
        case records.CheckpointRecord():
            what = f"checkpoint after {format_steps(record.step)} {record.outcome}: {record.reason}"
            yield "failed save", f"{what}; the earlier ones are untouched, and training goes on"
        case records.RoundRecord(round=0):
            reason = record.reason or "unknown"
            yield "missed round", f"no round with other sites after {format_steps(record.step)}: {reason}"
        case records.RoundRecord():
            yield "round", text_of_round(record)
        case records.DisputeRecord(outcome="saved"):
            size = format_bytes(record.num_bytes)
            yield "checkpoint", f"parameters of step {record.step}, in which groups differ, saved: {size}"
        case records.DisputeRecord():
            what = f"parameters of step {record.step}, in which groups differ, {record.outcome}: {record.reason}"
            yield "failed save", f"{what}; the step cannot be replayed, and training goes on"


def text_of_round(record: records.RoundRecord) -> str:
    """Text of a round with other sites that has come about.

    >>> found = {"sites": [0, 2], "weights": {"0": 160, "2": 144}, "num_bytes": 2000000, "spent_s": 1.5}
    >>> text_of_round(records.RoundRecord(group=0, step=40, attempt=41, round=2, **found))
    'round 2 after 40 steps: sites 0, 2 (160, 144 microbatches); 2 MB fetched in 1.5 s without training'
    """
    what = f"round {record.round} after {format_steps(record.step)}"
    weights = ", ".join(str(record.weights.get(str(site), "?")) for site in record.sites)
    took = f"{format_bytes(record.num_bytes)} fetched in {format_duration(record.spent_s)} without training"
    if not record.sites:
        return f"{what}: its state is taken from another site; {took}"
    sites = f"site{'s' if len(record.sites) > 1 else ''} {', '.join(map(str, record.sites))}"
    return f"{what}: {sites} ({weights} microbatches); {took}"


def describe_storage(record: records.StorageRecord) -> str:
    match record.outcome:
        case "held":
            return f"the storage takes no more of {record.path}: {record.reason}"
        case "written":
            return "the storage takes the files of the run again; nothing that was written down is lost"
        case "lost":
            files = and_others(record.path, record.num_files - 1)
            return f"the storage has not taken the last {format_bytes(record.num_bytes)} of {files}: {record.reason}"


def and_others(path: str, num_others: int) -> str:
    """Names a file and counts the others.

    >>> and_others("a", 0), and_others("a", 1), and_others("a", 2)
    ('a', 'a and 1 other file', 'a and 2 other files')
    """
    plural = "s" if num_others > 1 else ""
    return f"{path} and {num_others} other file{plural}" if num_others else path


def text_of_loss(record: records.LossRecord, *, is_known: bool) -> str:
    """Text of a loss; if the loss `is_known` already, that the group will not return."""
    if is_known:
        return f"group {record.group} given up: it has used up spare.rejoins"
    end = "; given up: it has used up spare.rejoins" if record.is_given_up else ""
    return f"group {record.group} lost: rank {record.rank}: {record.cause}{end}"


def text_of_culprit(record: records.CulpritRecord) -> str:
    """Text of what holds the run back, or does so no longer.

    >>> text_of_culprit(records.CulpritRecord(machine=3, cause="compute", of_group=2, excess_s=0.12, factor=2.04))
    'machine 3 makes each step 120 ms longer: compute of group 2, 2.0 times the usual time'
    >>> text_of_culprit(records.CulpritRecord(machine=3, cause="host", is_over=True))
    'machine 3 holds the run back no longer: host'
    """
    whose = "" if record.of_group is None else f" of group {record.of_group}"
    whose += "" if record.rank is None else f" rank {record.rank}"
    if record.is_over:
        return f"machine {record.machine} holds the run back no longer: {record.cause}{whose}"
    factor = f", {record.factor:.1f} times the usual time" if record.factor else ""
    detail = f" ({record.detail})" if record.detail else ""
    return (
        f"machine {record.machine} makes each step {format_duration(record.excess_s)} longer: "
        f"{record.cause}{whose}{factor}{detail}"
    )


def text_of_drain(record: records.LadderRecord) -> str:
    """Text of the decision to replace a machine that holds the run back."""
    by = {"group": "a further group", "machine": "a machine of a broken group"}.get(record.replacement)
    return (
        f"machine {record.machine} is drained{f', and {by} takes its part' if by else ''}: each step gains "
        f"{format_duration(record.gain_s)}, the change costs {format_duration(record.cost_s)}"
    )


def text_of_evaluation(last: Mapping[str, float | None]) -> str:
    loss = last["loss"]
    return f"{'not finite' if loss is None else f'{loss:.4f}'} after {format_steps(int(last['step'] or 0))}"


def text_of_pause(step: int, shards: Collection[int]) -> str:
    return f"no group left hosts {shards_named(shards)}; training waits for one with step {step}"


def text_of_paces(record: records.PacesRecord) -> str:
    """Text of a change of the paces by which work is dealt.

    >>> text_of_paces(records.PacesRecord(group=0, step=9, permille={"3": 1984}))
    'from step 9 on work is dealt by pace: for a microbatch group 3 takes 1.98 times as long as its like'
    """
    if not record.permille:
        return f"from step {record.step} on all groups are dealt the same work again: none is slower than its like"
    first, *others = (f"group {group} takes {pace / 1000:.2f} times" for group, pace in record.permille.items())
    paces = ", ".join((f"{first} as long as its like", *others))
    return f"from step {record.step} on work is dealt by pace: for a microbatch {paces}"


def text_of_places(record: records.PlacesRecord) -> str:
    """Text of an assignment of places to machines; `record.places` are there if it makes groups train again.

    >>> text_of_places(records.PlacesRecord(index=3, num_places=4, holdings=[], quarantined=[[2, "slow", "its link"]]))
    'machine 2 is in quarantine, as it is slow: its link'
    """
    begun = [
        f"machine {machine} is in quarantine, as it {_WHY[why]}: {text}" for machine, why, text in record.quarantined
    ]
    ended = [f"the quarantine of machine {machine} ends" for machine in record.released]
    taken = [f"machine {machine} takes place {place}" for machine, place, _ in record.holdings]
    stages = [f"group {group} is to run with {number} stages" for group, number in record.stages]
    purpose = " to make a group whole" if record.places and not stages else ""
    return ", ".join((*begun, *ended, *taken, *stages)) + purpose


_WHY: Mapping[int | str, str] = {"outvoted": "has computed wrongly", "slow": "is slow"}


def text_of_examination(record: records.ExaminationRecord) -> str:
    """Text of an examination of a machine in quarantine.

    >>> wrong = records.ExaminationRecord(machine=2, number=0, reason="it hangs", wait_s=8.0, own=None, likes={})
    >>> text_of_examination(wrong)
    'machine 2 stays in quarantine: it hangs; it is examined again in 8 s'
    """
    if not record.reason:
        return f"machine {record.machine} has passed its examination"
    return (
        f"machine {record.machine} stays in quarantine: {record.reason}; it is examined again in "
        f"{format_duration(record.wait_s)}"
    )


def text_of_end(record: records.EndRecord, halted_by: str) -> str:
    """Text of the end of the run; omits a reason that equals `halted_by`, which was shown when the log halted."""
    if not record.reason:
        return f"the run {record.outcome}"
    return f"the run ended: {record.outcome}" + (f": {record.reason}" if record.reason != halted_by else "")


KINDS: Mapping[str, EventKind] = {"evaluated": "evaluation", "restart": "restart", "undo": "undo", "halt": "halt"}
"""Kinds of the events of log entries; the others admit groups, or remove some."""


def text_of_entry(entry: Mapping[str, Any], taken_in: Collection[int]) -> str:
    """Text of a log entry after which the groups `taken_in` newly take part; empty if there is none."""
    match entry:
        case {"entry": "commit", "step": step}:
            take = "take" if len(taken_in) > 1 else "takes"
            joined = f"{groups_named(taken_in)} rejoined, and {take} part from step {step + 1} on" if taken_in else ""
            drained = [group for group, _ in entry.get("drain", ())]
            left = f"{groups_named(drained)} left after step {step}, as requested" if drained else ""
            return "; ".join(filter(None, (left, joined)))
        case {"entry": "resume", "step": step}:
            return f"training resumes with step {step}: {groups_named(taken_in)} back"
        case {"entry": "evaluated", "step": step}:
            losses = [f"{name} loss {loss:.4f}" for name, loss in losses_of(entry.get("sums", ())).items()]
            return f"evaluated after {format_steps(step)}: {', '.join(losses)}"
        case {"entry": "restart", "step": step}:
            source = "the snapshot" if entry.get("snapshot") is not None else "the checkpoint"
            where = f"{source} after {format_steps(step)}" if step else "the beginning"
            return f"training starts again from {where}"
        case {"entry": "undo", "step": step}:
            where = f"the snapshot after {format_steps(step)}, which are audited"
            return f"training goes back to {where}: what was committed since is computed again"
        case {"entry": "halt", "reason": reason}:
            return f"halted: {reason}"
    return ""
