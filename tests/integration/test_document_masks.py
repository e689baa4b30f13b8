"""Documents that are packed into one sequence, against the same documents alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from spare_megatron.config.schema_data import DataConfig
from spare_megatron.mcore.model import batches, model
from spare_megatron.mcore.model.attention import (
    TorchCoreAttention,
    document_mask,
    document_offsets,
    within_documents,
)
from spare_megatron.mcore.model.batches import on_device
from spare_megatron.mcore.model.training_samples import Corpus, prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration import numpy_gpt
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
    """In place of transformer-engine's, which needs a GPU: causal within each of the documents that are joined."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: None, *others: Any, **options: Any) -> Tensor:
        (packed,) = options.values()
        assert mask is None
        assert others == (AttnMaskType.causal,)
        assert packed.qkv_format == "thd"
        assert packed.cu_seqlens_q.dtype == torch.int32
        assert packed.cu_seqlens_q is packed.cu_seqlens_kv
        sizes = packed.cu_seqlens_q.diff()
        assert packed.max_seqlen_q == packed.max_seqlen_kv >= sizes.max()
        parts = zip(*(tensor.split(sizes.tolist()) for tensor in (query, key, value)), strict=True)
        attended = [super(PackedAttention, self).forward(*(part[:, None] for part in three), None) for three in parts]
        return torch.cat(attended)[:, 0]


def packed_and_computed(first: RunConfig, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """The same, as with layers of transformer-engine."""
    batches.uses_transformer_engine = lambda *_: True
    model.TorchCoreAttention = within_documents(PackedAttention)
    return computed(first, configs)


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
