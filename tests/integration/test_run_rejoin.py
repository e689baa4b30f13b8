"""Groups that come back after a loss or join by request, and losses at every moment of it."""

import os
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import ClusterConfig, FaultConfig, LayoutConfig, OptimizerConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.faults.points import FaultKind, FaultPoint
from spare_megatron.journal.proofs.proof import fold_journal
from spare_megatron.journal.records import (
    ContributionRecord,
    EntryRecord,
    FaultRecord,
    LossRecord,
    ParamsRecord,
    StartRecord,
    UpdateRecord,
)
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.process.reports import GroupLost, GroupRejoined, RanksStarted, RunEvent, StepCommitted
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    HEARTBEAT_S,
    Run,
    alert_config,
    assert_masked,
    complete_run,
    entries_of,
    kill,
    losses_of,
    tiny_config,
)

STEPS = 12
AWAITED = 6
"""The step at whose end the group that was lost is admitted: all wait until it is up again."""
WATCH = Watch(awaited=frozenset({(AWAITED, Member(GroupId(1), 1))}))


def rejoined(run: Run) -> list[tuple[int, int, int]]:
    """Group, incarnation and first step of those that came back."""
    return [(e.member.group, e.member.incarnation, e.step) for e in run.events if isinstance(e, GroupRejoined)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "layout",
    [LayoutConfig(num_groups=3), LayoutConfig(num_groups=3, pipeline_parallel=2)],
    ids=["one_rank", "stages"],
)
def test_a_lost_group_comes_back_and_takes_its_load_again(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    config = tiny_config(text_corpus, layout, steps=STEPS, faults=[kill(FaultPoint.BACKWARD, 2, 1)], rejoins=1)
    watch = replace(WATCH, dump_steps=frozenset({0, 3, STEPS - 2, STEPS - 1}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    ((group, incarnation, step),) = rejoined(run)
    assert (group, incarnation, step) == (1, 1, AWAITED + 1)
    admissions = [entry for entry in entries_of(run.journal) if entry.get("admit")]
    assert [(entry["step"] + 1, entry["admit"]) for entry in admissions] == [(step, [[1, 1]])]
    first = min(record.step for record in run.journal.of(ContributionRecord) if record.incarnation == 1)
    texts = [event.text for event in read_run_state(run.run_dir).events() if "rejoined" in event.text]
    assert texts == [f"group 1 rejoined, and takes part from step {first} on"]
    updates = run.journal.of(UpdateRecord)
    assert {update.group for update in updates if update.step == STEPS - 1} == {0, 1, 2}
    assert {update.makespan for update in updates if update.step == STEPS - 1} == {2}, "every group has one shard again"
    assert {update.makespan for update in updates if update.step == 3} == {3}
    ends = [record.sha256 for record in run.journal.of(ParamsRecord) if record.step == STEPS and record.sha256]
    assert len(ends) == 3
    assert len(set(ends)) == 1
    assert_exact(run, [0, 3, STEPS - 2, STEPS - 1])


@pytest.mark.timeout(120)
def test_a_group_comes_back_on_a_node_that_has_no_other(text_corpus: Path, tmp_path: Path) -> None:
    cluster = ClusterConfig(device="cpu", num_nodes=3)
    layout = LayoutConfig(num_groups=3)
    faults = [kill(FaultPoint.FORWARD, 2, 1)]
    config = tiny_config(text_corpus, layout, steps=STEPS, faults=faults, rejoins=1, cluster=cluster)
    run = complete_run(config, tmp_path / "run", WATCH)
    assert_masked(run)
    assert [group for group, _, _ in rejoined(run)] == [1]


@pytest.mark.timeout(120)
def test_spares_take_the_place_of_a_lost_group_and_change_no_bit(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    """Twice: those that took the place of the first are made up for."""
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    faults = [kill(FaultPoint.BACKWARD, 3, 1, rank=1), kill(FaultPoint.IN_REDUCE, AWAITED + 3, 2)]
    config = tiny_config(
        text_corpus, layout, steps=STEPS, faults=faults, rejoins=1, spares=1, mode="reproducible", hidden_dropout=0.1
    )
    whole = fault_free(config)
    awaited = {(AWAITED, Member(GroupId(1), 1)), (STEPS - 2, Member(GroupId(2), 1))}
    watch = Watch(awaited=frozenset(awaited), whole_spares=frozenset({2, AWAITED + 2}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    assert rejoined(run) == [(1, 1, AWAITED + 1), (2, 1, STEPS - 1)]
    assert run.journal.of(StartRecord) == [
        StartRecord(group=group, incarnation=1, num_ranks=2, num_spares=2) for group in (1, 2)
    ]
    pids = [frozenset(event.pids.values()) for event in run.events if isinstance(event, RanksStarted)]
    assert [len(after - before) for before, after in pairwise(pids)] == [2, 2], "whole groups are started again"
    assert run.summary.params_sha256 == whole.summary.params_sha256


@pytest.mark.timeout(120)
def test_a_group_is_given_up_after_its_last_restart(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(
        text_corpus, LayoutConfig(num_groups=3), steps=STEPS, faults=[kill(FaultPoint.FORWARD, 2, 1)], rejoins=0
    )
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert rejoined(run) == []
    assert not any(record.entry.get("admit") for record in run.journal.of(EntryRecord))


FEW_STEPS = 8
AWAITED_SOON = 4
"""The step at whose end the group that was lost first is admitted."""
LOSS = kill(FaultPoint.FORWARD, 2, 1)
THREE, FOUR = LayoutConfig(num_groups=3), LayoutConfig(num_groups=4)
AWAY_S = 10 * HEARTBEAT_S
"""Of a node that comes back: it is missed before that also where the store was slow meanwhile, and once more."""


def awaiting(*awaited: tuple[int, int, int]) -> Watch:
    """Step, group and incarnation of those that are waited for."""
    return Watch(awaited=frozenset((step, Member(GroupId(group), incarnation)) for step, group, incarnation in awaited))


def strike(kind: FaultKind, phase: FaultPoint, step: int, group: int, rank: int = 0) -> FaultConfig:
    return replace(kill(phase, step, group, rank), kind=kind)


def rejoined_incarnations(run: Run) -> list[tuple[int, int, int]]:
    """Group, incarnation and first step of those that came back."""
    return [(e.member.group, e.member.incarnation, e.step) for e in run.events if isinstance(e, GroupRejoined)]


def groups_at_the_end(run: Run) -> set[int]:
    last = {record.group for record in run.journal.of(UpdateRecord) if record.step == run.config.train.steps - 1}
    ends = {r.group: r.digest for r in run.journal.of(ParamsRecord) if r.step == run.config.train.steps}
    assert set(ends) >= last
    assert len(set(ends.values())) == 1
    return last


@pytest.mark.timeout(180)
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_newcomer_lost_during_the_transfer_costs_the_others_nothing_but_time(
    text_corpus: Path, tmp_path: Path, kind: FaultKind
) -> None:
    """Its next incarnation is admitted, and does not meet the fault again."""
    faults = [LOSS, strike(kind, FaultPoint.JOIN, 2, 1)]
    config = alert_config(text_corpus, THREE, steps=FEW_STEPS, faults=faults, rejoins=2)
    run = complete_run(config, tmp_path / "run", awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 1, 2)))
    assert_masked(run)
    assert rejoined_incarnations(run) == [(1, 2, AWAITED_SOON + 3)]
    assert run.summary.groups_rejoined == 1
    assert groups_at_the_end(run) == {0, 1, 2}


@pytest.mark.timeout(180)
@pytest.mark.alone
def test_a_newcomer_goes_on_with_another_group_where_its_donor_stops_during_the_transfer(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    """It was lost with its donor, and its next incarnation was admitted with the donor's."""
    faults = [LOSS, strike("stop", FaultPoint.JOIN, 2, 0)]
    config = alert_config(text_corpus, FOUR, steps=FEW_STEPS, faults=faults, rejoins=2, mode="reproducible")
    whole = fault_free(config)
    run = complete_run(config, tmp_path / "run", awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 0, 1)))
    assert_masked(run)
    assert sorted(rejoined_incarnations(run)) == [(0, 1, AWAITED_SOON + 3), (1, 1, AWAITED_SOON + 1)]
    assert {record.group for record in run.journal.of(FaultRecord)} == {0, 1}
    assert groups_at_the_end(run) == {0, 1, 2, 3}
    assert run.summary.params_sha256 == whole.summary.params_sha256


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", [FaultPoint.AFTER_COMMIT, FaultPoint.FORWARD, FaultPoint.IN_REDUCE])
def test_another_group_lost_around_the_admission(text_corpus: Path, tmp_path: Path, phase: FaultPoint) -> None:
    """After the commit that admits, or in the first step: the newcomer does not wait for what the lost one says."""
    step = AWAITED_SOON if phase is FaultPoint.AFTER_COMMIT else AWAITED_SOON + 1
    config = tiny_config(text_corpus, THREE, steps=FEW_STEPS, faults=[LOSS, kill(phase, step, 2)], rejoins=1)
    watch = replace(
        awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 2, 1)), dump_steps=frozenset({AWAITED_SOON, AWAITED_SOON + 1})
    )
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    assert sorted(rejoined_incarnations(run)) == [(1, 1, AWAITED_SOON + 1), (2, 1, AWAITED_SOON + 3)]
    assert groups_at_the_end(run) == {0, 1, 2}
    assert_exact(run, [AWAITED_SOON, AWAITED_SOON + 1])


@pytest.mark.timeout(180)
def test_a_newcomer_lost_right_after_its_admission_is_masked(text_corpus: Path, tmp_path: Path) -> None:
    faults = [LOSS, kill(FaultPoint.BACKWARD, AWAITED_SOON + 1, 1)]
    config = tiny_config(text_corpus, THREE, steps=FEW_STEPS, faults=faults, rejoins=2)
    run = complete_run(config, tmp_path / "run", awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 1, 2)))
    assert_masked(run)
    assert rejoined_incarnations(run) == [(1, 1, AWAITED_SOON + 1), (1, 2, AWAITED_SOON + 3)]
    assert run.summary.groups_rejoined == 1, "its second incarnation never voted"


