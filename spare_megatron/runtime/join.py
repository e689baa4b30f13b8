"""A group that comes back: it catches up with the log, waits to be admitted, and has its state confirmed by others."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from spare_megatron.core.controller import Controller
from spare_megatron.core.messages import Action, AdmitGroups, EntryRead, Fence, RunStarted
from spare_megatron.runtime.agreement import Fenced, GroupAgreement
from spare_megatron.runtime.fold import Stop
from spare_megatron.runtime.probe import RankProbe

_POLL_S = 0.005


class JoinFailed(Exception):
    """The group was admitted and could not take the state over. It has nothing to go on with."""


def catch_up(controller: Controller, agreement: GroupAgreement, announced: Callable[[], None]) -> deque[Action] | Stop:
    """Folds the log from its first entry until an entry admits this group, and carries nothing out.

    Collective over: all ranks of the group.

    Args:
        controller: A new one.
        agreement: The group's voice.
        announced: Called when the group has asked to be admitted.

    Returns:
        What there is to do from its admission on, that first; or how the run ends before.

    Raises:
        Fenced: The group was found lost while it waited.
    """
    controller.handle(RunStarted(), now_s=0.0)
    has_announced = False
    while True:
        if not has_announced and agreement.is_at_end(controller.head):
            agreement.announce()
            announced()
            has_announced = True
        index = controller.head
        entry = agreement.read_entry(index)
        if isinstance(entry, Fence) and entry.hits(agreement.member):
            raise Fenced(f"{agreement.member} is fenced by log entry {index} before it was admitted: {entry.reason}")
        actions = controller.handle(EntryRead(index=index, entry=entry), now_s=0.0)
        for number, action in enumerate(actions):
            if isinstance(action, Stop):
                return action
            if isinstance(action, AdmitGroups) and agreement.member in action.members:
                return deque(actions[number:])


def confirm(
    digest: str, action: AdmitGroups, head: int, agreement: GroupAgreement, timeout_s: float, probe: RankProbe
) -> None:
    """Makes sure that more than half of those who took part before hold the parameters that were taken over.

    Otherwise the copy of a wrong state could outvote the right ones in the next comparison. Whoever has been lost
    since the admission has no say: it may never tell.

    Args:
        digest: Of the parameters taken over.
        action: The admission.
        head: Entries of the log folded so far, that of the admission the last.
        agreement: The group's voice.
        timeout_s: Longest wait for the others.
        probe: Told that the rank is there while it waits.

    Raises:
        JoinFailed: They do not, or have not said so in time.
    """
    end_s = time.monotonic() + timeout_s
    while (verdict := majority_holds(digest, _told(action, head, agreement))) is None:
        if time.monotonic() > end_s:
            raise JoinFailed(f"too few groups have told their parameters within {timeout_s:g} s")
        time.sleep(_POLL_S)
        probe.progress()
    if not verdict:
        raise JoinFailed("the state that was taken over is not that of the other groups")


def _told(action: AdmitGroups, head: int, agreement: GroupAgreement) -> list[str | None]:
    """What those have told so far who took part before and still do."""
    left = [member.group for member in action.earlier if not agreement.is_lost(member, head)]
    return agreement.digests(head - 1, left)


def majority_holds(digest: str, others: Sequence[str | None]) -> bool | None:
    """Whether more than half of the others hold the same parameters; None while too few have said so.

    >>> [majority_holds("a", others) for others in (["a", None, "a"], ["a", None, "b"], ["b", "b", None])]
    [True, None, False]
    """
    same = sum(other == digest for other in others)
    different = sum(other is not None and other != digest for other in others)
    if 2 * same > len(others):
        return True
    return False if 2 * different >= len(others) else None
