"""The losses of a real run in virtual time: each is placed when its step has been computed there.

So one simulation is enough, however many there are.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter

from spare_megatron.core.placement import BoolArray
from spare_megatron.core.topology import GroupId
from spare_megatron.simulator.failures import Loss
from spare_megatron.simulator.measured import StepTimes
from spare_megatron.simulator.measured_membership import LossTime
from spare_megatron.simulator.scenario import Scenario
from spare_megatron.simulator.sharing import stretch
from spare_megatron.simulator.world import World

_LATEST = 0.999
"""Share of what follows the compute of a step by which a loss that stopped the reduction must have come. Of an update
likewise, by which one has come that is found in the next step."""


@dataclass(slots=True)
class _Pending:
    """A loss that is yet to strike.

    Attributes:
        at_s: When; infinite as long as it waits for the sum that it came after.
        loss: The loss.
        is_stop: It kept the step from being committed as it was reduced then.
        own_at_s: As long after the compute as it was measured.
    """

    at_s: float
    loss: LossTime
    is_stop: bool
    own_at_s: float


class PlacedLosses:
    """A `FailureProcess` whose losses are added as it goes on."""

    def __init__(self) -> None:
        self.pending: list[_Pending] = []

    def next_s(self) -> float:
        return min((item.at_s for item in self.pending), default=inf)

    def strike(self, is_up: BoolArray) -> Loss:
        struck = min(self.pending, key=lambda item: item.at_s)
        self.pending.remove(struck)
        group = GroupId(struck.loss.group)
        # Who comes back at the end of the step is ready at once; others are when that step begins.
        repair_s = 0.0 if struck.loss.back_after == struck.loss.step else None
        return Loss(at_s=struck.at_s, groups=(group,) if is_up[group] else (), repair_s=repair_s)

    def came_back(self, _now_s: float, _groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        pass

    def restarted(self, _began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self.pending = [item for item in self.pending if item.at_s > now_s]


class ReplayedWorld(World):
    """Virtual time in which a run loses and takes in its groups in the same steps as it did.

    A loss comes at the same share of the step's compute, or as long after it: before the sum is complete if it stopped
    the reduction, and after that if it did not.

    Args:
        scenario: The run, without losses.
        steps: Its steps as they were measured.
        losses: Its losses, during these.
        retried_at_s: Step -> when it was last decided that it be reduced again.
    """

    def __init__(
        self,
        scenario: Scenario,
        steps: Sequence[StepTimes],
        losses: Sequence[LossTime],
        retried_at_s: Mapping[int, float],
    ) -> None:
        self._placed = PlacedLosses()
        super().__init__(scenario, 0, self._placed)
        self._measured: Mapping[int, StepTimes] = {step.step: step for step in steps}
        self._retried_at_s = retried_at_s
        self._losses: dict[int, list[LossTime]] = defaultdict(list)
        self._returns: dict[int, list[GroupId]] = defaultdict(list)
        for loss in losses:
            self._losses[loss.step].append(loss)
            if loss.back_after is not None and loss.back_after > loss.step:
                self._returns[loss.back_after].append(GroupId(loss.group))
        self._computed_at_s = 0.0

    def compute(self, step: int, stacks: float) -> None:
        began_s = self.now_s
        super().compute(step, stacks)
        self._computed_at_s = self.now_s
        for loss in self._losses.pop(step, ()):  # a step that is done again has had them
            self._place(loss, began_s)
        for group in self._returns.pop(step, ()):
            self.fleet.ready_from(group, began_s)

    def wait(self, phases: Sequence[tuple[str, float]]) -> tuple[GroupId, ...]:
        if any(cause == "reduce" for cause, _ in phases):
            self._fit_into(self.now_s + sum(seconds for _, seconds in phases))
        return super().wait(phases)

    def _place(self, loss: LossTime, began_s: float) -> None:
        measured = self._measured[loss.step]
        is_stop = measured.began_at_s + loss.into_s < self._retried_at_s.get(loss.step, -inf)
        after_s = loss.into_s - measured.computed_s
        if after_s <= 0:
            own_at_s = began_s + loss.into_s / measured.computed_s * (self.now_s - began_s)
        else:
            own_at_s = self.now_s + after_s
        at_s = own_at_s if is_stop or after_s <= 0 else inf
        self._placed.pending.append(_Pending(at_s, loss, is_stop, own_at_s))

    def _fit_into(self, end_s: float) -> None:
        """Moves what would come on the wrong side of the end of a reduction."""
        pending = sorted(self._placed.pending, key=lambda item: item.at_s)
        stops = [item for item in pending if item.is_stop]
        for item in stops[:1]:  # the next one meets another reduction
            latest_s = self._computed_at_s + _LATEST * (end_s - self._computed_at_s)
            item.at_s = min(item.at_s, max(latest_s, self.now_s))
        if not stops:
            update_s = self.scenario.costs.update_s * stretch(int(self.fleet.is_up.sum()), self.scenario.costs)
            for item in pending:
                item.at_s = max(min(item.own_at_s, end_s + _LATEST * update_s), nextafter(end_s, inf))
