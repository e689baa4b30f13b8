"""The corpus as it is written, indexed and addressed."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.config.schema_sections import BlendedCorpus, DataConfig, ValidationCorpus
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.config.training.sample_index_folders import NUM_KEPT, epoch_seed, leased
from spare_megatron.config.training.terms import numbers_of as numbers_of_unit
from spare_megatron.mcore.model.training_samples import (
    Corpus,
    ValidationWindows,
    corpus_dataset,
    prepare_index,
    validation_sets,
)
from spare_megatron.stacking.plans import share_of
from spare_megatron.tools.replay.data_command import samples_of
from spare_megatron.tools.text.corpus_writer import CorpusCounts, write_corpus
from tests.integration.mcore_group import all_work, numbers_of, read_tokens, run_group, work_of

DOCUMENTS = [bytes(range(start, start + 90)) for start in range(60)]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    prefix = tmp_path / "text"
    write_corpus(DOCUMENTS, prefix)
    return RunConfig(
        model=ModelConfig(seq_length=16),
        layout=LayoutConfig(num_groups=3),
        spare=SpareConfig(redundancy=2, microbatches_per_shard=2),
        data=DataConfig(corpus=str(prefix)),
        train=TrainConfig(steps=4, micro_batch_size=2),
    )


# -------------------------------------------------------------------------------------------------------- writing


def test_what_is_written_is_what_megatron_reads(tmp_path: Path) -> None:
    counts = write_corpus([b"ab", b"", [0, 255], b"\x80"], tmp_path / "deep" / "text")
    assert counts == CorpusCounts(num_documents=3, num_tokens=5)
    assert read_documents(tmp_path / "deep" / "text") == [[97, 98], [0, 255], [128]]


@pytest.mark.parametrize("vocab_size", [256, 65499, 65500])
def test_what_is_written_is_to_the_byte_what_megatron_writes(tmp_path: Path, vocab_size: int) -> None:
    documents = [np.random.default_rng(0).integers(0, vocab_size, length) for length in (5, 1, 300)]
    write_corpus(documents, tmp_path / "ours", vocab_size=vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [document.size])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()


@pytest.mark.parametrize("documents", [[[0, 300]], [[-1]], [b""], []], ids=["too large", "negative", "empty", "none"])
def test_a_corpus_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, documents: list[list[int]]) -> None:
    write_corpus([b"old"], tmp_path / "text")
    with pytest.raises(ValueError, match=r"vocab_size|give it some text"):
        write_corpus([*documents], tmp_path / "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin", "text.idx"]
    assert bytes(read_documents(tmp_path / "text")[0]) == b"old"


def read_documents(prefix: Path) -> list[list[int]]:
    # Its items are views of a mapped file that is closed with it, so it must outlive them.
    dataset = IndexedDataset(str(prefix))
    return [dataset[number].tolist() for number in range(len(dataset))]


# ----------------------------------------------------------------------------------------------------- addressing


def test_every_sample_of_the_run_has_one_address(config: RunConfig) -> None:
    prepare_index(config)
    corpus = Corpus(config)
    first = [
        corpus.first_sample(step, number)
        for step in range(config.train.steps)
        for number in numbers_of(config, all_work(config), step)
    ]
    assert first == list(range(0, 4 * 3 * 2 * 2, config.train.micro_batch_size))


def test_every_sample_of_a_run_whose_batch_grows_has_one_address(config: RunConfig) -> None:
    config = replace(config, spare=replace(config.spare, microbatches_per_shard=4, ramp_start=1, ramp_steps=3))
    prepare_index(config)
    corpus = Corpus(config)
    sizes = [1, 2, 3, 4]
    numbers = [numbers_of(config, all_work(config, step), step) for step in range(4)]
    first = [corpus.first_sample(step, number) for step, of_step in enumerate(numbers) for number in of_step]
    assert first == list(range(0, 3 * sum(sizes) * 2, config.train.micro_batch_size))
    assert corpus.digest() != Corpus(replace(config, train=replace(config.train, steps=3))).digest()


def test_places_that_are_left_out_are_read_by_no_step_and_what_follows_moves_up(config: RunConfig) -> None:
    """Over the end of an epoch of 337 sequences; the index is the same."""
    config = replace(config, train=replace(config.train, steps=30))
    skip = ("3", "10-20", "330-345")
    skipping = replace(config, data=replace(config.data, skip=skip))
    longer = replace(config, train=replace(config.train, steps=33))
    assert prepare_index(longer) == prepare_index(skipping)
    whole, corpus = Corpus(longer), Corpus(skipping)
    read = [
        sample
        for step in range(33)
        for number in numbers_of(config, all_work(config), step)
        for sample in whole.microbatch(step, number)["tokens"].tolist()
    ]
    skipped = {3, *range(10, 21), *range(330, 346)}
    left = [read[place] for place in range(30 * 12 + len(skipped)) if place not in skipped]
    found, places = [], []
    for step in range(30):
        for number in numbers_of(config, all_work(config), step):
            found += corpus.microbatch(step, number)["tokens"].tolist()
            places += corpus.places(step, number)
    assert found == left
    assert [read[place] for place in places] == left
    (prefix,) = {address.partition(", epoch")[0] for address in corpus.addresses(0, 0)}
    assert corpus.addresses(29, 5)[-1] == f"{prefix}, epoch 1, sequence {places[-1] - 337}"


@pytest.mark.parametrize("skip", [(), ("3", "10-20", "330-345")], ids=["all", "some left out"])
def test_sites_read_every_other_sample_of_the_order(config: RunConfig, skip: tuple[str, ...]) -> None:
    """Over the end of an epoch; together they read what one run of twice as many steps reads, from the same index."""
    whole = replace(config, data=replace(config.data, skip=skip), train=replace(config.train, steps=60))
    sites = SitesConfig(endpoints=("tcp://127.0.0.1:4000",), num_sites=2)
    parts = [replace(whole, train=replace(whole.train, steps=30), sites=replace(sites, site=site)) for site in (0, 1)]
    assert len({prepare_index(one) for one in (*parts, whole)}) == 1
    read = [
        [
            sample
            for step in range(one.train.steps)
            for number in numbers_of(one, all_work(one), step)
            for sample in corpus.microbatch(step, number)["tokens"].tolist()
        ]
        for one in (*parts, whole)
        for corpus in [Corpus(one)]
    ]
    assert read[2][::2] == read[0]
    assert read[2][1::2] == read[1]
    consumed = [Corpus(one).consumed(one.train.steps) for one in (parts[1], whole)]
    assert consumed[0] == consumed[1]


def test_the_places_that_a_site_reads_leave_out_no_sample_of_another(config: RunConfig, tmp_path: Path) -> None:
    """Places 0 and 2 were shown as 0-2."""
    sites = SitesConfig(endpoints=("tcp://127.0.0.1:4000",), num_sites=2, site=0)
    (tmp_path / "config.toml").write_text(dump_run_config(replace(config, sites=sites)))
    shown = CliRunner().invoke(app, ["data", str(tmp_path), "0", "--microbatch", "0.1", "--json"])
    assert json.loads(shown.stdout)["skip"] == ["4", "6"]


def test_a_microbatch_of_lanes_that_divide_experts_is_a_row_of_them(config: RunConfig) -> None:
    """`spare replay` and `spare data` named others than the lanes compute."""
    model = replace(config.model, num_experts=2)
    config = replace(config, model=model, layout=LayoutConfig(num_groups=3, data_parallel=2))
    spare = SpareConfig(redundancy=2, microbatches_per_shard=8, ramp_start=4, ramp_increment=2, ramp_steps=4)
    config = replace(config, spare=spare)
    for unit in work_of((0, 0), (1, 2), (2, 1)):
        lanes = [share_of([unit], lane=lane, num_lanes=2, row_size=2, units_per_shard=3) for lane in (0, 1)]
        assert [one.number for (one,) in lanes] == list(numbers_of_unit(config, 2, unit))
    shown = [*samples_of(config, 2, "2.1", None)]
    places = Corpus(config).places(2, 14) + Corpus(config).places(2, 15)
    assert [(one.microbatch, one.place) for one in shown] == [("2.1", place) for place in places]


def test_the_documents_of_a_sample_are_those_that_its_text_is_from(config: RunConfig) -> None:
    prepare_index(config)
    dataset = corpus_dataset(config)
    for place in range(40):
        tokens, joined = dataset[place]["tokens"].tolist(), b"".join(DOCUMENTS[one] for one in dataset.documents(place))
        assert bytes(tokens) in joined


def test_an_index_that_memory_has_no_room_for_names_the_setting(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr("spare_megatron.mcore.model.training_samples.GPTDataset.__init__", fail)
    with pytest.raises(ValueError, match=r"sample index of /.*text, 337 sequences in an epoch: Unable .*"):
        prepare_index(config)


def test_an_index_that_storage_has_no_room_for_is_refused_before_it_fills(config: RunConfig) -> None:
    endless = replace(config, train=replace(config.train, steps=10**12))
    with pytest.raises(ValueError, match=r"train\.steps=1000000000000 of 12 .* GiB free; lower train\.steps"):
        prepare_index(endless)
    assert not (Path(config.data.corpus).parent / "cache").exists()


def reading(config: RunConfig, numbers: Sequence[int]) -> list[bytes]:
    """The tokens of samples, by the sequences consumed before each."""
    single = replace(
        config,
        layout=LayoutConfig(num_groups=1),
        spare=SpareConfig(redundancy=1, microbatches_per_shard=1),
        train=replace(config.train, steps=max(numbers) + 1, micro_batch_size=1),
    )
    prepare_index(single)
    corpus = Corpus(single)
    return [corpus.microbatch(step, 0)["tokens"].numpy().tobytes() for step in numbers]


def test_the_order_does_not_depend_on_the_number_of_steps(config: RunConfig) -> None:
    """Megatron's own order for more samples is another one."""
    few = reading(config, range(60))
    assert reading(config, range(900))[:60] == few
    assert reading(replace(config, train=replace(config.train, seed=5)), range(60)) != few


