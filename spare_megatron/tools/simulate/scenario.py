"""Describes a simulated run: its groups, policy, costs and failures."""

from dataclasses import dataclass, field, fields
from math import ceil, inf, lcm
from typing import Literal

import numpy as np

from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.core.saves.survival import coverage_probabilities, optimal_cadence_s, wiped_probabilities
from spare_megatron.stacking.layout import Layout, Slabs
from spare_megatron.stacking.order import Granularity
from spare_megatron.stacking.paces import PipelineTimes, Rounds
from spare_megatron.stacking.placement import PlacementKind, make_placement
from spare_megatron.tools.plan import reforming_costs as reforming
from spare_megatron.tools.plan.domains import consecutive_domains, domain_coverage_probabilities, hosts_per_domain
from spare_megatron.tools.plan.partition_redundancy import state_time_to_wipe_out_s
from spare_megatron.tools.plan.readmission import hardware_wait_s
from spare_megatron.tools.plan.repair import RepairTimes, shard_time_to_wipe_out_s, survival
from spare_megatron.tools.plan.slow_group_costs import SlowRate
from spare_megatron.tools.simulate.failures import FailureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of a simulated run in seconds, at the level of groups. ValueError if one is out of its range."""

    compute_s: float
    """One group computes one whole shard (m microbatches) at full speed, pipeline fill included."""
    reduce_s: float = 0.0
    """One cross-group reduction up to the commit; includes the optimizer step unless update_s is set."""
    update_s: float = 0.0
    """The optimizer step, after the commit."""
    evaluate_s: float = 0.0
    """One group computes its shard of an evaluation, which has as many microbatches as a step."""
    jitter: float = 0.0
    """Standard deviation of the factor N(1, jitter^2) on the compute of a step; a share, not seconds."""
    pipeline_fill: float = 0.0
    """Microbatches that filling and draining the pipeline adds to any work: (stages - 1) / model chunks per stage."""
    full_speed_groups: float = inf
    """Groups that can compute at full speed at the same time; fewer than all where groups share processors."""
    detect_s: float = 0.0
    """From the loss of a group to its fence. Survivors compute meanwhile and wait only for the rest."""
    agree_s: float = 0.0
    """From the fence to the new plan: votes, decision, controller."""
    rebuild_s: float = 0.0
    """From the fence to a new communicator, built during agreement and patch; only the rest is waited for."""
    retry_s: float = 0.0
    """Excess over reduce_s of reducing again after losses."""
    save_s: float = 0.0
    """Training stops this long for one save; small for asynchronous saves."""
    restart_s: float = 0.0
    """From a wipe-out until training resumes with all groups."""
    join_s: float = 0.0
    """All groups wait this long when groups are admitted, once for all admitted together."""
    state_transfer_s: float = 0.0
    """A group that is back fetches the state before it can be admitted; the others train on."""
    fetch_s: float = 0.0
    """From the start of a step or patch until a group has the data of shards that it does not host, with last_resort;
    meanwhile it computes what it hosts."""

    def __post_init__(self) -> None:
        for name, value in self.terms().items():
            if not 0 <= value < inf and (name, value) != ("full_speed_groups", inf):
                raise ValueError(f"costs.{name}={value} has to be 0 or more, and finite")
        for name in ("compute_s", "full_speed_groups"):
            if getattr(self, name) == 0:
                raise ValueError(f"costs.{name}=0.0 has to be above 0")

    def terms(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


_LEAST_ABSENCE_S = 1e-3
"""`tools.plan.repair` needs a repair time above 0."""
SimulatedPolicy = Literal["checkpoint_only", "replication", "spare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run to simulate. The ValueError for values that do not fit together lists all problems."""

    name: str
    num_groups: int
    """Data-parallel groups, and shards of every global batch (N)."""
    redundancy: int
    """Hosts of each shard (r); for replication, groups in a set; no effect with checkpoint_only."""
    microbatches_per_shard: int = 16
    """Microbatches of a shard (m)."""
    num_steps: int = 10_000
    evaluate_every: int = 0
    """Steps between evaluations; one more follows the last step. 0: none."""
    policy: SimulatedPolicy = "spare"
    """checkpoint_only restarts at any loss; replication at the loss of a whole set; spare at a wipe-out."""
    granularity: Granularity = "microbatch"
    """Unit of reordering: stack moves whole shards, as in the SPARe paper."""
    placement: PlacementKind = "golomb"
    groups_per_domain: int | None = None
    """Groups of consecutive ids that form a domain for the placement; None takes failures.groups_per_domain."""
    costs: CostModel
    failures: FailureSpec = field(default_factory=FailureSpec)
    slow: SlowRate = field(default_factory=SlowRate)
    slow_links: SlowRate = field(default_factory=SlowRate)
    """Groups whose link to the others is slow: costs.reduce_s, for all, times the factor while one of them takes part.
    """
    deal_by_pace: bool = True
    """Whether slow groups get less work; where none turns slow, nothing is measured."""
    replace_slow: bool = False
    """Whether slow groups, of a machine each, are drained and replaced as by `spare.replace_slow` in runs: the machines
    are back when they are as fast as before."""
    repair_s: float | None = None
    """Seconds from a loss until the hardware works again, for causes without their own; None: only at a restart."""
    repair_is_random: bool = False
    """Whether repair times are exponential with their means instead of constant; those of a trace stay as they are."""
    num_spares: int = 0
    """Idle hardware that replaces what was lost: groups, or machines where single nodes or machines are lost."""
    machines_per_group: int = 1
    """Machines of a group. With reform_s a loss takes one of them."""
    least_machines: int | None = None
    """Fewest machines with which a group goes on, in a shorter pipeline, until others make it whole; None: all."""
    reform_s: float | None = None
    """Groups are re-formed from idle machines and those of broken groups: seconds from the loss or repair of a machine
    until a group that it leaves whole runs and can fetch the state. None: a group waits for its own machines."""
    further_groups: int = 0
    """Groups beyond num_groups, which host no shard: admitted at the first commit, they share the work. Needs
    last_resort."""
    notice_s: float = 0.0
    """Notice of each loss, as of spot machines: a group that learns of its own leaves at the next commit, if every
    shard keeps a host."""
    history_s: float = 0.0
    """Seconds of losses and repairs of machines before the start, so that as many are away then as in the long run."""
    save_interval_s: float | None = None
    """Seconds from save to save; None takes the best for the mean time to wipe-out, inf saves never."""
    expected_group_life_s: float | None = None
    """Prior mean time until a given group is lost, for saves at a measured cadence; None saves at the planned one."""
    last_resort: bool = False
    """Every group can read all data: any survivor computes any shard, after costs.fetch_s."""
    partition_redundancy: int = 0
    """Hosts of each state partition (r_o); 0 if every group holds all state. Policy spare only."""
    partition_copy_s: float | None = None
    """Seconds to copy one state partition whose host is lost; None: only a restart makes copies."""

    def __post_init__(self) -> None:
        found = list(_problems(self))
        if found:
            raise ValueError("; ".join(found))

    @property
    def evaluations(self) -> EvaluationPolicy | None:
        if not self.evaluate_every:
            return None
        return EvaluationPolicy(every_steps=self.evaluate_every, microbatches_per_shard=self.microbatches_per_shard)

    @property
    def hosts_per_shard(self) -> int:
        """The redundancy of the policy: 1 for checkpoint_only."""
        return 1 if self.policy == "checkpoint_only" else self.redundancy

    @property
    def max_groups(self) -> int:
        """With the further ones."""
        return self.num_groups + self.further_groups

    @property
    def group_machines(self) -> int:
        """Of one group, where nodes are lost its nodes."""
        return self.machines_per_group * self.failures.nodes_per_group

    @property
    def num_machines(self) -> int:
        """With the spares."""
        return self.max_groups * self.group_machines + self.num_spares

    @property
    def placed_groups_per_domain(self) -> int:
        """Groups per domain for the placement; 1 for consecutive offsets, which ignore domains."""
        if self.groups_per_domain is not None:
            return self.groups_per_domain
        return self.failures.groups_per_domain if self.placement == "golomb" else 1

    @property
    def fetch(self) -> int:
        """costs.fetch_s in thousandths of the time of one microbatch."""
        costs = self.costs
        return round(1000 * costs.fetch_s * (self.microbatches_per_shard + costs.pipeline_fill) / costs.compute_s)

    @property
    def layout(self) -> Layout:
        """Each machine as a stage of its group."""
        n, size = self.max_groups, self.machines_per_group
        return Layout(
            num_groups=n, pipeline_parallel=size, num_nodes=n * size, least_pipeline_parallel=self.least_machines
        )

    @property
    def slabs(self) -> Slabs | None:
        """As in the controller's setup: of as many layers as make all stages of a group alike, whatever its length."""
        lengths = self.layout.lengths
        return Slabs(lcm(*lengths), lengths) if len(lengths) > 1 else None

    @property
    def rounds(self) -> Rounds | None:
        """As in the controller's setup: None if no paces are measured."""
        if not self.deal_by_pace or (self.slow.group_interval_s is None and self.slabs is None):
            return None
        return Rounds(fill=ceil(self.costs.pipeline_fill))

    @property
    def pipeline_times(self) -> PipelineTimes | None:
        """By which `core.machines.reforming` chooses between whole and smaller groups; None without the latter."""
        if self.slabs is None:
            return None
        return PipelineTimes(
            num_layers=self.slabs.num_layers,
            num_shards=self.num_groups,
            num_microbatches=self.microbatches_per_shard,
            moves_shards=self.granularity == "stack",
            is_dealt=self.deal_by_pace,
        )

    @property
    def num_sets(self) -> int:
        """Disjoint sets of groups under replication; groups left over join them as further hosts."""
        return self.num_groups // self.redundancy

    def save_cadence_s(self) -> float:
        """Planned seconds from the start of one save to the next; infinite for never."""
        if self.save_interval_s is not None:
            return self.save_interval_s
        time_s = self.time_to_wipe_out_s()
        if self.costs.save_s == 0 or time_s == inf:
            return 0.0 if self.costs.save_s == 0 else inf
        return optimal_cadence_s(self.costs.save_s, time_s)

    def time_to_wipe_out_s(self) -> float:
        """T_f, mean seconds of training until a wipe-out of shards or of state partitions, taken as independent. A copy
        counts one step after it is made, as in `tools.plan.partition_redundancy`.
        """
        shards_s = self._time_to_lost_shards_s()
        if not self.partition_redundancy:
            return shards_s
        costs, n = self.costs, self.num_groups
        step_s = costs.compute_s + costs.reduce_s + costs.update_s
        back_s = None if self.partition_copy_s is None else self.partition_copy_s + step_s
        group_interval_s = n * self.failures.mean_interval_s(n)
        if group_interval_s == inf:
            return shards_s
        partitions_s = state_time_to_wipe_out_s(n, self.partition_redundancy, group_interval_s, back_s)
        return 1 / (1 / shards_s + 1 / partitions_s)

    def _time_to_lost_shards_s(self) -> float:
        """Mean seconds until a shard has lost all hosts, by the closed forms of `planner`.

        Without repair: sum over k of P(no wipe-out after k losses) times the mean time to the next loss, in proportion
        to N / (N - k). With repair: `tools.plan.repair`. Losses are independent, times between them exponential. Under
        the policy spare, domains lost whole take the place of groups: without repair `tools.plan.domains`; with repair
        the shards with the fewest domains, one for each distinct set.
        """
        interval_s, n = self.failures.mean_interval_s(self.num_groups), self.num_groups
        if self.policy == "checkpoint_only" or interval_s == inf:
            return interval_s
        hosts = n if self.last_resort and self.policy == "spare" else self.redundancy
        if self.reform_s is not None:
            times = self._reform_times(self.reform_s)
            if self.last_resort:
                return reforming.time_without_machines_s(n, n * interval_s, times)
            return reforming.survival(n, hosts, n * interval_s, times, self.costs.restart_s).lived_s
        back_s = self.mean_absence_s()
        if self.failures.kind == "domain" and self.policy == "spare" and not self.last_resort:
            return self._time_to_wipe_out_by_domains_s(back_s)
        if back_s is not None:
            repair = self._repair_times(n * interval_s, back_s)
            if self.policy == "replication":
                return shard_time_to_wipe_out_s(hosts, repair) / self.num_sets
            return inf if hosts == n > 1 else survival(n, hosts, repair).mean_s  # all groups are never down together
        covered = coverage_probabilities(n, hosts)
        if self.policy == "replication":
            covered = (1 - wiped_probabilities(n, hosts)) ** self.num_sets
        lost = np.arange(n)
        return float((covered[:n] * interval_s * n / (n - lost)).sum())

    def _repair_times(self, group_interval_s: float, back_s: float) -> RepairTimes:
        """A shard without a host is waited for as long as a restart takes."""
        wait_s = self.costs.restart_s if self.policy == "spare" and not self.last_resort else None
        return RepairTimes(group_interval_s=group_interval_s, repair_s=max(back_s, _LEAST_ABSENCE_S), wait_s=wait_s)

    def _reform_times(self, reform_s: float) -> reforming.ReformTimes:
        costs = self.costs
        return reforming.ReformTimes(
            machines_per_group=self.machines_per_group,
            least_machines=self.least_machines,
            reform_s=reform_s,
            run_s=self.num_steps * (costs.compute_s + costs.reduce_s + costs.update_s),
            repair_s=self.failures.mean_repair_s(self.repair_s),
            transfer_s=costs.state_transfer_s,
            join_s=costs.join_s,
            num_spares=self.num_spares,
        )

    def _time_to_wipe_out_by_domains_s(self, back_s: float | None) -> float:
        placement = make_placement(self.placement, self.num_groups, self.redundancy, self.placed_groups_per_domain)
        counts = hosts_per_domain(placement, consecutive_domains(self.num_groups, self.failures.groups_per_domain))
        num_domains = counts.shape[1]
        if back_s is not None:
            patterns = np.unique(counts > 0, axis=0).sum(axis=1)
            repair = self._repair_times(self.failures.mean_s, back_s)
            return survival(int((patterns == patterns.min()).sum()), int(patterns.min()), repair).mean_s
        covered = domain_coverage_probabilities(counts)[:num_domains]
        return float((covered * self.failures.mean_s / (num_domains - np.arange(num_domains))).sum())

    def mean_absence_s(self) -> float | None:
        """Mean seconds from a loss until the group can be admitted; None if hardware is never repaired.
        `tools.plan.readmission.hardware_wait_s`, at the rate of losses with all groups up, plus the state transfer;
        with re-forming as if machines sufficed.
        """
        if self.reform_s is not None:
            return self.reform_s + self.costs.state_transfer_s
        repair_s = self.failures.mean_repair_s(self.repair_s)
        if repair_s is None:
            return None
        losses_per_s = 1 / self.failures.mean_interval_s(self.num_groups)
        return hardware_wait_s(self.num_spares, losses_per_s, repair_s) + self.costs.state_transfer_s


