"""Causal attention, also in a window or within documents: by torch's own kernel, or by that of transformer-engine.

Ranks that split a sequence gather its keys and values, except with transformer-engine where documents are not apart.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the customary name)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from spare_megatron.mcore.model.process_groups import all_gather
from spare_megatron.mcore.model.rng import distinct_on_tensor_ranks


class _Gathered(torch.autograd.Function):
    """A part of each context-parallel rank, [ranks, ...]. Gradients are added in the order of the ranks, so that their
    bits depend on no algorithm of a library. Collective over: the ranks of `group`, in both passes.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = part.new_empty(group.size() * part.size(0), *part.shape[1:])
        all_gather(gathered, part.contiguous(), group=group)
        return gathered.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        given = gradients[0].contiguous()
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=ctx.group)
        return received.sum(0, dtype=torch.float32).to(given.dtype), None


def chunks_of(length: int, group: dist.ProcessGroup) -> tuple[range, ...]:
    """The places in a sequence that a context-parallel rank computes, as `part_of_context_rank` has them."""
    if group.size() == 1:
        return (range(length),)
    size, last = length // (2 * group.size()), 2 * group.size() - 1
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (group.rank(), last - group.rank()))


def whole_sequence(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Keys and values of all context-parallel ranks, [sequence, ..., width], in the order of the text."""
    first, second = _Gathered.apply(torch.cat((key, value), -1).unflatten(0, (2, -1)), group).unbind(1)
    return torch.cat((first, second.flip(0))).flatten(0, 1).split((key.size(-1), value.size(-1)), -1)


def _one_after_another(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class TorchCoreAttention(MegatronModule):
    """The `core_attention` of a local layer spec; Megatron's own needs a global buffer and a sequence-squared mask."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # noqa: ARG002  (Megatron passes it)
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,  # noqa: ARG002  (latent attention passes it; tensors have their widths)
        v_channels: int | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__(config)
        assert attn_mask_type is AttnMaskType.causal, "only causal self-attention is built here"
        assert attention_type == "self", "only causal self-attention is built here"
        assert pg_collection is not None, "Megatron hands its process groups down"
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._scale = softmax_scale
        window = config.window_size
        has_window = is_layer_window_attention(window, config.window_attn_skip_freq, layer_number)
        self._num_before = window[0] if has_window and window[0] >= 0 else None
        self._tensor_rank = pg_collection.tp.rank()
        self._context = pg_collection.cp
        self._groups = pg_collection
        if config.softmax_type == "learnable":
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._groups.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002  (Megatron passes it)
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """[sequence, batch, heads, width] to [sequence, batch, width of all values here]; causal without a
        `document_mask`.
        """
        assert attention_bias is None, "attention bias needs transformer-engine"
        assert packed_seq_params is None, "packed sequences need transformer-engine"
        chunks = chunks_of(key.size(0) * self._context.size(), self._context)
        if len(chunks) > 1:
            key, value = whole_sequence(key, value, self._context)
        masks = [None] * len(chunks) if attention_mask is None else attention_mask.chunk(len(chunks), dim=2)
        dropout = self._dropout if self.training else 0.0
        attended = []
        with self._random_numbers(dropout, query.device):
            for part, chunk, mask in zip(query.chunk(len(chunks)), chunks, masks, strict=True):
                until = slice(chunk.stop)
                seen = None if mask is None else mask[..., until]
                attended.append(self._attend(part, key[until], value[until], seen, dropout))
        return _one_after_another(attended).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """The same of queries that are the last of the sequence: [sequence, batch, heads, width]."""
        length, num_keys = query.size(0), key.size(0)
        before = num_keys if self._num_before is None else self._num_before
        has_sink = self.config.softmax_type != "vanilla"
        if before < num_keys - 1 or (mask is None and (has_sink or length < num_keys)):
            window = window_mask(length, num_keys, before, query.device)
            mask = window if mask is None else mask & window
        scale = self._scale
        if has_sink and mask is not None:
            scale = query.size(-1) ** -0.5 if scale is None else scale
            query, key, value, mask = self._with_sink(query, key, value, mask, scale)
        return F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.size(2) != key.size(2),
        ).permute(2, 0, 1, 3)

    def _with_sink(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A first key that all attend to, whose score is the head's offset, or 0, and whose value is 0: what a head
        gives to it goes nowhere (Xiao et al., arXiv 2309.17453). An element more of queries and keys has the offset.
        """
        if self.config.softmax_type == "learnable":
            offsets = (self.softmax_offset.float() / scale).to(query.dtype)
            query = torch.cat((query, offsets[:, None].expand(*query.shape[:-1], 1)), -1)
            key = F.pad(key, (0, 1))
        sink = torch.zeros_like(key[:1])
        sink[..., -1] = self.config.softmax_type == "learnable"
        return query, torch.cat((sink, key)), F.pad(value, (0, 0, 0, 0, 0, 0, 1, 0)), F.pad(mask, (1, 0), value=True)

    def _random_numbers(self, dropout: float, device: torch.device) -> AbstractContextManager[None]:
        # Under sequence parallelism Megatron has already swapped the generators of the whole block.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        # Tensor-parallel ranks hold different heads, so their masks must differ.
        if device.type == "cuda":
            return get_cuda_rng_tracker().fork()
        return distinct_on_tensor_ranks(self._tensor_rank)


@cache
def window_mask(num_queries: int, num_keys: int, num_before: int, device: torch.device) -> Tensor:
    """[query, key]: whether a token attends to another, which are itself and the `num_before` tokens before it; the
    queries are the last tokens.
    """
    positions = torch.arange(num_keys, device=device)
    distances = positions[num_keys - num_queries :, None] - positions
    return (distances >= 0) & (distances <= num_before)


def document_mask(
    tokens: Tensor, end_of_document: int, parts: Tensor | None = None, chunks: Sequence[range] = ()
) -> Tensor:
    """[batch, 1, query, key]: whether a token attends to another of its document; [batch, sequence] `tokens`, and the
    numbers of the `parts` that lie apart in the text. Queries are all tokens, or those of `chunks`.
    """
    ends = (tokens == end_of_document).long()
    documents = ends.cumsum(dim=1) - ends + (0 if parts is None else parts)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    queries = torch.cat([places[chunk.start : chunk.stop] for chunk in chunks]) if chunks else places
    same = documents[:, queries][:, None, :, None] == documents[:, None, None, :]
    return same.logical_and_(queries[:, None] >= places)


def document_offsets(tokens: Tensor, end_of_document: int, parts: Tensor | None = None) -> Tensor:
    """[documents + 1], int32: the first place of each document, and one past the last, in the sequences of `tokens`
    ([batch, sequence]) one after another. What a sequence begins with, or ends with, is a document of its own, and so
    is what is of another one of the `parts`.
    """
    ends = tokens == end_of_document
    if parts is not None:
        ends[:, :-1] |= parts[:, :-1] != parts[:, 1:]
    ends[:, -1] = True
    return F.pad(ends.flatten().nonzero().flatten() + 1, (1, 0)).int()


def chunk_offsets(offsets: Tensor, length: int, chunks: Sequence[range]) -> Tensor:
    """[2, segments + 1], int32: the same offsets for queries and for keys, cut to some chunks of each sequence, one
    after another. The keys of a chunk end with it, and a document's begin where it does. A first segment of a query and
    a key, both repeated, takes the keys before that, so that numbers of queries and keys follow from shapes.
    """
    sizes = []
    for chunk in chunks:
        for begin in range(0, int(offsets[-1]), length):
            of_chunk = (offsets > begin + chunk.start) & (offsets < begin + chunk.stop)
            inside = [*(offsets[of_chunk] - begin).tolist(), chunk.stop]
            first = int(offsets[offsets <= begin + chunk.start][-1]) - begin
            num_queries, num_keys = (torch.tensor([place, *inside]).diff() for place in (chunk.start, first))
            sizes += [torch.tensor([[1], [1 + first]]), torch.stack((num_queries, num_keys))]
    return F.pad(torch.cat(sizes, 1).cumsum(1), (1, 0)).int()


class _Mask(Enum):
    """Masks of transformer-engine that Megatron does not name: the last query of a segment attends to its last key."""

    padding_causal_bottom_right = 1


class _WithinDocuments(torch.nn.Module):
    """What `within_documents` changes of a `core_attention` of transformer-engine."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        assert pg_collection is not None, "Megatron hands its process groups down"
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(
            config=alone,  # type: ignore[call-arg]
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            cp_comm_type=cp_comm_type,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )
        self._ranks_of_sequence = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attn_mask_type: AttnMaskType,
        attention_bias: None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """[sequence, batch, heads, width] to [sequence, batch, hidden here]."""
        assert attention_bias is None, "attention bias is not set here"
        assert packed_seq_params is None, "sequences are packed here alone"
        length, group = key.size(0) * self._ranks_of_sequence.size(), self._ranks_of_sequence
        chunks = chunks_of(length, group)
        kind: AttnMaskType | _Mask = attn_mask_type
        offsets = (attention_mask, attention_mask)
        if is_split := len(chunks) > 1:
            key, value = whole_sequence(key, value, group)
            kind, offsets = _Mask.padding_causal_bottom_right, (attention_mask[0], attention_mask[1])
        joined = [_joined(query.chunk(len(chunks)), repeats_first=is_split)]
        joined += [_joined([one[: chunk.stop] for chunk in chunks], repeats_first=is_split) for one in (key, value)]
        documents = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets[0],
            cu_seqlens_kv=offsets[1],
            max_seqlen_q=len(chunks[0]),
            max_seqlen_kv=length,
        )
        attended = super().forward(*joined, None, kind, packed_seq_params=documents)
        of_chunks = attended.unflatten(0, (len(chunks), query.size(1), -1))[:, :, int(is_split) :]
        return of_chunks.transpose(1, 2).flatten(0, 1).flatten(2).contiguous()


def within_documents(core_attention: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The `core_attention` of transformer-engine, given `document_offsets` in place of a mask: only it sees the
    sequences of a microbatch as one, in which documents lie one after another ("thd"). Context-parallel ranks give it
    `chunk_offsets` and the keys of the whole sequence, and it exchanges nothing.
    """
    return type("DocumentAttention", (_WithinDocuments, core_attention), {})


def _joined(chunks: Sequence[Tensor], *, repeats_first: bool) -> Tensor:
    """The sequences of chunks ([sequence, batch, ...]) one after another, each of which may begin with its first token
    a second time.
    """
    repeated = [torch.cat((chunk[:1], chunk)) if repeats_first else chunk for chunk in chunks]
    return _one_after_another([chunk.transpose(0, 1).flatten(0, 1) for chunk in repeated])
