"""What a training reads whose sequences get another length: every token once, by the text of the corpus alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import BlendedCorpus, CheckpointConfig, DataConfig
from spare_megatron.config.training.sample_index_folders import epoch_seed
from spare_megatron.mcore.model.attention import document_mask
from spare_megatron.mcore.model.training_samples import Corpus, prepare_index
from spare_megatron.tools.replay.data_command import samples_of
from spare_megatron.tools.text.corpus_writer import write_corpus

VOCABULARY = 60_000


def corpus_of(prefix: Path, first: int, lengths: Sequence[int]) -> BlendedCorpus:
    """A corpus in which every token occurs once, so that a token is its own place in the text."""
    ends = np.cumsum([first, *lengths])
    documents = [range(begin, end) for begin, end in pairwise(ends)]
    write_corpus(documents, prefix, vocab_size=VOCABULARY)
    return BlendedCorpus(corpus=str(prefix))


def config_of(data: DataConfig, seq_length: int, num_sequences: int) -> RunConfig:
    """A run whose steps read one sequence each."""
    return RunConfig(
        model=ModelConfig(seq_length=seq_length, vocab_size=VOCABULARY),
        layout=LayoutConfig(num_groups=1),
        spare=SpareConfig(redundancy=1, microbatches_per_shard=1),
        data=data,
        train=TrainConfig(steps=num_sequences, micro_batch_size=1),
    )


def read(data: DataConfig, lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of the sequences of a training: of each phase the length, and how many."""
    end, phases = 0, ()
    for seq_length, number in lengths:
        begin, end = end, end + number
        config = config_of(replace(data, phases=phases), seq_length, end)
        prepare_index(config)
        corpus = Corpus(config)
        for step in range(begin, end):
            batch = corpus.microbatch(step, 0)
            yield batch["tokens"][0].numpy(), batch["labels"][0].numpy()
        phases = (*phases, f"{seq_length}:{end}")


Samples = list[tuple[np.ndarray, np.ndarray]]
Phases = list[tuple[int, int]]
LENGTHS = [1, 2, 300, 40, 1, 1, 90, 700, 5, 64, 16, 33, 1200, 3, 250]
"""Of documents: some of one token, some of several samples."""
PHASES: list[tuple[Phases, int]] = [
    ([(16, 40)], 64),
    ([(64, 21)], 16),
    ([(24, 33)], 36),
    ([(36, 1)], 7),
    ([(16, 20), (64, 9), (16, 30)], 40),
    ([(16, 30), (64, 12), (48, 4)], 17),
    ([(16, 168)], 64),  # but for a few tokens the whole epoch
    ([(16, 167), (64, 1)], 16),  # what is left is less than a sample of the second length
]


def counted(samples: Samples) -> Counter[int]:
    return Counter(int(token) for tokens, _ in samples for token in tokens)


def assert_read_once(samples: Samples, num_tokens: int, seq_length: int) -> None:
    """The last token of an epoch is a label alone."""
    counts = counted(samples)
    assert max(counts.values()) == 1, "nothing is read twice"
    assert 0 <= num_tokens - 1 - len(counts) < seq_length, "and less than a sample is left out"


def rest_of(before: Phases, num_tokens: int) -> tuple[int, int, int]:
    """Counted one by one: the epoch under way, the sequences before it, and the tokens that are left of it."""
    epoch, first, number, left = 0, 0, 0, num_tokens - 1
    for length, count in before:
        for _ in range(count):
            if left < length:
                epoch, first, left = epoch + 1, number, num_tokens - 1
            number, left = number + 1, left - length
    return epoch, first, left


