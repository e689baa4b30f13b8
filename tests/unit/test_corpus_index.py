"""Damaged indices of corpora: what Megatron refuses is refused before anything starts, and what is not trains."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.corpus import judge_corpus
from tests.unit.tiny_corpus import DTYPE_CODES

HEADER = struct.Struct("<9sQBQQ")
NUM_DRAWN = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The fields of an index, and the bytes of both files where they are not those of the fields."""

    dtype: str
    lengths: tuple[int, ...]
    documents: tuple[int, ...]
    magic: bytes = b"MMIDIDX\x00\x00"
    version: int = 1
    code: int | None = None
    num_sequences: int | None = None
    num_documents: int | None = None
    begins: tuple[int, ...] | None = None
    change: Callable[[bytes], bytes] = bytes
    change_tokens: Callable[[bytes], bytes] = bytes

    def write(self, prefix: Path) -> None:
        lengths = np.array(self.lengths, np.int64)
        tokens = np.arange(lengths.clip(0).sum()).astype(self.dtype) % 100
        begins = (np.cumsum(lengths) - lengths) * tokens.itemsize if self.begins is None else np.array(self.begins)
        header = HEADER.pack(
            self.magic,
            self.version,
            DTYPE_CODES[self.dtype] if self.code is None else self.code,
            len(self.lengths) if self.num_sequences is None else self.num_sequences,
            len(self.documents) if self.num_documents is None else self.num_documents,
        )
        numbers = (lengths.astype("<i4"), begins.astype("<i8"), np.array(self.documents, "<i8"))
        Path(f"{prefix}.bin").write_bytes(self.change_tokens(tokens.tobytes()))
        Path(f"{prefix}.idx").write_bytes(self.change(header + b"".join(part.tobytes() for part in numbers)))


def whole(random: Random) -> Drawn:
    """An index as programs write it; documents may be empty, and have several sequences."""
    lengths = tuple(random.choice((0, 1, 2, 5, 40)) for _ in range(random.randrange(1, 6)))
    inner = sorted(random.choices(range(len(lengths) + 1), k=random.randrange(len(lengths) + 1)))
    return Drawn(
        dtype=random.choice(["u1", "i1", "i2", "i4", "i8", "u2"]), lengths=lengths, documents=(0, *inner, len(lengths))
    )


