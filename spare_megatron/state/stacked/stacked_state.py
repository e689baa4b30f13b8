"""Stacked optimizer state on a rank: each partition lies on a few groups, others gather its parameters."""

from collections.abc import Callable
from dataclasses import replace

from spare_megatron.comm.bucket_exchange import Staging
from spare_megatron.core.log.actions import GatherParams, StartRepairs, TakeSnapshot, UpdateModel
from spare_megatron.core.log.votes import PartitionDigest, Vote
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.records import RedundancyRecord, RepairRecord
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.mcore.state import StateCopy
from spare_megatron.process.snapshot_wire import PartKey
from spare_megatron.stacking.layout import PartitionId
from spare_megatron.stacking.state_partitions import Hosts, hosted_by
from spare_megatron.state.optimizer_state import OptimizerState
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.stacked.params_gather import ParamsGather
from spare_megatron.state.stacked.partition_copier import PartitionRepairs, partition_contents
from spare_megatron.state.stacked.scattered_buckets import ScatteredBuckets, make_bucket_sums


class StackedState(OptimizerState):
    """Optimizer state of which the group hosts the partitions `hosted` at first."""

    is_gathered = True

    def __init__(
        self, ctx: RankContext, optimizer: StackedOptimizer, staging: Staging, hosted: tuple[PartitionId, ...]
    ) -> None:
        [communicator] = ctx.communicators
        super().__init__(ctx.trainer, [make_bucket_sums(ctx.member.group, ctx.trainer, communicator)])
        self._ctx = ctx
        self._optimizer = optimizer
        contents = partition_contents(optimizer)
        self.served = {content.name: content for content in contents}
        self._params_gather = ParamsGather(ctx, optimizer, staging)
        awaits_update = isinstance(self.bucket_sums[0], ScatteredBuckets)
        self._repairs = PartitionRepairs(ctx, optimizer, contents, awaits_update=awaits_update)
        self._repairs.run_in_background()
        self._hosted = frozenset(hosted)
        self._copying: frozenset[PartitionId] = frozenset()
        self._unproven: frozenset[PartitionId] = frozenset()  # copied, and not yet compared with all hosts
        self._moving: frozenset[PartitionId] = frozenset()  # to this group
        self._journaled: frozenset[PartitionId] = frozenset()

    # ---------------------------------------------------------------------------------------------------------- copies

    def gather(self, action: GatherParams) -> None:
        self._params_gather.run(action)

    def start_repairs(self, action: StartRepairs) -> None:
        member = self._ctx.member
        hosted = frozenset(hosted_by(action.hosts, member))
        # State that is hosted anew without a copy begins here, at the start or from a checkpoint.
        self._unproven = (self._unproven | (hosted - self._hosted) & self._copying) & hosted
        self._hosted = hosted
        self._copying = frozenset(copy.partition for copy in action.copies if copy.receiver == member)
        self._repairs.assign(action)
        self._journaled &= frozenset(self._repairs.whole())
        self._moving = frozenset(move.partition for move in action.moves if move.receiver == member)
        record = RedundancyRecord(
            group=member.group, step=self._repairs.step, num_missing=len(action.repairs), num_hosted=len(hosted)
        )
        self._ctx.write_if_leader(record)

    def on_commit(self, action: UpdateModel) -> None:
        self._unproven -= {copy.partition for copy in action.proven if copy.member == self._ctx.member}

    def with_copies(self, vote: Vote) -> Vote:
        """The copies are those that are whole on all ranks of the group. Collective over these."""
        here = self._repairs.whole()
        if not here:
            return vote
        with self._ctx.probe.during(Operation.SETTLE):
            everywhere = self._ctx.agreement.shared(list(here.values()))
        restored = tuple(number for number, is_whole in zip(here, everywhere, strict=True) if is_whole)
        for number in restored:
            if number not in self._journaled:
                self._write(number)
        self._journaled = frozenset(restored)
        return replace(vote, restored=restored)

    def _write(self, number: PartitionId) -> None:
        repair, repair_s = self._repairs.made(number)
        record = RepairRecord(
            group=self._ctx.member.group,
            step=self._repairs.step,
            slice=number,
            donor=repair.donor.group,
            is_move=number in self._moving,
            num_bytes=self._repairs.num_bytes(number),
            repair_s=round(repair_s, 6),
        )
        self._ctx.write_if_leader(record)

    # --------------------------------------------------------------------------------------------------------- digests

    def digests(self) -> list[TensorsDigest]:
        return [self._optimizer.state_digest(number) for number in sorted(self._hosted)]

    def reported(self, digests: list[str]) -> tuple[PartitionDigest, ...]:
        return tuple(
            PartitionDigest(number, digest, number not in self._unproven)
            for number, digest in zip(sorted(self._hosted), digests, strict=True)
        )

    def digest_of_rest(self) -> None:
        return None

    def digests_by_name(self) -> dict[str, str]:
        optimizer = self._optimizer
        return {str(number): optimizer.state_digest(number).hexdigest() for number in optimizer.hosted}

    # ------------------------------------------------------------------------------------------------------- snapshots

    def snapshot_parts(self, action: TakeSnapshot) -> dict[PartKey, StateCopy]:
        group = self._ctx.member.group
        kept = [PartitionId(number) for number, holders in enumerate(action.partition_holders) if group in holders]
        return {number: self._ctx.trainer.partition_copy(number) for number in kept}

    def load(self, hosts: Hosts, load_part: Callable[[PartKey, TensorBytes], None]) -> None:
        states = {number: self._optimizer.empty_state(number) for number in hosted_by(hosts, self._ctx.member)}
        for number, state in states.items():
            load_part(number, TensorBytes([state]))
        self._optimizer.install_partitions(states)
