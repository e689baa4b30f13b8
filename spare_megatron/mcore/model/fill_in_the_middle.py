"""Documents to be filled in: beginning and end come first, the middle last (Bavarian et al., arXiv 2207.14255)."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from spare_megatron.config.schema_sections import DataConfig

Sample = Mapping[str, Tensor]


class FillInTheMiddle:
    """Rearranges documents of samples. What becomes of a sample depends on the seed and its number alone, so whichever
    group computes it reads the same tokens, also after a loss or in a later run.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._rate, self._spm_rate, self._end = data.fim_rate, data.fim_spm_rate, data.end_of_document
        self._prefix, self._middle, self._suffix = (np.array([token]) for token in data.fim_ids)
        self._seed = seed

    def rearranged(self, text: np.ndarray, number: int, part: int = 0) -> np.ndarray:
        """A part of a sample's text, as long as before: what the three tokens of each document push out at its end is
        left out. Documents and pieces of them count alike, and keep the token that ends them.
        """
        random = np.random.default_rng([self._seed, number, part])
        ends = np.flatnonzero(text == self._end)
        pieces: list[np.ndarray] = []
        for document in np.split(text, np.unique(np.concatenate((ends, ends + 1)))):
            is_chosen, is_spm = random.random(2) < (self._rate, self._spm_rate)
            is_end = len(document) == 1 and document[0] == self._end
            pieces += (
                self._parts(document, random, is_spm) if is_chosen and len(document) and not is_end else [document]
            )
        return np.concatenate(pieces)[: len(text)].astype(text.dtype)

    def _parts(self, document: np.ndarray, random: np.random.Generator, is_spm: bool) -> list[np.ndarray]:
        prefix, middle, suffix = np.split(document, np.sort(random.integers(0, len(document) + 1, 2)))
        if is_spm:
            return [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
        return [self._prefix, prefix, self._suffix, suffix, self._middle, middle]

    def of_sample(self, sample: Sample, number: int, make: Callable[[list[Tensor]], dict[str, Tensor]]) -> Sample:
        """The sample of a number, made anew of its texts, each with the token that follows it."""
        texts = [text.numpy() for text in _texts_of(sample)]
        return make([torch.from_numpy(self.rearranged(text, number, part)) for part, text in enumerate(texts)])


def _texts_of(sample: Sample) -> Iterator[Tensor]:
    parts = sample.get("parts", torch.zeros_like(sample["tokens"]))
    for part in range(int(parts.max()) + 1):
        tokens, labels = sample["tokens"][parts == part], sample["labels"][parts == part]
        yield torch.cat([tokens, labels[-1:]])
