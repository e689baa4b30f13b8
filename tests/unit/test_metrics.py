"""What the metrics of a run say, and where they go: read back by those who show them."""

import itertools
import json
import math
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from spare_megatron.config.checks.validate_training import metrics_problems
from spare_megatron.config.model.model_tensors import flops_per_token
from spare_megatron.config.schema import LayoutConfig, MetricsConfig, RunConfig, SpareConfig
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.driver.run import run_record
from spare_megatron.driver.telemetry import Telemetry, open_sinks
from spare_megatron.formats.store_space import StoreSpace
from spare_megatron.journal.records import CheckpointRecord, LossRecord, RecoveryRecord, RestartRecord, UpdateRecord
from spare_megatron.journal.step_values import MEMORY
from spare_megatron.observe.metrics import DetachedSink, JsonlSink, MetricsSink, Value, WandbSink
from spare_megatron.process.reports import (
    EvaluationDecided,
    GroupLost,
    GroupRejoined,
    Message,
    RunPaused,
    StepCommitted,
    StoreMeasured,
)
from spare_megatron.stacking.layout import GroupId, Member, ShardId

SAVED = CheckpointRecord(group=0, step=3, outcome="saved", reason="", num_bytes=1, stall_s=0.0, write_s=0.0)
CONFIG = RunConfig(layout=LayoutConfig(num_groups=4), spare=SpareConfig(redundancy=3, microbatches_per_shard=4))


class ListSink:
    """Keeps everything."""

    def __init__(self) -> None:
        self.taken: list[Mapping[str, Value]] = []
        self.is_closed = False

    def write(self, values: Mapping[str, Value]) -> None:
        self.taken.append(values)

    def close(self) -> None:
        self.is_closed = True


class BrokenSink(ListSink):
    def write(self, values: Mapping[str, Value]) -> None:
        raise OSError("no route to it")


class UnclosedSink(ListSink):
    def close(self) -> None:
        raise OSError("no route to it")


def unopened() -> MetricsSink:
    raise OSError("no route to it")


def committed(
    step: int,
    group: int = 0,
    num_alive: int = 4,
    step_s: float = 0.5,
    terms: Mapping[str, float] | None = None,
    values: Mapping[str, float] | None = None,
) -> StepCommitted:
    update = UpdateRecord(
        group=group,
        step=step,
        attempt=step,
        num_microbatches=16,
        loss=5.0 - step,
        grad_norm=1.5,
        learning_rate=1e-3,
        makespan=4,
        step_s=step_s,
        terms=dict(terms or {}),
        values=dict(values or {}),
    )
    return StepCommitted(
        update=update,
        num_alive=num_alive,
        split_s={Operation.COMPUTE: 0.3, Operation.VOTE: 0.05, Operation.AWAIT_ENTRY: 0.05, Operation.UPDATE: 0.01},
        head=step,
        epoch=4 - num_alive,
        num_recomputed=0,
        recoveries=(),
    )


def restarted(group: int, step: int, num_restarts: int = 1) -> RestartRecord:
    return RestartRecord(
        group=group, incarnation=1, step=step, rework_steps=0, restart_s=1.0, num_restarts=num_restarts
    )


def lost(group: int) -> GroupLost:
    return GroupLost(record=LossRecord(group=group, rank=0, cause="killed", entry_index=0))


def recorded(
    *events: Any, config: RunConfig = CONFIG, clock: Callable[[], float] = time.monotonic
) -> list[Mapping[str, Value]]:
    sink = ListSink()
    telemetry = Telemetry(config, run_record(config, (), {"commit": "", "code": ""}), [sink], clock)
    for event in events:
        telemetry.on_event(event)
    telemetry.close()
    assert sink.is_closed
    return sink.taken


