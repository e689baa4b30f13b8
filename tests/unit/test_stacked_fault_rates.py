"""Random faults with stacked optimizer state: every partition keeps a host, and a majority of hosts that is right."""

import numpy as np
import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.planned_faults import draw_faults
from spare_megatron.faults.points import FaultPoint
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import Ownership, PartitionCopy, PartitionSetup, first_ownership
from tests.unit.test_fault_rates import EVER, at_risk, configured

STACKED = ("optimizer.sharding=stacked", "layout.num_groups=8", "spare.redundancy=6", "faults.mean_steps=6")


@pytest.mark.parametrize("redundancy", [2, 3, 4])
@pytest.mark.parametrize("num_rejoins", [0, EVER])
def test_every_partition_keeps_a_host_and_a_majority_of_hosts_that_is_right(redundancy: int, num_rejoins: int) -> None:
    """Against the fold of the ownership, with groups that come back at any time and copies that take all theirs."""
    num_losses = num_flips = num_moved = 0
    for seed in range(4):
        settings = (f"optimizer.redundancy={redundancy}", f"faults.seed={seed}", f"spare.rejoins={num_rejoins}")
        config = configured(*STACKED, *settings, "train.steps=2000")
        faults = [fault for fault in draw_faults(config) if at_risk(config, fault)]
        history = StackedHistory(config, np.random.default_rng(seed))
        for fault in faults:
            history.advance(fault.step)
            history.lose(at_risk(config, fault), is_flip=fault.kind == "param_flip")
        num_losses += len(faults)
        num_flips += history.num_flips
        num_moved += history.num_moved
    assert num_losses > (20 if num_rejoins else 8)
    assert (num_flips > 0) == (redundancy > 2)
    assert num_rejoins == 0 or num_moved > 4


class StackedHistory:
    """Who hosts what while random faults strike."""

    def __init__(self, config: RunConfig, rng: np.random.Generator) -> None:
        self._steps, self._rng, self._comes_back = config.faults.recovery_steps, rng, config.spare.rejoins > 0
        self._redundancy = config.optimizer.redundancy
        groups = config.layout.num_groups
        partitioning = PartitionSetup(num_groups=groups, redundancy=config.optimizer.redundancy)
        self._ownership = first_ownership(partitioning, [Member(GroupId(group)) for group in range(groups)])
        self._returns: list[tuple[int, Member]] = []
        self._asked: dict[PartitionCopy, int] = {}
        self._copied: dict[PartitionCopy, int] = {}
        self._wrong: tuple[int, Member, Ownership] | None = None  # with who hosted what then
        self._step = self.num_flips = self.num_moved = 0

    def advance(self, step: int) -> None:
        """Copies that were asked for at least so long ago are whole, and some groups are back."""
        for at in range(self._step, step + 1):
            for when, member in [one for one in self._returns if one[0] == at]:
                self._returns.remove((when, member))
                self._take_over(self._ownership.for_members([*self._ownership.members, member]), at)
            made = [copy for copy, since in self._asked.items() if since + self._steps <= at]
            self._copied |= dict.fromkeys(made, at)
            # A move's copy has been compared by the commit that releases its donor.
            released, moves = set(self._ownership.superseded), self._ownership.moves
            compared = [move for move in moves if PartitionCopy(move.partition, move.donor) in released]
            self._copied |= {PartitionCopy(move.partition, move.receiver): at - self._steps for move in compared}
            self.num_moved += len(released)
            self._take_over(self._ownership.with_copies(made, released), at)
            if self._wrong is not None and self._wrong[0] + self._steps <= at:
                self._wrong = None
        self._step = step

    def _take_over(self, ownership: Ownership, step: int) -> None:
        self._ownership = ownership
        copies = (*ownership.repairs, *ownership.moves)
        asked = [
            PartitionCopy(c.partition, c.receiver) for c in copies if c.receiver not in ownership.hosts[c.partition]
        ]
        self._asked = {copy: self._asked.get(copy, step) for copy in asked}

    def lose(self, groups: frozenset[GroupId], *, is_flip: bool) -> None:
        """They are lost, now or when their wrong state is found; every partition keeps a host."""
        lost = [member for member in self._ownership.members if member.group in groups]
        assert len(lost) == len(groups), "every group that is hit is there"
        before = self._ownership
        self._take_over(before.for_members(set(before.members) - set(lost)), self._step)
        if is_flip:
            self._wrong = self._step, lost[0], before
            self.num_flips += 1
        if self._wrong is not None:
            self._assert_found(*self._wrong[1:])
        if self._comes_back:
            for group, incarnation in lost:
                back_at = self._step + int(self._rng.integers(1, self._steps + 1))
                self._returns.append((back_at, Member(group, incarnation + 1)))

    def _assert_found(self, wrong: Member, before: Ownership) -> None:
        for number, row in enumerate(self._ownership.hosts):
            reporters = set(row) | ({wrong} & set(before.hosts[number]))
            right = [
                host
                for host in row
                if self._copied.get(PartitionCopy(PartitionId(number), host), -EVER) + self._steps <= self._step
            ]
            if wrong in reporters:
                assert 2 * len(right) > min(len(reporters), self._redundancy)


def test_with_stacked_state_groups_are_hit_between_update_and_gather_too() -> None:
    faults = [fault for seed in range(10) for fault in draw_faults(configured(*STACKED, f"faults.seed={seed}"))]
    phases = {fault.phase for fault in faults}
    assert FaultPoint.BEFORE_GATHER in phases
    assert FaultPoint.IN_GATHER not in phases


def test_with_stacked_state_a_flipped_parameter_stays_of_usual_size() -> None:
    settings = ("optimizer.redundancy=3", "faults.kinds=['param_flip']")
    bits = [fault.bit for fault in draw_faults(configured(*STACKED, *settings))]
    assert len(bits) > 10
    assert max(bit for bit in bits if bit is not None) < 23
