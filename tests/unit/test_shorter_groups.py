"""Groups with fewer stages: what they keep and save, what the journal proves of them, and where they are shown."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.cli.run_view import lines_of, step_line, view_of
from spare_megatron.commands import app
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.restart import RestartLimits, Search, decide_restart
from spare_megatron.core.log.actions import Action, CheckpointCandidate, SaveCheckpoint, TakeSnapshot
from spare_megatron.core.log.entries import Commit, Entry, Fence, GiveUp, Restart
from spare_megatron.core.log.events import EntryRead, RestartState, RunStarted
from spare_megatron.core.saves.checkpoint_policy import emergency_save
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy, WholeSnapshot
from spare_megatron.journal.files import Journal, Line, encode_line
from spare_megatron.journal.proofs.check_terms import check_code
from spare_megatron.journal.proofs.proof import fold_view
from spare_megatron.journal.records import EntryRecord, RankRecord, Record, StartRecord, UpdateRecord
from spare_megatron.journal.state.goodput import Stretches
from spare_megatron.journal.state.overview import UNPROVEN, overview_of
from spare_megatron.journal.state.run_state import RunState, SavePlan
from spare_megatron.stacking.layout import GroupId, Layout, Member, Slabs
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.report.history import history_of
from spare_megatron.tools.report.page import _figures_of
from tests.unit.journal_in_memory import JournalInMemory, run_record
from tests.unit.test_metrics import CONFIG, committed, recorded

NUM_GROUPS, NUM_STAGES = 4, 4
LAYOUT = Layout(num_groups=NUM_GROUPS, pipeline_parallel=NUM_STAGES, num_nodes=16, least_pipeline_parallel=3)
ALL = tuple(Member(GroupId(group)) for group in range(NUM_GROUPS))
BACK = Member(GroupId(1), 1)
RUN = run_record(
    NUM_GROUPS, ranks_per_group=4, num_steps=6, code="c", flops_per_step=20e12, tokens_per_step=64, peak_tflops=1.0
)

# -------------------------------------------------------------------------------------------------- what they keep


def snapshots_of(entries: Iterable[Entry]) -> list[TakeSnapshot]:
    setup = ControllerSetup(
        placement=make_placement("golomb", NUM_GROUPS, 3),
        microbatches_per_shard=4,
        num_steps=9,
        num_stages=NUM_STAGES,
        slabs=Slabs(8, (4, 3)),
        snapshots=SnapshotPolicy(every_steps=2, redundancy=1, layout=LAYOUT),
    )
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    found: list[Action] = []
    for entry in entries:
        found += controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)
    return [action for action in found if isinstance(action, TakeSnapshot)]


def test_groups_with_the_whole_pipeline_alone_keep_snapshots() -> None:
    returned = [
        Fence(group=GroupId(1)),
        Commit(step=0, attempt=0, admit=(BACK,), stages=(3,)),
        Commit(step=1, attempt=1),
    ]
    (taken,) = snapshots_of(returned)
    assert len(taken.holders) == NUM_STAGES
    assert {group for holders in taken.holders for group in holders} == {0, 2, 3}
    whole = [returned[0], replace(returned[1], stages=()), returned[2]]
    (taken,) = snapshots_of(whole)
    assert {group for holders in taken.holders for group in holders} == {0, 1, 2, 3}


def test_without_a_whole_group_there_is_no_snapshot() -> None:
    back = tuple(Member(group, 1) for group, _ in ALL[:3])
    assert (
        snapshots_of(
            [
                *(Fence(group=member.group) for member in back),
                Commit(step=0, attempt=0, admit=back, stages=(3, 3, 3)),
                Fence(group=GroupId(3)),
                Commit(step=1, attempt=1),
            ]
        )
        == []
    )


def waiting(group: int, *steps: int, stages: int | None = None) -> RestartState:
    candidates = tuple(map(CheckpointCandidate, steps))
    return RestartState(member=Member(GroupId(group), 1), candidates=candidates, stages=stages)


def restart_of(*waits: RestartState, redundancy: int = 2, waited_s: float = 9.0) -> object:
    terms = ControllerSetup(placement=make_placement("golomb", 3, redundancy), num_steps=9, microbatches_per_shard=1)
    limits = RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)
    return decide_restart(9, Search(terms, waits, waited_s, limits, WholeSnapshot(step=6, attempt=7)), 0)


def test_a_snapshot_is_loaded_by_whole_groups_if_they_host_all_shards() -> None:
    """The others come back as newcomers, whose state is copied slab by slab."""
    members = tuple(Member(GroupId(group), 1) for group in range(3))
    whole = [waiting(group, 4) for group in range(3)]
    assert restart_of(*whole) == Restart(step=6, members=members, snapshot=7)
    assert restart_of(*whole[:2], replace(whole[2], stages=3)) == Restart(step=6, members=members[:2], snapshot=7)


@pytest.mark.parametrize("shorter", [(1, 2), (0, 1, 2)])
def test_else_all_start_again_from_a_checkpoint_which_any_pipeline_can_load(shorter: tuple[int, ...]) -> None:
    members = tuple(Member(GroupId(group), 1) for group in range(3))
    waits = [waiting(group, 4, stages=3 if group in shorter else None) for group in range(3)]
    assert restart_of(*waits) == Restart(step=4, members=members)
    assert restart_of(*waits[:1], waited_s=0.0) is None, "others may come"
    assert isinstance(restart_of(*waits[:1], waited_s=9.0), GiveUp)


def test_whole_groups_alone_save_without_the_store() -> None:
    def savers(*shorter: int) -> list[int]:
        saves = [
            emergency_save(
                one, 5, ALL, 0, (), first_step=0, has_params=True, shorter=[GroupId(group) for group in shorter]
            )
            for one in ALL
        ]
        return [save.member.group for save in saves if isinstance(save, SaveCheckpoint)]

    assert savers() == [0, 1]
    assert savers(0, 2) == [1, 3]
    assert savers(0, 1, 2) == [3]
    assert savers(0, 1, 2, 3) == [], "files of their ranks would fit no other group"


# ------------------------------------------------------------------------------------------------------ the journal


def entry_records() -> list[Record]:
    """Group 1 is lost in step 1, and is back with 3 stages from step 2 on, and with all of them from step 4 on."""
    entries: list[dict[str, Any]] = [
        {"entry": "commit", "step": 0, "attempt": 0},
        {"entry": "fence", "group": 1, "incarnation": 0},
        {"entry": "commit", "step": 1, "attempt": 1, "admit": [[1, 1]], "stages": [3]},
        {"entry": "commit", "step": 2, "attempt": 2, "drain": [[1, 1]]},
        {"entry": "commit", "step": 3, "attempt": 3, "admit": [[1, 2]]},
        {"entry": "commit", "step": 4, "attempt": 4},
    ]
    return [EntryRecord(group=0, index=index, entry=entry) for index, entry in enumerate(entries)]


def ranks_of(*incarnations: tuple[int, int, int]) -> list[Record]:
    return [
        RankRecord(group=group, incarnation=incarnation, rank=rank, code="c")
        for group, incarnation, num_ranks in incarnations
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(
    ("num_ranks", "stages", "missing"),
    [(3, 3, None), (4, 3, None), (2, 3, [2]), (3, None, [3]), (4, None, None)],
)
def test_the_code_of_as_many_ranks_is_in_the_journal_as_an_incarnation_was_started_with(
    num_ranks: int, stages: int | None, missing: list[int] | None
) -> None:
    started = StartRecord(group=1, incarnation=1, num_ranks=3, num_spares=0, stages=stages)
    other = StartRecord(group=1, incarnation=2, num_ranks=4, num_spares=0)
    all_ranks = ranks_of(*((group, 0, 4) for group in range(NUM_GROUPS)), (1, 1, num_ranks), (1, 2, 4))
    records = [RUN, *all_ranks, started, other, *entry_records()]
    view = JournalInMemory(
        Journal(lines=tuple(Line(source="test", at_s=float(at), record=one) for at, one in enumerate(records)))
    )
    fold = fold_view(view, RUN)
    assert fold.errors == []
    found = [finding.reason for finding in check_code(view, RUN, fold)]
    lacks = f"the code of ranks {missing} of group 1 in incarnation 1 is not in the journal"
    assert found == ([] if missing is None else [lacks])


# ------------------------------------------------------------------------------------------------------- what is shown


def lines(num_entries: int = 6) -> list[Line]:
    found: list[Line] = [Line(source="driver", at_s=100.0, record=RUN)]
    for record in entry_records()[:num_entries]:
        assert isinstance(record, EntryRecord)
        at_s = 101.0 + record.index
        found.append(Line(source="test", at_s=at_s, record=record))
        if record.entry["entry"] == "commit":
            update = UpdateRecord(
                group=0,
                step=record.entry["step"],
                attempt=record.entry["attempt"],
                num_microbatches=4,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1.0,
                makespan=1,
                step_s=2.0,
            )
            found.append(Line(source="test", at_s=at_s, record=update))
    return found


def run_state_of(num_entries: int = 6) -> RunState:
    run_state = RunState()
    for line in lines(num_entries):
        run_state.add_line(line)
    run_state.settle(is_whole=True)
    return run_state


def view_lines(run_state: RunState) -> list[str]:
    overview = overview_of(run_state, 110.0, UNPROVEN, window_s=100.0)
    return list(lines_of(view_of(run_state, SavePlan(), overview)))


def test_a_group_with_fewer_stages_is_named_when_it_comes_and_as_long_as_it_takes_part() -> None:
    text = "group 1 runs with 3 of 4 stages"
    run_state = run_state_of(3)
    assert [event.text for event in run_state.events() if event.kind == "re-form"] == [text]
    assert text in view_lines(run_state)
    run_state = run_state_of()
    assert run_state.folding is not None
    assert run_state.folding.errors == []
    assert [event.text for event in run_state.events() if event.kind == "re-form"] == [text], "once"
    assert text not in view_lines(run_state), "it is whole again"


@pytest.mark.parametrize(("num_entries", "num_ranks"), [(1, 16), (3, 12), (4, 15), (5, 12), (6, 16)])
def test_figures_of_a_step_are_over_the_ranks_that_took_part(num_entries: int, num_ranks: int) -> None:
    assert f"MFU {20 / 2 / num_ranks:.1%}" in step_line(run_state_of(num_entries), 110.0)


def test_the_report_has_the_steps_of_groups_with_fewer_stages() -> None:
    run_state = run_state_of()
    history = history_of(run_state, overview_of(run_state, 110.0, UNPROVEN, window_s=100.0))
    assert history.steps.num_ranks.tolist() == [16, 12, 15, 12, 16]
    assert ("steps with groups of fewer stages", "1") in list(_figures_of(history))
    utilization = history.utilization()
    assert utilization is not None
    taken_s = history.steps.taken_s[1:]
    assert utilization[1:] == pytest.approx(20.0 / taken_s / history.steps.num_ranks[1:])


def test_a_step_with_a_shorter_group_is_no_quiet_one() -> None:
    """What it takes beyond the others is lost to fewer machines, though all groups take part."""
    stretches, members = Stretches(), frozenset(range(NUM_GROUPS))
    for index, num_ranks in enumerate((16, 16, 16, 15, 16)):
        stretches.add_entry(index, {"entry": "commit", "step": index}, members, num_ranks)
    ended_s = np.array([1.0, 2.0, 3.0, 4.5, 5.5])
    goodput = stretches.goodput(lambda indices: ended_s[indices], (0.0, 5.5), ())
    assert goodput is not None
    assert goodput.step_s == 1.0
    assert goodput.lost_s["fewer_groups"] == pytest.approx(0.5)


def test_metrics_are_over_the_ranks_that_took_part() -> None:
    config = replace(CONFIG, layout=replace(CONFIG.layout, pipeline_parallel=4))
    whole = committed(0, group=0, num_alive=4)
    found = [recorded(replace(whole, num_missing_stages=missing), config=config)[0] for missing in (0, 1)]
    each = [one["perf/tflops_per_rank"] for one in found]
    assert each[1] == pytest.approx(each[0] * 16 / 15, rel=1e-2)
    assert found[1]["spare/groups_alive"] == 4


def test_status_lists_the_stages_of_groups_that_have_fewer(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "test.jsonl").write_text("".join(encode_line(line) + "\n" for line in lines(3)))
    shown = json.loads(CliRunner().invoke(app, ["status", str(tmp_path), "--json"]).stdout)
    assert shown["stages"] == {"1": 3}
    assert "group 1 runs with 3 of 4 stages" in CliRunner().invoke(app, ["status", str(tmp_path)]).stdout
