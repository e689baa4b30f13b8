"""Documents that are packed into one sequence, against the same documents alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.model import batches, model
from spare_megatron.mcore.model.attention import (
    TorchCoreAttention,
    chunk_offsets,
    chunks_of,
    document_mask,
    document_offsets,
    within_documents,
)
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.training_samples import Corpus, prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration import mcore_group, numpy_gpt
from tests.integration.mcore_group import CPU, run_group
from tests.integration.numpy_gpt import Arrays

END = 6
MODELS: dict[str, dict[str, Any]] = {
    "rope": {"position_embedding": "rope", "num_query_groups": 2, "normalization": "rmsnorm", "activation": "swiglu"},
    "rope in a window": {"position_embedding": "rope", "sliding_window": 3},
    "learned": {},
}


def config_of(corpus: Path, **model: Any) -> RunConfig:
    is_learned = "position_embedding" not in model
    config = RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=32, seq_length=24, vocab_size=16, **model),
        layout=LayoutConfig(num_groups=1),
        data=DataConfig(
            corpus=str(corpus), reset_attention_mask=True, reset_position_ids=is_learned, end_of_document=END
        ),
        train=TrainConfig(micro_batch_size=4),
    )
    prepare_index(config)
    return config


def documents_in(tokens: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Row and places of each document, which ends with its last token or with the sequence."""
    for row, sequence in enumerate(tokens):
        begin = 0
        for place, token in enumerate(sequence):
            if token == END or place + 1 == len(sequence):
                yield row, slice(begin, place + 1)
                begin = place + 1


class PackedAttention(TorchCoreAttention):
    """In place of transformer-engine's, which needs a GPU: in each segment the last query attends to all its keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: None, *others: Any, **options: Any) -> Tensor:
        (packed,), (kind,) = options.values(), others
        assert mask is None
        assert packed.qkv_format == "thd"
        offsets = packed.cu_seqlens_q, packed.cu_seqlens_kv
        assert {each.dtype for each in offsets} == {torch.int32}
        assert offsets[0] is offsets[1] if kind is AttnMaskType.causal else kind.name == "padding_causal_bottom_right"
        of_queries, of_keys = (each.diff() for each in offsets)
        assert self.config.context_parallel_size == 1, "it would exchange keys and values itself"
        assert (of_queries > 0).all()
        assert (of_keys >= of_queries).all()
        assert packed.max_seqlen_q >= of_queries.max()
        assert packed.max_seqlen_kv >= max(of_keys.max(), packed.max_seqlen_q)
        sizes = of_queries.tolist(), of_keys.tolist(), of_keys.tolist()
        parts = zip(*map(Tensor.split, (query, key, value), sizes), strict=True)
        return torch.cat([self._of_segment(*three) for three in parts])

    def _of_segment(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """By the definition, [query, hidden here]."""
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        sees = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
        if self._num_before is not None:
            sees = sees.triu(len(key) - len(query) - self._num_before)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value).flatten(1)


def packed_and_computed(first: RunConfig, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """The same, as with layers of transformer-engine."""
    take_packed_attention()
    return computed(first, configs)


def packed_sums(config: RunConfig, *calls: Any) -> Any:
    """As `compute_sums`, with such layers."""
    take_packed_attention()
    return mcore_group.compute_sums(config, *calls)


def take_packed_attention() -> None:
    batches.uses_transformer_engine = lambda *_: True
    model.TorchCoreAttention = within_documents(PackedAttention)


def computed(_first: RunConfig, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Of each model: values, a batch, losses of its tokens with and without the mask, gradients of their sum, and
    those of the sum over all documents, each computed alone."""
    answers = []
    for config in configs:
        trainer = GroupTrainer(config, CPU)
        (chunk,) = trainer.chunks
        named = {name.removeprefix("module."): value for name, value in chunk.module.named_parameters()}
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for value in named.values():
                value += 0.2 * torch.randn(value.shape, generator=generator)
        batch = Corpus(config).microbatch(0, 0)
        batch = on_device(batch, config, CPU, trainer.process_groups.cp)
        inputs, labels = (batch["tokens"], batch["position_ids"]), batch["labels"]
        losses = chunk.module(*inputs, batch["attention_mask"], labels=labels)
        is_packed = batch["attention_mask"].dim() == 1

        def one(tokens: Tensor, *, is_packed: bool = is_packed) -> Tensor | None:
            """What makes each sequence a document."""
            return torch.arange(0, tokens.numel() + 1, tokens.shape[1]).int() if is_packed else None

        alone = []
        for row, places in documents_in(inputs[0].numpy()):
            tokens = inputs[0][row : row + 1, places]
            positions = torch.arange(tokens.shape[1])[None]
            alone.append(chunk.module(tokens, positions, one(tokens), labels=labels[row : row + 1, places]).sum())
        answers.append(
            {
                "values": {name: value.detach().numpy() for name, value in named.items()},
                "batch": {name: values.numpy() for name, values in batch.items()},
                "losses": losses.detach().numpy(),
                "unmasked": chunk.module(*inputs, one(inputs[0]), labels=labels).detach().numpy(),
                "packed": gradients(losses.sum(), named),
                "alone": gradients(torch.stack(alone).sum(), named),
            }
        )
    return answers


