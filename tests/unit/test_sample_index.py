"""Which sample indices stay beside a corpus, and which go."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.sample_index_folders import (
    LEASE_S,
    NUM_KEPT,
    index_folder,
    leased,
    remove_unused,
    renew,
)
from tests.unit.tiny_corpus import write_tiny_corpus


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write_tiny_corpus(tmp_path / "text")
    return RunConfig(data=DataConfig(corpus=str(tmp_path / "text")))


def seeded(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=seed))


def built(config: RunConfig, seed: int) -> Path:
    """The index of a run that has been used the later, the higher its seed is."""
    folder = index_folder(seeded(config, seed))
    folder.mkdir(parents=True)
    (folder / "shuffle_index.npy").touch()
    aged(folder, 1000.0 - seed)
    return folder


def aged(path: Path, age_s: float) -> None:
    os.utime(path, (time.time() - age_s,) * 2)


def remaining(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_indices_that_no_run_uses_go_but_for_the_last_ones(config: RunConfig) -> None:
    """16 of them had piled up after an afternoon."""
    *folders, own = [built(config, seed) for seed in range(16)]
    notes = own.with_name("corpus-1234.json")
    notes.touch()
    renew(own)
    remove_unused(own)
    assert remaining(own) == {own.name, notes.name, *(folder.name for folder in folders[-NUM_KEPT:])}


def test_an_index_in_use_stays_however_long_ago_it_was_built(config: RunConfig) -> None:
    first, *_, own = [built(config, seed) for seed in range(12)]
    renew(own)
    with leased(seeded(config, 0)), leased(seeded(config, 0)):
        remove_unused(own)
        assert (first / "shuffle_index.npy").exists()
    assert len(remaining(own)) == 2 + NUM_KEPT
    remove_unused(own)
    assert len(remaining(own)) == 1 + NUM_KEPT
    assert first.name not in remaining(own), "both runs have ended"


def test_the_lease_of_a_run_that_was_killed_ends_by_itself(config: RunConfig) -> None:
    first, *_, own = [built(config, seed) for seed in range(12)]
    lease = first.with_name(f"{first.name}.lease-0123456789abcdef")
    lease.touch()
    aged(lease, LEASE_S - 60.0)
    renew(own)
    remove_unused(own)
    assert first.is_dir()
    renew(first)  # as its ranks do
    assert time.time() - lease.stat().st_mtime < 60.0
    aged(lease, LEASE_S + 60.0)
    remove_unused(own)
    assert not lease.exists()


def test_what_a_killed_process_was_building_goes_in_time(config: RunConfig) -> None:
    own = built(config, 1)
    old, new = own.with_name(f".{own.name}.17"), own.with_name(f".{own.name}.18")
    for path, age_s in ((old, LEASE_S + 60.0), (new, 60.0)):
        path.mkdir()
        aged(path, age_s)
    renew(own)
    remove_unused(own)
    assert remaining(own) == {own.name, new.name}


def test_an_index_that_a_run_takes_while_it_is_being_removed_is_put_back(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, own = [built(config, seed) for seed in range(2 + NUM_KEPT)]
    renew(own)
    really_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == first:
            first.with_name(f"{first.name}.lease-ab").touch()
        return really_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    remove_unused(own)
    assert (first / "shuffle_index.npy").exists()


def test_a_folder_that_cannot_be_written_is_left_to_its_builder(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with leased(config):
        pass
    assert (tmp_path / "cache").is_file()