def _problems(scenario: Scenario) -> list[str]:
    n, r = scenario.num_groups, scenario.redundancy
    found = [
        f"{name}={getattr(scenario, name)} has to be {least} or more"
        for name, least in (
            ("num_groups", 1),
            ("redundancy", 1),
            ("microbatches_per_shard", 1),
            ("num_steps", 1),
            ("evaluate_every", 0),
            ("num_spares", 0),
            ("further_groups", 0),
            ("machines_per_group", 1),
        )
        if getattr(scenario, name) < least
    ]
    if scenario.groups_per_domain is not None and scenario.groups_per_domain < 1:
        found.append(f"groups_per_domain={scenario.groups_per_domain} has to be 1 or more")
    if (scenario.groups_per_domain or 1) > 1 and scenario.placement == "consecutive":
        found.append(f"groups_per_domain={scenario.groups_per_domain} needs the placement golomb; set one of them")
    if r > n:
        found.append(f"redundancy={r} exceeds num_groups={n}; lower it or take more groups")
    if not 0 <= scenario.partition_redundancy <= n:
        found.append(f"partition_redundancy={scenario.partition_redundancy} has to be from 0 to num_groups={n}")
    if scenario.partition_redundancy and scenario.policy != "spare":
        found.append(f"partition_redundancy belongs to the policy spare, not {scenario.policy}; set it to 0")
    if scenario.partition_copy_s is not None and not scenario.partition_redundancy:
        found.append(f"partition_copy_s={scenario.partition_copy_s} is never used: partition_redundancy is 0")
    for name in ("repair_s", "reform_s", "notice_s", "history_s", "save_interval_s", "partition_copy_s"):
        value = getattr(scenario, name)
        if value is not None and not value >= 0:
            found.append(f"{name}={value} has to be 0 or more")
    mix = scenario.failures.mix
    if mix and scenario.repair_s is not None and all(cause.repair_s is not None for cause in mix):
        found.append(
            f"repair_s={scenario.repair_s} is never used: every cause in failures.mix has its own; leave it out"
        )
    if scenario.repair_is_random and scenario.repair_s is None and all(cause.repair_s is None for cause in mix):
        found.append("repair_is_random has no mean: set repair_s, or repair_s of the causes in failures.mix")
    if scenario.num_spares and scenario.policy == "checkpoint_only":
        found.append(f"num_spares={scenario.num_spares} is never used: checkpoint_only restarts all groups at any loss")
    found += _problems_of_membership(scenario)
    found += _problems_of_slow_groups(scenario)
    found += _problems_of_evaluations(scenario)
    if scenario.last_resort and scenario.policy != "spare":
        found.append(f"last_resort belongs to the policy spare, not {scenario.policy}; unset one of them")
    if scenario.last_resort and scenario.granularity == "stack":
        found.append("last_resort takes single microbatches; set granularity to microbatch")
    most = scenario.max_groups
    outside = {group for loss in scenario.failures.trace for group in loss.groups if not 0 <= group < most}
    if outside:
        found.append(f"the trace names groups {sorted(outside)[:5]}, but ids go from 0 to num_groups - 1 = {most - 1}")
    return found


