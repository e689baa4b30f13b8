"""What votes confirm of the state that one of them reports."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from spare_megatron.core.log.votes import PartitionDigest, Vote

Voter = TypeVar("Voter")


def has_majority(digests: Mapping[Voter, str], members: Collection[Voter]) -> bool:
    """Whether most agree, given what all members say and, of the lost ones, at most these."""
    [(digest, num_agreeing)] = Counter(digests.values()).most_common(1) or [("", 0)]
    num_seen = sum(voter in members for voter, other in digests.items() if other == digest)
    return num_seen > len(digests) - num_agreeing


def is_unconfirmed(own: Vote, votes: Sequence[Vote], most_hosts: int) -> bool:
    """Whether these votes leave open if the state that one of them reports is right."""
    reported: dict[int, list[PartitionDigest]] = {}
    for digest in (digest for vote in votes for digest in vote.partition_digests):
        reported.setdefault(digest.partition, []).append(digest)
    for digest in own.partition_digests:
        of_partition = reported[digest.partition]
        num_right = sum(one.is_proven and one.value == digest.value for one in of_partition)
        if len({one.value for one in of_partition}) > 1 and 2 * num_right <= min(len(of_partition), most_hosts):
            return True
    return min(map(len, reported.values()), default=2) == 1 and len({vote.params_digest for vote in votes} - {""}) > 1
