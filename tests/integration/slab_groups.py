"""Tasks of the ranks of groups whose pipelines have other lengths than those of other groups."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from spare_megatron.comm.bucket_exchange import BucketExchange, BucketSums, Staging
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.slab_exchanges import SlabExchanges
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.gradients.gradients import Totals
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, Member, Slabs
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.voting.agreement import GroupAgreement, GroupOpinion, RankOutcome
from tests.integration.mcore_group import CPU, TIMEOUT_S, agreed_loss, reduce_alone, staged, sums_of

MEMBERS = (GroupId(0), GroupId(1))


def compute_in_slabs(
    config: RunConfig, slabs: Slabs, *calls: Sequence[Microbatch]
) -> tuple[list[int], tuple[Totals, dict[str, Any]]]:
    """The numbers of this rank's chunks, and as `mcore_group.compute_sums`."""
    trainer = GroupTrainer(config, CPU, slabs=slabs)
    return [chunk.stage for chunk in trainer.chunks], sums_of(trainer, calls)


def digests_of_gradients(
    _config: RunConfig, slabs: Slabs, variants: Mapping[str, RunConfig], *calls: Sequence[Microbatch]
) -> dict[str, dict[str, str]]:
    """For each variant the SHA-256 of what each position stages, and of every parameter's gradient that is not zero;
    and the digests of a microbatch for an audit.
    """
    found = {}
    for variant, config in variants.items():
        trainer = GroupTrainer(config, CPU, slabs=slabs)
        _, parameters = sums_of(trainer, calls)
        arrays = {name: gradient for name, (_, gradient, _) in parameters.items() if gradient.any()}
        trainer.begin_step(1)
        for work in calls:
            trainer.compute(work, audited=calls[-1][:1])
        for number, slab in enumerate(trainer.slabs):
            arrays[f"position {slab.position}, {len(slab.gradients.buckets)} buckets"] = staged(trainer, number).numpy()
        found[variant] = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
        for one in trainer.passes.boundaries(calls[-1][0]):
            found[variant][f"{one.kind} of slab {one.stage} at position {one.position}"] = f"{one.digest:x}"
    return found


class Group:
    """This rank of a group that sums its gradients over two groups, whose ranks meet at a store."""

    def __init__(self, config: RunConfig, slabs: Slabs, group: int, port: int) -> None:
        self.trainer = trainer = GroupTrainer(config, CPU, slabs=slabs)
        self.posted: list[int] = []
        """The positions over whose communicators this rank has posted buckets, in order."""
        self.communicators = [
            CrossGroupCommunicator(
                group=GroupId(group),
                position=slab.position,
                device=CPU,
                store=SimpleNamespace(rendezvous=partial(_connected, port)),  # type: ignore[arg-type]
                timeout_s=TIMEOUT_S / 2,
                ask_interval_s=0.05,
                probe=SilentProbe(),
            )
            for slab in trainer.slabs
        ]
        self.exchanges = [
            BucketExchange(
                position=slab.position,
                lanes=config.parallel.beside(slab.position),
                is_alone=config.parallel.ranks_per_group == 1,
                sums=slab.gradients,
                communicator=communicator,
                bucket_sums=_Recorded(self.posted, slab.position, BucketSums(slab.gradients, communicator)),  # type: ignore[arg-type]
                staging=Staging(slab.gradients.new_staging),
                outlier_factor=0.0,
                probe=SilentProbe(),
            )
            for slab, communicator in zip(trainer.slabs, self.communicators, strict=True)
        ]
        self.sums = SlabExchanges(trainer, self.exchanges)
        member = Member(GroupId(group))
        log: Any = SimpleNamespace()
        self.agreement = GroupAgreement(member, dist.group.WORLD, log, TIMEOUT_S, num_positions=trainer.num_positions)

    def build(self, key: int) -> None:
        for communicator in self.communicators:
            communicator.start_build(key, MEMBERS)

    def start(self, step: int, attempt: int, kept: tuple[int, ...] = ()) -> None:
        voters = tuple(map(Member, MEMBERS))
        attempted = AttemptReduce(
            step=step, attempt=attempt, epoch=0, members=MEMBERS, voters=voters, plan_digest="", kept=kept
        )
        self.sums.start_attempt(attempted)

    def compute_early(self, work: Sequence[Microbatch]) -> None:
        """Sends buckets while the work is computed."""
        self.sums.begin_early(len(work))
        self.trainer.compute(work, lambda position, num_ready: self.sums.send_ready(position, num_ready, lambda: False))

    def opinion(self) -> GroupOpinion:
        outcome = RankOutcome(
            is_complete=self.sums.is_complete,
            num_complete=self.sums.num_complete,
            work_digest="0" * 12,
            loss=self.sums.loss_sum(),
            finding=self.sums.judge(),
            wrong_sums=self.sums.first_wrong_sums(),
        )
        return self.agreement.settle(outcome)


def _connected(port: int, name: str, *_: object) -> dist.Store:
    """By a connection of its own: one that waits for a key holds up all others that use it."""
    return dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))


class _Recorded:
    """Sums over groups, of which each bucket that is posted is noted."""

    def __init__(self, posted: list[int], position: int, bucket_sums: BucketSums) -> None:
        self._posted, self._position, self._bucket_sums = posted, position, bucket_sums

    def post(self, bucket: int, values: Any) -> bool:
        self._posted.append(self._position)
        return self._bucket_sums.post(bucket, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket_sums, name)


