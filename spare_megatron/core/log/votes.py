"""A group's vote on an attempt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.core.audits.audits import Dispute, MicrobatchDigest
from spare_megatron.core.audits.suspects import Named
from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.core.log.loss_sums import SetSum
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import Ownership


class PartitionDigest(NamedTuple):
    """A host's digest, over all ranks, of a partition's parameters and state; an unproven one repeats its donor's."""

    partition: PartitionId
    value: str
    is_proven: bool = True


class Held(NamedTuple):
    """A complete copy of a rank position (rank inside its group) in some node's memory."""

    attempt: int
    """Of the commit whose state it is; names the snapshot uniquely."""
    position: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of the state before a step, where it is compared; otherwise empty."""

    params: str = ""
    partitions: tuple[PartitionDigest, ...] = ()
    state: str = ""
    """Without partitions, all other state."""
    copied_from: GroupId | None = None
    """The donor whose state, and so digests, the group has taken over since the last commit."""


class RoundResult(NamedTuple):
    """As in `Synced`."""

    round: int = 0
    sites: tuple[int, ...] = ()
    digest: str = ""


WRONG_NUMBERS = "own checks found wrong numbers"
"""The `error` of a group's fence for that; so begin a Halt for several such groups, and the evidence in their votes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The vote of one group on one attempt, cast once. For digests see `Digests`."""

    is_complete: bool
    """Every rank of the group holds the whole cross-group sum of this attempt; in an evaluation, the group has computed
    its part."""
    plan_digest: str
    """Digest of all the work of the step in the group's view."""
    params_digest: str = ""
    num_complete: tuple[int, ...] = ()
    """For each position of a slab, the number of leading buckets whose sums the group holds; may be empty."""
    lacks_params: bool = False
    """The group could not gather the parameters of this step, has computed nothing, and reduces nothing."""
    restored: tuple[PartitionId, ...] = ()
    """Partitions of which the group has completed a requested copy; repeated until a commit makes it a host."""
    save_ends: tuple[SaveEnd, ...] = ()
    """Saves of the group that have ended; repeated until a commit includes them."""
    partition_digests: tuple[PartitionDigest, ...] = ()
    state_digest: str = ""
    copied_from: GroupId | None = None
    sums: tuple[SetSum, ...] = ()
    """In an evaluation, of each validation set over all microbatches that the group has computed."""
    pace_ns: int = 0
    """Nanoseconds per microbatch of the group's slowest rank in the step so far, waits for other stages and for data
    excluded; 0 if unknown."""
    leaves: bool = False
    """The group is asked to leave the run; repeated until a commit drains it, or it is asked no more."""
    ends: bool = False
    """A rank of the group is asked to end the run: the commit of this attempt is the last."""
    failure: str = ""
    """Which resource of its own the group lacked for the sums, so that it could not take part; for people."""
    has_wrong_sum: bool = False
    """A sum over groups that has come to the group contradicts its checksum: nothing of the attempt may stay."""
    audits: tuple[MicrobatchDigest, ...] = ()
    """Of the audited microbatches that the group has computed in the step, its own and others'."""
    losses: tuple[MicrobatchDigest, ...] = ()
    """Digests of losses: suspect ones that the group has counted in the step, and those that it was asked about."""
    wrong_positions: tuple[int, ...] = ()
    """As in `Fence`: those whose ranks have found numbers of their own wrong since the step began."""
    wrong_numbers: str = ""
    """What the first of these ranks has found; empty if none has."""
    held: tuple[Held, ...] = ()
    """Where the attempt is about an undo, the snapshots that the nodes of the group have intact."""
    sync: bool = False
    """A round with other sites is due after this step, or another site has opened one."""
    synced: RoundResult | None = None
    """Where the attempt is about such a round: what it came to. The digest of state is that of the result."""


HostDigests = dict[PartitionId, dict[GroupId, PartitionDigest]]
"""Digests of the hosts of each state partition."""


def host_digests(votes: Mapping[GroupId, Vote]) -> HostDigests:
    found: HostDigests = {}
    for group, vote in votes.items():
        for digest in vote.partition_digests:
            found.setdefault(digest.partition, {})[group] = digest
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The attempt to decide, as of the latest log entry, with remaining members and all voters, including lost ones.

    A discarded sum (a group with wrong state contributed) is never committed. If all steps are committed and evaluated,
    the attempt decides whether the run can end.
    """

    step: int
    attempt: int
    members: tuple[GroupId, ...]
    voters: tuple[Member, ...]
    is_discarded: bool
    is_over: bool
    is_evaluation: bool = False
    is_sync: bool = False
    """It is about a round with other sites."""
    ownership: Ownership | None = None
    wrong_sums: tuple[GroupId, ...] = ()
    """The groups that found wrong sums in the attempt before."""
    failed: frozenset[GroupId] = frozenset()
    """The groups that were themselves the cause of earlier failures in this step."""
    disputes: tuple[Dispute, ...] = ()
    """About microbatches that this attempt has had computed again."""
    questioned: frozenset[Named] = frozenset()
    """Suspects of the step that a question has been about, and the groups that it has named."""
    may_question: bool = False
    """Whether suspects may be computed again before the commit."""
    hosts: Sequence[Sequence[GroupId]] | None = None
    """Of each shard; None if every group can read all data."""

    @property
    def is_shared(self) -> bool:
        """Whether groups get most parameters from others, so that all may have the same wrong value."""
        return self.ownership is not None