def gradients(loss: torch.Tensor, named: dict[str, torch.nn.Parameter]) -> Arrays:
    found = torch.autograd.grad(loss, list(named.values()))
    return {name: gradient.numpy() for name, gradient in zip(named, found, strict=True)}


@pytest.mark.parametrize("task", [computed, packed_and_computed], ids=["mask", "packed"])
def test_packed_documents_have_the_losses_and_gradients_of_the_documents_alone(
    tmp_path: Path, task: Callable[..., Any]
) -> None:
    """Losses against NumPy, in which no document knows of another, and gradients against our own model."""
    write_corpus([np.random.default_rng(1).integers(0, 16, 2000)], tmp_path / "text")
    configs = [config_of(tmp_path / "text", **model) for model in MODELS.values()]
    (answers,) = run_group(task, configs[0], configs)
    for name, config, answer in zip(MODELS, configs, answers, strict=True):
        tokens, labels = answer["batch"]["tokens"], answer["batch"]["labels"]
        documents = list(documents_in(tokens))
        assert len(documents) > 2 * len(tokens)
        expected = np.zeros(tokens.shape)
        for row, places in documents:
            expected[row, places] = numpy_gpt.token_losses(
                config.model, answer["values"], tokens[row : row + 1, places], labels[row : row + 1, places]
            )
            if config.data.reset_position_ids:
                assert answer["batch"]["position_ids"][row, places].tolist() == [*range(places.stop - places.start)]
        np.testing.assert_allclose(answer["losses"], expected, rtol=2e-5, err_msg=name)
        assert np.abs(answer["unmasked"] - expected).max() > 0.1
        for parameter, gradient in answer["packed"].items():
            apart = np.linalg.norm(gradient - answer["alone"][parameter])
            assert apart < 1e-5 * np.linalg.norm(gradient), (name, parameter)


@pytest.mark.parametrize("seed", range(5))
def test_the_mask_is_that_of_every_pair(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 2 + seed, (3, 12))
    end = 1
    pairs = [
        [[key <= query and end not in row[key:query].tolist() for key in range(12)] for query in range(12)]
        for row in tokens
    ]
    mask = document_mask(torch.from_numpy(tokens), end)
    assert mask.shape == (3, 1, 12, 12)
    assert mask[:, 0].tolist() == pairs


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_offsets_of_documents_are_those_of_the_mask(seed: int, has_parts: bool) -> None:
    random = np.random.default_rng(seed)
    tokens = torch.from_numpy(random.integers(0, 2 + seed, (3, 12)))
    parts = torch.from_numpy(random.integers(0, 2, (3, 12)).cumsum(axis=1)) if has_parts else None
    offsets = document_offsets(tokens, 1, parts)
    assert offsets.dtype == torch.int32
    assert (offsets[0], offsets[-1]) == (0, tokens.numel())
    number = torch.bucketize(torch.arange(tokens.numel()), offsets, right=True)
    of_all = (number[:, None] == number).tril()
    expected = torch.block_diag(*document_mask(tokens, 1, parts)[:, 0].int()).bool()
    assert torch.equal(of_all, expected)


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_offsets_of_chunks_pair_what_the_mask_pairs(seed: int, has_parts: bool) -> None:
    """For each of up to three ranks; what the first segment of a chunk has beside keys without a query is repeated."""
    random, length = np.random.default_rng(seed), 12
    tokens = torch.from_numpy(random.integers(0, 2 + seed, (3, length)))
    parts = torch.from_numpy(random.integers(0, 2, (3, length)).cumsum(axis=1)) if has_parts else None
    num_ranks = 2 + seed % 2
    for rank in range(num_ranks):
        group = SimpleNamespace(size=lambda: num_ranks, rank=lambda rank=rank: rank)
        chunks = chunks_of(length, group)
        of_queries, of_keys = chunk_offsets(document_offsets(tokens, 1, parts), length, chunks)
        queries = [
            (row, place) for chunk in chunks for row in range(3) for place in (None, *range(chunk.start, chunk.stop))
        ]
        keys = [(row, place) for chunk in chunks for row in range(3) for place in (None, *range(chunk.stop))]
        assert (len(queries), len(keys)) == (of_queries[-1], of_keys[-1])
        pairs = []
        for segment in range(len(of_queries) - 1):
            some, others = (slice(each[segment], each[segment + 1]) for each in (of_queries, of_keys))
            for number, (row, place) in enumerate(reversed(queries[some])):
                seen = keys[others][: len(keys[others]) - number]
                pairs += [(row, place, key) for of_row, key in seen if place is not None and of_row == row]
                assert {of_row for of_row, _ in seen} == {row}
        mask = document_mask(tokens, 1, parts, chunks)[:, 0]
        places = [*chunks[0], *chunks[1]]
        expected = [(int(row), places[query], int(key)) for row, query, key in mask.nonzero()]
        assert sorted(pairs) == sorted(expected)
        assert torch.equal(mask, document_mask(tokens, 1, parts)[:, 0, places])