def test_each_step_is_reported_once_and_again_after_a_restart() -> None:
    restarts = [restarted(group, 1) for group in (0, 1)]
    steps = [committed(0), committed(0, group=1), committed(1), committed(2), *restarts, committed(1), committed(2)]
    found = recorded(*steps)
    assert [values["step"] for values in found] == [0, 1, 2, 1, 2]
    assert [values["fault/restarts"] for values in found] == [0, 0, 0, 1, 1]


def test_a_restart_that_a_group_reports_after_others_have_gone_on_counts_once() -> None:
    """Its record was read after a step that others had committed since, and counted as a second restart."""
    first, late, again = restarted(0, 1), restarted(1, 1), restarted(1, 1, num_restarts=2)
    steps = [committed(0), committed(1), first, committed(1), late, committed(1, group=1), committed(2)]
    found = recorded(*steps, again, committed(1))
    assert [values["step"] for values in found] == [0, 1, 1, 2, 1]
    assert [values["fault/restarts"] for values in found] == [0, 0, 1, 1, 2]
    assert found[3]["perf/lost_rework_s"] == found[2]["perf/lost_rework_s"]


def test_a_restart_that_throws_no_step_away_counts() -> None:
    found = recorded(committed(0), restarted(0, 1), committed(1))
    assert [values["fault/restarts"] for values in found] == [0, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_gets_each_step_with_its_terms_and_which_are_new(tmp_path: Path, *, fails: bool) -> None:
    received: list[tuple[Any, ...]] = []
    reasons: list[Any] = []

    def on_step(metrics: Mapping[str, Value], is_new: bool) -> None:
        received.append((metrics["step"], is_new, metrics["train/z"]))
        metrics.clear()  # type: ignore[attr-defined]
        if fails:
            raise RuntimeError("no")

    sinks = open_sinks(CONFIG, tmp_path, reasons.append, on_step, rest_s=0.0)
    telemetry = Telemetry(CONFIG, run_record(CONFIG, (), {"commit": "", "code": ""}), sinks)
    steps = [committed(step, terms={"z": step / 2}) for step in range(3)]
    restart = restarted(0, 1)
    for event in (*steps, restart, *steps[1:], SAVED):
        telemetry.on_event(event)
    telemetry.close()
    if fails:
        assert received == [(0, True, 0.0)]
        (reason,) = [event.text for event in reasons]
        assert reason.startswith("on_step takes no more metrics: RuntimeError: no; ")
    else:
        assert received == [(0, True, 0.0), (1, True, 0.5), (2, True, 1.0), (1, False, 0.5), (2, False, 1.0)]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one.get("train/z") for one in written] == [0.0, 0.5, 1.0, 0.5, 1.0, None]


def test_steps_that_a_restart_throws_away_have_been_of_no_use() -> None:
    """As `spare status` counts it: 100 steps of a second, 90 of which are made again."""
    restart = restarted(0, 10)
    steps = [committed(step, step_s=1.0) for step in (*range(100), *range(10, 100))]
    found = recorded(*steps[:100], restart, *steps[100:], clock=map(float, itertools.count()).__next__)
    assert found[99]["perf/goodput"] == pytest.approx(1.0)
    assert found[100]["perf/goodput"] == pytest.approx(11 / 101, abs=1e-5)
    assert found[-1]["perf/goodput"] == pytest.approx(100 / 190, abs=1e-5)


def test_losses_and_returns_show_in_the_hosts_that_are_left() -> None:
    back = GroupRejoined(member=Member(GroupId(1), 1), step=2)
    given_up = replace(lost(1), record=replace(lost(1).record, is_given_up=True))  # the same loss, reported again
    first, second, third = recorded(committed(0), lost(1), given_up, committed(1, num_alive=3), back, committed(2))
    assert [values["spare/fewest_hosts"] for values in (first, second, third)] == [3, 2, 3]
    assert [values["fault/groups_lost"] for values in (first, second, third)] == [0, 1, 1]
    assert third["fault/groups_rejoined"] == 1


