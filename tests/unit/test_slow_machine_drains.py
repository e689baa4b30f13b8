"""When a machine that holds the run back is drained: the rule, the driver's inputs, and what `spare check` says."""

from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.core.slow_machines.culprit import Cause, Culprit
from spare_megatron.core.slow_machines.slow_machine_policy import MARGIN, REST_S, Situation, decide
from spare_megatron.journal.files import JournalWriter, read_journal
from spare_megatron.journal.proofs.check_machines import check_quarantines
from spare_megatron.journal.records import LadderRecord, PlacesRecord
from spare_megatron.process.requests import read_requests, request
from spare_megatron.slow_machines.slow_machine_drains import SlowMachineDrains
from spare_megatron.stacking.layout import GroupId, MachineId
from spare_megatron.store import keys
from spare_megatron.store.interface import StoreLost
from spare_megatron.supervisor.places.group_reforming import AssignmentList
from tests.unit.memory_store import MemoryStore

LINK = Situation(
    machine=1,
    cause=Cause.LINK,
    excess_s=0.5,
    mended_ratio=0.0,
    step_s=2.0,
    lost_steps=40,
    steps_left=80,
    num_members=4,
    num_leaving=1,
    least_hosts=2,
    replacement="group",
    admission_s=10.0,
)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, "drain"),
        ({"lost_steps": 39}, "not yet"),
        ({"steps_left": 79}, "too late"),
        ({"under_way": True}, "under way"),
        ({"num_leaving": 0}, "under way"),
        ({"since_drain_s": REST_S - 1}, "drained before"),
        ({"since_drain_s": REST_S}, "drain"),
        ({"least_hosts": 1}, "redundancy"),
        ({"least_hosts": None}, "drain"),
        ({"num_members": 2, "least_hosts": None}, "redundancy"),
        ({"replacement": "none"}, "no gain"),
        ({"replacement": "none", "excess_s": 1.0, "lost_steps": 61, "steps_left": 150}, "drain"),
        ({"cause": Cause.COMPUTE, "mended_ratio": 1.0}, "no gain"),
        ({"cause": Cause.COMPUTE, "mended_ratio": 4 / 3}, "drain"),
    ],
)
def test_a_machine_is_drained_where_that_gains_more_than_it_costs(changes: dict[str, Any], rule: str) -> None:
    assert decide(replace(LINK, **changes)).rule == rule


def test_no_slowness_costs_more_than_about_twice_what_the_best_choice_would() -> None:
    """Known only later: the machine stays slow for some steps. Against the better of a drain at once and none."""
    random = Random(3)
    for _ in range(300):
        gain_s, cost_s, slow_steps = random.uniform(0.1, 5), random.uniform(1, 200), random.randint(1, 2000)
        situation = replace(LINK, step_s=0.1, excess_s=gain_s, admission_s=cost_s / 2, steps_left=10**9)
        spent_s = 0.0
        for step in range(slow_steps):
            if decide(replace(situation, lost_steps=step)).rule == "drain":
                spent_s += cost_s
                break
            spent_s += gain_s
        assert spent_s <= 2 * min(cost_s, gain_s * slow_steps) + gain_s + 1e-6


# ------------------------------------------------------------------------------------------------------- the driver's


class Driven:
    """The drains over a store in memory, in a run of 3 groups with a spare one, each on a machine of its own."""

    def __init__(self, run_dir: Path, **spare: Any) -> None:
        self.config = RunConfig(
            layout=LayoutConfig(num_groups=3, max_groups=4),
            cluster=ClusterConfig(device="cpu", num_nodes=4),
            data=DataConfig(access="shared"),
            spare=SpareConfig(redundancy=3, microbatches_per_shard=16, **spare),
            train=TrainConfig(steps=1000),
        )
        self.run_dir = run_dir
        self.store: Any = MemoryStore({keys.beat(place): "1" for place in range(4)})
        self.is_store_there = True
        self.journal = JournalWriter(run_dir, "driver")
        self.drains = SlowMachineDrains(self.config, run_dir, self.journal, self.open_store)
        self.step, self.now_s = 0, 0.0

    def open_store(self) -> Any:
        if not self.is_store_there:
            raise StoreLost
        return self.store

    def report(self, culprit: Culprit | None, num: int = 1, step_s: float = 1.0) -> None:
        """So many reports of five steps each."""
        for _ in range(num):
            for _ in range(5):
                self.drains.on_step(self.step, step_s)
                self.step += 1
            self.now_s += 5 * step_s
            self.drains.consider(culprit, step_s, self.config.parallel.further_groups, self.now_s)

    @property
    def quarantined(self) -> list[tuple[int, str]]:
        places = AssignmentList(self.store, self.config.parallel).read()
        return [(one.machine, one.cause) for one in places.quarantines]

    def records(self) -> list[LadderRecord]:
        self.journal.close()
        return read_journal(self.run_dir).of(LadderRecord)


SLOW_LINK = Culprit(machine=MachineId(1), cause=Cause.LINK, excess_s=0.5, factor=5.0)


