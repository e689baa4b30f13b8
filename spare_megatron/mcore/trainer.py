"""One rank's part of a group: compute microbatches into local sums, and apply the sums of all groups."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.mcore import cpu, rng
from spare_megatron.mcore.checkpoint import GroupState, load_checkpoint
from spare_megatron.mcore.data import Corpus
from spare_megatron.mcore.flat_gradients import GradientPart, ReadyBuckets, Tell, gradient_parts
from spare_megatron.mcore.gradients import make_gradient_sums
from spare_megatron.mcore.host_copies import HostCopies
from spare_megatron.mcore.model import Chunk, build_chunks
from spare_megatron.mcore.optimizer import Optimizer
from spare_megatron.mcore.parameters import NamedParameter, named_parameters, optimized, parameters_sha256
from spare_megatron.mcore.partitions import Slices
from spare_megatron.mcore.pipeline import Item, LossFunction, Pipeline
from spare_megatron.mcore.probe import Probe, SilentProbe
from spare_megatron.mcore.process_groups import build_process_groups
from spare_megatron.mcore.stacked_optimizer import StackedOptimizer
from spare_megatron.mcore.state import (
    IncomingState,
    OutgoingState,
    RestOfState,
    StateCopy,
    load_state,
    outgoing_state,
    save_state,
    slice_state,
)
from spare_megatron.mcore.transformer import transformer_config
from spare_megatron.stacking.layout import SliceId
from spare_megatron.stacking.plans import Microbatch


class IncompleteSum(Exception):
    """The sums that were to be applied do not count each microbatch of the step exactly once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one update did.

    Attributes:
        num_microbatches: Microbatches that the sums counted.
        loss: Mean cross entropy per token of the step, in nats.
        grad_norm: Norm of the mean gradient over the whole model, before clipping.
        learning_rate: Learning rate of this update.
    """

    num_microbatches: int
    loss: float
    grad_norm: float
    learning_rate: float


class GroupTrainer:
    """The model, data and optimizer of one rank of one data-parallel group.

    The default torch.distributed world must be the group. A step goes begin_step, compute once or several times,
    gradients.stage bucket by bucket; once the sums over all groups are agreed on and put, update.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        probe: Probe | None = None,
        *,
        hosted: Sequence[SliceId] = (),
    ) -> None:
        """Build the rank.

        Collective over: all ranks of the group.

        Args:
            config: The run's configuration; `prepare_index` has been called for it.
            device: Where this rank computes. A CUDA device must be the current one.
            probe: Told of the moments of a step.
            hosted: The slices whose optimizer state begins here, where `optimizer.sharding` is stacked.

        Raises:
            ValueError: The configuration asks for what Megatron or this package does not do.
        """
        if device.type == "cpu":
            cpu.install()
        self._config, self._device = config, device
        self._probe = SilentProbe() if probe is None else probe
        transformer = transformer_config(config, device)
        timeout = timedelta(seconds=config.control.group_timeout_s)
        self.process_groups = groups = build_process_groups(config.parallel, device, timeout)
        self.chunks = build_chunks(config, transformer, groups, device)
        self.gradients = make_gradient_sums(config, self.chunks, device)
        self._ready = ReadyBuckets(self.chunks, self.gradients.buckets)
        self.stacked: StackedOptimizer | None = None
        if config.optimizer.sharding == "stacked":
            slices = Slices(self.chunks, config.layout.num_groups)
            self.stacked = StackedOptimizer(config, self.chunks, groups, slices=slices, hosted=hosted)
        self._optimizer = self.stacked or Optimizer(config, self.chunks, groups)
        self._copies = HostCopies(device)
        self._pipeline = Pipeline(config, transformer, groups, self.chunks, self._probe)
        self.corpus = Corpus(config)
        self._num_microbatches = config.layout.num_groups * config.spare.microbatches_per_shard
        tokens_per_microbatch = config.train.micro_batch_size * config.model.seq_length
        self._num_tokens = self._num_microbatches * tokens_per_microbatch
        # Only the schedule's own bookkeeping reads it, and nothing reads that.
        self._schedule_tokens = torch.tensor(0, dtype=torch.int)
        self._is_random = max(config.model.hidden_dropout, config.model.attention_dropout) > 0.0
        self._step = -1
        self._seen: list[Microbatch] = []
        self._show_progress()
        if FaultPoint.BACKWARD in self._probe.phases:
            self._probe_backward()

    # ------------------------------------------------------------------------------------------------ computing

    def begin_step(self, step: int) -> None:
        """Start a step from zero sums."""
        self._step = step
        self.gradients.reset()
        self._optimizer.zero_grad()

    def compute(self, work: Sequence[Microbatch], on_ready: Tell | None = None) -> list[Microbatch]:
        """Add the gradients and losses of some microbatches to the local sums of the step that are not kept.

        Collective over: all ranks of the group, which must bring the same work in the same order.

        Args:
            work: The microbatches.
            on_ready: Told during the backward passes of buckets whose sums are complete with this work.

        Returns:
            The microbatches that really went through this rank, in their order. They are what is counted.

        Raises:
            RuntimeError: They are not the work.
        """
        self._seen.clear()
        is_counted = False

        def count() -> None:
            nonlocal is_counted
            if is_counted:
                return
            if sorted(self._seen) != sorted(work):
                raise RuntimeError(f"step {self._step}: the schedule ran {self._seen} where {list(work)} was asked for")
            self.gradients.add_count(len(self._seen))
            is_counted = True

        def tell(num_ready: int) -> None:
            count()  # nothing leaves that is not counted
            assert on_ready is not None
            on_ready(num_ready)

        told = None if on_ready is None else tell
        with self.gradients.adding(), self._ready.telling(self._pipeline.num_passes(work), told):
            self._pipeline.run(work, self._forward)
        count()
        return list(self._seen)

    # ----------------------------------------------------------------------------------------------- committing

    def loss_sum(self) -> float | None:
        """The cross entropy over groups, summed over tokens; None except on the last stage, which alone knows it."""
        return self.gradients.totals().loss_sum if self.chunks[-1].is_last else None

    def update(self, loss_sum: float, squares: float | None = None) -> UpdateResult:
        """Apply the sums over all groups, put in the place of the local sums, to the parameters.

        With stacked state, to those of the slices hosted here.

        Collective over: all ranks of the group, each with the sums of its own part of the model.

        Args:
            loss_sum: `loss_sum` of the last stage.
            squares: The sum of the squares of the gradients of slices, where not all of them are here
                (`StackedOptimizer.step`).

        Raises:
            IncompleteSum: Some bucket does not count as many microbatches as a step has. Nothing is changed.
        """
        counted = self.gradients.totals().num_microbatches
        for bucket, num_counted in enumerate(counted):
            if num_counted != self._num_microbatches:
                raise IncompleteSum(
                    f"step {self._step}: the sums of bucket {bucket} count {num_counted} microbatches, "
                    f"the step has {self._num_microbatches}"
                )
        self.gradients.finish(1.0 / self._num_tokens)
        # Sums what ranks of this group hold in parts: over context-parallel ranks, over both ends of tied
        # embeddings, over the norms of sequence parallelism. In place, so it must not come before the commit.
        finalize_model_grads([chunk.module for chunk in self.chunks], None, pg_collection=self.process_groups)
        if self.stacked is not None and squares is not None:
            grad_norm, learning_rate = self.stacked.step(squares / self._num_tokens**2)
        else:
            grad_norm, learning_rate = self._optimizer.step()
        return UpdateResult(
            num_microbatches=min(counted),
            loss=loss_sum / self._num_tokens,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
        )

    def gradient_parts(self) -> tuple[tuple[GradientPart, ...], ...]:
        """The parts of each bucket, by the slices whose gradients they are."""
        assert self.stacked is not None, "only stacked state has slices"
        return gradient_parts(self.chunks, self.process_groups, self.stacked.slices, self.gradients.buckets)

    def save_state(self, path: Path) -> tuple[int, str]:
        """Writes the rank's whole state between two steps to a file; returns its bytes and their SHA-256."""
        return save_state(path, self.chunks, self._optimizer)

    def load_state(self, paths: Sequence[Path], slices: Collection[SliceId] = ()) -> None:
        """Takes over what ranks of this position have written, all slices together; this one is as new.

        Raises:
            ForeignState: It is the state of another model.
        """
        load_state(paths, self.chunks, self._optimizer, slices)
        self._probe(FaultPoint.LOAD_READ)

    def outgoing_state(self) -> OutgoingState:
        """The rank's whole state for others to read, until the next update."""
        return outgoing_state(self.chunks, self._optimizer)

    def state_copy(self) -> StateCopy:
        """The same to be copied to host memory, until the next update."""
        return StateCopy(self.outgoing_state(), self._copies)

    def slice_copy(self, number: SliceId) -> StateCopy:
        """The state of a slice that is here whole, to be copied to host memory until the next update."""
        assert self.stacked is not None, "only stacked state has slices"
        return StateCopy(slice_state(self.stacked, number), self._copies)

    def incoming_state(self, description: bytes) -> IncomingState:
        """For taking over the state of the rank of the same position in another group, which has this description.

        Raises:
            ForeignState: It is the state of another model.
        """
        return IncomingState(description, self.chunks, self._optimizer)

    def checkpoint_state(self, slices: Collection[SliceId] = (), *, has_rest: bool = True) -> GroupState:
        """This rank's part of a checkpoint, between two updates.

        Args:
            slices: The slices whose state it has, of those whose whole state is here.
            has_rest: Whether it has all but slices.
        """
        return GroupState(self.chunks, self._optimizer, self.process_groups, self._copies, slices, has_rest=has_rest)

    def load_checkpoint(self, folder: Path, slices: Collection[SliceId] = ()) -> None:
        """Take the state over from a checkpoint, whatever layout wrote it, with stacked state or without.

        Collective over: all ranks of the group.

        Args:
            folder: The checkpoint.
            slices: Where `optimizer.sharding` is stacked, the slices to hold from here on.
        """
        on_read = partial(self._probe, FaultPoint.LOAD_READ)
        load_checkpoint(folder, self.chunks, self._optimizer, self.process_groups, on_read, slices)

    def params_sha256(self) -> str:
        """The SHA-256 of this rank's parameters, bit for bit."""
        return parameters_sha256(self.chunks)

    def rest_of_state(self) -> RestOfState:
        """All other state that the rank has in every group, to be hashed by another thread before the next update."""
        assert not isinstance(self._optimizer, StackedOptimizer), "what is stacked differs from group to group"
        return RestOfState(self.chunks, self._optimizer, self._copies)

    def moments(self) -> Iterator[Tensor]:
        """The first moments of the optimizer that are held here; none before the first update."""
        if isinstance(self._optimizer, StackedOptimizer):
            yield from self._optimizer.first_moments()
            return
        for named in named_parameters(self.chunks):
            state = self._optimizer.state_of(optimized(named.parameter))
            if state:
                yield state["exp_avg"]

    def parameters_named(self) -> Iterator[NamedParameter]:
        """The parameters of this rank and their gradients, by their names in the whole model."""
        return named_parameters(self.chunks)

    # ------------------------------------------------------------------------------------------------- internal

    def _forward(self, chunk: Chunk, item: Item) -> tuple[Tensor, LossFunction]:
        self._probe(FaultPoint.FORWARD)
        if chunk is self.chunks[0] and not item.is_padding:
            self._seen.append(item.microbatch)
        if self._is_random:
            tensor_rank = self.process_groups.tp.rank()
            rng.seed_microbatch(
                self._config.train.seed, self._step, item.microbatch, chunk.stage, tensor_rank, self._device
            )
        batch = self._batch(chunk, item.microbatch)
        output = chunk.module(
            batch.get("tokens"), batch.get("position_ids"), None, labels=batch["labels"] if chunk.is_last else None
        )

        def loss_function(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            loss = losses.float().sum()
            if item.is_padding:
                loss = loss * 0.0
            else:
                self.gradients.add_loss(self._over_context(loss.detach()))
            return loss, self._schedule_tokens, {}

        return output, loss_function

    def _batch(self, chunk: Chunk, microbatch: Microbatch) -> dict[str, Tensor]:
        """What a chunk needs of a microbatch: nothing between the ends of the model."""
        if not (chunk.is_first or chunk.is_last):
            return {}
        with self._probe.during(Operation.STORAGE):
            batch = self.corpus.microbatch(self._step, microbatch)
        if self._device.type != "cpu":
            batch = {key: values.to(self._device, non_blocking=True) for key, values in batch.items()}
        return get_batch_on_this_cp_rank(batch, self.process_groups.cp)

    def _over_context(self, loss: Tensor) -> Tensor:
        """The loss over the whole sequence; each context-parallel rank has that of its part."""
        if self.process_groups.cp.size() == 1:
            return loss
        whole = loss.clone()
        torch.distributed.all_reduce(whole, group=self.process_groups.cp)
        return whole

    def _show_progress(self) -> None:
        """Tell the probe of every layer that is begun forward, and about done backward."""
        for chunk in self.chunks:
            for layer in chunk.module.modules():
                if isinstance(layer, BaseTransformerLayer):
                    layer.register_forward_pre_hook(lambda *_: self._probe.progress())
                    next(layer.parameters()).register_hook(lambda _: self._probe.progress())

    def _probe_backward(self) -> None:
        """Probe inside the backward pass: when a parameter in the middle of each chunk has its gradient."""
        for chunk in self.chunks:
            parameters = list(chunk.module.module.parameters())
            parameters[len(parameters) // 2].register_hook(lambda _: self._probe(FaultPoint.BACKWARD))
