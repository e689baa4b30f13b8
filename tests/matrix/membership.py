"""Rows of the fault matrix in which a group is lost while another one leaves the run, or a further one joins it."""

from pathlib import Path

from spare_megatron.journal.records import UpdateRecord
from spare_megatron.process.reports import RanksStarted, RunEvent
from spare_megatron.process.requests import request
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, assert_masked, complete_run, entries_of, fenced_groups, kill, retries_of
from tests.matrix.cells import JOINING, LEAVING, NUM_GROUPS, NUM_STEPS, STEP, MembershipCell
from tests.matrix.trial import Outcome, assert_same_bits, config_of, found_after_s

JOINS = Member(GroupId(JOINING), 1)


def run_membership_cell(cell: MembershipCell, corpus: Path, run_dir: Path, expected: Run) -> Outcome:
    """Runs the cell; asserts that the change took place with the loss, and that the run ends like the expected one."""
    is_drain = cell.change == "drain"
    changed = GroupId(LEAVING if is_drain else JOINING)

    def on_event(event: RunEvent) -> None:
        if isinstance(event, RanksStarted):  # those of the further group bring another one
            request(run_dir, [changed], cell.change)

    fault = kill(cell.phase, cell.step, cell.victim, rank=cell.step % 2)
    config = config_of(corpus, [fault], isolate=False, is_stacked=cell.is_stacked, num_further=0 if is_drain else 1)
    watch = Watch(
        leaving=frozenset({(STEP, LEAVING)} if is_drain else ()), awaited=frozenset(() if is_drain else {(STEP, JOINS)})
    )
    run = complete_run(config, run_dir, watch, on_event)
    assert_masked(run)  # with it, that the fault struck
    assert_same_bits(run, expected)
    entries = entries_of(run.journal)
    assert [entry["group"] for entry in entries if entry["entry"] == "fence"] == [cell.victim]
    (_assert_left if is_drain else _assert_joined)(cell, run)
    return Outcome(
        fenced=tuple(sorted(fenced_groups(run.journal))),
        found_s=found_after_s(run, fault),
        recovery_s=sum(recovery.total_s for recovery in run.summary.recoveries),
        num_retries=retries_of(run.journal)[cell.step],
        params_sha256=run.summary.params_sha256,
    )


def _assert_left(cell: MembershipCell, run: Run) -> None:
    """The commit of the step names the group, unless it was lost before."""
    commits = [entry for entry in entries_of(run.journal) if entry["entry"] == "commit"]
    named = [entry["step"] for entry in commits if [LEAVING, 0] in (entry["leaving"] or entry["drain"])]
    assert named[:1] in ([[STEP], []] if cell.is_own else [[STEP]]), named
    if not (cell.is_own or cell.is_stacked):
        assert [entry["step"] for entry in commits if entry["drain"]] == [STEP]
        assert LEAVING not in _groups_at_the_end(run)


def _assert_joined(cell: MembershipCell, run: Run) -> None:
    """The commit of the step admits the group. Later ones may name it, too, which is void once it is fenced."""
    admitted = [
        entry["step"] for entry in entries_of(run.journal) if entry["entry"] == "commit" and [*JOINS] in entry["admit"]
    ]
    assert admitted[0] == STEP
    assert _groups_at_the_end(run) == {*range(NUM_GROUPS), JOINING} - {cell.victim}


def _groups_at_the_end(run: Run) -> set[int]:
    return {record.group for record in run.journal.of(UpdateRecord) if record.step == NUM_STEPS - 1}
