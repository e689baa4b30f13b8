"""What one group says of one attempt, in the form in which it crosses ranks."""

import json
from dataclasses import asdict, dataclass

from spare_megatron.core.saves import SaveEnd
from spare_megatron.core.topology import SliceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one group says of one attempt, once.

    Attributes:
        is_complete: Every rank of the group holds the whole cross-group sum of this attempt.
        plan_digest: Digest of all the work the group believes the step consists of.
        params_digest: Digest of the group's parameters before this step, where they were compared; else empty.
        num_complete: For each rank of the group, the buckets whose sums it holds, from the first on; none if empty.
        lacks_params: The group could not gather the parameters of this step, has computed nothing, and reduces nothing.
        restored: Slices of which the group has a whole copy, of the state before this step, that a repair has asked it
            for. It says so in every vote until the log has it: a commit makes it a host of them.
        save_ends: Saves of the group that have ended; it says so, too, until a commit has it.
    """

    is_complete: bool
    plan_digest: str
    params_digest: str = ""
    num_complete: tuple[int, ...] = ()
    lacks_params: bool = False
    restored: tuple[SliceId, ...] = ()
    save_ends: tuple[SaveEnd, ...] = ()


def encode_vote(vote: Vote) -> str:
    return json.dumps(asdict(vote), sort_keys=True)


def decode_vote(text: str) -> Vote:
    fields = json.loads(text)
    for name in ("num_complete", "restored"):  # JSON knows no tuples
        fields[name] = tuple(fields[name])
    fields["save_ends"] = tuple(SaveEnd(*end) for end in fields["save_ends"])
    return Vote(**fields)
