"""Metrics of steps of a whole run are those of one process that adds them up; cells of the matrix keep their bits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, MetricsConfig, RunConfig
from spare_megatron.config.schema_sections import BlendedCorpus, DataConfig
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.journal.step_values import MEMORY
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration.mcore_group import run_group
from tests.integration.step_values_group import HALF, recomputed
from tests.integration.whole_run import assert_masked, complete_run, kill, tiny_config, values_of

pytestmark = pytest.mark.timeout(180)

END = 7
STEPS = 4
EPOCH = (20 * 41 - 1) // 32 * 32
"""Tokens of an epoch of either corpus."""


def blended(folder: Path, layout: LayoutConfig, faults: Sequence[FaultConfig] = ()) -> RunConfig:
    """Two sequences in a microbatch, often of both corpora; ends of documents do not count."""
    rng = np.random.default_rng(5)
    parts = []
    for name, weight, first in (("low", 3.0, 8), ("high", 1.0, HALF)):
        prefix = folder / name
        if not prefix.with_suffix(".bin").exists():
            write_corpus([np.append(rng.integers(first, first + HALF - 8, 40), END) for _ in range(20)], prefix)
        parts.append(BlendedCorpus(corpus=str(prefix), weight=weight))
    config = tiny_config(Path(parts[0].corpus), layout, steps=STEPS, faults=faults, mode="reproducible")
    data = DataConfig(blend=tuple(parts), eod_mask_loss=True, end_of_document=END)
    train = replace(config.train, micro_batch_size=2)
    return replace(config, data=data, train=train, metrics=MetricsConfig(model_every_steps=1))


def test_values_are_those_that_one_process_adds_up(tmp_path: Path) -> None:
    """With a loss, whose patch is of both corpora."""
    config = blended(tmp_path, LayoutConfig(num_groups=3), [kill("backward", 1, 1)])
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    (expected,) = run_group(recomputed, config, END)
    found = values_of(run)
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    read = {"low": 0, "high": 0}
    for step, of_step in enumerate(expected):
        assert found[step].items() <= lines[step].items()
        for name in read:
            assert found[step][f"train/loss/{name}"] == pytest.approx(of_step["means"][name], rel=1e-6)
            read[name] += of_step["tokens"][name]
            assert found[step][f"data/tokens/{name}"] == read[name]
            assert found[step][f"data/epochs/{name}"] == pytest.approx(read[name] / EPOCH)
    assert found[STEPS - 1]["data/epochs/low"] > 1.0
    of_records = [[record.values.get(key) for key in MEMORY] for record in run.journal.of(UpdateRecord)]
    assert all(allocated and peak and 2**20 < allocated <= peak for allocated, _, peak in of_records)
    assert lines[-1]["perf/memory_peak_bytes"] >= max(peak or 0.0 for *_, peak in of_records) / 2
