"""The corpus as it is written, indexed and addressed."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from spare_megatron.config.sample_index import NUM_KEPT, leased
from spare_megatron.config.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.mcore.corpus_writer import CorpusCounts, write_corpus
from spare_megatron.mcore.data import Corpus, prepare_index
from tests.integration.mcore_group import all_work, read_tokens, run_group, work_of

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


def test_an_end_token_follows_every_document(tmp_path: Path) -> None:
    counts = write_corpus([b"ab", b"c"], tmp_path / "text", vocab_size=257, end_of_document=256)
    assert counts.num_tokens == 5
    assert read_documents(tmp_path / "text")[1] == [99, 256]


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
        corpus.first_sample(step, microbatch) for step in range(config.train.steps) for microbatch in all_work(config)
    ]
    assert first == list(range(0, 4 * 3 * 2 * 2, config.train.micro_batch_size))


def test_an_index_that_memory_has_no_room_for_names_the_setting(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr("spare_megatron.mcore.data._open_dataset", fail)
    with pytest.raises(
        ValueError, match=r"too little memory for the sample index of train\.steps=4: Unable .* lower it"
    ):
        prepare_index(config)


def test_samples_are_those_of_megatrons_builder(config: RunConfig, tmp_path: Path) -> None:
    prepare_index(config)
    batch = Corpus(config).microbatch(1, work_of((2, 1))[0])
    first_sample = ((1 * 3 + 2) * 2 + 1) * 2

    class Vocabulary:
        vocab_size, eod, pad = 256, -2, -1
        unique_identifiers = {}  # noqa: RUF012  (never changed)

    dataset_config = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=16,
        blend=([config.data.corpus], None),
        split="1,0,0",
        path_to_cache=str(tmp_path / "another_cache"),
        tokenizer=Vocabulary(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [48, 0, 0], lambda: True, dataset_config).build()[0]
    for row in range(2):
        for key in ("tokens", "labels", "position_ids"):
            np.testing.assert_array_equal(batch[key][row], theirs[first_sample + row][key])


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
    folder = prepare_index(config)
    built_ns = [file.stat().st_mtime_ns for file in sorted(folder.iterdir())]
    assert prepare_index(config) == folder
    assert [file.stat().st_mtime_ns for file in sorted(folder.iterdir())] == built_ns
    assert prepare_index(replace(config, train=replace(config.train, seed=5))) != folder
    write_corpus(DOCUMENTS[1:], config.data.corpus)
    assert prepare_index(config) != folder
    assert not list(folder.parent.glob(".*"))


def test_indices_of_former_settings_do_not_pile_up(config: RunConfig) -> None:
    folders = [prepare_index(replace(config, train=replace(config.train, seed=seed))) for seed in range(NUM_KEPT + 3)]
    assert len(list(folders[0].parent.iterdir())) == NUM_KEPT + 1
    assert folders[-1].is_dir()


def test_a_corpus_keeps_its_index_in_use(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare_index(config)
    with leased(config):
        [lease] = folder.parent.glob("*.lease-*")
        corpus, (work, *_) = Corpus(config), all_work(config)
        os.utime(lease, (1, 1))
        corpus.microbatch(0, work)
        assert lease.stat().st_mtime == 1
        monkeypatch.setattr("spare_megatron.mcore.data.RENEWAL_S", -1.0)
        corpus.microbatch(0, work)
        assert lease.stat().st_mtime > 1


def test_the_cache_can_be_elsewhere(config: RunConfig, tmp_path: Path) -> None:
    elsewhere = replace(config, data=replace(config.data, cache=str(tmp_path / "else" / "where")))
    assert prepare_index(elsewhere).parent == tmp_path / "else" / "where"
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
