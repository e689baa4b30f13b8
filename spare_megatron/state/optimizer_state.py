"""The optimizer state of a rank behind one interface: the same in every group, or stacked (`state.stacked`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from spare_megatron.comm.bucket_exchange import BucketSums
from spare_megatron.core.log.actions import GatherParams, StartRepairs, TakeSnapshot, UpdateModel
from spare_megatron.core.log.votes import PartitionDigest, Vote
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.state import StateCopy
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.snapshot_wire import PartKey
from spare_megatron.stacking.state_partitions import Hosts


class Content(Protocol):
    """State that is read in pieces."""

    num_bytes: int

    def read(self, piece: Piece) -> bytes | memoryview:
        """The bytes of the piece, until the thread's next call. Raises `NotOffered` if they are not here now."""


class OptimizerState:
    """The optimizer state of a rank where every group holds all of it; `state.stacked` overrides what differs.
    `is_gathered`: an update leaves some parameters lacking until `gather`. `served`: what other groups may read after
    every update. `bucket_sums`: of the slabs, in layer order.
    """

    is_gathered = False
    served: Mapping[str, Content] = {}

    def __init__(self, trainer: GroupTrainer, bucket_sums: Sequence[BucketSums]) -> None:
        self._trainer = trainer
        self.bucket_sums = bucket_sums

    def gather(self, action: GatherParams) -> None:
        """Gathers lacking parameters. Collective over: rank j of every member group, all ranks of the group."""
        raise AssertionError(f"no parameters are lacking: {action}")

    def start_repairs(self, action: StartRepairs) -> None:
        """Starts the copies that the group is to make, which are all that it makes from here on."""
        raise AssertionError(f"no group lacks a copy: {action}")

    def on_commit(self, action: UpdateModel) -> None:
        """A commit says which copies have been compared."""

    def with_copies(self, vote: Vote) -> Vote:
        """The vote with the copies that are whole. Collective over: all ranks of the group."""
        return vote

    def digests(self) -> list[TensorsDigest]:
        """Of the rank's parts of what some groups hold alone, in the order that `reported` takes."""
        return []

    def reported(self, digests: list[str]) -> tuple[PartitionDigest, ...]:
        """These digests, combined over the group's ranks, as votes report them."""
        assert not digests, "every group holds all state"
        return ()

    def digest_of_rest(self) -> dict[int, TensorsDigest] | None:
        """Digest of all state beside parameters, by position; None if groups differ in it."""
        return self._trainer.by_position(self._trainer.rest_of_state)

    def digests_by_name(self) -> dict[str, str]:
        """Hex digests of the parts that some groups hold alone, for an emergency checkpoint."""
        return {}

    def snapshot_parts(self, action: TakeSnapshot) -> dict[PartKey, StateCopy]:  # noqa: ARG002  (there are none)
        """The parts that some groups hold alone and this one is to keep."""
        return {}

    def load(self, hosts: Hosts, load_part: Callable[[PartKey, TensorBytes], None]) -> None:
        """Loads the parts that some groups hold alone, each by `load_part`."""