@pytest.mark.timeout(180)
def test_a_group_lost_three_times_with_two_restarts_is_given_up(text_corpus: Path, tmp_path: Path) -> None:
    faults = [LOSS, kill(FaultPoint.FORWARD, 4, 1), kill(FaultPoint.FORWARD, 6, 1)]
    config = tiny_config(text_corpus, THREE, steps=FEW_STEPS, faults=faults, rejoins=2)
    run = complete_run(config, tmp_path / "run", awaiting((3, 1, 1), (5, 1, 2)))
    assert_masked(run)
    assert rejoined_incarnations(run) == [(1, 1, 4), (1, 2, 6)]
    losses = sorted((record.incarnation, record.is_given_up) for record in run.journal.of(LossRecord))
    assert losses == [(0, False), (1, False), (2, True)]
    assert [event.record.is_given_up for event in run.events if isinstance(event, GroupLost)] == [False, False, True]
    assert groups_at_the_end(run) == {0, 2}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", [(1, 2), (1, 2, 3)], ids=["two", "all_but_one"])
def test_groups_lost_in_one_step_come_back_in_one_commit(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns, lost: tuple[int, ...]
) -> None:
    faults = [kill(FaultPoint.BACKWARD, 2, group) for group in lost]
    config = tiny_config(text_corpus, FOUR, steps=FEW_STEPS, faults=faults, rejoins=1, mode="reproducible")
    whole = fault_free(config)
    run = complete_run(config, tmp_path / "run", awaiting(*((AWAITED_SOON, group, 1) for group in lost)))
    assert_masked(run)
    assert sorted(rejoined_incarnations(run)) == [(group, 1, AWAITED_SOON + 1) for group in lost]
    assert [len(entry["admit"]) for entry in entries_of(run.journal) if entry.get("admit")] == [len(lost)]
    assert groups_at_the_end(run) == {0, 1, 2, 3}
    assert run.summary.params_sha256 == whole.summary.params_sha256