def _problems_of_evaluations(scenario: Scenario) -> list[str]:
    found = []
    if bool(scenario.evaluate_every) != bool(scenario.costs.evaluate_s):
        found.append(
            f"evaluate_every={scenario.evaluate_every} and costs.evaluate_s={scenario.costs.evaluate_s} have an effect "
            "together alone; set both or neither"
        )
    if scenario.evaluate_every and scenario.policy == "replication":
        found.append("evaluate_every is simulated for the policies spare and checkpoint_only; set it to 0")
    return found


def _problems_of_slow_groups(scenario: Scenario) -> list[str]:
    if scenario.slow.group_interval_s is None:
        return ["replace_slow has no effect: set slow.group_interval_s"] if scenario.replace_slow else []
    found = []
    if scenario.replace_slow and (scenario.policy != "spare" or scenario.reform_s is not None or scenario.notice_s):
        found.append("replace_slow is simulated for the policy spare, without reform_s and notice_s; unset one of them")
    if scenario.replace_slow and scenario.failures.kind not in ("system", "trace"):
        found.append(
            f"replace_slow is simulated for failures.kind system or trace, not {scenario.failures.kind}, whose clocks "
            "would strike groups that are drained; unset one of them"
        )
    if scenario.policy == "replication":
        found.append("slow.group_interval_s is simulated for the policies spare and checkpoint_only; unset it")
    if scenario.costs.full_speed_groups < inf:
        found.append("slow.group_interval_s needs groups with processors of their own: unset costs.full_speed_groups")
    return found