def other(random: Random, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers with one that is changed, left out, added or swapped."""
    changed = list(numbers)
    place = random.randrange(len(changed) + 1)
    match random.randrange(4) if place < len(changed) else 2:
        case 0:
            changed[place] += random.choice((-2, -1, 1, 2, 2**40))
        case 1:
            del changed[place]
        case 2:
            changed.insert(place, random.choice((-1, 0, 1, 3, 9)))
        case 3:
            random.shuffle(changed)
    return tuple(changed)


def damaged(random: Random, drawn: Drawn) -> Drawn:
    item = np.dtype(drawn.dtype).itemsize
    begins = tuple(item * sum(drawn.lengths[:place]) for place in range(len(drawn.lengths)))

    def flipped(content: bytes) -> bytes:
        place = random.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]

    def cut(content: bytes) -> bytes:
        return content[: random.randrange(len(content) + 1)]

    cases: list[Callable[[], Drawn]] = [
        lambda: replace(drawn, documents=other(random, drawn.documents)),
        lambda: replace(drawn, documents=drawn.documents[: random.randrange(len(drawn.documents))]),
        lambda: replace(drawn, documents=drawn.documents[random.randrange(1, len(drawn.documents)) :]),
        lambda: replace(drawn, documents=tuple(random.choices(range(-1, 9), k=random.randrange(4)))),
        lambda: replace(drawn, lengths=tuple(min(length, 99) for length in other(random, drawn.lengths)) or (0,)),
        lambda: replace(drawn, begins=other(random, begins)),
        lambda: replace(drawn, begins=tuple(random.choices(begins, k=len(begins)))),
        lambda: replace(drawn, num_sequences=random.choice((0, 1, 2, 3, 2**63))),
        lambda: replace(drawn, num_documents=random.choice((0, 1, 2, 3, 2**63))),
        lambda: replace(drawn, code=random.randrange(12)),
        lambda: replace(drawn, version=random.choice((0, 2, 2**63))),
        lambda: replace(drawn, magic=b"MMIDIDX\x00\x01"),
        lambda: replace(drawn, change=cut),
        lambda: replace(drawn, change=flipped),
        lambda: replace(drawn, change=lambda content: content + bytes(random.randrange(9))),
        lambda: replace(drawn, change_tokens=lambda content: cut(content) if content else b"1"),
        lambda: replace(drawn, change_tokens=lambda content: content + bytes(random.randrange(9))),
    ]
    return random.choice(cases)()


def megatrons_refusal(prefix: Path) -> str:
    """What Megatron raises as it opens the corpus and reads every sequence; nothing if it does not."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        dataset = IndexedDataset(str(prefix))
        for number in range(len(dataset)):
            assert len(dataset[number]) == dataset.sequence_lengths[number]
    except Exception as error:  # noqa: BLE001  (any is a refusal)
        return repr(error)
    return ""


def train(prefix: Path, num_tokens: int) -> None:
    """Reads every sample of an epoch of a run; raises as the run would."""
    from spare_megatron.mcore.model.training_samples import Corpus, prepare_index

    config = RunConfig(
        model=ModelConfig(seq_length=2),
        layout=LayoutConfig(num_groups=1),
        spare=SpareConfig(redundancy=1),
        data=DataConfig(corpus=str(prefix), cache=str(prefix.parent / "cache" / prefix.name)),
        train=TrainConfig(steps=(num_tokens - 1) // 2, micro_batch_size=1),
    )
    prepare_index(config)
    corpus = Corpus(config)
    for step in range(config.train.steps):
        assert corpus.microbatch(step, 0)["tokens"].shape == (1, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Megatron's half open datasets
def test_what_megatron_refuses_is_refused_with_one_line_and_what_passes_trains(tmp_path: Path) -> None:
    random = Random(39)
    num_refused = num_trained = 0
    for number in range(NUM_DRAWN):
        drawn = whole(random) if number % 10 == 0 else damaged(random, whole(random))
        prefix = tmp_path / f"drawn-{number}"
        drawn.write(prefix)
        theirs = megatrons_refusal(prefix)
        facts, ours = judge_corpus(DataConfig(corpus=str(prefix), cache=str(tmp_path / "cache")))
        assert (facts is None) == bool(ours), drawn
        assert not (theirs and not ours), f"{theirs} of {drawn}"
        if facts is None:
            assert ours.startswith(f"data.corpus={prefix}: {prefix}."), ours
            assert "\n" not in ours
            num_refused += bool(theirs)
        elif facts.num_tokens > 2 and num_trained < 100:  # fewer are less than a sample
            train(prefix, facts.num_tokens)
            num_trained += 1
    assert num_refused > NUM_DRAWN // 4
    assert num_trained == 100


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ((0, 1, 2), "has 4 sequences, and its documents end at sequence 2"),
        ((2, 3, 4), "has 4 sequences, and its first document begins at sequence 2"),
        ((), "has 4 sequences, and no documents"),
        ((0,), "has 4 sequences, and its documents end at sequence 0"),
        ((0, 3, 2, 4), "has documents that are out of order: document 2 begins at sequence 2"),
        ((-1, 4), "has documents that are out of order: document 0 begins at sequence -1"),
        ((0, 5), "has 4 sequences, and its documents end at sequence 5"),
    ],
)
def test_a_list_of_documents_that_is_not_of_the_sequences_is_named(
    tmp_path: Path, documents: tuple[int, ...], expected: str
) -> None:
    """The last had a traceback of Megatron's, in a rank."""
    Drawn(dtype="u1", lengths=(64, 64, 64, 64), documents=documents).write(tmp_path / "text")
    _, failure = judge_corpus(DataConfig(corpus=str(tmp_path / "text")))
    assert failure == f"data.corpus={tmp_path}/text: {tmp_path}/text.idx {expected}; copy or write the corpus anew"


@pytest.mark.parametrize("documents", [(0, 4), (0, 0, 2, 2, 4, 4), (0, 1, 2, 3, 4)])
def test_documents_may_be_empty_or_have_several_sequences(tmp_path: Path, documents: tuple[int, ...]) -> None:
    Drawn(dtype="u1", lengths=(64, 0, 1, 64), documents=documents).write(tmp_path / "text")
    facts, failure = judge_corpus(DataConfig(corpus=str(tmp_path / "text")))
    assert (facts is not None and facts.num_tokens, failure) == (129, "")