@pytest.mark.timeout(180)
def test_a_group_of_stages_and_tensor_ranks_comes_back_with_bf16(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2, tensor_parallel=2)
    config = tiny_config(text_corpus, layout, steps=6, faults=[LOSS], rejoins=1, mode="reproducible", precision="bf16")
    whole = fault_free(config)
    run = complete_run(config, tmp_path / "run", awaiting((3, 1, 1)))
    assert_masked(run)
    assert rejoined_incarnations(run) == [(1, 1, 4)]
    assert run.summary.params_sha256 == whole.summary.params_sha256


@pytest.mark.timeout(180)
def test_the_copy_of_wrong_parameters_is_refused(text_corpus: Path, tmp_path: Path) -> None:
    """The donor's parameters change right before it gives them. Neither it nor the newcomer outvotes the others."""
    faults = [LOSS, replace(strike("param_flip", FaultPoint.JOIN, 2, 0), bit=20)]
    config = tiny_config(text_corpus, FOUR, steps=FEW_STEPS, faults=faults, rejoins=2)
    watch = awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 0, 1), (AWAITED_SOON + 2, 1, 2))
    run = complete_run(config, tmp_path / "run", watch)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert {(record.group, record.kind) for record in run.journal.of(FaultRecord)} == {(1, "kill"), (0, "param_flip")}
    fences = [entry for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    assert {(fence["group"], fence["incarnation"]) for fence in fences} == {(0, 0), (1, 0), (1, 1)}
    assert [fence["group"] for fence in fences if fence["discard"]] == [0]
    assert sorted(rejoined_incarnations(run)) == [(0, 1, AWAITED_SOON + 3), (1, 2, AWAITED_SOON + 3)]
    assert groups_at_the_end(run) == {0, 1, 2, 3}


@pytest.mark.timeout(180)
def test_a_donor_revealed_by_its_gradients_costs_its_newcomer_at_most_one_incarnation(
    text_corpus: Path, tmp_path: Path
) -> None:
    """It is lost before it has given its parameters, and another group gives them; or after that, and they are refused.

    Which of the two is a matter of milliseconds.
    """
    faults = [LOSS, strike("param_flip", FaultPoint.JOIN, 2, 0)]
    config = tiny_config(text_corpus, FOUR, steps=FEW_STEPS, faults=faults, rejoins=2)
    run = complete_run(config, tmp_path / "run", awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 0, 1)))
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert {(record.group, record.kind) for record in run.journal.of(FaultRecord)} == {(1, "kill"), (0, "param_flip")}
    fences = [entry for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    fenced = {(fence["group"], fence["incarnation"]) for fence in fences}
    assert fenced - {(1, 1)} == {(1, 0), (0, 0)}
    assert not any(fence["discard"] for fence in fences)
    assert (0, 1, AWAITED_SOON + 3) in rejoined_incarnations(run)
    assert ((1, 1) in fenced) != ((1, 1, AWAITED_SOON + 1) in rejoined_incarnations(run))
    assert groups_at_the_end(run) >= {0, 2, 3}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_copy_of_wrong_moments_is_fenced_with_its_donor(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns, precision: str
) -> None:
    """The donor's parameters are right, and so are those of its newcomer until the next update: then two of four groups
    would hold the same wrong ones, and no group would know who is right.
    """
    faults = [LOSS, replace(strike("moment_flip", FaultPoint.JOIN, 2, 0), bit=25)]
    config = tiny_config(
        text_corpus, FOUR, steps=FEW_STEPS, faults=faults, rejoins=2, mode="reproducible", precision=precision
    )
    whole = fault_free(config)
    watch = awaiting((AWAITED_SOON, 1, 1), (AWAITED_SOON + 2, 0, 1), (AWAITED_SOON + 2, 1, 2))
    run = complete_run(config, tmp_path / "run", watch)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert {(record.group, record.kind) for record in run.journal.of(FaultRecord)} == {(1, "kill"), (0, "moment_flip")}
    fences = [entry for entry in entries_of(run.journal) if entry["entry"] == "fence" and entry["discard"]]
    assert {(fence["group"], fence["incarnation"]) for fence in fences} == {(0, 0), (1, 1)}
    assert {fence["reason"] for fence in fences} == {
        f"its state before step {AWAITED_SOON + 1} differs from that of 2 groups"
    }
    assert sorted(rejoined_incarnations(run)) == [
        (0, 1, AWAITED_SOON + 3),
        (1, 1, AWAITED_SOON + 1),
        (1, 2, AWAITED_SOON + 3),
    ]
    assert groups_at_the_end(run) == {0, 1, 2, 3}
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert run.summary.params_sha256 == whole.summary.params_sha256


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="networks of their own need root")


