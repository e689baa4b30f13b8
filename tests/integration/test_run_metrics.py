"""Metrics of real runs and what their journals measure: what services receive, values of steps, costs."""

import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from spare_megatron.config.schema import FaultConfig, LayoutConfig, MetricsConfig, RunConfig
from spare_megatron.config.schema_sections import BlendedCorpus, DataConfig
from spare_megatron.driver import telemetry
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.journal.step_values import MEMORY
from spare_megatron.observe.metrics import DetachedSink
from spare_megatron.process.reports import Message
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.tools.simulate.measured import WARM_UP_STEPS
from spare_megatron.tools.simulate.run_replay import replay
from spare_megatron.tools.simulate.scenario import CostModel
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration.mcore_group import run_group
from tests.integration.step_values_group import HALF, recomputed
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, alert_config, assert_masked, complete_run, kill, tiny_config, values_of

STEPS = 4


def with_wandb(corpus: Path) -> RunConfig:
    metrics = MetricsConfig(wandb_project="tests", run_id="abcd1234")
    return replace(tiny_config(corpus, LayoutConfig(num_groups=2), steps=STEPS), metrics=metrics)


def records_in(file: Path) -> Iterator[Record]:
    """The records of a file of Weights & Biases: a head of 7 bytes, then LevelDB's log format, blocks of 32 KiB."""
    data, place, begun = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place < len(data):
        left = -place % 32768 or 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        begun += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(begun)
            yield record
            begun = b""


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def lost_metrics(run: Run) -> list[str]:
    """What the run says about sinks that lack something."""
    return [event.text for event in run.events if isinstance(event, Message) and "metrics.jsonl" in event.text]


@pytest.mark.timeout(120)
def test_what_wandb_receives_offline_is_in_its_file(
    text_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of the user who runs the tests
    run = complete_run(with_wandb(text_corpus), tmp_path / "run")
    assert_masked(run)
    assert lost_metrics(run) == []
    (file,) = (run.run_dir / "wandb").glob("offline-run-*-abcd1234/run-abcd1234.wandb")
    history = [record.history for record in records_in(file) if record.HasField("history")]
    received = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in history
    ]
    assert [row["step"] for row in received] == list(range(STEPS))
    for ours, theirs in zip(steps_of(run.run_dir), received, strict=True):
        assert {name: theirs[name] for name in ours} == pytest.approx(ours)


@pytest.mark.timeout(120)
def test_a_wandb_that_hangs_keeps_no_step_waiting_and_does_not_end_the_run(
    text_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, is_asked = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        is_asked.set()
        goes_on.wait()
        raise OSError("no answer")

    monkeypatch.setattr(telemetry, "WandbSink", hang)
    monkeypatch.setattr(telemetry, "DetachedSink", partial(DetachedSink, close_timeout_s=0.01))
    run = complete_run(with_wandb(text_corpus), tmp_path / "run")
    # All of it happened while it hung.
    assert is_asked.is_set()
    assert not goes_on.is_set()
    goes_on.set()
    assert_masked(run)
    assert [values["step"] for values in steps_of(run.run_dir)] == list(range(STEPS))
    (lost,) = lost_metrics(run)
    assert lost.startswith("Weights & Biases has not taken everything")
    assert os.listdir(run.run_dir).count("wandb") == 0


END = 7
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


@pytest.mark.timeout(180)
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


CALIBRATED_STEPS = 14


@pytest.mark.timeout(120)
@pytest.mark.alone
def test_every_state_of_a_run_and_every_recovery_is_predicted(text_corpus: Path, tmp_path: Path) -> None:
    faults = [kill(FaultPoint.BACKWARD, 6, 1), kill(FaultPoint.IN_REDUCE, 10, 2)]
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    run = complete_run(alert_config(text_corpus, layout, steps=CALIBRATED_STEPS, faults=faults), tmp_path / "run")
    assert_masked(run)
    found = calibrate(run.journal)
    assert found.full_speed_groups == len(os.sched_getaffinity(0)) / 2
    assert 0 <= found.pipeline_fill <= 1  # two stages
    assert found.num_steps == CALIBRATED_STEPS - WARM_UP_STEPS - len(faults)
    assert None not in (found.detect_s, found.agree_s, found.retry_s)
    predicted = replay(run.journal, CostModel(**found.costs))
    assert [(step.num_alive, step.num_steps) for step in predicted.steps] == [(4, 3), (3, 3), (2, 3)]
    assert [recovery.step for recovery in predicted.recoveries] == [6, 10]
    for time in [one.time for one in (*predicted.steps, *predicted.recoveries)]:
        assert time.predicted_s is not None
        assert 0 < time.predicted_s < 10 * time.measured_s


@pytest.mark.timeout(120)
@pytest.mark.alone
def test_a_run_whose_group_comes_back_measures_and_predicts_what_that_takes(text_corpus: Path, tmp_path: Path) -> None:
    lost_in, back_after = 4, 6
    faults = [kill(FaultPoint.FORWARD, lost_in, 1)]
    config = alert_config(text_corpus, LayoutConfig(num_groups=3), steps=CALIBRATED_STEPS, faults=faults, rejoins=1)
    watch = Watch(awaited=frozenset({(back_after, Member(GroupId(1), 1))}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    found = calibrate(run.journal)
    num_whole = CALIBRATED_STEPS - (back_after + 1) - WARM_UP_STEPS
    assert (found.num_recoveries, found.num_joins) == (1, 1)
    assert found.num_steps == 2 + 1 + num_whole  # step 3, those without the group, those after its return
    assert found.join_s is not None
    predicted = replay(run.journal, CostModel(**found.costs))
    assert [(step.num_alive, step.num_steps) for step in predicted.steps] == [(3, 1 + num_whole), (2, 2)]
    assert [recovery.step for recovery in predicted.recoveries] == [lost_in]
    assert [(join.step, join.groups) for join in predicted.joins] == [(back_after + 1, (1,))]
    assert predicted.joins[0].time.predicted_s == pytest.approx(found.join_s)
