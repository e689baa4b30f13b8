"""Causal attention, also in a window or within documents: by torch's own kernel, or by that of transformer-engine."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from spare_megatron.mcore.model.rng import distinct_on_tensor_ranks


class TorchCoreAttention(MegatronModule):
    """The `core_attention` of a local layer spec; Megatron's own needs a global buffer and a sequence-squared mask."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002  (Megatron passes it)
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # noqa: ARG002  (Megatron passes it)
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert attn_mask_type is AttnMaskType.causal, "only causal self-attention is built here"
        assert attention_type == "self", "only causal self-attention is built here"
        assert pg_collection is not None, "Megatron hands its process groups down"
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._scale = softmax_scale
        window = config.window_size
        self._num_before = window[0] if window is not None and window[0] >= 0 else None
        self._tensor_rank = pg_collection.tp.rank()

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
        """[sequence, batch, heads, width] to [sequence, batch, hidden here]; causal without a `document_mask`."""
        assert attention_bias is None, "attention bias needs transformer-engine"
        assert packed_seq_params is None, "packed sequences need transformer-engine"
        dropout = self._dropout if self.training else 0.0
        length, before = query.size(0), self._num_before
        mask = None if before is None or before >= length - 1 else window_mask(length, before, query.device)
        if attention_mask is not None:
            mask = attention_mask if mask is None else attention_mask & mask
        with self._random_numbers(dropout, query.device):
            attended = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=self._scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return attended.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _random_numbers(self, dropout: float, device: torch.device) -> AbstractContextManager[None]:
        # Under sequence parallelism Megatron has already swapped the generators of the whole block.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        # Tensor-parallel ranks hold different heads, so their masks must differ.
        if device.type == "cuda":
            return get_cuda_rng_tracker().fork()
        return distinct_on_tensor_ranks(self._tensor_rank)


@cache
def window_mask(length: int, num_before: int, device: torch.device) -> Tensor:
    """[query, key]: whether a token attends to another, which are itself and the `num_before` tokens before it."""
    positions = torch.arange(length, device=device)
    distances = positions[:, None] - positions
    return (distances >= 0) & (distances <= num_before)


def document_mask(tokens: Tensor, end_of_document: int, parts: Tensor | None = None) -> Tensor:
    """[batch, 1, query, key]: whether a token attends to another of its document; [batch, sequence] `tokens`, and the
    numbers of the `parts` that lie apart in the text.
    """
    ends = (tokens == end_of_document).long()
    documents = ends.cumsum(dim=1) - ends + (0 if parts is None else parts)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


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


def within_documents(core_attention: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The `core_attention` of transformer-engine, given the `document_offsets` in place of a mask: only it sees the
    sequences of a microbatch as one, in which documents lie one after another ("thd").
    """

    class DocumentAttention(core_attention):  # type: ignore[misc, valid-type]
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
            length, batch_size = query.shape[:2]
            joined = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
            documents = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=attention_mask,
                cu_seqlens_kv=attention_mask,
                max_seqlen_q=length,
                max_seqlen_kv=length,
            )
            attended = super().forward(*joined, None, attn_mask_type, packed_seq_params=documents)
            return attended.reshape(batch_size, length, -1).transpose(0, 1).contiguous()

    return DocumentAttention