def test_the_time_of_a_run_is_useful_or_lost_to_something_with_a_name() -> None:
    """Steps of a second that begin when the one before has ended, but where something takes longer."""
    now_s = 0.0
    sink = ListSink()
    telemetry = Telemetry(CONFIG, run_record(CONFIG, (), {"commit": "", "code": ""}), [sink], lambda: now_s)

    def commit(step: int, at_s: float, **settings: Any) -> None:
        nonlocal now_s
        now_s = at_s
        telemetry.on_event(committed(step, step_s=1.0, **settings))

    for step in range(5):
        commit(step, 8.0 + step)  # 7 s before the first
    telemetry.on_event(lost(1))
    commit(5, 15.0, num_alive=3)  # 2 s in a recovery
    commit(6, 16.5, num_alive=3)  # half a second, for 3 groups do the work of 4
    telemetry.on_event(GroupRejoined(member=Member(GroupId(1), 1), step=7))
    commit(7, 20.5)  # 3 s to take one in
    commit(8, 21.75)
    telemetry.on_event(lost(1))
    telemetry.on_event(restarted(0, 7))  # without steps 7 and 8
    commit(7, 27.0)
    commit(8, 28.0)
    telemetry.close()
    lost_s = {"start": 7.0, "recovery": 2.0, "fewer_groups": 0.5, "admission": 0.0, "rework": 5.25, "restart": 4.25}
    assert {name: sink.taken[-1][f"perf/lost_{name}_s"] for name in lost_s} == pytest.approx(lost_s)
    assert sink.taken[-1]["perf/lost_scatter_s"] == pytest.approx(0.0)
    assert sink.taken[-1]["perf/goodput"] == pytest.approx(9.0 / 28.0, abs=1e-6)


def test_a_recovery_is_reported_once_with_its_parts_and_what_was_recomputed() -> None:
    record = RecoveryRecord(
        group=1,
        step=1,
        lost=[3],
        computed_at_s=0.0,
        noticed_at_s=1.0,
        agree_s=0.01,
        patch_s=0.2,
        rebuild_s=0.03,
        reduce_s=0.04,
        num_patched=2,
    )
    first = replace(committed(1, num_alive=3), num_recomputed=4)
    late = replace(committed(1, group=1, num_alive=3), recoveries=(record,))  # not the first to report the step
    again = replace(committed(2, group=2, num_alive=3), recoveries=(replace(record, group=2, agree_s=9.0),))
    found = recorded(committed(0), first, late, again, committed(3, num_alive=3))
    assert [values["spare/microbatches_recomputed"] for values in found] == [0, 4, 0, 0]
    assert [values["spare/epoch"] for values in found] == [0, 1, 1, 1]
    assert [values.get("fault/recovery_agree_s") for values in found] == [None, None, 0.01, None]
    assert [found[2][f"fault/recovery_{part}_s"] for part in ("patch", "rebuild", "reduce")] == [0.2, 0.03, 0.04]


def test_speed_is_that_of_the_models_own_operations() -> None:
    config = replace(CONFIG, metrics=MetricsConfig(peak_tflops=2.0))
    (values,) = recorded(committed(0, step_s=2.0), config=config)
    tokens = 4 * 4 * config.train.micro_batch_size * config.model.seq_length
    assert values["train/tokens"] == tokens
    assert values["perf/tokens_per_s"] == pytest.approx(tokens / 2.0)
    tflops = flops_per_token(config) * tokens / 2.0 / 4 / 1e12
    assert values["perf/tflops_per_rank"] == pytest.approx(tflops, abs=1e-6)
    assert values["perf/mfu"] == pytest.approx(tflops / 2.0, abs=1e-6)
    assert values["perf/vote_s"] == pytest.approx(0.1)
    assert "perf/mfu" not in recorded(committed(0))[0]


