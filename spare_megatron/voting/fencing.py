"""Recognizes errors that show a lost peer, and fences lost groups. A supervisor sees a dead child, a rank a reset
socket inside its group; both write the same fence. A reset socket between groups only fails the attempt.
"""

import re
from collections.abc import Callable

from spare_megatron.core.log.entries import Fence, decode_entry, encode_entry
from spare_megatron.stacking.layout import Member
from spare_megatron.store.decision_log import DecisionLog

_CONNECTION_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|"
    r"timed out waiting|remote process exited",
    re.IGNORECASE,
)

_NUM_RECENT = 64
"""Entries searched for an existing fence. A second fence loses nothing, but ends the reduction under way."""


def is_connection_error(error: Exception) -> bool:
    """Whether a collective failed because a peer is gone; gloo and NCCL raise RuntimeError for any fault."""
    return _CONNECTION_ERROR.search(str(error)) is not None


def fence(
    log: DecisionLog,
    member: Member,
    reason: str,
    from_index: int,
    error: str = "",
    on_entry: Callable[[], None] = lambda: None,
) -> int:
    """Makes sure that the log fences the member; returns the index of an entry that does. Only _NUM_RECENT existing
    entries are read: a member that is fenced twice is lost once. `from_index`: at or before the head, the closer the
    fewer reads. `error`: last line of the exception that ended the group, if it was its own. `on_entry` is called after
    each entry that another process wrote first.
    """
    text = encode_entry(
        Fence(group=member.group, incarnation=member.incarnation, reason=reason[:200], error=error[:200])
    )
    head = log.find_head(from_index)
    first = max(0, head - _NUM_RECENT)  # also before from_index, which may have come from a later commit
    for index, entry in enumerate(log.written(first, head), first):
        if fences(entry, member):
            return index
    while not fences(log.append(head, text), member):
        head += 1
        on_entry()
    return head


def fences(text: str, member: Member) -> bool:
    """Whether this is the text of a log entry that fences the member."""
    entry = decode_entry(text)
    return isinstance(entry, Fence) and entry.hits(member)
