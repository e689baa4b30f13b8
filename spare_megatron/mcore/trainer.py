"""One rank's model, data and optimizer: computes microbatches into local sums and applies the sums of all groups."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.devices import gpu
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.audited_passes import AuditedPasses
from spare_megatron.mcore.evaluator import Evaluator
from spare_megatron.mcore.gradients.checksums import squares_in_fp64
from spare_megatron.mcore.gradients.digests import TensorsDigest, prepare_digests
from spare_megatron.mcore.gradients.flat_gradients import counts_for_norm, is_divided_expert, sum_inside_group
from spare_megatron.mcore.gradients.host_copies import HostCopies
from spare_megatron.mcore.gradients.partitions import GradientPart, StatePartitions, gradient_parts, whole_parameters
from spare_megatron.mcore.group_checkpoint import GroupState, load_checkpoint
from spare_megatron.mcore.held_slabs import HeldSlab, held_slabs
from spare_megatron.mcore.loss_terms import LossTerms
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.model import Chunk, build_chunks
from spare_megatron.mcore.model.pipeline import Item, LossFunction, Pipeline, share_in_lane
from spare_megatron.mcore.model.probe import Probe, SilentProbe
from spare_megatron.mcore.model.process_groups import build_process_groups
from spare_megatron.mcore.model.program import ForwardPasses, Program, Terms, program_of
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.mcore.optimizer.divided_optimizer import DividedOptimizer
from spare_megatron.mcore.optimizer.fragment_adam import FragmentAdam
from spare_megatron.mcore.optimizer.lane_buffers import LaneBuffers
from spare_megatron.mcore.optimizer.optimizer import Optimizer
from spare_megatron.mcore.optimizer.outer_step import OuterState
from spare_megatron.mcore.optimizer.parameters import (
    NamedParameter,
    named_parameters,
    optimized,
    parameters_digest,
    parameters_sha256,
    sums_of_squares,
)
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.mcore.pass_checks import PassChecks
from spare_megatron.mcore.state import (
    IncomingState,
    OutgoingState,
    StateCopy,
    load_state,
    outgoing_state,
    partition_state,
    rest_of_state,
    save_state,
)
from spare_megatron.mcore.weights import load_weights
from spare_megatron.stacking.layout import PartitionId, Slabs
from spare_megatron.stacking.plans import Microbatch, Numbered

T = TypeVar("T")

OnSlabReady = Callable[[int, int], None]
"""Called with the position of a slab and the number of its leading buckets whose gradients are complete, last slabs
first. An exception ends the backward pass.
"""


class IncompleteSum(Exception):
    """The sums to apply do not count each microbatch of the step exactly once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Outcome of an update, with the step's mean loss per token that counts and gradient norm before clipping."""

    num_microbatches: int
    """Units of work counted, which with experts are rows."""
    loss: float
    grad_norm: float
    learning_rate: float
    terms: Mapping[str, float] = field(hash=False)
    """Means of the further terms of the loss that anything counted for."""
    figures: Mapping[str, Sequence[float]] | None = field(default=None, compare=False)
    """What this rank adds to figures of the model (`step_values.model_figures`); None in steps without."""


