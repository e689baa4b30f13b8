"""A group that reads the log in a new incarnation, and the clock that it goes on with."""

import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ControlConfig
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.restart import RestartLimits
from spare_megatron.core.log.actions import AppendEntry, LoadCheckpoint
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart
from spare_megatron.core.log.events import VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.rank.bootstrap import longest_wait_s
from spare_megatron.rank.rejoin import Rejoin
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from tests.rank_context import rank_context

GROUPS = (GroupId(0), GroupId(1))
RESTART_S = 1000.0
"""What the restart has taken so far."""


class Agreement:
    """Of one of a group's ranks that has the log before it."""

    def __init__(self, member: Member, entries: Sequence[Entry]) -> None:
        self.member = member
        self.is_leader = False
        self._entries = list(entries)

    def is_at_end(self, index: int) -> bool:
        return index >= len(self._entries)

    def read_entries(self, index: int) -> list[Entry]:
        return self._entries[index : index + 1]


@pytest.mark.parametrize(("interval_s", "is_due"), [(RESTART_S / 2, False), (0.0, True)])
def test_a_restart_is_no_time_without_a_save(interval_s: float, *, is_due: bool) -> None:
    """It was: the first step after each restart that took as long as an interval was saved, for nothing."""
    again = tuple(Member(group, 1) for group in GROUPS)
    log = [
        Commit(step=0, attempt=0, at_s=10.0),
        Fence(group=GroupId(0)),
        Restart(step=0, members=again),
    ]
    controller = Controller(
        ControllerSetup(
            placement=make_placement("golomb", 2, 1),
            microbatches_per_shard=1,
            num_steps=100,
            saves=SavePolicy(interval_s=interval_s),
            restarts=RestartLimits(max_restarts=1, window_s=1e6, wait_s=1.0),
        )
    )
    wiped_out_at_s = time.monotonic() - RESTART_S
    restart_loader: Any = SimpleNamespace(now_s=lambda: wiped_out_at_s, on_wipe_out=lambda: None)
    nothing: Any = None
    num_turns = 0

    def progress() -> None:
        nonlocal num_turns
        num_turns += 1

    probe: Any = SimpleNamespace(progress=progress)
    agreement: Any = Agreement(again[1], log)
    ctx = rank_context(again[1], controller=controller, agreement=agreement, probe=probe)
    first = Rejoin(ctx, restart_loader=restart_loader, announced=nothing, paused=nothing).run()
    assert isinstance(first, deque)
    assert isinstance(first[0], LoadCheckpoint)
    assert num_turns == 2  # who has much to read does not hang
    votes = dict.fromkeys(GROUPS, Vote(is_complete=True, plan_digest="p"))
    [decided] = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=time.monotonic())
    assert isinstance(decided, AppendEntry)
    assert isinstance(decided.entry, Commit)
    assert decided.entry.save == is_due
    assert decided.entry.at_s >= 10.0 + RESTART_S


@pytest.mark.parametrize(("startup_s", "decision_s"), [(3600.0, 600.0), (300.0, 600.0)])
def test_ranks_wait_longer_than_their_leader_for_whatever_it_waits(startup_s: float, decision_s: float) -> None:
    """Who gave the start more time than a decision, as the message advises, lost all groups but for their leaders."""
    control = ControlConfig(startup_timeout_s=startup_s, decision_timeout_s=decision_s)
    assert longest_wait_s(control) > max(startup_s, decision_s)