def test_a_slow_link_is_replaced_by_a_further_group_once_it_has_cost_as_much(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.report(SLOW_LINK, 4)
    assert driven.quarantined == []
    driven.report(SLOW_LINK)
    assert driven.quarantined == [(1, "slow")], "two admissions of 5 steps each, and half a second lost in each step"
    assert read_requests(tmp_path) == {GroupId(3): "grow"}
    driven.report(SLOW_LINK, 3)
    assert [record.rule for record in driven.records()] == ["not yet", "drain", "under way"]
    (first, drain, _) = driven.records()
    assert (drain.replacement, drain.num_members, drain.num_leaving, drain.least_hosts) == ("group", 3, 1, None)
    assert (first.lost_steps, drain.lost_steps) == (0, 20)
    assert [record.quarantined[0][:2] for record in read_journal(tmp_path).of(PlacesRecord)] == [[1, "slow"]]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_further_group_that_is_to_leave_or_has_no_machine_replaces_nothing(tmp_path: Path, *, is_there: bool) -> None:
    """Its request was overwritten."""
    driven = Driven(tmp_path)
    if is_there:
        request(tmp_path, [GroupId(3)], "drain")
    else:
        del driven.store.values[keys.beat(3)]
    requests = read_requests(tmp_path)
    driven.report(SLOW_LINK, 60)
    assert {record.replacement for record in driven.records()} == {"none"}
    assert read_requests(tmp_path) == requests


def test_another_cause_counts_from_its_own_beginning(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.report(SLOW_LINK, 4)
    driven.report(replace(SLOW_LINK, machine=MachineId(2)), 4)
    assert driven.quarantined == []


def test_a_machine_that_recovers_counts_from_its_next_slow_step(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.report(SLOW_LINK, 4)
    driven.report(None, 50)
    driven.report(SLOW_LINK, 4)
    assert driven.quarantined == []


def test_steps_that_a_restart_repeats_count_again(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.report(SLOW_LINK, 4)
    driven.step = 3
    driven.drains.on_restart(driven.step)
    driven.report(SLOW_LINK, 4)
    assert driven.quarantined == []
    driven.report(SLOW_LINK)
    assert driven.quarantined == [(1, "slow")]
    drain = driven.records()[-1]
    assert (drain.lost_steps, drain.steps_left) == (20, 1000 - 28)


@pytest.mark.parametrize("cause", [Cause.COMPUTE, Cause.HOST])
def test_what_dealing_mends_is_drained_for_the_rest_alone(cause: Cause, tmp_path: Path) -> None:
    """Three groups, one at half speed: a dealt step takes 20/16, so that a fifth of it is left to gain."""
    driven = Driven(tmp_path)
    driven.report(Culprit(machine=MachineId(1), cause=cause, excess_s=0.9, factor=2.0), 10)
    assert driven.quarantined == []
    driven.report(Culprit(machine=MachineId(1), cause=cause, excess_s=0.9, factor=2.0), 2)
    assert driven.quarantined == [(1, "slow")]
    drain = driven.records()[-1]
    assert drain.mended_ratio == 20 / 16
    assert drain.gain_s == pytest.approx(0.2)


def test_without_a_replacement_compute_is_left_to_dealing(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    request(tmp_path, [GroupId(3)], "grow")  # it takes part by now
    driven.report(Culprit(machine=MachineId(1), cause=Cause.COMPUTE, excess_s=0.9, factor=2.0), 60)
    assert driven.quarantined == []
    assert {record.rule for record in driven.records()} == {"no gain"}


def test_admissions_that_were_seen_are_what_a_change_costs(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.report(SLOW_LINK)
    driven.drains.on_admission(driven.step)
    driven.drains.on_step(driven.step, 3.0)
    driven.step += 1
    driven.report(SLOW_LINK, 2)
    assert driven.quarantined == [(1, "slow")], "4 s in all, instead of 10 s"
    assert driven.records()[-1].cost_s == 4.0


def test_an_admission_that_was_hardly_seen_costs_a_step() -> None:
    """One of no length had a machine drained that held the run back for a moment."""
    moment = replace(LINK, admission_s=0.0, step_s=0.5, excess_s=0.06)
    assert decide(replace(moment, lost_steps=0)).rule == "not yet"
    assert decide(replace(moment, lost_steps=17)).rule == "drain"


def test_without_its_store_the_driver_decides_later(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.is_store_there = False
    driven.report(SLOW_LINK, 20)
    assert driven.quarantined == []
    driven.is_store_there = True
    driven.report(SLOW_LINK)
    assert driven.quarantined == [(1, "slow")]


# ------------------------------------------------------------------------------------------------------------- proof

DRAIN = LadderRecord(rule="drain", gain_s=0.5, cost_s=20.0, **{**asdict(replace(LINK, excess_s=0.5)), "cause": "link"})
SLOW = PlacesRecord(index=0, num_places=4, holdings=[], quarantined=[[1, "slow", "its link"]])


def findings(*records: Any) -> list[str]:
    view: Any = SimpleNamespace(rare=[SimpleNamespace(source="driver", record=record) for record in records])
    return [finding.reason for finding in check_quarantines(view)]


def test_the_proof_finds_nothing_in_what_was_decided() -> None:
    assert findings(DRAIN, SLOW) == []


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([SLOW], "which no decision asks for"),
        ([replace(DRAIN, rule="not yet"), SLOW], "which no decision asks for"),
        ([replace(DRAIN, rule="not yet")], "lead to `drain`"),
        ([replace(DRAIN, gain_s=0.7), SLOW], "by its inputs 0.5 s"),
        ([replace(DRAIN, least_hosts=1), SLOW], "lead to `redundancy`"),
        ([replace(DRAIN, steps_left=int(MARGIN * 39)), SLOW], "lead to `too late`"),
    ],
)
def test_a_drain_that_nothing_asked_for_is_found(records: list[Any], found: str) -> None:
    assert any(found in reason for reason in findings(*records))
