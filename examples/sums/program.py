"""A custom program: a recurrent model that learns to add, with a second term of the loss and a metric.

    spare train examples/sums/config.toml --program examples/sums/program.py

or `python examples/sums/program.py`. The configuration kills two of the four groups.
"""

from pathlib import Path

import torch
from torch.nn import functional

# First: without triton, as on CPUs, megatron-core 0.18 and later can only be imported after this.
from spare_megatron import Batch, LossTerm, ModelContext, RunConfig, StepContext, Terms, pretrain

# isort: split
from megatron.core.transformer import MegatronModule

CHARACTERS = "0123456789+=;"

loss_terms = {
    "z": LossTerm(weight=1e-3),  # keeps the normaliser of the softmax near 1
    "correct": LossTerm(weight=0.0),  # a metric: the share of characters that are right
}


class Sums:
    """Lines of sums such as `17+5=22;`, made from the number of the sample; only the results count for the loss."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        text, counts = "", ""
        while len(text) <= self._length:
            left, right = torch.randint(100, (2,), generator=generator).tolist()
            task, result = f"{left}+{right}=", f"{left + right};"
            text, counts = text + task + result, counts + "0" * len(task) + "1" * len(result)
        line = torch.tensor([CHARACTERS.index(character) for character in text[: self._length + 1]])
        mask = torch.tensor([float(digit) for digit in counts[1 : self._length + 1]])
        return {"tokens": line[:-1], "labels": line[1:], "mask": mask}


class Adder(MegatronModule):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context.transformer)
        width = context.config.model.hidden_size
        self.embedding = torch.nn.Embedding(len(CHARACTERS), width)
        self.layers = torch.nn.GRU(width, width, num_layers=context.config.model.num_layers, batch_first=True)
        self.output = torch.nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embedding(tokens))
        return self.output(hidden)


def model_provider(context: ModelContext) -> MegatronModule:
    return Adder(context)


def datasets_provider(config: RunConfig) -> Sums:
    return Sums(config.model.seq_length)


def forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[torch.Tensor, Terms]:
    logits = model(batch["tokens"])
    labels, mask = batch["labels"], batch["mask"]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
    count = mask.count_nonzero()
    terms = {
        "loss": ((losses * mask).sum(), count),
        "z": ((logits.logsumexp(-1).square() * mask).sum(), count),
        "correct": (((logits.argmax(-1) == labels) * mask).sum(), count),
    }
    return logits, terms


if __name__ == "__main__":
    pretrain(
        Path(__file__).with_name("config.toml"),
        model_provider=model_provider,
        forward_step=forward_step,
        datasets_provider=datasets_provider,
        loss_terms=loss_terms,
    )