@pytest.mark.timeout(180)
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["stop_node", pytest.param("cut", marks=NEEDS_ROOT)])
def test_a_node_that_was_stopped_or_cut_off_comes_back(text_corpus: Path, tmp_path: Path, kind: FaultKind) -> None:
    fault = replace(strike(kind, FaultPoint.FORWARD, 2, 1), seconds=AWAY_S)
    cluster = ClusterConfig(device="cpu", num_nodes=4, isolate_nodes=kind == "cut")
    config = alert_config(text_corpus, FOUR, steps=FEW_STEPS, faults=[fault], rejoins=1, cluster=cluster)
    run = complete_run(config, tmp_path / "run", awaiting((AWAITED_SOON, 1, 1)))
    assert_masked(run)
    assert rejoined_incarnations(run) == [(1, 1, AWAITED_SOON + 1)]
    assert groups_at_the_end(run) == {0, 1, 2, 3}


@pytest.mark.timeout(180)
def test_the_run_does_not_wait_for_a_group_that_comes_too_late(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, THREE, steps=4, faults=[kill(FaultPoint.FORWARD, 3, 1)], rejoins=1)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert rejoined_incarnations(run) == []
    ends = [line.at_s for line in run.journal.lines]
    last_update = max(line.at_s for line in run.journal.lines if isinstance(line.record, UpdateRecord))
    assert ends[-1] - last_update < 20.0