def test_an_epoch_has_every_sample_once_and_the_next_one_in_another_order(config: RunConfig) -> None:
    per_epoch = (60 * 90 - 1) // 16
    write_corpus([[*np.random.default_rng(0).integers(0, 256, 60 * 90)]], config.data.corpus)  # all samples differ
    samples = reading(config, range(3 * per_epoch))
    epochs = [samples[first : first + per_epoch] for first in range(0, len(samples), per_epoch)]
    assert [len({*epoch}) for epoch in epochs] == [per_epoch] * 3
    assert {*epochs[0]} == {*epochs[1]} == {*epochs[2]}
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_layout_and_batch_only_move_the_cursor(config: RunConfig) -> None:
    samples = reading(config, range(700))
    for num_groups, num_microbatches, size in ((3, 2, 2), (5, 1, 4), (2, 3, 1)):
        other = replace(
            config,
            layout=LayoutConfig(num_groups=num_groups),
            spare=SpareConfig(redundancy=2, microbatches_per_shard=num_microbatches),
            train=replace(config.train, steps=80 // num_groups, micro_batch_size=size),
        )
        prepare_index(other)
        corpus, found = Corpus(other), []
        for step in range(other.train.steps):
            for number in numbers_of(other, all_work(other)):
                found += [row.numpy().tobytes() for row in corpus.microbatch(step, number)["tokens"]]
        assert found == samples[: len(found)]


def test_a_run_with_another_batch_goes_on_with_the_next_sample(config: RunConfig) -> None:
    """After 2 steps of 12 sequences, from which it goes on with steps of 18."""
    longer = replace(config, train=replace(config.train, steps=12))
    samples = reading(longer, range(120))
    other = replace(config, spare=replace(config.spare, microbatches_per_shard=3))
    load = replace(other.checkpoint, load="step-00000002")
    other = replace(other, data=replace(other.data, offset=2 * 12 - 2 * 18), checkpoint=load)
    corpus = Corpus(other)
    numbers = numbers_of(other, all_work(other))
    found = [row.tobytes() for step in (2, 3) for number in numbers for row in rows_of(corpus, step, number)]
    assert found == samples[24 : 24 + 2 * 18]
    assert corpus.digest() == Corpus(other).digest()


def rows_of(corpus: Corpus, step: int, number: int) -> list[np.ndarray]:
    return [*corpus.microbatch(step, number)["tokens"].numpy()]


@pytest.mark.parametrize("epoch", [0, 2])
def test_samples_of_an_epoch_are_those_of_megatrons_builder(config: RunConfig, tmp_path: Path, epoch: int) -> None:
    config = replace(config, train=replace(config.train, steps=90))
    prepare_index(config)
    corpus, per_epoch = Corpus(config), (60 * 90 - 1) // 16
    theirs = built_by_megatron(config, epoch_seed(config.train.seed, 0, epoch), tmp_path / "another_cache")[0]
    num_compared = 0
    for step in range(config.train.steps):
        for number in numbers_of(config, all_work(config)):
            first, batch = corpus.first_sample(step, number), corpus.microbatch(step, number)
            for row, sample in enumerate(range(first - epoch * per_epoch, first - epoch * per_epoch + 2)):
                if 0 <= sample < per_epoch:
                    num_compared += 1
                    for key in ("tokens", "labels", "position_ids"):
                        np.testing.assert_array_equal(batch[key][row], theirs[sample][key])
    assert num_compared == len(theirs) == per_epoch


def built_by_megatron(config: RunConfig, seed: int, cache: Path, split: str = "1,0,0") -> list[GPTDataset]:
    """One epoch of each part of the corpus by Megatron's builder."""

    class Vocabulary:
        vocab_size, eod, pad = 256, -2, -1
        unique_identifiers = {}  # noqa: RUF012  (never changed)

    dataset_config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=config.model.seq_length,
        blend=([config.data.corpus], None),
        split=split,
        path_to_cache=str(cache),
        tokenizer=Vocabulary(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, dataset_config).build()


# ---------------------------------------------------------------------------------------------------------- split


def split_in(config: RunConfig, split: str) -> RunConfig:
    return replace(config, data=replace(config.data, split=split))


@pytest.mark.parametrize("split", ["80,20,0", "11,5,2", "3,1", "0.5,0.25,0.25"])
def test_a_split_cuts_documents_where_megatron_cuts_them(config: RunConfig, tmp_path: Path, split: str) -> None:
    config = split_in(config, split)
    train, validation, *_ = built_by_megatron(config, epoch_seed(config.train.seed, 0, 0), tmp_path / "other", split)
    samples = reading(config, range(len(train)))
    assert samples == [sample["tokens"].numpy().tobytes() for sample in train]

    windows = ValidationWindows(config)
    documents = read_documents(Path(config.data.corpus))
    text = [token for number in validation.indices for token in documents[number]]
    assert len(windows) == len(validation) == (len(text) - 1) // 16
    assert [windows[number].tolist() for number in range(len(windows))] == [
        text[first : first + 17] for first in range(0, len(windows) * 16, 16)
    ]


def test_validation_sets_are_whole_corpora_of_their_own_beside_the_split(config: RunConfig, tmp_path: Path) -> None:
    """Also masks: those of Megatron's dataset for the same text."""
    end = 5
    texts = {name: np.random.default_rng(seed).integers(0, 9, 16 * 9 + seed) for seed, name in enumerate("abc")}
    for name, tokens in texts.items():
        write_corpus([tokens[:40], tokens[40:]], tmp_path / name)
    own = tuple(ValidationCorpus(name=name, corpus=str(tmp_path / name)) for name in texts)
    masked = replace(config.data, validation=own, split="3,1", eod_mask_loss=True, end_of_document=end)
    sets = validation_sets(replace(config, data=masked))
    assert list(sets) == ["validation", *texts]
    split = ValidationWindows(split_in(config, "3,1"))
    assert [window.tolist() for window in map(split.__getitem__, range(len(split)))] == [
        window.tolist() for window in map(sets["validation"].__getitem__, range(len(sets["validation"])))
    ]
    for name, tokens in texts.items():
        windows = sets[name]
        assert len(windows) == (len(tokens) - 1) // 16
        for number in range(len(windows)):
            text, sample = tokens[16 * number :][:17], windows.sample(number)
            assert windows[number].tolist() == text.tolist()
            assert (sample["tokens"].tolist(), sample["labels"].tolist()) == (text[:-1].tolist(), text[1:].tolist())
            assert sample["position_ids"].tolist() == list(range(16))
            assert sample["loss_mask"].tolist() == (text[:-1] != end).tolist()
    prepare_index(replace(config, data=masked))
    corpus = Corpus(replace(config, data=masked))
    assert corpus.microbatch(0, 0).keys() == sets["a"].sample(0).keys()
    assert "loss_mask" not in split.sample(0)


def test_a_validation_set_of_less_than_a_window_is_refused(config: RunConfig, tmp_path: Path) -> None:
    write_corpus([bytes(16)], tmp_path / "short")
    short = ValidationCorpus(name="a", corpus=str(tmp_path / "short"))
    config = replace(config, data=replace(config.data, validation=(short,)))
    with pytest.raises(ValueError, match=rf"{tmp_path}/short has 16 tokens, a sample needs model.seq_length \+ 1 = 17"):
        prepare_index(config)
    with pytest.raises(ValueError, match=r"data\.validation has no set named b"):
        ValidationWindows(config, "b")


def test_windows_of_a_blend_are_those_of_each_corpus(blended: RunConfig) -> None:
    for number, part in enumerate(blended.data.blend):
        write_corpus([bytes([number]) * 30, bytes([10 + number]) * (17 + 16 * number)], part.corpus)
    windows = ValidationWindows(split_in(blended, "1,1"))
    assert [windows[number].tolist() for number in range(6)] == [[10 + k] * 17 for k in (0, 1, 1, 2, 2, 2)]
    assert len(windows) == 6


def test_a_part_of_less_than_a_sample_is_refused(config: RunConfig, tmp_path: Path) -> None:
    write_corpus([bytes(40), bytes(16), bytes(90)], config.data.corpus)
    for split, begin, end in (("1,1,1", 1, 2), ("0.1,1", 0, 0)):
        text = rf"documents {begin} to {end} of data\.split={split} in .*text has \d+ tokens, a sample needs"
        with pytest.raises(ValueError, match=text):
            prepare_index(split_in(config, split))
    assert list((tmp_path / "cache").glob("*")) == []
    with pytest.raises(ValueError, match=r"data\.split=None holds nothing out"):
        ValidationWindows(config)


# ---------------------------------------------------------------------------------------------------------- blend


@pytest.fixture
def blended(config: RunConfig, tmp_path: Path) -> RunConfig:
    """Three corpora in proportions 1 : 5 : 3, whose tokens differ."""
    parts = ((tmp_path / "a", 1.0, 100), (tmp_path / "b", 5.0, 150), (tmp_path / "c", 3.0, 200))
    for prefix, _, first in parts:
        write_corpus([[*np.random.default_rng(first).integers(first, first + 50, 60 * 90)]], prefix)
    blend = tuple(BlendedCorpus(corpus=str(prefix), weight=weight) for prefix, weight, _ in parts)
    return replace(config, data=DataConfig(blend=blend))


def corpora_of(samples: Sequence[bytes]) -> list[int]:
    return [(int(np.frombuffer(sample, np.int64)[0]) - 100) // 50 for sample in samples]


def test_a_blend_takes_its_samples_from_the_corpora_that_megatrons_takes_them_from(
    blended: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spare_megatron.mcore.model.training_samples._CHOICES", 500)

    class Part:
        unique_identifiers: ClassVar = {}
        index_split = Split.train

        def __len__(self) -> int:
            return 500

        def __getitem__(self, _: int) -> dict[str, int]:
            return {}

    settings = BlendedMegatronDatasetConfig(
        random_seed=1, sequence_length=16, blend=(["a"], None), split="1,0,0", tokenizer=object()
    )
    theirs = BlendedDataset([Part(), Part(), Part()], [1.0, 5.0, 3.0], 500, settings).dataset_index.tolist()
    assert corpora_of(reading(blended, range(900))) == theirs + theirs[:400], "repeats"


def test_each_corpus_of_a_blend_is_read_in_its_own_epochs(blended: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are each read once before one is read again, over the repetitions of the choices, too."""
    monkeypatch.setattr("spare_megatron.mcore.model.training_samples._CHOICES", 70)
    per_epoch, samples = (60 * 90 - 1) // 16, reading(blended, range(1500))
    for corpus in range(3):
        taken = [sample for sample, of in zip(samples, corpora_of(samples), strict=True) if of == corpus]
        epochs = [taken[first : first + per_epoch] for first in range(0, len(taken), per_epoch)]
        assert [len({*epoch}) for epoch in epochs] == [len(epoch) for epoch in epochs]
        assert all({*epoch} <= {*epochs[0]} for epoch in epochs)
    assert reading(blended, range(60)) == samples[:60], "whatever the number of steps is"


def test_one_corpus_twice_in_a_blend_is_read_in_two_orders(config: RunConfig) -> None:
    twice = (BlendedCorpus(corpus=config.data.corpus),) * 2
    samples = reading(replace(config, data=DataConfig(blend=twice)), range(80))
    assert samples[::2] != samples[1::2]


@pytest.mark.parametrize("skip", [(), ("0-2", "17", "100-131")], ids=["all", "some left out"])
def test_what_is_consumed_of_each_corpus_is_what_its_steps_have_read(
    blended: RunConfig, monkeypatch: pytest.MonkeyPatch, skip: tuple[str, ...]
) -> None:
    """Counted by the tokens read, over repetitions of the choices."""
    monkeypatch.setattr("spare_megatron.mcore.model.training_samples._CHOICES", 70)
    config = replace(blended, data=replace(blended.data, skip=skip), train=replace(blended.train, steps=60))
    prepare_index(config)
    corpus, read = Corpus(config), np.zeros(3, int)
    per_epoch = (60 * 90 - 1) // 16
    for step in range(60):
        for number in range(3 * 2):
            batch = corpus.microbatch(step, number)
            of_tokens = (batch["tokens"][:, 0].numpy() - 100) // 50
            np.testing.assert_array_equal(batch["corpus"], np.repeat(of_tokens[:, None], 16, axis=1))
            read += np.bincount(of_tokens, minlength=3)
        found = corpus.consumed(step + 1)
        assert found == {
            **{f"data/epochs/{name}": read[place] / per_epoch for place, name in enumerate("abc")},
            **{f"data/tokens/{name}": read[place] * 16 for place, name in enumerate("abc")},
        }
    assert read[1] > per_epoch


def test_a_corpus_that_is_twice_in_a_blend_counts_once(config: RunConfig) -> None:
    twice = replace(config, data=DataConfig(blend=(BlendedCorpus(corpus=config.data.corpus),) * 2))
    prepare_index(twice)
    corpus = Corpus(twice)
    num_sequences = 3 * 2 * 2
    assert corpus.consumed(1) == {
        "data/epochs/text": pytest.approx(num_sequences / ((60 * 90 - 1) // 16)),
        "data/tokens/text": num_sequences * 16,
    }
    assert "corpus" not in corpus.microbatch(0, 0)


def test_every_corpus_of_a_blend_is_leased(blended: RunConfig) -> None:
    folders = prepare_index(blended)
    cache = folders[0].parent
    with leased(blended):
        assert {path.name.partition(".lease-")[0] for path in cache.glob("*.lease-*")} == {
            path.name for path in folders
        }
    assert list(cache.glob("*.lease-*")) == []


# ----------------------------------------------------------------------------------------------------------- ranks


def test_all_ranks_read_the_same_tokens(config: RunConfig) -> None:
    config = replace(config, layout=replace(config.layout, tensor_parallel=2))
    prepare_index(config)
    work = all_work(config)
    first, second = run_group(read_tokens, config, 3, work)
    # The other way round, in another process.
    backwards = run_group(read_tokens, replace(config, layout=LayoutConfig(num_groups=3)), 3, work[::-1])[0]
    for key, tokens in first.items():
        np.testing.assert_array_equal(tokens, second[key])
        np.testing.assert_array_equal(tokens, backwards[key][::-1])
    np.testing.assert_array_equal(first["tokens"][..., 1:], first["labels"][..., :-1])


# ---------------------------------------------------------------------------------------------------------- index


def test_an_index_is_built_once_per_corpus_and_seed(config: RunConfig) -> None:
    (folder,) = prepare_index(config)
    built_ns = [file.stat().st_mtime_ns for file in sorted(folder.rglob("*"))]
    assert prepare_index(config) == (folder,)
    assert [file.stat().st_mtime_ns for file in sorted(folder.rglob("*"))] == built_ns
    assert prepare_index(replace(config, train=replace(config.train, seed=5))) != (folder,)
    write_corpus(DOCUMENTS[1:], config.data.corpus)
    assert prepare_index(config) != (folder,)
    assert not list(folder.parent.glob(".*"))


def test_indices_of_former_settings_do_not_pile_up(config: RunConfig) -> None:
    folders = [prepare_index(replace(config, train=replace(config.train, seed=seed))) for seed in range(NUM_KEPT + 3)]
    assert len(list(folders[0][0].parent.iterdir())) == NUM_KEPT + 1
    assert folders[-1][0].is_dir()


def test_a_corpus_keeps_its_index_in_use(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = prepare_index(config)
    with leased(config):
        [lease] = folder.parent.glob("*.lease-*")
        corpus = Corpus(config)
        os.utime(lease, (1, 1))
        corpus.microbatch(0, 0)
        assert lease.stat().st_mtime == 1
        monkeypatch.setattr("spare_megatron.mcore.model.training_samples.RENEWAL_S", -1.0)
        corpus.microbatch(0, 0)
        assert lease.stat().st_mtime > 1


def test_the_cache_can_be_elsewhere(config: RunConfig, tmp_path: Path) -> None:
    elsewhere = replace(config, data=replace(config.data, cache=str(tmp_path / "else" / "where")))
    assert prepare_index(elsewhere)[0].parent == tmp_path / "else" / "where"
    assert not (tmp_path / "cache").exists()
    Corpus(elsewhere)


def test_ranks_do_not_build_an_index(config: RunConfig) -> None:
    with pytest.raises(ValueError, match="call prepare_index"):
        Corpus(config)


def test_a_missing_or_short_corpus_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.bin and .*nothing\.idx missing"):
        prepare_index(replace(config, data=DataConfig(corpus=str(tmp_path / "nothing"))))
    write_corpus([b"short"], config.data.corpus)
    with pytest.raises(ValueError, match="has 5 tokens, a sample needs"):
        prepare_index(config)
    assert list((tmp_path / "cache").glob("*")) == []
