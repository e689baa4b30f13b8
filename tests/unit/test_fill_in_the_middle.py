"""Documents that are rearranged to be filled in: put back in order they are the text, at the rates that are set."""

import numpy as np
import pytest
import torch

from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.model.fill_in_the_middle import FillInTheMiddle

PREFIX, MIDDLE, SUFFIX, END = 100, 101, 102, 9
TOKENS = f"{PREFIX},{MIDDLE},{SUFFIX}"


def filling(rate: float, spm_rate: float = 0.5, seed: int = 1) -> FillInTheMiddle:
    data = DataConfig(fim_rate=rate, fim_spm_rate=spm_rate, fim_tokens=TOKENS, end_of_document=END)
    return FillInTheMiddle(data, seed)


def random_text(seed: int, length: int, of_ends: float = 0.05) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.where(random.random(length) < of_ends, END, random.integers(10, 90, length)).astype(np.int64)


def in_order(document: list[int]) -> tuple[list[int], str]:
    """A document put back in order, and how it was arranged: without a prefix both ways are the same."""
    if document[:1] != [PREFIX]:
        return document, "plain"
    if document[1] == SUFFIX:
        middle = document.index(MIDDLE)
        return document[middle + 1 :] + document[2:middle], "spm"
    suffix, middle = document.index(SUFFIX), document.index(MIDDLE)
    return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle], "psm"


def documents(text: np.ndarray) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in text.tolist():
        if token == END:
            found.append([])
        else:
            found[-1].append(token)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_whole_documents_put_back_in_order_are_those_of_the_text(seed: int) -> None:
    text = random_text(seed, 1000)
    arranged = filling(0.7).rearranged(text, number=seed)
    assert len(arranged) == len(text)
    before, after = documents(text), documents(arranged)[:-1]  # the last one is cut
    kinds = set()
    for original, document in zip(before, after, strict=False):
        assert original or not document
        found, kind = in_order(document)
        kinds.add(kind)
        assert found == original
    assert kinds == {"plain", "psm", "spm"}


def test_as_many_documents_are_arranged_as_the_rates_say() -> None:
    text = np.tile(np.array([*range(10, 90), *range(10, 90), END]), 2500)
    kinds = [in_order(one)[1] for one in documents(filling(0.4, 0.25).rearranged(text, number=3))[:2000] if one]
    share = {kind: kinds.count(kind) / len(kinds) for kind in ("plain", "psm", "spm")}
    assert share == pytest.approx({"plain": 0.6, "psm": 0.3, "spm": 0.1}, abs=0.03)


def test_it_follows_from_seed_and_number_alone() -> None:
    text = random_text(7, 300)
    one = filling(1.0).rearranged(text, number=5)
    assert np.array_equal(one, filling(1.0).rearranged(text, number=5))
    others = [
        filling(1.0).rearranged(text, 6),
        filling(1.0, seed=2).rearranged(text, 5),
        filling(1.0).rearranged(text, 5, 1),
    ]
    assert not any(np.array_equal(one, other) for other in others)
    assert np.array_equal(filling(0.0).rearranged(text, number=5), text)


def test_texts_without_documents_stay_and_single_tokens_are_documents() -> None:
    ends = np.full(20, END)
    assert np.array_equal(filling(1.0).rearranged(ends, number=0), ends)
    arranged = filling(1.0, 0.0).rearranged(np.array([50, END, *[END] * 20]), number=0)
    assert in_order(documents(arranged)[0])[0] == [50]
    assert len(documents(arranged)[0]) == 4


def test_each_part_of_a_sample_is_arranged_with_the_token_that_follows_it() -> None:
    text, other = random_text(1, 33), random_text(2, 17)
    sample = {
        "tokens": torch.from_numpy(np.concatenate([text[:-1], other[:-1]])),
        "labels": torch.from_numpy(np.concatenate([text[1:], other[1:]])),
        "parts": torch.tensor([0] * 32 + [1] * 16),
    }
    given: list[torch.Tensor] = []

    def make(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        given.extend(texts)
        return {}

    filling(1.0).of_sample(sample, 4, make)
    expected = [filling(1.0).rearranged(text, 4), filling(1.0).rearranged(other, 4, 1)]
    assert [one.tolist() for one in given] == [one.tolist() for one in expected]