@pytest.mark.parametrize(("before", "seq_length"), PHASES)
def test_each_token_of_an_epoch_is_read_once_but_for_its_last_ones(
    tmp_path: Path, before: Phases, seq_length: int
) -> None:
    """Also those of the next epoch, which begins after that."""
    num_tokens = sum(LENGTHS)
    data = DataConfig(corpus=corpus_of(tmp_path / "text", 0, LENGTHS).corpus)
    epoch, first, left = rest_of(before, num_tokens)
    end = sum(number for _, number in before) + left // seq_length
    per_epoch = (num_tokens - 1) // seq_length
    samples = [*read(data, [*before, (seq_length, left // seq_length + per_epoch)])]
    assert_read_once(samples[first:end], num_tokens, seq_length)
    assert_read_once(samples[end:], num_tokens, seq_length)
    last_tokens = np.cumsum(LENGTHS) - 1
    for tokens, labels in samples:
        assert len(tokens) in {seq_length, *(length for length, _ in before)}
        assert ((labels == tokens + 1) | np.isin(tokens, last_tokens)).all(), "each is what follows in the document"
    plain = [*read(data, [(seq_length, (epoch + 2) * per_epoch)])]
    assert [tokens.tolist() for tokens, _ in samples[end:]] == [
        tokens.tolist() for tokens, _ in plain[(epoch + 1) * per_epoch :]
    ], "the next epoch is that of a training of this length"


def by_hand(documents: Sequence[Sequence[int]], seed: int, phases: Phases) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What docs/data.md says that the first epoch has, token by token, with NumPy alone."""
    shuffle, order = np.random.RandomState(seed), np.arange(len(documents))
    shuffle.shuffle(order)
    text = np.concatenate([documents[number] for number in order])
    left = np.arange(len(text) - 1)
    for length, number in phases:
        cuts = np.arange(len(left) // length)
        shuffle.shuffle(cuts)
        read = [left[cut * length :][:length] for cut in cuts[:number]]
        yield from ((text[places], text[places + 1]) for places in read)
        left, shuffle = np.setdiff1d(left, [*read]), np.random.RandomState(seed)


@pytest.mark.parametrize(("before", "seq_length"), PHASES[:-1])
def test_samples_come_in_the_order_that_the_documentation_names(
    tmp_path: Path, before: Phases, seq_length: int
) -> None:
    data = DataConfig(corpus=corpus_of(tmp_path / "text", 0, LENGTHS).corpus)
    ends = np.cumsum([0, *LENGTHS])
    documents = [range(begin, end) for begin, end in pairwise(ends)]
    _, _, left = rest_of(before, sum(LENGTHS))
    phases = [*before, (seq_length, left // seq_length)][: len(before) + (left >= seq_length)]
    expected = by_hand(documents, epoch_seed(TrainConfig().seed, 0, 0), phases)
    for (tokens, labels), (text, following) in zip(read(data, phases), expected, strict=True):
        assert tokens.tolist() == text.tolist()
        assert labels.tolist() == following.tolist()


def test_a_part_counts_as_a_document_where_documents_are_kept_apart(tmp_path: Path) -> None:
    """Every token of a sample attends to those of its own document and part alone, and has its place in them."""
    end = 59_999
    lengths = [37, 5, 211, 90, 60, 2, 133]
    begins = np.cumsum([0, *lengths])
    documents = [[*range(begin, last - 1), end] for begin, last in pairwise(begins)]
    write_corpus(documents, tmp_path / "text", vocab_size=VOCABULARY)
    data = DataConfig(
        corpus=str(tmp_path / "text"), end_of_document=end, reset_attention_mask=True, reset_position_ids=True,
        eod_mask_loss=True, phases=("8:30",),
    )  # fmt: skip
    config = config_of(data, 32, 38)
    prepare_index(config)
    corpus, num_apart = Corpus(config), 0
    for step in range(30, 38):
        batch = corpus.microbatch(step, 0)
        tokens, parts = batch["tokens"][0].tolist(), batch["parts"][0].tolist()
        starts = [0]
        for place in range(1, 32):
            is_new = tokens[place - 1] == end or (tokens[place] != end and tokens[place] != tokens[place - 1] + 1)
            starts.append(place if is_new else starts[-1])
            num_apart += is_new and tokens[place - 1] != end
            assert parts[place] >= parts[place - 1]
        mask = document_mask(batch["tokens"], end, batch["parts"])[0, 0]
        assert mask.tolist() == [[starts[i] <= j <= i for j in range(32)] for i in range(32)]
        assert batch["position_ids"][0].tolist() == [place - start for place, start in enumerate(starts)]
        assert batch["loss_mask"][0].tolist() == [token != end for token in tokens]
    assert num_apart > 5


def test_a_change_at_the_end_of_an_epoch_goes_on_with_megatrons_order(tmp_path: Path) -> None:
    data = DataConfig(corpus=corpus_of(tmp_path / "text", 0, [400, 113]).corpus)
    changed, plain = [*read(data, [(16, 32), (32, 30)])], [*read(data, [(32, 46)])]
    assert [tokens.tolist() for tokens, _ in changed[32:]] == [tokens.tolist() for tokens, _ in plain[16:]]


def test_phases_of_another_corpus_may_have_samples_longer_than_this_one(tmp_path: Path) -> None:
    """Epochs of what they have read were counted in this corpus, which has none of that length."""
    data = DataConfig(corpus=corpus_of(tmp_path / "text", 0, [40, 60]).corpus)
    config = config_of(replace(data, phases=("4096:3", "2048:10:other")), 16, 16)
    prepare_index(config)
    plain = [*read(data, [(16, 6)])]
    changed = [Corpus(config).microbatch(step, 0)["tokens"][0].tolist() for step in range(10, 16)]
    assert changed == [tokens.tolist() for tokens, _ in plain]


def test_steps_of_the_run_before_are_not_shown_as_those_of_this_one() -> None:
    """They were shown with samples that no run has read."""
    config = config_of(DataConfig(corpus="text", phases=("16:6",)), 32, 9)
    config = replace(config, checkpoint=CheckpointConfig(load="first/checkpoints/step-00000006"))
    reason = (
        r"step 5: the run has the steps 6 to 8 \(train.steps\); .* saved checkpoint.load=first/.*: name its directory"
    )
    with pytest.raises(ValueError, match=reason):
        next(samples_of(config, 5, None, None))


@pytest.mark.parametrize(("before", "seq_length"), [PHASES[0], PHASES[2], PHASES[4]])
def test_each_corpus_of_a_blend_leaves_out_less_than_a_sample(
    tmp_path: Path, before: Phases, seq_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choices of corpora repeat, and begin anew with each phase."""
    monkeypatch.setattr("spare_megatron.mcore.model.training_samples._CHOICES", 23)
    parts = [
        replace(corpus_of(tmp_path / "a", 0, LENGTHS), weight=2.0),
        replace(corpus_of(tmp_path / "b", 10_000, [*reversed(LENGTHS), 900]), weight=3.0),
        corpus_of(tmp_path / "c", 20_000, [5000]),
    ]
    samples = [*read(DataConfig(blend=tuple(parts)), [*before, (seq_length, 900)])]
    for first, num_tokens in ((0, sum(LENGTHS)), (10_000, sum(LENGTHS) + 900), (20_000, 5000)):
        own = [one for one in samples if first <= one[0][0] < first + 10_000]
        used, num_read = 0, 0
        for tokens, _ in own:
            if num_read + len(tokens) > num_tokens - 1:
                break
            used, num_read = used + 1, num_read + len(tokens)
        assert used < len(own), "a second epoch begins"
        assert_read_once(own[:used], num_tokens, seq_length)
    shares = Counter(int(tokens[0]) // 10_000 for tokens, _ in samples[-900:])
    assert [round(shares[part] / 150) for part in range(3)] == [2, 3, 1]
