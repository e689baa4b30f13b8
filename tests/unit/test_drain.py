"""Groups that are asked to leave: which may, what is handed over before, and who asks them."""

from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.decision import departures
from spare_megatron.core.controller.start import EarlyLoss, Start
from spare_megatron.core.log.actions import ComputeStep, TakeSnapshot
from spare_megatron.core.log.entries import Commit
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.core.machines.group_starts import RestartBudget
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.fold import fold_log
from spare_megatron.journal.records import EntryRecord, LossRecord, PlacesRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.machine.timers import Timers
from spare_megatron.process.reports import ExitCode
from spare_megatron.process.requests import asked_to_leave, read_requests, request
from spare_megatron.stacking.layout import GroupId, Layout, Member, PartitionId
from spare_megatron.stacking.placement import Placement, make_placement
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, first_ownership
from spare_megatron.supervisor.node_requests import RequestWatch
from spare_megatron.supervisor.rank_exits import Consequence, consequence_of
from spare_megatron.supervisor.restarts import GroupRestarts
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import check_journal, run_record
from tests.unit.test_config_validate import CPU
from tests.unit.test_run_state import write

ONE = GroupId(1)


def members(*groups: int) -> tuple[Member, ...]:
    return tuple(Member(GroupId(group)) for group in groups)


def is_covered(placement: Placement, left: set[int]) -> bool:
    return all(set(row) & left for row in placement.hosts)


@pytest.mark.parametrize("seed", range(20))
def test_groups_leave_in_order_while_every_shard_keeps_a_host(seed: int) -> None:
    random = Random(seed)
    num_groups = random.randint(2, 9)
    placement = make_placement("golomb", num_groups, random.randint(1, num_groups))
    present = set(random.sample(range(num_groups), random.randint(1, num_groups)))
    asked = sorted(random.sample(sorted(present), random.randint(1, len(present))))
    found = departures(members(*asked), members(*sorted(present)), placement, None)
    left, granted = set(present), []
    for group in asked:
        if is_covered(placement, left - {group}):
            left.discard(group)
            granted.append(group)
    assert [member.group for member in found.drain] == granted
    assert (found.ready, found.leaving) == (found.drain, ())


def test_with_hosts_of_last_resort_all_but_one_may_leave_and_writers_wait() -> None:
    ring, present = make_placement("golomb", 4, 1), members(0, 1, 2, 3)
    assert departures(present, present, ring, None).drain == ()
    assert departures(present, present, ring, None, last_resort=True).drain == members(0, 1, 2)
    found = departures(members(2, 3), present, ring, None, writers=members(3), last_resort=True)
    assert (found.drain, found.ready) == (members(2), members(2, 3))


@pytest.mark.parametrize("seed", range(20))
def test_state_partitions_of_those_that_leave_come_to_others_first(seed: int) -> None:
    random = Random(seed)
    num_groups = random.randint(3, 8)
    redundancy = random.randint(1, num_groups - 1)
    before = first_ownership(PartitionSetup(num_groups=num_groups, redundancy=redundancy), members(*range(num_groups)))
    leaving = sorted(random.sample(before.members, random.randint(1, num_groups - 1)))
    staying = [member for member in before.members if member not in leaving]
    ownership = before.with_copies((), (), leaving)
    rounds = 0
    while not all(map(ownership.has_handed_over, leaving)):
        copies = [PartitionCopy(copy.partition, copy.receiver) for copy in (*ownership.repairs, *ownership.moves)]
        assert copies, "what keeps them is still to be copied"
        assert not {copy.member for copy in copies} & set(leaving)
        assert all(set(row) <= set(now) for row, now in zip(before.hosts, ownership.hosts, strict=True))
        ownership = ownership.with_copies(copies[:1], (), leaving)
        rounds += 1
    after = ownership.for_members(staying)
    assert not after.repairs
    assert all(len(set(row) & set(staying)) >= min(redundancy, len(staying)) for row in after.hosts)
    needed = sum(max(0, min(redundancy, len(staying)) - len(set(row) & set(staying))) for row in before.hosts)
    assert rounds == needed, "no copy is made that is not needed"