def _problems_of_membership(scenario: Scenario) -> list[str]:
    """Those of groups re-formed, added and drained."""
    found = []
    if scenario.machines_per_group > 1 and scenario.reform_s is None and scenario.policy == "spare":
        found.append(f"machines_per_group={scenario.machines_per_group} is never used: set reform_s")
    if (least := scenario.least_machines) is not None:
        if not 1 <= least <= scenario.machines_per_group:
            found.append(f"least_machines={least} has to be from 1 to machines_per_group={scenario.machines_per_group}")
        if scenario.partition_redundancy or scenario.costs.full_speed_groups < inf:
            found.append("least_machines cannot be with partition_redundancy or costs.full_speed_groups; unset them")
    names, most = scenario.failures.machine_names, scenario.num_machines
    if len(names) > most:
        found.append(f"the trace names {len(names)} machines, but groups and num_spares have {most}; raise one of them")
    if names and (scenario.reform_s is None or scenario.notice_s):
        found.append(f"the trace names machines, as {names[0]}: set reform_s, and notice_s to 0")
    domains = scenario.failures.domains
    if domains and (scenario.reform_s is None or scenario.notice_s):
        found.append(f"failures.domains.{domains[0].name} takes machines: set reform_s, and notice_s to 0")
    if scenario.history_s and (scenario.reform_s is None or scenario.failures.kind != "system" or scenario.notice_s):
        found.append(f"history_s={scenario.history_s} needs reform_s, failures.kind system and notice_s=0")
    if scenario.reform_s is not None and scenario.policy != "spare":
        found.append(f"reform_s={scenario.reform_s} belongs to the policy spare, not {scenario.policy}; unset it")
    if scenario.reform_s is not None and scenario.failures.kind not in ("system", "trace"):
        found.append(
            f"reform_s={scenario.reform_s} is simulated for failures.kind system and trace, "
            f"not {scenario.failures.kind}, whose clocks belong to groups"
        )
    if scenario.further_groups and not scenario.last_resort:
        found.append(f"further_groups={scenario.further_groups} host no shard: set last_resort, or leave them out")
    for name in ("further_groups", "notice_s"):
        if (value := getattr(scenario, name)) and scenario.policy != "spare":
            found.append(f"{name}={value} belongs to the policy spare, not {scenario.policy}; set it to 0")
        if value and scenario.failures.kind not in ("system", "trace"):
            found.append(
                f"{name}={value} is simulated for failures.kind system or trace, not {scenario.failures.kind}, whose "
                "clocks belong to groups that take part from the start"
            )
    return found
