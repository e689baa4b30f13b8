"""What a rank is asked to do with snapshots of state partitions: it holds a trainer of every group, on one node."""

import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from spare_megatron.comm.bucket_exchange import Staging
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import TakeSnapshot
from spare_megatron.core.log.events import HeldPartition
from spare_megatron.core.log.votes import Held
from spare_megatron.journal.records import SnapshotRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.snapshot_wire import HeldSnapshots
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.state.rank_context import RankContext, RankProgress
from spare_megatron.state.snapshot.mapped_files import MappedFile, MappedFiles
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.state.stacked.stacked_state import StackedState
from tests.integration import stacked_groups as groups
from tests.integration.mcore_group import CPU
from tests.integration.stacked_checkpoint_groups import digest
from tests.rank_context import rank_context

ATTEMPT = 7


class KeptHere:
    """The snapshot server of rank 0, without a process."""

    def __init__(self) -> None:
        self.kept: dict[PartitionId | None, mmap.mmap] = {}
        self.mapped = MappedFiles(None)

    def copy(
        self,
        attempt: int,
        kept: tuple[int, ...],
        num_bytes: Mapping[PartitionId | None, int],
        write: Callable[[Sequence[MappedFile]], None],
    ) -> None:
        memories = {number: mmap.mmap(-1, size) for number, size in num_bytes.items()}
        write([MappedFile(memory, (0, index)) for index, memory in enumerate(memories.values())])
        self.kept |= memories

    def memory(self, attempt: int, number: PartitionId | None) -> mmap.mmap:
        return self.kept[number]

    def list_intact(self, host: str) -> HeldSnapshots:
        digests = {number: hashlib.sha256(memory).hexdigest() for number, memory in self.kept.items()}
        rest = digests.pop(None)
        partitions = tuple(
            HeldPartition(ATTEMPT, number, sha256) for number, sha256 in digests.items() if number is not None
        )
        return HeldSnapshots(held=(Held(ATTEMPT, 0, rest),), partitions=partitions, damaged=(), server="nowhere")


def go_on_from_memory(config: RunConfig, before: int, after: int) -> tuple[list[Any], list[SnapshotRecord]]:
    """Trains and takes a snapshot after some steps; goes on, and goes on from the snapshot with groups that are new.

    Returns losses and digests of the parameters of both; and how the copies of each group ended.
    """
    trainers, hosts = groups.build_groups(config), groups.first_hosts(config)
    train(trainers, config, range(before - 1))
    snapshot_server = KeptHere()
    records = take_late(snapshot_server, trainers, config, before - 1)
    later = range(before, before + after)
    answers = [train(trainers, config, later)]
    again = [GroupTrainer(config, CPU) for _ in trainers]
    for group, trainer in enumerate(again):
        loader = loader_of(snapshot_server, trainer, GroupId(group))
        loader.announce_intact()
        loader.load(ATTEMPT, [[Member(host, 1) for host in row] for row in hosts.hosts], ())
    answers.append(train(again, config, later))
    groups.assert_alike_on_hosts(again, hosts.hosts)
    return answers, records


def train(trainers: Sequence[GroupTrainer], config: RunConfig, steps: range) -> tuple[list[float], set[str]]:
    losses = []
    for step in steps:
        losses.append(update(trainers, config, step))
        groups.gather(trainers, owners(config))
    return losses, {digest(trainer) for trainer in trainers}


def update(trainers: Sequence[GroupTrainer], config: RunConfig, step: int) -> float:
    total, loss = groups.summed(trainers, config, step)
    (loss,) = {groups.updated(trainer, total, loss).loss for trainer in trainers}
    return loss


def owners(config: RunConfig) -> list[GroupId]:
    return [row[-1] for row in groups.first_hosts(config).hosts]


def take_late(
    snapshot_server: KeptHere, trainers: Sequence[GroupTrainer], config: RunConfig, step: int
) -> list[SnapshotRecord]:
    """A step after which a snapshot is taken, which groups read of before they have all parameters.

    The first group keeps all but partitions; each partition is kept by its owner.
    """
    update(trainers, config, step)
    progress, server = RankProgress(lacks_params=True), cast(SnapshotClient, snapshot_server)
    snapshotters = [
        Snapshotter(stacked_context(Member(GroupId(group)), trainer=trainer, progress=progress), server)
        for group, trainer in enumerate(trainers)
    ]
    action = TakeSnapshot(
        step=step + 1,
        attempt=ATTEMPT,
        kept=(),
        settled_by=step + 2,
        holders=((GroupId(0),),),
        partition_holders=tuple((owner,) for owner in owners(config)),
    )
    for snapshotter in snapshotters:
        snapshotter.start_copy(action)
        snapshotter.await_copy(step + 1)
    assert snapshot_server.kept == {}
    groups.gather(trainers, owners(config))
    progress.lacks_params = False
    for snapshotter in snapshotters:
        snapshotter.start_postponed()
        snapshotter.await_copy(step + 2)
    return [record for snapshotter in snapshotters for record in snapshotter.take_finished()]


def stacked_context(member: Member, **parts: Any) -> RankContext:
    ctx = rank_context(member, communicators=[None], **parts)
    ctx.optimizer_state = StackedState(ctx, groups.stacked(ctx.trainer), cast(Staging, None), ())
    return ctx


def loader_of(snapshot_server: KeptHere, trainer: GroupTrainer, group: GroupId) -> SnapshotLoader:
    agreement = SimpleNamespace(gathered=lambda brought: [brought], waiting_to_restart=lambda groups: ())
    store = SimpleNamespace(local_host=lambda: "", put=lambda key, value: None)
    ctx = stacked_context(Member(group, 1), trainer=trainer, agreement=agreement, store=store)
    return SnapshotLoader(ctx, cast(SnapshotClient, snapshot_server))
