"""Names what holds the run back, and drains its machine where `core.slow_machines.slow_machine_policy` decides so.

An entry of the list of assignments puts it into quarantine; its supervisors do the rest, and go on without the driver.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.places import Places, Quarantine
from spare_megatron.core.machines.reforming import can_reform
from spare_megatron.core.slow_machines import slow_machine_policy as policy
from spare_megatron.core.slow_machines.culprit import Cause, Culprit, CulpritWatch, Window
from spare_megatron.journal.event_texts import text_of_culprit
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import CulpritRecord, LadderRecord
from spare_megatron.process.reports import NodeMeasured
from spare_megatron.process.requests import asked_to_leave, read_requests, request
from spare_megatron.stacking.layout import GroupId, MachineId, PlaceId
from spare_megatron.stacking.paces import dealt_stacks
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.supervisor.places.group_reforming import AssignmentList, empty_places

_NUM_USUAL = 8
"""Last steps whose median is the usual length."""


_NUM_REPORTS = 8
"""Last reports of what is named whose median counts: single ones scatter."""


@dataclass(slots=True)
class _Named:
    """What is named, since this step; its excess and the length of a step in the last reports; the last rule."""

    machine: MachineId
    cause: Cause
    since_step: int
    excesses_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_REPORTS))
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_REPORTS))
    rule: policy.Rule | None = None


class SlowMachineDrains:
    """The decisions of one run. `open_store` may take seconds; it is called once a machine may have to be drained."""

    def __init__(
        self, config: RunConfig, run_dir: Path, journal: JournalWriter, open_store: Callable[[], ControlStore]
    ) -> None:
        self._config = config
        self._layout = config.parallel
        self._run_dir = run_dir
        self._journal = journal
        self._open_store = open_store
        self._store: ControlStore | None = None
        self._named: _Named | None = None
        self._step = 0
        self._usual_s: deque[float] = deque(maxlen=_NUM_USUAL)
        self._admitting: set[int] = set()
        self._admission_s: float | None = None  # as last measured
        self._drained_at_s: dict[int, float] = {}  # by what a machine and those that replace it have in common

    def on_admission(self, step: int) -> None:
        """Groups are admitted with this step."""
        self._admitting.add(step)

    def on_step(self, step: int, step_s: float) -> None:
        """A step has been committed; several groups report each."""
        if step < self._step:
            return
        self._step = step + 1
        if step not in self._admitting:
            self._usual_s.append(step_s)
            return
        self._admitting.discard(step)
        if self._usual_s:
            self._admission_s = max(0.0, step_s - median(self._usual_s))

    def on_restart(self, step: int) -> None:
        """The run goes on from this step, after a restart or an undo: what is slow counts from here."""
        self._step, self._named = step, None

    def consider(self, culprit: Culprit | None, step_s: float, absent: Collection[GroupId], now_s: float) -> None:
        """Drains the culprit's machine if that is worth it. `absent`: groups that take no part."""
        if culprit is None:
            self._named = None
            return
        named = self._named
        if named is None or (named.machine, named.cause) != (culprit.machine, culprit.cause):
            named = self._named = _Named(culprit.machine, culprit.cause, self._step)
        named.excesses_s.append(culprit.excess_s)
        named.steps_s.append(step_s)
        with contextlib.suppress(StoreLost, OSError):  # decided with the next window
            self._store = self._store or self._open_store()
            self._consider(named, culprit, absent, now_s, self._store)

    def _consider(
        self,
        named: _Named,
        culprit: Culprit,
        absent: Collection[GroupId],
        now_s: float,
        store: ControlStore,
    ) -> None:
        assignments = AssignmentList(store, self._layout)
        places = assignments.read()
        held = places.held_by(culprit.machine)
        if held is None:
            return
        asked = asked_to_leave(self._run_dir, self._layout.further_groups)
        members = frozenset(map(GroupId, range(self._layout.num_groups))) - asked - frozenset(absent)
        leaving = members.intersection(self._layout.groups_on(held.place))
        replacement, group = self._replacement(store, places, held.place, members, asked)
        drained_at_s = self._drained_at_s.get(culprit.machine % self._layout.num_nodes)
        situation = policy.Situation(
            machine=culprit.machine,
            cause=culprit.cause,
            excess_s=median(named.excesses_s),
            mended_ratio=self._mended_ratio(culprit, len(members), len(leaving)),
            step_s=median(named.steps_s),
            lost_steps=self._step - named.since_step,
            steps_left=self._config.train.steps - self._step,
            num_members=len(members),
            num_leaving=len(leaving),
            least_hosts=self._least_hosts(members - leaving),
            replacement=replacement,
            admission_s=self._admission_s if self._admission_s is not None else self._assumed_s(named),
            since_drain_s=None if drained_at_s is None else now_s - drained_at_s,
            under_way=bool(places.quarantines),
        )
        decision = policy.decide(situation)
        self._note(named, situation, decision)
        if decision.rule != "drain":
            return
        if group is not None:
            request(self._run_dir, [group], "grow")
        reason = text_of_culprit(record_of(culprit))
        assigned = assignments.quarantine(Quarantine(culprit.machine, held.place, "slow", reason))
        self._drained_at_s[culprit.machine % self._layout.num_nodes] = now_s
        if assigned is not None:
            self._journal.write(assigned.record(self._layout))

    def _note(self, named: _Named, situation: policy.Situation, decision: policy.Decision) -> None:
        """Journals the decision, if the rule is another one than before."""
        if decision.rule == named.rule:
            return
        named.rule = decision.rule
        fields = {**asdict(situation), "cause": str(situation.cause)}
        self._journal.write(LadderRecord(rule=decision.rule, gain_s=decision.gain_s, cost_s=decision.cost_s, **fields))

    def _assumed_s(self, named: _Named) -> float:
        interval_s = self._config.control.heartbeat_interval_s
        return max(policy.ADMISSION_INTERVALS * interval_s, policy.ADMISSION_STEPS * median(named.steps_s))

    def _mended_ratio(self, culprit: Culprit, num_members: int, num_slow: int) -> float:
        spare = self._config.spare
        deals = spare.deal_by_pace and spare.granularity == "microbatch"
        has_slow_passes = culprit.cause in (Cause.COMPUTE, Cause.HOST) and culprit.factor > 1.0
        if not has_slow_passes or not deals or not 0 < num_slow < num_members:
            return 0.0
        return dealt_stacks(num_members, spare.microbatches_per_shard, num_slow, culprit.factor)

    def _least_hosts(self, staying: frozenset[GroupId]) -> int | None:
        if self._config.data.access == "shared":
            return None
        return min(len(staying.intersection(hosts)) for hosts in self._config.placement.hosts)

    def _replacement(
        self,
        store: ControlStore,
        places: Places,
        place: PlaceId,
        members: frozenset[GroupId],
        asked: frozenset[GroupId],
    ) -> tuple[policy.Replacement, GroupId | None]:
        """What takes the part of the machine in this place, and the further group to ask for, if that is it."""
        layout = self._layout
        leaving = {group for group, what in read_requests(self._run_dir).items() if what == "drain"}
        for further in sorted(layout.further_groups & asked - leaving):
            nodes = [PlaceId(node) for node in layout.nodes_of(further)]
            if place not in nodes and not empty_places(store, places, nodes):
                return "group", further
        broken = frozenset(map(GroupId, range(layout.num_groups))) - members - asked
        of_broken = [PlaceId(node) for group in sorted(broken) for node in layout.nodes_of(group)]
        can_take = self._config.spare.rejoins > 0 and can_reform(layout)
        is_there = can_take and len(empty_places(store, places, of_broken)) < len(of_broken)
        return "machine" if is_there else "none", None


