"""Evidence that a group is lost, and the fence that follows from it.

The supervisor sees a dead child; a rank sees a reset socket inside its own group. Each writes the same fence, so it
does not matter who is first. A reset socket between groups names nobody: the attempt fails, and the fence tells why.
"""

import re

from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.core.messages import Fence, decode_entry, encode_entry
from spare_megatron.core.topology import Member

_CONNECTION_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|"
    r"timed out waiting|remote process exited",
    re.IGNORECASE,
)


def is_connection_error(error: RuntimeError) -> bool:
    """Whether a collective or a transfer failed because a peer is gone, rather than by a fault of its own.

    gloo and NCCL raise RuntimeError for both, and only the text tells.
    """
    return _CONNECTION_ERROR.search(str(error)) is not None


def fence(log: DecisionLog, member: Member, reason: str, from_index: int, error: str = "") -> int:
    """Makes sure that the log fences the member; returns the index of the entry that does.

    Args:
        log: The log.
        member: The lost group, in the incarnation that was lost.
        reason: For people.
        from_index: An index at or before the head; entries from there on are read.
        error: The last line of the exception that ended it, if that was its own.
    """
    text = encode_entry(
        Fence(group=member.group, incarnation=member.incarnation, reason=reason[:200], error=error[:200])
    )
    index = from_index
    while True:
        standing = decode_entry(log.append(index, text))
        if isinstance(standing, Fence) and standing.hits(member):
            return index
        index += 1
