"""Controllers as tests drive them: begun, asked to decide on votes, and given what the log has."""

from collections.abc import Iterable, Mapping
from typing import Any

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import AppendEntry
from spare_megatron.core.log.entries import Entry, Fence
from spare_megatron.core.log.events import EntryRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement


def setup_with(num_groups: int = 4, redundancy: int = 3, m: int = 4, steps: int = 3, **others: Any) -> ControllerSetup:
    """Of groups on a ring, of which each shard has `m` microbatches."""
    placement = make_placement("golomb", num_groups, redundancy)
    return ControllerSetup(placement=placement, microbatches_per_shard=m, num_steps=steps, **others)


def begun_with(setup: ControllerSetup) -> Controller:
    """That of a run which has begun its first step."""
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def begun(**setup: Any) -> Controller:
    return begun_with(setup_with(**setup))


def members(*groups: int) -> tuple[Member, ...]:
    """These groups in their first incarnation."""
    return tuple(Member(GroupId(group)) for group in groups)


def fence(group: int, incarnation: int = 0) -> Fence:
    return Fence(group=GroupId(group), incarnation=incarnation)


def fold(controller: Controller, *entries: Entry) -> list[Any]:
    """The actions of the last of some entries."""
    actions: list[Any] = []
    for entry in entries:
        actions = list(controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0))
    return actions


def decided(controller: Controller, votes: Mapping[GroupId, Vote]) -> Any:
    """The entry that follows from these votes on the attempt under way."""
    [append] = controller.handle(VotesRead(attempt=controller.attempt, votes=votes), now_s=0.0)
    assert isinstance(append, AppendEntry)
    assert append.index == controller.head
    return append.entry


def of_type(actions: Iterable[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]