@dataclass
class Culprits:
    """Judges the machines' windows together, and journals and reports each change. A window of the run has one of each
    machine, of about the same steps: the next begins when a machine reports again. `shares_processors`: as in `Window`.
    `on_named` is called after each window with what is named, if anything is, and the length of a step.
    """

    journal: JournalWriter
    on_event: Callable[[CulpritRecord], None]
    shares_processors: bool
    on_named: Callable[[Culprit | None, float], None] = lambda *_: None
    _watch: CulpritWatch = field(default_factory=CulpritWatch)
    _reports: dict[MachineId, NodeMeasured] = field(default_factory=dict)

    def add(self, report: NodeMeasured) -> None:
        if report.machine in self._reports:
            self._judge()
            self._reports.clear()
        self._reports[report.machine] = report

    def _judge(self) -> None:
        reports = self._reports
        window = Window(
            step_s=median(report.step_s for report in reports.values()),
            ranks=[times for machine in sorted(reports) for times in reports[machine].ranks],
            machines={machine: reports[machine].signs for machine in sorted(reports)},
            shares_processors=self.shares_processors,
        )
        before = self._watch.named
        has_changed = self._watch.add(window)
        named = self._watch.named
        if has_changed and named is None:
            assert before is not None, "what is named no longer was named"
            self._report(before, is_over=True)
        elif has_changed and named is not None:
            self._report(named, is_over=False)
        self.on_named(named, window.step_s)

    def _report(self, culprit: Culprit, *, is_over: bool) -> None:
        record = record_of(culprit, is_over=is_over)
        self.journal.write(record)
        self.on_event(record)


def record_of(culprit: Culprit, *, is_over: bool = False) -> CulpritRecord:
    fields = asdict(culprit)
    fields |= {"of_group": fields.pop("group"), "cause": str(culprit.cause)}
    return CulpritRecord(**fields, is_over=is_over)