@pytest.mark.timeout(180)
def test_losing_every_group_ends_the_run_at_once(text_corpus: Path, tmp_path: Path) -> None:
    faults = [kill(FaultPoint.FORWARD, 2, group) for group in range(3)]
    config = tiny_config(text_corpus, THREE, steps=FEW_STEPS, faults=faults, rejoins=3)
    run = complete_run(config, tmp_path / "run")
    why = "no group is left, the last was lost by SIGKILL"
    assert (run.summary.outcome, run.summary.outcome_reason, run.summary.steps_committed) == ("wipe_out", why, 2)
    assert run.summary.verdict == "valid", run.summary.reasons
    losses = [line.at_s for line in run.journal.lines if isinstance(line.record, LossRecord)]
    assert run.journal.lines[-1].at_s - losses[-1] < 30.0


MANY_STEPS, AWAITED_AT = 48, 8
STACKED = OptimizerConfig(sharding="stacked", redundancy=2)


def losses(run: Run) -> list[tuple[int, float]]:
    return sorted({(record.step, record.loss) for record in run.journal.of(UpdateRecord)})


def run_of(run: Run) -> RunRecord:
    [record] = run.journal.of(RunRecord)
    return record


def drained(run: Run) -> list[list[int]]:
    """The members that each commit drains, if any."""
    return [member for entry in entries_of(run.journal) for member in entry.get("drain", ())]


@pytest.mark.timeout(120)
def test_groups_leave_and_join_and_change_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    """From 4 groups to 6 and then to 3, in part by notice. Nothing is computed again.

    The further groups have a node of their own, which has nothing to do at first, and in the end.
    """
    notice = tmp_path / "notice-2"
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=MANY_STEPS,
        redundancy=3,
        num_microbatches=3,
        mode="reproducible",
        hidden_dropout=0.1,
        optimizer=STACKED,
    )
    whole = complete_run(config, tmp_path / "whole")
    run_dir = tmp_path / "run"
    asked: set[str] = set()

    def ask(command: str, *which: str) -> None:
        if command + which[0] not in asked:
            asked.add(command + which[0])
            result = CliRunner().invoke(app, [command, str(run_dir), *which])
            assert result.exit_code == 0, result.output

    def on_event(event: RunEvent) -> None:
        match event:
            case RanksStarted(node=0):
                ask("grow", "4", "5")
            case StepCommitted(num_alive=6):
                notice.touch()
                ask("drain", "1")

    growing = replace(
        config,
        layout=replace(config.layout, max_groups=6),
        data=replace(config.data, access="shared"),
        cluster=ClusterConfig(device="cpu", num_nodes=3, notice_file=str(tmp_path / "notice-{node}")),
    )
    assert problems(growing, look_at_machine(growing)) == []
    watch = Watch(awaited=frozenset((AWAITED_AT, Member(GroupId(group), 1)) for group in (4, 5)))
    run = complete_run(growing, run_dir, watch, on_event)
    assert (run.summary.verdict, run.summary.reasons) == ("valid", ())
    assert sorted(drained(run)) == [[1, 0], [4, 1], [5, 1]]
    numbers = [len(commit.members) for commit in fold_journal(run.journal, run_of(run)).commits]
    changes = [count for count, _ in groupby(numbers)]
    assert changes[:2] == [4, 6]
    assert changes[2:] in ([3], [4, 3], [5, 3], [5, 4, 3]), "each leaves once others have its part of the state"
    assert losses(run) == losses(whole)
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert run.journal.of(LossRecord) == []
    assert (run.summary.groups_lost, run.summary.microbatches_recomputed) == (0, 0)
    state = read_run_state(run_dir)
    assert state.groups() == ["alive", "drained", "alive", "alive", "drained", "drained"]
    assert state.damage == []
    computed = {record.group for record in run.journal.of(ContributionRecord) if record.microbatches}
    assert computed == {0, 1, 2, 3, 4, 5}, "further groups compute, too"
