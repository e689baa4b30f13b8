"""What one group says of one attempt, in the form in which it crosses ranks."""

import json
from dataclasses import dataclass, fields
from typing import NamedTuple

from spare_megatron.core.entries import SaveEnd
from spare_megatron.stacking.layout import GroupId, Member, SliceId
from spare_megatron.stacking.state_partitions import Ownership


class SliceDigest(NamedTuple):
    """What a host says of a slice: the parameters that it has computed, and all optimizer state.

    Attributes:
        slice: The slice.
        sha256: Over all ranks of the group. It is the same for all hosts of the slice.
        is_proven: The copy has been compared with those of all other hosts at once. One that was made since tells only
            what its donor has.
    """

    slice: SliceId
    sha256: str
    is_proven: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What a vote says of the state before a step, where that is compared; else empty.

    Attributes:
        params: Digest of all parameters of the group.
        slices: Of the state of each slice that the group hosts, ascending.
        state: Of all else that each group holds where there are no slices, the optimizer's moments above all: where
            state has been copied, or is the last of the run. What is wrong there shows in the parameters only after
            the next update.
        copied_from: The donor from which the group has taken its state over since the last commit: it tells what that
            one has, and nothing of its own.
    """

    params: str = ""
    slices: tuple[SliceDigest, ...] = ()
    state: str = ""
    copied_from: GroupId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one group says of one attempt, once.

    Attributes:
        is_complete: Every rank of the group holds the whole cross-group sum of this attempt.
        plan_digest: Digest of all the work the group believes the step consists of.
        params_digest: As in `Digests`.
        num_complete: For each rank of the group, the buckets whose sums it holds, from the first on; none if empty.
        lacks_params: The group could not gather the parameters of this step, has computed nothing, and reduces nothing.
        restored: Slices of which the group has a whole copy, of the state before this step, that a repair or a move has
            asked it for. It says so in every vote until the log has it: a commit makes it a host of them.
        save_ends: Saves of the group that have ended; it says so, too, until a commit has it.
        slice_digests: As in `Digests`.
        state_digest: As in `Digests`.
        copied_from: As in `Digests`.
    """

    is_complete: bool
    plan_digest: str
    params_digest: str = ""
    num_complete: tuple[int, ...] = ()
    lacks_params: bool = False
    restored: tuple[SliceId, ...] = ()
    save_ends: tuple[SaveEnd, ...] = ()
    slice_digests: tuple[SliceDigest, ...] = ()
    state_digest: str = ""
    copied_from: GroupId | None = None


_USUAL = {field.name: field.default for field in fields(Vote)}


def encode_vote(vote: Vote) -> str:
    """One line of JSON. What is as usual is left out.

    >>> encode_vote(Vote(is_complete=True, plan_digest="5d1e"))
    '{"is_complete": true, "plan_digest": "5d1e"}'
    """
    # `asdict` would take twice as long as all this.
    values = {name: getattr(vote, name) for name in _USUAL}
    return json.dumps({name: value for name, value in values.items() if value != _USUAL[name]})


def decode_vote(text: str) -> Vote:
    """The vote that `encode_vote` wrote."""
    values = json.loads(text)
    for name, of in (("save_ends", SaveEnd), ("slice_digests", SliceDigest)):  # JSON knows no tuples
        if name in values:
            values[name] = tuple(of(*one) for one in values[name])
    for name in ("num_complete", "restored"):
        if name in values:
            values[name] = tuple(values[name])
    return Vote(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The attempt that is decided by votes, as the log has it by now.

    Attributes:
        step: The step.
        attempt: The attempt.
        members: The groups that are left, ascending.
        voters: All that began the attempt, also those that were lost since.
        is_discarded: A group with wrong parameters contributed to it: the sum is never committed.
        is_over: All steps are committed; it decides whether the run can end.
        ownership: Who holds which slice, where there are any.
    """

    step: int
    attempt: int
    members: tuple[GroupId, ...]
    voters: tuple[Member, ...]
    is_discarded: bool
    is_over: bool
    ownership: Ownership | None = None

    @property
    def is_shared(self) -> bool:
        """Whether each group has most parameters from others: where one is wrong, all may have it."""
        return self.ownership is not None