def test_a_group_that_is_to_stay_after_all_keeps_what_it_has() -> None:
    before = first_ownership(PartitionSetup(num_groups=4, redundancy=2), members(0, 1, 2, 3))
    asked = before.with_copies((), (), members(1))
    assert asked.repairs
    assert not asked.has_handed_over(Member(ONE))
    assert asked.with_copies([PartitionCopy(PartitionId(1), Member(GroupId(3)))], (), ()).leaving == ()
    assert asked.with_copies((), (), ()) == before


def undisturbed() -> list[Line]:
    """The journal of a run of 7 groups, each shard on 3, without a loss."""
    scenario = Scenario(
        name="undisturbed",
        num_groups=7,
        redundancy=3,
        microbatches_per_shard=3,
        num_steps=8,
        costs=CostModel(compute_s=60.0, reduce_s=6.0),
        failures=FailureSpec(kind="system", mean_s=1e12),
    )
    lines: list[Line] = []
    simulate(scenario, 0, journal=lines.append)
    return lines


def drained_in(lines: list[Line], step: int, group: int) -> Journal:
    """The journal with the group drained by the commit of this step, as far as the log is concerned."""
    changed = []
    for line in lines:
        record = line.record
        if isinstance(record, EntryRecord) and record.entry.get("step") == step and record.entry["entry"] == "commit":
            line = replace(line, record=replace(record, entry={**record.entry, "drain": [[group, 0]]}))
        changed.append(line)
    return Journal(lines=tuple(changed))


def test_the_check_finds_a_drained_group_that_is_dealt_work(tmp_path: Path) -> None:
    lines = undisturbed()
    assert check_journal(Journal(lines=tuple(lines))).verdict == "valid"
    answer = check_journal(drained_in(lines, 3, 2))
    assert answer.verdict == "invalid"
    assert "invalid: step 4: group 2 contributed after it was fenced" in answer.reasons
    state = read_run_state(write(tmp_path / "run", list(drained_in(lines, 3, 2).lines)))
    assert state.groups()[2] == "drained"
    assert "group 2 left after step 3, as requested" in [event.text for event in state.events()]


def test_a_drained_group_that_is_fenced_before_it_has_applied_its_last_commit_is_excused() -> None:
    entries = {
        0: {"entry": "commit", "step": 0, "attempt": 0, "drain": [[1, 0]]},
        1: {"entry": "fence", "group": 1, "incarnation": 0},
    }
    fold = fold_log(entries, run_record(3))
    assert (fold.groups, fold.errors) == ({0, 2}, [])
    assert (fold.last_fenced_at, fold.fenced) == ({1: 1}, {})
    strange = {0: {**entries[0], "drain": [[1, 4]]}}
    assert fold_log(strange, run_record(3)).errors == ["step 0: group 1 is drained, and takes no part"]


def test_the_last_request_for_a_group_stands(tmp_path: Path) -> None:
    assert read_requests(tmp_path) == {}
    request(tmp_path, [ONE, GroupId(12)], "drain")
    request(tmp_path, [ONE], "grow")
    (tmp_path / "requests" / "group-0003~").write_text("drain\n")  # of an editor
    assert read_requests(tmp_path) == {1: "grow", 12: "drain"}
    assert asked_to_leave(tmp_path) == {12}


def test_the_notice_of_a_machine_asks_its_groups_to_leave_once(tmp_path: Path) -> None:
    watch = RequestWatch(tmp_path, [ONE], str(tmp_path / "notice"))
    watch.poll()
    assert not watch.inbox.poll()
    (tmp_path / "notice").touch()
    watch.poll()
    assert watch.receive() == {1}
    request(tmp_path, [ONE], "grow")
    watch.poll()
    watch.poll()
    assert watch.receive() == frozenset()
    assert not watch.inbox.poll()


