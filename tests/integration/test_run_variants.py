"""Losses in runs that compute differently: bf16, the interleaved schedule. And what a long run leaves behind."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch, read_census
from tests.integration.whole_run import assert_masked, complete_run, kill, patched_in, tiny_config
from tests.unit.journal_in_memory import check_journal

pytestmark = pytest.mark.timeout(120)

INTERLEAVED = LayoutConfig(num_groups=4, pipeline_parallel=2, virtual_pipeline=2)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_interleaved_schedule_stays_exact_through_losses(text_corpus: Path, tmp_path: Path, is_tied: bool) -> None:
    faults = [kill("receive", 1, 1, 1), kill("in_reduce", 2, 2), kill("backward", 3, 3, 1)]
    config = tiny_config(
        text_corpus, INTERLEAVED, steps=5, faults=faults, num_microbatches=3, num_layers=4, tie_embeddings=is_tied
    )
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(5))))
    assert_masked(run)
    assert_exact(run, range(5))
    assert all(patched_in(run.journal)[step] > 0 for step in (1, 2, 3))


def test_a_whole_domain_may_be_lost_if_the_hosts_of_a_shard_are_in_different_ones(
    text_corpus: Path, tmp_path: Path
) -> None:
    faults = [kill("forward", 2, 2), kill("backward", 2, 3)]
    layout = LayoutConfig(num_groups=4)
    config = tiny_config(text_corpus, layout, faults=faults, redundancy=2, groups_per_domain=2)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(4))))
    assert_masked(run)
    assert_exact(run, range(4))
    assert patched_in(run.journal)[2] == 2 * 2
    # The same losses are a wipe-out, and the same journal is invalid, where the placement knows of no domains.
    assert make_placement("golomb", 4, 2).uncovered(frozenset({GroupId(0), GroupId(1)}))
    lines = tuple(
        replace(line, record=replace(line.record, groups_per_domain=1)) if isinstance(line.record, RunRecord) else line
        for line in run.journal.lines
    )
    assert check_journal(replace(run.journal, lines=lines)).verdict == "invalid"


def test_bf16_masks_losses_and_keeps_all_groups_equal(text_corpus: Path, tmp_path: Path) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    faults = [kill("forward", 1, 1), kill("in_reduce", 2, 2, 1)]
    config = tiny_config(text_corpus, layout, steps=4, faults=faults, precision="bf16")
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert all(patched_in(run.journal)[step] > 0 for step in (1, 2))


@pytest.mark.slow
def test_nothing_that_a_rank_holds_grows_with_the_steps_or_the_losses(text_corpus: Path, tmp_path: Path) -> None:
    """150 steps of four groups, two of which are lost on the way."""
    early, before, after, last = 20, 55, 95, 149
    faults = [kill("in_reduce", 60, 1), kill("forward", 75, 2)]
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), steps=150, faults=faults)
    watch = Watch(census_steps=frozenset({early, before, after, last}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    for group in (0, 3):
        held = read_census(run.run_dir, group, 0)
        assert held.keys() == watch.census_steps
        for count in ("num_threads", "num_files"):
            counts = {step: getattr(census, count) for step, census in held.items()}
            assert counts[early] == counts[before], count
            # What a loss broke is released when its transfers have ended, some steps later at most.
            assert counts[last] <= counts[after] <= counts[early] + 4, count
        # Allocators fill up in the first hundreds of steps, by some 4 MB. Keeping the 140 kB buffer of each step
        # would come to 18 MB.
        assert held[last].anonymous_bytes - held[early].anonymous_bytes < 9e6
