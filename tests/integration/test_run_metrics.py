"""Metrics of real runs: what Weights & Biases receives is in its file, and one that hangs delays no step."""

import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from spare_megatron.config.schema import LayoutConfig, MetricsConfig, RunConfig
from spare_megatron.driver import telemetry
from spare_megatron.observe.metrics import DetachedSink
from spare_megatron.process.reports import Message
from tests.integration.whole_run import Run, assert_masked, complete_run, tiny_config

pytestmark = pytest.mark.timeout(120)

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
