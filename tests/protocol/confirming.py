"""What votes confirm of the state that one of them tells of."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from spare_megatron.core.votes import PartitionDigest, Vote

Life = TypeVar("Life")


def has_majority(digests: Mapping[Life, str], members: Collection[Life]) -> bool:
    """Whether most agree, for whoever has seen what all members say, and of those that were lost at most these."""
    [(digest, num_agreeing)] = Counter(digests.values()).most_common(1) or [("", 0)]
    num_seen = sum(life in members for life, other in digests.items() if other == digest)
    return num_seen > len(digests) - num_agreeing


def is_unconfirmed(own: Vote, votes: Sequence[Vote], most_hosts: int) -> bool:
    """Whether these votes leave open if the state that one of them tells of is right."""
    told: dict[int, list[PartitionDigest]] = {}
    for digest in (digest for vote in votes for digest in vote.slice_digests):
        told.setdefault(digest.partition, []).append(digest)
    for digest in own.slice_digests:
        of_slice = told[digest.partition]
        num_right = sum(one.is_proven and one.sha256 == digest.sha256 for one in of_slice)
        if len({one.sha256 for one in of_slice}) > 1 and 2 * num_right <= min(len(of_slice), most_hosts):
            return True
    return min(map(len, told.values()), default=2) == 1 and len({vote.params_digest for vote in votes} - {""}) > 1
