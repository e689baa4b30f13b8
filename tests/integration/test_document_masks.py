"""Documents that are packed into one sequence, against the same documents alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from spare_megatron.config.schema_data import DataConfig
from spare_megatron.mcore.model.attention import document_mask
from spare_megatron.mcore.model.training_samples import Corpus, on_device, prepare_index
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
        alone = []
        for row, places in documents_in(inputs[0].numpy()):
            tokens = inputs[0][row : row + 1, places]
            positions = torch.arange(tokens.shape[1])[None]
            alone.append(chunk.module(tokens, positions, None, labels=labels[row : row + 1, places]).sum())
        answers.append(
            {
                "values": {name: value.detach().numpy() for name, value in named.items()},
                "batch": {name: values.numpy() for name, values in batch.items()},
                "losses": losses.detach().numpy(),
                "unmasked": chunk.module(*inputs, None, labels=labels).detach().numpy(),
                "packed": gradients(losses.sum(), named),
                "alone": gradients(torch.stack(alone).sum(), named),
            }
        )
    return answers


def gradients(loss: torch.Tensor, named: dict[str, torch.nn.Parameter]) -> Arrays:
    found = torch.autograd.grad(loss, list(named.values()))
    return {name: gradient.numpy() for name, gradient in zip(named, found, strict=True)}


def test_packed_documents_have_the_losses_and_gradients_of_the_documents_alone(tmp_path: Path) -> None:
    """Losses against NumPy, in which no document knows of another, and gradients against our own model."""
    write_corpus([np.random.default_rng(1).integers(0, 16, 2000)], tmp_path / "text")
    configs = [config_of(tmp_path / "text", **model) for model in MODELS.values()]
    (answers,) = run_group(computed, configs[0], configs)
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
