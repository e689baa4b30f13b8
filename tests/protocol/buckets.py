"""The gradients of one process: of each bucket its local sum, or the sum over groups in its place.

It holds what `mcore.gradients.gradients` and `rank.reduction` hold, and notices when one is taken for the other.
"""

from collections.abc import Collection, Iterable, Sequence
from random import Random

from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.core.log.bucket_window import BucketWindow
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import recipients
from tests.protocol.communicators import Sums
from tests.protocol.violation import Violation

UNSOUND = Microbatch(ShardId(-1), -1)
"""Stands in a local sum that is not finite: no batch has it, so no sum with it may be applied."""

FLIPPED = Microbatch(ShardId(-2), -1)
"""Stands in a sum over groups that has changed since it was staged, which its checksum shows."""

Recipients = Sequence[Collection[int]]
"""For each state partition, the groups that get the sums of its gradients; empty without partitions."""


def recipients_of(action: AttemptReduce) -> Recipients:
    """Sums go to those alone who need them."""
    return () if action.ownership is None else recipients(action.ownership)


class Buckets:
    """The buckets of one process.

    Args:
        name: The process.
        num_buckets: How many there are.
        window_type: The window under test.
    """

    def __init__(self, name: str, num_buckets: int, window_type: type[BucketWindow]) -> None:
        self._name = name
        self._window_type = window_type
        self.num_buckets = num_buckets
        self._local: list[list[Microbatch]] = []
        self._staged: dict[int, Sums] = {}
        self._in_place: dict[int, Sums] = {}
        self._attempt = -1
        self._num_kept = 0
        self._recipients: Recipients = ()
        self._came_to: dict[int, Recipients] = {}
        self.window = window_type(num_buckets, 0)
        self.has_posted_unsound = False
        """Whether it has posted an unsound local sum in this attempt; it finds out when the attempt is over."""
        self.has_wrong_sum = False
        """Whether a sum that has come in this attempt contradicts its checksum."""
        self._flips = ""  # what is flipped next

    def flip(self, what: str) -> None:
        """What is "sent" next changes on its way, or the next sum "received", or every one from here on ("always")."""
        self._flips = what

    def spoil(self, random: Random) -> bool:
        """Some local sum that is still to be posted becomes unsound. False if there is none."""
        left = range(self.window.num_posted, len(self._local))
        if left:
            self._local[random.choice(left)].append(UNSOUND)
        return bool(left)

    def compute(self, work: Iterable[Microbatch]) -> None:
        """From zero sums."""
        items = list(work)
        self._local = [list(items) for _ in range(self.num_buckets)]
        self._staged, self._in_place = {}, {}
        self._num_kept = 0
        self.has_posted_unsound = self.has_wrong_sum = False
        self.window = self._window_type(self.num_buckets, 0)

    def begin(self, attempt: int, kept: tuple[int, ...], to: Recipients) -> None:
        """Before the patch of an attempt, and before the attempt, whose sums come to these.

        Raises:
            Violation: It does not hold what is kept.
        """
        if attempt == self._attempt:
            return
        self._attempt, self._num_kept, self._recipients = attempt, sum(kept), to
        if self._num_kept > self.window.num_complete:
            raise Violation(f"{self._name} is to keep {kept} buckets and holds {self.window.num_complete}")
        for bucket in range(self._num_kept):
            self._put(bucket)
        self._staged = {}
        self.has_posted_unsound = self.has_wrong_sum = False
        self.window = self._window_type(self.num_buckets, self._num_kept)

    def patch(self, work: Iterable[Microbatch]) -> None:
        """Adds to what is not kept."""
        items = list(work)
        for local in self._local[self._num_kept :]:
            local += items

    def post(self) -> tuple[int, tuple[Microbatch, ...]]:
        """The next bucket and its local sum.

        Raises:
            Violation: A sum over groups stands in its place.
        """
        bucket = self.window.post()
        if bucket in self._in_place:
            raise Violation(f"{self._name} has lost its local sum of bucket {bucket}, which is reduced again")
        self.has_posted_unsound |= UNSOUND in self._local[bucket]
        return bucket, (*self._local[bucket], *self._flip("sent"))

    def receive(self, sums: Sums) -> bool:
        """The sum of the first bucket in flight has come. False if it has an unsound part: the attempt is over."""
        is_sound = not any(UNSOUND in brought for brought in sums.values())
        if is_sound:
            arrived = {**sums, self._name: (*sums[self._name], *self._flip("received"))}
            self.has_wrong_sum |= self.is_wrong(arrived)
            self.complete(arrived)
        return is_sound

    def is_wrong(self, sums: Sums) -> bool:
        return any(FLIPPED in brought for brought in sums.values())

    def _flip(self, what: str) -> tuple[Microbatch, ...]:
        is_always = self._flips == "always" and what == "received"
        if self._flips != what and not is_always:
            return ()
        self._flips = self._flips if is_always else ""
        return (FLIPPED,)

    def complete(self, sums: Sums) -> None:
        """Counts the sum of the first bucket in flight."""
        self._staged[self.window.num_complete] = sums
        self._came_to[self.window.num_complete] = self._recipients
        for bucket in self.window.complete():
            self._put(bucket)

    def lacks(self, group: int, index: int) -> bool:
        """Whether some sums of a partition's gradients have not come to this group, whatever else it has."""
        return any(group not in self._came_to[bucket][index] for bucket in range(self.num_buckets))

    def sums(self) -> list[Sums] | None:
        """The sums over groups of all buckets; None if some have not come."""
        if not self.window.is_complete:
            return None
        return [(self._in_place | self._staged)[bucket] for bucket in range(self.num_buckets)]

    def _put(self, bucket: int) -> None:
        if bucket in self._staged:
            self._in_place[bucket] = self._staged.pop(bucket)