def test_an_evaluation_is_written_once_and_again_when_a_restart_repeats_it() -> None:
    first = EvaluationDecided(
        group=GroupId(1), step=2, attempt=2, loss=1.5, losses={"validation": 2.0, "wiki": 1.0}, spent_s=0.25
    )
    again, later = replace(first, group=GroupId(0)), replace(first, attempt=5)
    found = recorded(committed(0), committed(1), first, again, restarted(0, 2), later)
    of_sets = {"eval/validation/loss": 2.0, "eval/wiki/loss": 1.0}
    assert found[2:] == [{"step": 1, "eval/loss": 1.5, **of_sets, "eval/spent_s": 0.25}] * 2


def test_memory_is_that_of_the_fullest_rank_of_the_groups_that_take_part() -> None:
    allocated, reserved, _ = MEMORY

    def step(number: int, group: int, held: float, **more: float) -> StepCommitted:
        return committed(number, group, values={allocated: held, "data/tokens/web": 5.0, **more})

    events = [step(0, 0, 3.0), step(0, 1, 7.0), step(0, 2, 5.0, **{reserved: 9.0})]
    found = recorded(*events, step(1, 0, 4.0), lost(1), step(2, 0, 4.0), step(2, 2, 1.0), step(3, 0, 2.0))
    assert [values[allocated] for values in found] == [3.0, 7.0, 5.0, 2.0]
    assert [values.get(reserved) for values in found] == [None, 9.0, 9.0, None]
    assert {values["data/tokens/web"] for values in found} == {5.0}


def test_the_page_has_every_key_and_no_other() -> None:
    times = dict.fromkeys(("computed_at_s", "noticed_at_s", "agree_s", "patch_s", "rebuild_s", "reduce_s"), 0.0)
    recovery = RecoveryRecord(group=0, step=1, lost=[1], num_patched=1, **times)
    events = [
        StoreMeasured(space=StoreSpace(used_bytes=1, limit_bytes=2, is_full=False), shortage=""),
        committed(0),
        lost(1),
        replace(committed(1, num_alive=3), recoveries=(recovery,)),
        committed(2, num_alive=3),
        GroupRejoined(member=Member(GroupId(1), 1), step=3),
        committed(3),
        committed(4),
        RunPaused(group=GroupId(0), step=5, shards=(ShardId(1),)),
        RunPaused(group=GroupId(0), step=5),
        committed(5, values=dict.fromkeys((*MEMORY, "train/params_norm"), 1.0)),
        SAVED,
        restarted(0, 4),
        committed(4),
        EvaluationDecided(group=GroupId(0), step=5, attempt=6, loss=1.0, losses={}, spent_s=1.0),
        committed(5),
    ]
    found = recorded(*events, config=replace(CONFIG, metrics=MetricsConfig(peak_tflops=1.0)))
    keys = {key for values in found for key in values} - {"step"}
    page = (Path(__file__).parents[2] / "docs/watching.md").read_text()
    rows = "".join(re.findall(r"^\|([^|]*)\|", page, re.MULTILINE))
    assert set(re.findall(r"`([a-z]+/[a-z_]+)`", rows)) == keys


@pytest.mark.parametrize("broken", [unopened, BrokenSink, UnclosedSink])
def test_an_error_of_a_sink_is_reported_once_and_the_others_have_everything(broken: Callable[[], MetricsSink]) -> None:
    """One that failed to close was waited for, and reported as one that has not taken everything."""
    reasons: list[str] = []
    whole = ListSink()
    sinks: list[MetricsSink] = [DetachedSink("broken", broken, reasons.append, close_timeout_s=5.0, rest_s=0.0), whole]
    telemetry = Telemetry(CONFIG, run_record(CONFIG, (), {"commit": "", "code": ""}), sinks)
    for step in range(10):
        telemetry.on_event(committed(step))
    telemetry.close()
    assert reasons == ["broken takes no more metrics: OSError: no route to it"]
    assert len(whole.taken) == 10


