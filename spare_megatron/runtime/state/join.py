"""A group that is admitted has its state confirmed by others."""

import time
from collections.abc import Sequence

from spare_megatron.core.messages import AdmitGroups
from spare_megatron.core.phases import Phase
from spare_megatron.runtime.process.probe import RankProbe
from spare_megatron.runtime.vote.agreement import GroupAgreement

_POLL_S = 0.005


NO_DIGEST = "lacking"
"""What a group tells newcomers that lacks parameters itself: none will come."""


class JoinFailed(Exception):
    """The group was admitted and could not take the state over. It has nothing to go on with."""


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
        probe: Told that the rank is there while it waits, and of the end.

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
    probe(Phase.JOIN_DONE)


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