def test_a_notice_that_cannot_be_followed_is_shown_once_and_keeps_no_request_from_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Requests of people were not read any more, and nothing showed it."""
    watch = RequestWatch(tmp_path, [ONE], str(tmp_path / "notice"))
    (tmp_path / "notice").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", Mock(side_effect=PermissionError(13, "Permission denied")))
        watch.poll()
        request(tmp_path, [GroupId(7)], "drain")
        watch.poll()
    assert watch.receive() == {7}
    assert capfd.readouterr().out.count("/notice cannot be followed: [Errno 13] Permission denied") == 1
    watch.poll()
    assert watch.receive() == {1, 7}


def test_a_rank_that_has_left_costs_nothing() -> None:
    left = consequence_of(ExitCode.LEFT, is_group_lost=False, is_store_given_up=False)
    assert left is Consequence.GROUP_LEFT


def restarts_of(timers: Timers, started: list[GroupId], most_restarts: int = 0) -> GroupRestarts:
    """Those of a node that holds group 1."""
    return GroupRestarts(
        budget=RestartBudget(most_restarts, interval_s=0.0),
        restarts_all=True,
        whole_groups=frozenset({ONE}),
        timers=timers,
        wait_for_parts=lambda group: None,
        start_ranks=lambda group, takes_spares: started.append(group),
    )


def test_a_drained_group_is_started_when_it_is_asked_for_or_after_a_wipe_out() -> None:
    started: list[GroupId] = []
    timers = Timers()
    restarts = restarts_of(timers, started)
    restarts.on_asked(frozenset({ONE}))
    restarts.on_left(ONE)
    timers.run_due()
    assert (started, restarts.drained) == ([], {1})
    restarts.on_asked(frozenset())
    timers.run_due()
    assert (started, restarts.drained) == ([1], set())
    restarts.on_asked(frozenset({ONE}))
    assert restarts.on_fenced(ONE), "it is lost while it was to leave: it stays away, and is not given up"
    timers.run_due()
    assert (started, restarts.drained) == ([1], {1})
    restarts.on_wipe_out()
    timers.run_due()
    assert started == [1, 1]


def test_further_groups_stay_away_until_they_are_asked_for(tmp_path: Path) -> None:
    watch = RequestWatch(tmp_path, [ONE, GroupId(4)], "", frozenset({GroupId(4)}))
    watch.poll()
    assert not watch.inbox.poll()
    request(tmp_path, [GroupId(4)], "grow")
    watch.poll()
    assert watch.receive() == frozenset()
    request(tmp_path, [GroupId(4)], "drain")
    watch.poll()
    assert watch.receive() == {4}


def test_further_groups_have_places_and_no_part_in_the_start() -> None:
    layout = RunConfig(layout=LayoutConfig(num_groups=4, max_groups=6), cluster=ClusterConfig(num_nodes=2)).parallel
    assert (layout.num_home_groups, layout.num_groups, layout.num_ranks) == (4, 6, 6)
    assert [layout.groups_on(node) for node in range(2)] == [[0, 1, 2], [3, 4, 5]]
    setup = ControllerSetup(placement=make_placement("golomb", 4, 2), microbatches_per_shard=1, num_steps=1)
    start = Start(layout, setup)
    lost = (4, 5, 0, 1, 2, 3)
    reasons = [start.lose(EarlyLoss(group=GroupId(group), rank=0, cause="SIGSEGV")) for group in lost]
    assert reasons[:5] == [""] * 5
    assert "all groups were lost" in reasons[5]


def test_groups_that_leave_with_a_commit_keep_no_part_of_its_snapshot() -> None:
    policy = SnapshotPolicy(every_steps=2, redundancy=1, layout=Layout(num_groups=3, num_nodes=3))
    placement = make_placement("golomb", 3, 3)
    controller = Controller(
        ControllerSetup(placement=placement, microbatches_per_shard=1, num_steps=9, snapshots=policy)
    )
    controller.handle(RunStarted(), now_s=0.0)
    controller.handle(EntryRead(index=0, entry=Commit(step=0, attempt=0)), now_s=0.0)
    commit = Commit(step=1, attempt=1, drain=members(0))
    (taken,) = [
        action
        for action in controller.handle(EntryRead(index=1, entry=commit), now_s=0.0)
        if isinstance(action, TakeSnapshot)
    ]
    assert taken.holders == ((1, 2),)


@pytest.mark.parametrize(
    ("layout", "access", "problem"),
    [
        ({"max_groups": 3}, "shared", "layout.max_groups=3 is less than layout.num_groups=4"),
        ({"max_groups": 6}, "stacked", "layout.max_groups=6 exceeds layout.num_groups=4, and groups beyond that host"),
        ({"max_groups": 6}, "shared", ""),
        ({"max_groups": 4}, "stacked", ""),
    ],
)
def test_groups_beyond_those_of_the_start_need_shared_data(layout: dict[str, int], access: str, problem: str) -> None:
    config = RunConfig(layout=LayoutConfig(num_groups=4, **layout), data=DataConfig(access=access))
    found = [text for text in problems(config, CPU) if "max_groups" in text]
    assert [problem in text for text in found] == ([True] if problem else [])


def test_further_groups_compute_and_the_batch_stays_as_it_is() -> None:
    setup = ControllerSetup(
        placement=make_placement("golomb", 4, 2),
        microbatches_per_shard=3,
        num_steps=9,
        last_resort=True,
        partitions=PartitionSetup(num_groups=4, redundancy=2),
    )
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    grown = (Member(GroupId(4), 1), Member(GroupId(5), 1))
    actions = controller.handle(EntryRead(index=0, entry=Commit(step=0, attempt=0, admit=grown)), now_s=0.0)
    [plan] = [action.plan for action in actions if isinstance(action, ComputeStep)]
    assert plan.work.loads.tolist() == [2] * 6
    assert plan.work.owners.shape == (4, 3)
    entry = Commit(step=1, attempt=1, drain=(*grown, Member(GroupId(3))))
    controller.handle(EntryRead(index=1, entry=entry), now_s=0.0)
    assert controller.members == (0, 1, 2)
    assert controller.ownership is not None
    assert len(controller.ownership.hosts) == 4


def run_of_seven(folder: Path) -> Path:
    """The directory of a run that goes on, of 7 groups, each shard on 3."""
    run_dir = write(folder, undisturbed()[:60])
    (run_dir / "config.toml").write_text("[layout]\nnum_groups = 7\n[spare]\nredundancy = 3\n")
    return run_dir


def test_drain_refuses_what_leaves_a_shard_without_a_host(tmp_path: Path) -> None:
    run_dir = run_of_seven(tmp_path / "run")
    result = CliRunner().invoke(app, ["drain", str(run_dir), *"01234"])
    assert result.exit_code == 2
    assert "without groups [0, 1, 2, 3, 4] the run would have no host for shards" in result.output
    assert "(spare.redundancy=3)" in result.output
    assert asked_to_leave(run_dir) == frozenset()
    result = CliRunner().invoke(app, ["drain", str(run_dir), "5", "node:0"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["drain", str(run_dir), "7"])
    assert "'7' names no group of the run, which has layout.num_groups=7" in result.output
    result = CliRunner().invoke(app, ["drain", str(run_dir), "5"])
    assert result.exit_code == 0, result.output
    assert asked_to_leave(run_dir) == {5}
    assert CliRunner().invoke(app, ["grow", str(run_dir), "5"]).exit_code == 0
    assert asked_to_leave(run_dir) == frozenset()


def test_a_machine_is_asked_to_leave_wherever_it_is(tmp_path: Path) -> None:
    """Node 2 is the place that it has left, which another machine has taken since."""
    lines = undisturbed()[:60]
    for index, holdings in enumerate([[[2, 0, 1]], [[10, 2, 1]], [[2, 1, 1], [8, 0, 2]]]):
        record = PlacesRecord(index=index, num_places=7, holdings=holdings)
        lines.append(Line(at_s=lines[-1].at_s, source=f"supervisor-{index}", record=record))
    run_dir = write(tmp_path / "run", lines)
    text = "[layout]\nnum_groups = 7\n[spare]\nredundancy = 3\n[cluster]\nnum_nodes = 7\n"
    (run_dir / "config.toml").write_text(text)
    for which, group in (("machine:2", 1), ("node:2", 2), ("machine:3", 2), ("machine:6", 6)):
        result = CliRunner().invoke(app, ["drain", str(run_dir), which])
        assert result.exit_code == 0, result.output
        assert asked_to_leave(run_dir) == {group}, which
        request(run_dir, [GroupId(group)], "grow")
    result = CliRunner().invoke(app, ["drain", str(run_dir), "machine:7"])
    assert "'machine:7' names no machine of the run, which has cluster.num_nodes=7" in result.output


def test_groups_are_asked_to_join_by_their_number(tmp_path: Path) -> None:
    """The lowest of those that are away; those that are lost do not count, and cannot be asked."""
    lines = undisturbed()[:60]
    lost = LossRecord(group=6, rank=0, cause="SIGKILL", entry_index=99, incarnation=0, pending=[])
    lines.append(Line(at_s=lines[-1].at_s, source="supervisor-0", record=lost))
    run_dir = write(tmp_path / "run", lines)
    text = "[layout]\nnum_groups = 7\nmax_groups = 9\n[spare]\nredundancy = 3\n[data]\naccess = 'shared'\n"
    (run_dir / "config.toml").write_text(text)
    request(run_dir, [GroupId(3), GroupId(5)], "drain")

    def grow(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["grow", str(run_dir), *words])
        return result.exit_code, " ".join(result.output.split())

    assert grow("--to", "4")[1].startswith("the run has 4 groups already")
    assert asked_to_leave(run_dir, {7, 8}) == {3, 5, 7, 8}
    assert grow("--by", "1")[1].startswith("asked group 3 to take part")
    assert asked_to_leave(run_dir, {7, 8}) == {5, 7, 8}
    assert grow("--to", "7")[1].startswith("asked groups 5, 7 to take part")
    assert asked_to_leave(run_dir, {7, 8}) == {8}
    code, text = grow("--to", "9")
    assert code == 2
    assert "--to 9: the run has 7 groups, and 1 more may be asked to take part (layout.max_groups=9)" in text
    assert "--to 3: the run has 7 groups; `spare drain` has groups leave" in grow("--to", "3")[1]
    assert "name groups, or give their number by --to or --by" in grow("8", "--by", "1")[1]
    assert grow()[0] == 2
    assert asked_to_leave(run_dir, {7, 8}) == {8}


def test_a_group_that_leaves_as_a_pause_begins_is_started_again() -> None:
    """The pause had asked for it before it was known to have left."""
    started: list[GroupId] = []
    timers = Timers()
    restarts = restarts_of(timers, started)
    restarts.on_asked(frozenset({ONE}))
    restarts.on_pause()
    assert restarts.left_out == frozenset(), "every group is needed"
    restarts.on_left(ONE)
    timers.run_due()
    assert started == [ONE]
    restarts.on_resume()
    assert restarts.left_out == {ONE}


def test_a_further_group_of_a_node_that_is_taken_over_starts_once_its_last_life_is_fenced() -> None:
    """It was started as soon as the request to grow was read, in an incarnation that had been."""
    started: list[GroupId] = []
    timers = Timers()
    restarts = restarts_of(timers, started, most_restarts=3)
    restarts.on_asked(frozenset())
    timers.run_due()
    assert started == []
    assert restarts.on_fenced(ONE)
    timers.run_due()
    assert started == [ONE]
