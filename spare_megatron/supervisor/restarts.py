"""Decides which groups of a node are started again and when, by the rules of `core.machines.group_starts`."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from spare_megatron.core.machines.group_starts import RestartBudget
from spare_megatron.machine.timers import Timers
from spare_megatron.stacking.layout import GroupId


@dataclass(kw_only=True)
class GroupRestarts:
    """The restarts of a node's groups: within `budget`, besides those after wipe-outs and in pauses. `restarts_all`:
    wipe-outs start all groups again, and pauses those that have used up their restarts. `wait_for_parts` gets groups on
    several nodes that this node is ready to start; once all are, call `start`. `start_ranks` starts those of a group.
    """

    budget: RestartBudget
    restarts_all: bool
    whole_groups: frozenset[GroupId]
    further_groups: frozenset[GroupId] = frozenset()
    timers: Timers
    wait_for_parts: Callable[[GroupId], None]
    start_ranks: Callable[[GroupId, bool], None]

    def __post_init__(self) -> None:
        self._up_since_s: dict[GroupId, float] = {}
        self._takes_spares: dict[GroupId, bool] = {}
        self._ended: set[GroupId] = set()  # fenced, or ready to start again after a wipe-out
        self.coming_back: set[GroupId] = set()  # lost, and about to be started again
        self.not_admitted: set[GroupId] = set()  # these, and those that are started but not admitted yet
        # Groups that have left the run, and further ones that are not asked for yet: started when they are, and those
        # that have taken part also after a wipe-out or in a pause.
        self.drained = set(self.further_groups)
        self._leave_asked = self.further_groups
        self.wiped_out_at_s: float | None = None  # monotonic, of a wipe-out that the run has not recovered from
        self.is_paused = False  # survivors of a wipe-out wait for hosts
        self._is_held = False  # the machine is in quarantine
        self._held: set[GroupId] = set()  # those to be started once it is not
        self.has_begun = False  # some group has been ready, so that losses are masked
        self.is_over = False  # the run is ending: no group is started again

    def on_ready(self, group: GroupId) -> None:
        self.has_begun = True
        self._up_since_s[group] = time.monotonic()

    def on_admitted(self, group: GroupId) -> None:
        self.not_admitted.discard(group)
        self.wiped_out_at_s = None
        self.is_paused = False

    def on_ended(self, group: GroupId) -> None:
        """Notes that the group may be started again after a wipe-out."""
        self._ended.add(group)

    def on_left(self, group: GroupId) -> None:
        """The group has left the run, with all of its ranks here."""
        self._ended.add(group)
        self.drained.add(group)
        self.not_admitted.discard(group)
        self.on_asked(self._leave_asked)
        if self.is_paused or self.wiped_out_at_s is not None:  # it left before it could learn of that
            self._bring_back(group)

    def on_asked(self, to_leave: frozenset[GroupId]) -> None:
        """These groups are asked to leave or to stay away; schedules the start of those that are asked for again."""
        self._leave_asked = to_leave
        for group in sorted(self.drained - to_leave):
            self._bring_back(group)

    @property
    def left_out(self) -> frozenset[GroupId]:
        """Groups that training can do without for good: none while shards or state have no host."""
        return frozenset() if self.is_paused or self.wiped_out_at_s is not None else self._leave_asked

    def on_fenced(self, group: GroupId, *, is_own: bool = True) -> bool:
        """Schedules the group's restart; False if it has used its restarts up. `is_own`: the loss began on this
        machine.
        """
        self._ended.add(group)
        if group in self._leave_asked and self.wiped_out_at_s is None and not self.is_paused:
            self.drained.add(group)
            return True
        is_wanted = self.budget.most_restarts > 0 or self._is_free
        return not is_wanted or self.is_over or self._bring_back(group, is_own=is_own)

    def on_missed(self, group: GroupId) -> None:
        """Schedules the incarnation after one that this node waited for and that is already lost elsewhere."""
        self.coming_back.discard(group)
        self.on_fenced(group, is_own=False)

    def on_wipe_out(self) -> None:
        """Schedules the restart of all ended groups, because the whole run restarts. Called again as others end."""
        self.wiped_out_at_s = self.wiped_out_at_s or time.monotonic()
        for group in sorted(self._ended):
            self._bring_back(group)

    def on_pause(self) -> None:
        """Schedules the restart of all lost groups, as some of them may host what is missing."""
        self.is_paused = True
        for group in sorted(self._ended if self.restarts_all else self._ended & self.drained):
            self._bring_back(group)

    def on_resume(self) -> None:
        self.is_paused = False

    @property
    def _is_free(self) -> bool:
        """Whether restarts do not count now: without them training cannot go on."""
        return self.wiped_out_at_s is not None or (self.is_paused and self.restarts_all)

    def _bring_back(self, group: GroupId, *, is_own: bool = True) -> bool:
        """Schedules the group's restart. Returns False if it is not to be started again."""
        if self.is_over:
            return False
        if group in self.coming_back:
            return True
        now_s = time.monotonic()
        up_s = now_s - self._up_since_s.pop(group, now_s)
        is_free = self._is_free or group in self.drained
        start = self.budget.spend(group, up_s, is_free=is_free, is_own=is_own)
        if start is None:
            return False
        self.drained.discard(group)
        self._takes_spares[group] = start.takes_spares
        self.coming_back.add(group)
        self.not_admitted.add(group)
        self.timers.after(start.delay_s, lambda: self._unless_held(group))
        return True

    def hold(self) -> None:
        """Starts no group until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Starts the groups that were held meanwhile."""
        self._is_held, held, self._held = False, self._held, set()
        for group in sorted(held):
            self._unless_held(group)

    def _unless_held(self, group: GroupId) -> None:
        if self._is_held:
            self._held.add(group)
        else:
            (self.start if group in self.whole_groups else self.wait_for_parts)(group)

    def start(self, group: GroupId) -> None:
        """Starts the group, unless the run is over."""
        self.coming_back.discard(group)
        if not self.is_over:
            self._ended.discard(group)
            self.start_ranks(group, self._takes_spares[group])

    @property
    def awaits_other_nodes(self) -> bool:
        """Whether some group cannot come back before other nodes are ready, or before an examination has passed."""
        return self._is_held or not self.coming_back <= self.whole_groups