class GroupTrainer:
    """The model, data and optimizer of one rank of one group, which is the default torch.distributed world. A step:
    `begin_step`, `compute`, for each slab and bucket `gradients.stage`; once committed, `gradients.put` and `update`.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        probe: Probe | None = None,
        *,
        hosted: Sequence[PartitionId] = (),
        program: Program | None = None,
        slabs: Slabs | None = None,
    ) -> None:
        """Builds the rank, after `prepare_index`; a CUDA `device` must be current. Partitions in `hosted` start here.
        `slabs`: unless all groups have pipelines of this length. Collective over: all ranks of the group. Raises
        ValueError if the configuration is rejected.
        """
        if device.type == "cpu":
            cpu.install()
        self._config, self._device = config, device
        self._probe = SilentProbe() if probe is None else probe
        prepare_digests(device)
        transformer = transformer_config(config, device)
        timeout = timedelta(seconds=config.control.group_timeout_s)
        self.process_groups = groups = build_process_groups(config.parallel, device, timeout)
        self._program = program or program_of(config)
        provider = self._program.model_provider
        self.chunks = build_chunks(config, transformer, groups, device, provider=provider, slabs=slabs)
        if config.checkpoint.load_weights:
            load_weights(Path(config.checkpoint.load_weights), self.chunks, groups)
        self._terms = LossTerms(config, self._program.loss_terms, self.process_groups, device)
        num_terms = len(self._program.loss_terms)
        self.slabs, self.num_positions = held_slabs(config, self.chunks, groups, device, slabs, num_terms)
        self._slab_of = {chunk.stage: slab for slab in self.slabs for chunk in slab.chunks}
        self.passes = AuditedPasses(self.slabs, groups)
        self._has_lanes = groups.lanes.size() > 1
        self._has_other_lengths = slabs is not None and len(slabs.lengths) > 1
        self.outer: OuterState | None = None  # if the run is one of several sites
        self.stacked = self._stacked_optimizer(hosted) if config.optimizer.sharding == "stacked" else None
        self._optimizer = self.stacked or self._own_optimizer()
        self._copies = HostCopies(device)
        self._pipeline = Pipeline(config, transformer, groups, self.chunks, self._probe)
        self.corpus = self._program.corpus(config)
        self._evaluator = self._make_evaluator() if config.eval.every_steps else None
        # The schedule adds it up, but nothing uses the total.
        self._schedule_tokens = torch.tensor(0, dtype=torch.int)
        self._passes = self._forward_passes()
        self.checks = PassChecks(config, device)
        self._step = 0
        self.on_loaded: Callable[[Tensor], None] | None = None
        """A fault: called with the tokens of the next microbatch that is read, and forgotten."""
        self.injector: AbstractContextManager[object] | None = None
        """Faults in results of operations: entered around forward and backward passes, before what watches these."""
        self._seen: list[Numbered] = []
        self._losses: dict[Numbered, tuple[Tensor, Tensor | None]] = {}
        self._audited_losses: dict[Numbered, tuple[Tensor, Tensor | None]] = {}
        self._show_progress()
        if FaultPoint.BACKWARD in self._probe.phases:
            self._probe_backward()

    def _forward_passes(self) -> ForwardPasses:
        model = self._config.model
        is_random = max(model.hidden_dropout, model.attention_dropout) > 0.0 or bool(self._config.program.file)
        device, groups = self._device, self.process_groups
        return ForwardPasses(self._config, self._program, groups, device, self._probe, is_random=is_random)

    def _stacked_optimizer(self, hosted: Sequence[PartitionId]) -> StackedOptimizer:
        partitions = StatePartitions(whole_parameters(self.chunks), self._config.layout.num_groups)
        return StackedOptimizer(self._config, self.chunks, self.process_groups, partitions=partitions, hosted=hosted)

    def _own_optimizer(self) -> Optimizer | DividedOptimizer:
        """One that does not depend on what other groups have."""
        spaces = [(slab.chunks, slab.gradients.space) for slab in self.slabs]
        if self._has_lanes and self._config.optimizer.kind == "adam":  # strips would cut the matrices of Muon
            return DividedOptimizer(self._config, self.process_groups, spaces)
        lanes = LaneBuffers(spaces) if self._has_lanes else None
        optimizer = Optimizer(self._config, self.chunks, self.process_groups, lanes)
        if self._config.sites.is_used:
            self.outer = optimizer.outer = OuterState(self.chunks, self._probe.progress)
        return optimizer

    def _make_evaluator(self) -> Evaluator:
        return Evaluator(
            self._config,
            chunks=self.chunks,
            groups=self.process_groups,
            pipeline=self._pipeline,
            program=self._program,
            terms=self._terms,
            device=self._device,
            probe=self._probe,
        )

    # ------------------------------------------------------------------------------------------------ computing

    def begin_step(self, step: int) -> None:
        """Starts a step with all sums at zero."""
        self._step = step
        self._losses.clear()
        self._audited_losses.clear()
        for slab in self.slabs:
            slab.gradients.reset()
        self.passes.forget()
        self.checks.begin_step(step)
        self._optimizer.zero_grad()

    def compute(
        self,
        work: Sequence[Microbatch],
        on_ready: OnSlabReady | None = None,
        *,
        audited: Collection[Microbatch] = (),
        audits: Sequence[Microbatch] = (),
    ) -> list[Microbatch]:
        """Adds the gradients and losses of some microbatches to the group's sums of the buckets that are not kept.

        This rank computes the share of its lane. `audits`, of other groups, are computed first and added to nothing;
        digests are taken of these and of `audited` ones. Returns `work`; raises RuntimeError if the schedule runs
        another share. Collective over: all ranks of the group, with the same arguments in order.
        """
        share = self._share(work)
        self._probe.begin_passes(len(share))
        if not work:
            return []
        self._drop([*audited, *audits])
        items = self._audits(audits, beside=work) + [Item(one, is_digested=one.unit in audited) for one in share]
        self._seen.clear()
        is_counted = False

        def sum_ready(slab: HeldSlab, num_ready: int, *, in_backward: bool) -> None:
            nonlocal is_counted
            if not is_counted:
                self._count(share, in_backward=in_backward)  # no bucket may be sent before
                is_counted = True
            for bucket in self._summed_over_lanes(slab, num_ready, in_backward=in_backward) if self._has_lanes else ():
                if on_ready is not None:
                    on_ready(slab.position, bucket + 1)  # one by one: the same order on all lanes

        def report(slab: HeldSlab, num_ready: int) -> None:
            sum_ready(slab, num_ready, in_backward=True)
            if on_ready is not None and not self._has_lanes:
                on_ready(slab.position, num_ready)

        with ExitStack() as stack:
            for slab in self.slabs:
                stack.enter_context(slab.gradients.adding())
                reported = None if on_ready is None else partial(report, slab)
                stack.enter_context(slab.ready.reporting(self._pipeline.num_passes(items), reported))
            stack.enter_context(self.passes.watching(items))
            stack.enter_context(self.injector or nullcontext())
            self._pipeline.run(items, self._forward, self.passes.on_backward, around=self.checks.around)
        for slab in reversed(self.slabs):
            sum_ready(slab, len(slab.gradients.buckets), in_backward=False)
        return list(work)

    def audit(self, microbatches: Sequence[Microbatch]) -> None:
        """Computes some microbatches for their digests alone. Collective as `compute`."""
        self._drop(microbatches)
        items = self._audits(microbatches)
        with self.passes.watching(items), self.injector or nullcontext():
            self._pipeline.run(items, self._forward, self.passes.on_backward, around=self.checks.around)

    def _drop(self, units: Collection[Microbatch]) -> None:
        """Drops what is known of audited units: this time another lane may compute them."""
        self.passes.drop(units)
        self._audited_losses = {one: loss for one, loss in self._audited_losses.items() if one.unit not in units}

    def _audits(self, microbatches: Sequence[Microbatch], beside: Sequence[Microbatch] = ()) -> list[Item]:
        """Those that this lane computes: the first lanes that have less to do of what stands beside take them."""
        share = self._share([*beside, *microbatches])[len(self._share(beside)) :]
        return [Item(one, is_digested=True, is_audit=True) for one in share]

    def _share(self, work: Sequence[Microbatch]) -> list[Numbered]:
        return share_in_lane(work, self.process_groups, self._config, self._config.unit_ramp.at(self._step))

    def _count(self, share: Sequence[Numbered], *, in_backward: bool) -> None:
        """Counts the microbatches of all lanes, once this one has computed its share."""
        if sorted(self._seen) != sorted(share):
            raise RuntimeError(f"step {self._step}: the schedule ran {self._seen} where {list(share)} was asked for")
        for slab in self.slabs:
            slab.gradients.add_count(len(self._seen))
            if self._has_lanes:
                with self._probe.during(Operation.TRANSFER, in_backward=in_backward):
                    slab.gradients.sum_counts()

    def _summed_over_lanes(self, slab: HeldSlab, num_ready: int, *, in_backward: bool) -> Iterator[int]:
        """As `GradientSums.sum_over_lanes`."""
        sums = slab.gradients.sum_over_lanes(num_ready)
        while True:
            with self._probe.during(Operation.TRANSFER, in_backward=in_backward):
                bucket = next(sums, None)
            if bucket is None:
                return
            yield bucket

    @property
    def evaluator(self) -> Evaluator:
        assert self._evaluator is not None, "only a run with eval.every_steps evaluates"
        return self._evaluator

    # ----------------------------------------------------------------------------------------------- committing

    def loss_sum(self) -> LossSum | None:
        """Loss of the step over all groups; None except on the last pipeline stage."""
        return self.slabs[-1].gradients.totals().loss if self.chunks[-1].is_last else None

    def microbatch_losses(self) -> dict[Numbered, float]:
        """Mean losses of the microbatches since the last call, on one rank of those with the same ones. Waits for the
        device.
        """
        losses, self._losses = self._losses, {}
        return self._means(losses)

    def audited_losses(self) -> dict[Numbered, float]:
        """The same of those that were computed in this step for their digests alone."""
        return self._means(self._audited_losses)

    def _means(self, losses: Mapping[Numbered, tuple[Tensor, Tensor | None]]) -> dict[Numbered, float]:
        groups = self.process_groups
        if not losses or groups.tp.rank() or groups.cp.rank():
            return {}
        totals = torch.stack([total for total, _ in losses.values()])
        counts = [count for _, count in losses.values() if count is not None]
        all_count = self._config.train.micro_batch_size * self._config.model.seq_length
        means = totals / (torch.stack(counts).clamp(min=1) if counts else all_count)
        return dict(zip(losses, means.tolist(), strict=True))

    def term_sums(self) -> list[LossSum | None]:
        """The same of each further term of the loss."""
        is_last = self.chunks[-1].is_last
        return list(self.slabs[-1].gradients.totals().terms) if is_last else [None] * len(self._program.loss_terms)

    def update(
        self, loss: LossSum, squares: Mapping[str, float] | None = None, terms: Sequence[LossSum] = ()
    ) -> UpdateResult:
        """Applies the sums over all groups to the parameters; with stacked state, to the state partitions hosted here.

        `loss` is that of the last stage, whose number of tokens divides the sums; `squares` of the sums as in
        `StackedOptimizer.step`, by parts of the model; `terms` are those of `term_sums`. Collective over: all ranks of
        the group. Raises IncompleteSum, with nothing changed, if a bucket does not count exactly the microbatches of a
        step.
        """
        self._terms.check_totals(loss, terms)
        num_microbatches = self._config.layout.num_groups * self._config.spare.ramp.at(self._step)
        counted = [number for slab in self.slabs for number in slab.gradients.totals().num_microbatches]
        for bucket, num_counted in enumerate(counted):
            if num_counted != num_microbatches:
                raise IncompleteSum(
                    f"step {self._step}: the sums of bucket {bucket} count {num_counted} microbatches, "
                    f"the step has {num_microbatches}"
                )
        for slab in self.slabs:
            slab.gradients.finish(1.0 / loss.divisor)
        if not isinstance(self._optimizer, StackedOptimizer):
            self._optimizer.gather_gradients()
        every = self._config.metrics.model_every_steps
        has_figures = every > 0 and self._step % every == 0
        sum_inside_group(self.chunks, self.process_groups)
        figures = self._figures(squares, loss.divisor) if has_figures else None
        if self.stacked is not None and squares is not None:
            grad_norm, learning_rate = self.stacked.step(math.fsum(squares.values()) / loss.divisor**2)
        else:
            norm = self._norm_over_slabs() if self._has_other_lengths else None
            grad_norm, learning_rate = self._optimizer.step(norm)
        if self.outer is not None:
            self.outer.count(min(counted) // self._config.row_size)
        return UpdateResult(
            num_microbatches=min(counted) // self._config.row_size,
            loss=loss.mean,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            terms={
                name: term.mean for name, term in zip(self._program.loss_terms, terms, strict=True) if term.num_tokens
            },
            figures=figures,
        )

    def _norm_over_slabs(self) -> float:
        """The norm of all gradients, slab by slab in fp64: unlike that of Megatron, which adds up what each rank has in
        fp32, it does not depend on which ranks hold the slabs. Collective over: all ranks of the group.
        """
        assert not isinstance(self._optimizer, StackedOptimizer), "stacked state has a norm over its partitions"
        chunks = [(slab.position, chunk) for slab in self.slabs for chunk in slab.chunks]
        positions = {one: position for position, chunk in chunks for one in chunk.module.parameters()}
        found: list[float] = []
        for gradients, ranks in self._optimizer.for_norm():
            squares = torch.zeros(self.num_positions, dtype=torch.float64, device=self._device)
            for parameter, gradient in gradients:
                squares[positions[parameter]] += squares_in_fp64(gradient)
            torch.distributed.all_reduce(squares, group=ranks)
            found += squares.tolist()
        return math.sqrt(math.fsum(found))  # `sum` rounds otherwise from Python 3.12 on

    def _figures(self, scattered: Mapping[str, float] | None, divisor: float) -> dict[str, Sequence[float]]:
        """Squares of gradients and parameters before an update, and tokens of experts, each on one rank that has it.
        Of gradients that are `scattered` over groups there are the squares. Waits for the device, once.
        """
        groups, optimizer = self.process_groups, self._optimizer
        named = self.parameters_named() if groups.cp.rank() == 0 else ()
        counted = {one.parameter: one for one in named if counts_for_norm(one.parameter, groups)}
        own = [
            one
            for one in counted.values()
            if not (groups.expert_lanes if is_divided_expert(one.parameter) else groups.lanes).rank()
        ]
        squared = [("params_norm", one.parameter) for one in own]
        if isinstance(optimizer, DividedOptimizer) and not optimizer.has_all_gradients:
            strips = (one for one in optimizer.fragments() if one.parameter in counted)
            squared += [(f"grad_norm/{counted[one.parameter].part}", one.gradient) for one in strips]
        else:
            whole = counted.keys() if scattered is None or self.stacked is None else self.stacked.needed_everywhere
            squared += [(f"grad_norm/{one.part}", one.main_grad) for one in own if one.parameter in whole]
        squares = sums_of_squares(squared)
        for part, of_others in (scattered or {}).items():
            squares[f"grad_norm/{part}"] = squares.get(f"grad_norm/{part}", 0.0) + of_others / divisor**2
        sums = [slab.gradients for slab in self.slabs] if not groups.lanes.rank() else []
        load = [one for each in sums for one in each.experts.by_layer(each.tokens_of_experts()).items()]
        return {
            **{f"train/{name}": [of_name] for name, of_name in squares.items()},
            **{f"train/expert_load/{layer}": of_layer for layer, of_layer in load if len(of_layer) > 1},
        }

    def memory(self) -> tuple[float, float, float]:
        """Bytes that tensors take, that the allocator holds, and that tensors took at most, on the device; of a process
        on CPUs those in memory, 0, and the most so far.
        """
        if self._device.type != "cpu":
            stats = gpu.memory_stats(self._device)
            held = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
            return *held, stats["allocated_bytes.all.peak"]
        pages = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
        return 1024.0 * int(pages["VmRSS"]), 0.0, 1024.0 * int(pages["VmHWM"])

    def leave_device(self) -> None:
        """Ends what the device has to do, and leaves memory that no tensor has to other processes."""
        if self._device.type != "cpu":
            gpu.synchronize(self._device)
            gpu.empty_cache()

    def gradient_parts(self) -> tuple[tuple[GradientPart, ...], ...]:
        assert self.stacked is not None, "only stacked state has partitions"
        part_of = {one.parameter: one.part for one in self.parameters_named()}
        [buckets] = [slab.gradients.buckets for slab in self.slabs]
        return gradient_parts(self.chunks, self.process_groups, self.stacked.partitions, buckets, part_of)

    def save_state(self, path: Path) -> tuple[int, str]:
        """Writes the rank's whole state to a file, between two steps. Returns the file's bytes and SHA-256."""
        return save_state(path, self.chunks, self._optimizer)

    def load_state(self, paths: Sequence[Path], partitions: Collection[PartitionId] = ()) -> None:
        """Loads files of this position, together with all state partitions, into a new rank. Raises ForeignState."""
        load_state(paths, self.chunks, self._optimizer, partitions)
        self._begin_outer()
        self._probe(FaultPoint.LOAD_READ)

    def _begin_outer(self) -> None:
        """After a load: what has no state of the outer step is the start of the first round."""
        if self.outer is not None and not self.outer.revision.digest:
            self.outer.begin()

    def _chunks_of(self, slab: int | None) -> Sequence[Chunk]:
        return self.chunks if slab is None else self.slabs[slab].chunks

    def outgoing_state(self, slab: int | None = None) -> OutgoingState:
        """The state of a slab, by its index, or of the rank, for others to read, valid until the next update."""
        return outgoing_state(self._chunks_of(slab), self._optimizer)

    def state_copy(self) -> StateCopy:
        """The rank's state to be copied to host memory, valid until the next update."""
        return StateCopy(self.outgoing_state(), self._copies)

    def partition_copy(self, number: PartitionId) -> StateCopy:
        """A state partition that is whole here, to be copied to host memory; valid until the next update."""
        assert self.stacked is not None, "only stacked state has partitions"
        return StateCopy(partition_state(self.stacked, number), self._copies)

    def incoming_state(self, description: bytes, slab: int | None = None) -> IncomingState:
        """Prepares to take the state of a slab, by its index, or of a rank that holds the same. Raises ForeignState for
        another model.
        """
        return IncomingState(description, self._chunks_of(slab), self._optimizer)

    def forget_moments(self) -> None:
        """Frees what a load is about to replace: memory may not have room for both."""
        if not isinstance(self._optimizer, FragmentAdam):
            self._optimizer.forget_moments()

    def checkpoint_state(self, partitions: Collection[PartitionId] = (), *, has_rest: bool = True) -> GroupState:
        """This rank's part of a checkpoint, between two updates: `partitions` and, if `has_rest`, everything else."""
        return GroupState(
            self.chunks, self._optimizer, self.process_groups, self._copies, partitions, has_rest=has_rest
        )

    def weights_state(self) -> GroupState:
        """This rank's parameters alone, for a checkpoint without optimizer state; valid until the next update."""
        return GroupState(self.chunks, None, self.process_groups, self._copies)

    def load_checkpoint(self, folder: Path, partitions: Collection[PartitionId] = ()) -> None:
        """Loads a checkpoint of any layout, to host stacked `partitions`. Collective over: all ranks of the group."""
        on_read = partial(self._probe, FaultPoint.LOAD_READ)
        load_checkpoint(folder, self.chunks, self._optimizer, self.process_groups, on_read, partitions)
        self._begin_outer()

    def params_sha256(self, slab: int = 0) -> str:
        """Of the parameters of a slab, by its index."""
        held = self.slabs[slab]
        return parameters_sha256(held.chunks, self._probe.progress, self._beside_parameters(held))

    def params_digest(self, slab: int = 0) -> TensorsDigest:
        """The same as a digest."""
        held = self.slabs[slab]
        return parameters_digest(held.chunks, self._beside_parameters(held))

    def _beside_parameters(self, slab: HeldSlab) -> list[tuple[str, Tensor]]:
        """What else decides outputs and updates of the model: divided fp32 parameters, and expert biases."""
        main = self._optimizer.main_parameters(slab.chunks) if isinstance(self._optimizer, DividedOptimizer) else []
        return [*main, *slab.gradients.experts.biases()]

    def rest_of_state(self, slab: int = 0) -> TensorsDigest:
        """Digest of all other state of a slab that is equal in every group."""
        assert not isinstance(self._optimizer, StackedOptimizer), "what is stacked differs from group to group"
        return rest_of_state(self.slabs[slab].chunks, self._optimizer)

    def by_position(self, of_slab: Callable[[int], T]) -> dict[int, T]:
        """What a function of the index of a slab gives, by its position."""
        return {slab.position: of_slab(index) for index, slab in enumerate(self.slabs)}

    def moments(self) -> Iterator[Tensor]:
        """The first moments held here; none before the first update."""
        return self._optimizer.first_moments()

    def kept_values(self) -> Iterator[Tensor]:
        """Parameters as the optimizer keeps them; where it has parts, those come first."""
        if isinstance(self._optimizer, FragmentAdam):
            yield from self._optimizer.kept_values()
        yield from (optimized(named.parameter).detach() for named in self.parameters_named())

    def parameters_named(self) -> Iterator[NamedParameter]:
        return named_parameters(self.chunks)

    # ------------------------------------------------------------------------------------------------- internal

    def _forward(self, chunk: Chunk, item: Item) -> tuple[Tensor, LossFunction]:
        self._probe(FaultPoint.FORWARD)
        if chunk is self.chunks[0] and item.is_counted:
            self._seen.append(item.microbatch)
        number = item.microbatch.number
        first = self.corpus.first_sample(self._step, number)
        with self._slab_of[chunk.stage].gradients.experts.counting() if item.is_counted else nullcontext():
            on_batch = partial(self.checks.on_batch, microbatch=item.microbatch)
            output, terms = self._passes.run(chunk, self._step, number, first, partial(self._batch, number), on_batch)
        if chunk.is_last:
            output = self._loss(terms, item)
        self.passes.on_forward(chunk, item, output)
        return output, self._finished_loss

    def _loss(self, terms: Terms, item: Item) -> Tensor:
        """What to differentiate for a microbatch; adds its terms to the sums of the step, if it counts."""
        total = self._terms.weighted(terms)
        if item.is_padding:
            return total * 0.0
        if item.is_audit:
            self._audited_losses[item.microbatch] = self._terms.of_microbatch(terms)
        else:
            self._losses[item.microbatch] = self._terms.add_to(self.slabs[-1].gradients, terms)
        return total

    def _finished_loss(self, loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return loss, self._schedule_tokens, {}

    def _batch(self, number: int) -> dict[str, Tensor]:
        batch = self.corpus.microbatch(self._step, number)
        self.checks.on_read(batch, self.process_groups.cp)
        if self.on_loaded is not None:
            self.on_loaded(batch["tokens"])
            self.on_loaded = None
        return batch

    def _show_progress(self) -> None:
        """Reports progress when a layer starts its forward pass and around the end of its backward pass."""
        for chunk in self.chunks:
            for layer in chunk.module.modules():
                if isinstance(layer, BaseTransformerLayer):
                    layer.register_forward_pre_hook(lambda *_: self._probe.progress())
                    next(layer.parameters()).register_hook(lambda _: self._probe.progress())

    def _probe_backward(self) -> None:
        """Reports `FaultPoint.BACKWARD` when a parameter in the middle of each chunk has its gradient."""
        for chunk in self.chunks:
            parameters = list(chunk.module.module.parameters())
            parameters[len(parameters) // 2].register_hook(lambda _: self._probe(FaultPoint.BACKWARD))
