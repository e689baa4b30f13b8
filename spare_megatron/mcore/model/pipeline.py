"""Runs microbatches through the pipeline stages of a group, with Megatron's schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.model.experts import scale_auxiliary_losses
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.probe import Probe
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.stacking.plans import Microbatch, Numbered, share_of


class Item(NamedTuple):
    """A microbatch in the schedule; padding contributes nothing. `is_digested`: digests of it are taken, for an audit.
    `is_audit`: another group owns it, and no sum gets anything of it.
    """

    microbatch: Numbered
    is_padding: bool = False
    is_digested: bool = False
    is_audit: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether it is one of those that this group adds to the sums of the step."""
        return not (self.is_padding or self.is_audit)


LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
"""Maps per-token losses to the value to differentiate, a number of tokens, and values to log."""

ForwardStep = Callable[[Chunk, Item], tuple[Tensor, LossFunction]]
"""The forward pass of one microbatch through one chunk."""


OnBackward = Callable[[Chunk, Item, Tensor], None]
"""Called when the backward pass of a microbatch through a chunk begins, with the gradient of the chunk's output."""


Surroundings = Callable[[Chunk, Item, Literal["forward", "backward"]], AbstractContextManager[object] | None]
"""A context in which a pass of a microbatch, through a chunk and those that follow it at once, is to run, if any."""


class ProbedCommunicator(P2PCommunicator):
    """Megatron's transfers between stages, reported to a probe before each."""

    def __init__(self, group: torch.distributed.ProcessGroup, transformer: TransformerConfig, probe: Probe) -> None:
        super().__init__(group, transformer)
        self._probe = probe
        self.is_training = True
        """Whether transfers are fault points; those of an evaluation are not."""

    def _communicate(self, **transfer: Any) -> Any:
        # All nine public transfers call this one, and only this one knows what is really sent and received.
        is_sending = transfer["tensor_send_next"] is not None or transfer["tensor_send_prev"] is not None
        if self.is_training and is_sending:
            self._probe(FaultPoint.SEND)
        if self.is_training and (transfer["recv_prev"] or transfer["recv_next"]):
            self._probe(FaultPoint.RECEIVE)
        with self._probe.during(Operation.TRANSFER):
            return super()._communicate(**transfer)


class Pipeline:
    """The schedule that the layout selects: one stage, 1F1B, or interleaved."""

    def __init__(
        self,
        config: RunConfig,
        transformer: TransformerConfig,
        groups: GroupCollection,
        chunks: Sequence[Chunk],
        probe: Probe,
    ) -> None:
        num_stages = groups.pp.size()
        self._probe = probe
        stages = [list(stage) for _, stage in groupby(chunks, key=lambda chunk: chunk.virtual_stage)]
        self._stages = {id(stage[0].module): stage for stage in stages}  # the schedule knows a stage by its first chunk
        self._schedule = get_forward_backward_func(
            pp_size=num_stages, vp_size=transformer.virtual_pipeline_model_parallel_size
        )
        self._multiple = transformer.microbatch_group_size_per_vp_stage if len(stages) > 1 else 1
        self._fixed_arguments: dict[str, Any] = {
            "model": [stage[0].module for stage in stages],
            "seq_length": config.model.seq_length,
            "micro_batch_size": config.train.micro_batch_size,
            "pg_collection": groups,
        }
        self._transfers = ProbedCommunicator(groups.pp, transformer, probe) if num_stages > 1 else None
        if self._transfers is not None:
            self._fixed_arguments["p2p_communicator"] = self._transfers

    def num_passes(self, items: Sequence[Item]) -> int:
        """Backward passes of each chunk in `run`, padding included."""
        return len(pad(items, self._multiple)) if items else 0

    def run(
        self,
        items: Sequence[Item],
        forward_step: ForwardStep,
        on_backward: OnBackward | None = None,
        *,
        is_forward_only: bool = False,
        around: Surroundings | None = None,
    ) -> None:
        """Adds gradients to the buffers, unless `is_forward_only`. Collective over: all ranks of the lane, with the
        same items.
        """
        if not items:
            # Megatron's schedule for one stage would run one microbatch even if there is none.
            return
        items = pad(items, self._multiple)
        if self._transfers is not None:
            self._transfers.is_training = not is_forward_only
        for _, *others in self._stages.values():
            for chunk in others:
                chunk.module.set_is_first_microbatch()  # as the schedule does with the first

        def step(iterator: Iterator[Item], module: torch.nn.Module) -> tuple[Tensor, LossFunction]:
            item, stage = next(iterator), self._stages[id(module)]
            outputs: list[tuple[Tensor, LossFunction]] = []
            with (
                self._probe.forward(item.microbatch.unit),
                (around and around(stage[0], item, "forward")) or nullcontext(),
            ):
                for chunk in stage:
                    if outputs:
                        unwrap_model(chunk.module).set_input_tensor(outputs[-1][0])
                    outputs.append(forward_step(chunk, item))
            if around is not None and (context := around(stage[0], item, "backward")) is not None:
                output, loss = outputs[-1]
                outputs[-1] = _Surrounded.apply(torch.empty(0, requires_grad=True), [output], context), loss
            if not is_forward_only:
                # The backward pass of a chunk, which the schedule runs, starts with the gradient of its output.
                outputs[-1][0].register_hook(lambda _: self._begin_backward(item))
                if on_backward is not None:
                    for chunk, (output, _) in zip(stage, outputs, strict=True):
                        output.register_hook(partial(on_backward, chunk, item))
            return outputs[-1]

        self._schedule(
            forward_step_func=step,
            data_iterator=[iter(items) for _ in self._stages],
            num_microbatches=len(items),
            forward_only=is_forward_only,
            **self._fixed_arguments,
        )

    def _begin_backward(self, item: Item) -> None:
        if self._multiple > 1:
            scale_auxiliary_losses(0.0 if item.is_padding else 1.0)
        self._probe.backward(item.microbatch.unit)


class _Surrounded(torch.autograd.Function):
    """Repeats an output that no graph leads to: its gradient starts a backward pass in a context of its own. What is
    entered inside a backward pass would be left again with the next of its operations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        _requires_grad: Tensor,
        output: Sequence[Tensor],  # hidden from autograd
        around: AbstractContextManager[object],
    ) -> Tensor:
        ctx.output, ctx.around = output, around
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        with ctx.around:
            torch.autograd.backward(ctx.output, gradients)
        del ctx.output, ctx.around
        return None, None, None


def share_in_lane(
    work: Sequence[Microbatch], groups: GroupCollection, config: RunConfig, units_per_shard: int
) -> list[Numbered]:
    """The microbatches of a group's work that the lane of this rank computes, in order."""
    return share_of(
        work,
        lane=groups.lanes.rank(),
        num_lanes=groups.lanes.size(),
        row_size=config.row_size,
        units_per_shard=units_per_shard,
    )


def pad(items: Sequence[Item], multiple: int) -> list[Item]:
    """Pads the items to the multiple that the interleaved schedule needs.

    >>> [item.is_padding for item in pad([Item(Numbered(Microbatch(0, 0), 0))], 2)]
    [False, True]
    """
    return [*items, *[items[-1]._replace(is_padding=True, is_digested=False)] * (-len(items) % multiple)]


def summed_loss(losses: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sum of a microbatch's losses in fp32, and how many tokens count by the 0/1 `mask` (int64); None without a
    mask.
    """
    losses = losses.float()
    return (losses.sum(), None) if mask is None else ((losses * mask).sum(), mask.count_nonzero())