def test_a_sink_that_rests_has_everything_when_it_is_closed() -> None:
    kept = ListSink()
    sink = DetachedSink("whole", lambda: kept, pytest.fail, rest_s=3600.0)
    for step in range(100):
        sink.write({"step": step})
    sink.close()
    assert [values["step"] for values in kept.taken] == list(range(100))
    assert kept.is_closed


def test_a_sink_that_hangs_blocks_no_other() -> None:
    goes_on = threading.Event()
    reasons: list[str] = []

    class Hanging(ListSink):
        def write(self, values: Mapping[str, Value]) -> None:
            goes_on.wait()

    sink = DetachedSink("slow", Hanging, reasons.append, close_timeout_s=0.01)
    for step in range(5000):
        sink.write({"step": step})
    sink.close()
    goes_on.set()
    left, lacks = reasons
    assert left.startswith("slow has not taken everything within 0.01 s")
    assert lacks.startswith("slow was too slow for ")


def test_a_wandb_that_cannot_be_imported_is_reported_and_the_file_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    failures: list[Message] = []
    config = replace(CONFIG, metrics=MetricsConfig(wandb_project="gpt", run_id="abcd1234"))
    telemetry = Telemetry(
        config, run_record(config, (), {"commit": "", "code": ""}), open_sinks(config, tmp_path, failures.append)
    )
    for step in range(3):
        telemetry.on_event(committed(step))
    telemetry.close()
    (failure,) = failures
    assert failure.text.startswith("Weights & Biases takes no more metrics: ModuleNotFoundError: ")
    assert failure.text.endswith("; metrics.jsonl has all of them, and training goes on")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_long_run_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """But 17 bytes a step, by which goodput goes back with a restart; benchmarks/telemetry.py measures 100,000."""
    telemetry = Telemetry(CONFIG, run_record(CONFIG, (), {"commit": "", "code": ""}), [JsonlSink(tmp_path)])
    tracemalloc.start()
    try:
        sizes = []
        for step in range(12_000):
            if step in (2000, 11_999):
                sizes.append(tracemalloc.get_traced_memory()[0])
            telemetry.on_event(committed(step))
    finally:
        tracemalloc.stop()
    telemetry.close()
    assert sizes[1] - sizes[0] < 19 * 12_000 + 20_000


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    failures: list[Message] = []
    config = replace(CONFIG, metrics=MetricsConfig(tensorboard=True))
    telemetry = Telemetry(
        config, run_record(config, (), {"commit": "", "code": ""}), open_sinks(config, tmp_path, failures.append)
    )
    for step in range(3):
        telemetry.on_event(committed(step))
    telemetry.close()
    assert not failures
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(item.step, item.value) for item in events.Scalars("train/loss")] == [(0, 5.0), (1, 4.0), (2, 3.0)]
    (path,) = (tmp_path / "tensorboard").iterdir()
    shown = {value.tag: value for event in EventFileLoader(str(path)).Load() for value in event.summary.value}
    assert shown["train/loss"].metadata.plugin_data.plugin_name == "scalars"  # as the page itself reads it
    assert set(shown) == set(events.Tags()["scalars"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [5.0, 4.0, 3.0]


def test_without_a_key_wandb_stays_offline_under_the_id_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of the user who runs the tests
    sink = WandbSink(tmp_path, "project", "abcd1234", "name", {"setting": 1})
    sink.write({"step": 0, "train/loss": math.nan, "ckpt/outcome": "saved"})
    sink.close()
    # Its service writes what it was given after the run has finished: a reader may then find an empty file.
    assert [child for child in psutil.Process().children() if "wandb" in child.name()] == []
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abcd1234")
    assert list(folder.glob("run-abcd1234.wandb"))


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = list(metrics_problems(MetricsConfig(tensorboard=True, wandb_project="gpt")))
    assert [text.partition(" needs")[0] for text in found] == ["metrics.tensorboard=True", "metrics.wandb_project=gpt"]
    assert all("pip install 'spare_megatron[metrics]'" in text for text in found)