Works = Sequence[Sequence[Sequence[Microbatch]]]
"""Of each call of compute, of each group."""


def train(
    config: RunConfig, slabs: Slabs, group: int, port: int, works: Works
) -> tuple[list[int], list[tuple[int, ...]], list[tuple[Any, ...]], dict[str, str]]:
    """Steps of this group beside the other: the positions of all buckets in the order in which this rank has posted
    them; the group's complete buckets after each step; its loss, norm and digests of parameters and of the rest of the
    state; and the SHA-256 of this rank's parameters in the end.
    """
    rank = Group(config, slabs, group, port)
    rank.build(0)
    complete, figures = [], []
    for step, work in enumerate(works):
        rank.trainer.begin_step(step)
        rank.start(step, step)
        rank.compute_early(work[group])
        rank.sums.sum_rest(lambda: False)
        opinion = rank.opinion()
        assert opinion.is_complete, rank.sums.evidence
        assert opinion.loss is not None
        complete.append(opinion.num_complete)
        rank.sums.commit()
        result = rank.trainer.update(agreed_loss(rank.trainer))
        assert result.grad_norm > config.optimizer.clip_grad > 0
        figures.append((result.loss, result.grad_norm, *_combined(rank.trainer)))
    lane = rank.trainer.process_groups.lanes.rank()  # has experts of its own
    named = {f"{lane} {one.name}": one.parameter.detach().float().numpy() for one in rank.trainer.parameters_named()}
    values = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in named.items()}
    return rank.posted, complete, figures, values


def give(
    config: RunConfig, slabs: Slabs, folder: Path, calls: Sequence[Sequence[Microbatch]], *, as_checkpoint: bool
) -> list[str]:
    """Trains a step with each of these works; before the last writes a checkpoint, or the state of every position.
    Returns digests of the group's parameters and of the rest of its state after the last.
    """
    trainer = GroupTrainer(config, CPU, slabs=slabs)
    for step, work in enumerate(calls[:-1]):
        _train_alone(trainer, step, work)
    if as_checkpoint:
        written = trainer.checkpoint_state()
        written.copy()
        written.write(folder, dist.group.WORLD, lambda: None)
    else:
        for index, slab in enumerate(trainer.slabs):
            state = trainer.outgoing_state(index)
            (folder / f"{slab.position}.json").write_bytes(state.description)
            (folder / f"{slab.position}.bin").write_bytes(state.tensors.read(Piece(0, state.tensors.num_bytes)))
    _train_alone(trainer, len(calls) - 1, calls[-1])
    return _combined(trainer)


def take(
    config: RunConfig, slabs: Slabs, folder: Path, calls: Sequence[Sequence[Microbatch]], *, as_checkpoint: bool
) -> list[str]:
    """Takes over what `give` has written, and trains the last step in the same way."""
    trainer = GroupTrainer(config, CPU, slabs=slabs)
    if as_checkpoint:
        trainer.load_checkpoint(folder)
    for index, slab in enumerate(() if as_checkpoint else trainer.slabs):
        state = trainer.incoming_state((folder / f"{slab.position}.json").read_bytes(), index)
        content = (folder / f"{slab.position}.bin").read_bytes()
        with state.tensors.writing() as writer:
            writer.room(len(content))[:] = content
            writer.write(Piece(0, len(content)))
        state.install()
    _train_alone(trainer, len(calls) - 1, calls[-1])
    return _combined(trainer)


def _train_alone(trainer: GroupTrainer, step: int, work: Sequence[Microbatch]) -> None:
    trainer.begin_step(step)
    trainer.compute(work)
    reduce_alone(trainer)
    trainer.update(agreed_loss(trainer))


def _combined(trainer: GroupTrainer) -> list[str]:
    log: Any = SimpleNamespace()
    member = Member(MEMBERS[0])
    agreement = GroupAgreement(member, dist.group.WORLD, log, TIMEOUT_S, num_positions=trainer.num_positions)
    return agreement.combine_digests(
        trainer.by_position(
            lambda slab: [one(slab).hexdigest() for one in (trainer.params_digest, trainer.rest_of_state)]
        )
    )


def retry(
    config: RunConfig, slabs: Slabs, group: int, port: int, works: Works
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """A step whose first attempt ends after the sums of the last slab, which the second one keeps: the complete buckets
    of all positions then, and by position the number of microbatches in each bucket in the end.
    """
    rank = Group(config, slabs, group, port)
    kept: tuple[int, ...] = ()
    rank.trainer.begin_step(0)
    for attempt, work in enumerate(works):
        rank.build(attempt)
        rank.start(0, attempt, kept)
        rank.trainer.compute(work[group])
        rank.sums.measure_all(len(work[group]))
        for one in rank.exchanges:
            if attempt or one.position == rank.trainer.num_positions - 1:
                one.sum_rest(lambda: False)
        opinion = rank.opinion()
        assert opinion.is_complete is bool(attempt)
        kept = kept or opinion.num_complete
    rank.sums.commit()
    return kept, {slab.position: slab.gradients.totals().num_microbatches for slab in rank.trainer.slabs}
