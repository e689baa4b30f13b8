"""What Prometheus reads from a run, by the parser of its own client; alarms and dashboard name what is there."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.checks.validate_training import metrics_problems
from spare_megatron.config.schema import MetricsConfig
from spare_megatron.driver.run import _can_listen
from spare_megatron.driver.telemetry import open_sinks
from spare_megatron.journal.state.follow import Follower
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.observe.prometheus import PrometheusSink, name_of
from tests.kept_runs.runs import unpack
from tests.unit.test_config_validate import CPU, configured, only_problem

ROOT = Path(__file__).parents[2]
LINES = [
    {"step": 7, "train/loss": 2.5, "spare/fewest_hosts": 2, "perf/step_s": 0.25, "perf/lost_recovery_s": 1.5},
    {"step": 7, "ckpt/outcome": "saved", "ckpt/num_bytes": 10},
    {"step": 8, "train/loss": 2.25, "fault/groups_lost": 1, "perf/tokens_per_s": 1e3, "perf/lost_scatter_s": 0.5},
    {"step": 8, "eval/loss": 3.0, "eval/code/loss": 3.5},
    {"step": 9, "train/loss/web": 2.0, "train/loss/a/b": 4.0},
    {"step": 8, "ckpt/outcome": "failed"},
]


@contextmanager
def scraped(run_dir: Path) -> Iterator[tuple[PrometheusSink, dict[tuple[str, str], float]]]:
    """A sink that has these lines, and what it answers: (name, value of its label) -> value."""
    sink = PrometheusSink(run_dir, "kept", "127.0.0.1", 0)
    try:
        for line in LINES:
            sink.write(line)
        with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        yield sink, {(one.name, ",".join(one.labels.values())): one.value for one in samples}
    finally:
        sink.close()


def test_the_last_values_and_the_state_of_the_run_are_served(tmp_path: Path) -> None:
    with scraped(unpack("wiped_out", tmp_path)) as (_, found):
        assert found["spare_train_loss", ""] == 2.25
        assert found["spare_perf_step_seconds", ""] == 0.25
        assert found["spare_perf_tokens_per_second", ""] == 1e3
        assert found["spare_fault_groups_lost_total", ""] == 1.0
        assert (found["spare_perf_lost_seconds", "recovery"], found["spare_perf_lost_seconds", "scatter"]) == (1.5, 0.5)
        assert (found["spare_eval_loss", ""], found["spare_eval_set_loss", "code"]) == (3.0, 3.5)
        assert [found["spare_train_loss_by_corpus", name] for name in ("web", "a/b")] == [2.0, 4.0]
        outcomes = {label: value for (name, label), value in found.items() if name == "spare_ckpt_saves_total"}
        assert outcomes == {"saved": 1.0, "skipped": 0.0, "failed": 1.0}
        groups = {label: value for (name, label), value in found.items() if name == "spare_groups"}
        assert sum(groups.values()) == 4.0
        assert found["spare_commit_timestamp_seconds", ""] > 1.7e9
        assert "spare_last_step" in {name for name, _ in found}


def test_a_run_that_has_written_nothing_is_answered_and_a_closed_sink_lets_go_of_its_port(tmp_path: Path) -> None:
    with scraped(tmp_path) as (sink, found):
        assert found["spare_train_loss", ""] == 2.25
        assert "spare_groups" not in {name for name, _ in found}
        assert not _can_listen("127.0.0.1", sink.port)
    assert _can_listen("127.0.0.1", sink.port)


def test_a_step_is_taken_while_a_journal_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def poll(_: Follower) -> RunState:
        begun.set()
        assert may_end.wait(30)
        return RunState()

    monkeypatch.setattr(Follower, "poll", poll)
    sink = PrometheusSink(tmp_path, "kept", "127.0.0.1", 0)
    reader = threading.Thread(target=lambda: list(sink.collect()))
    reader.start()
    assert begun.wait(30)
    writer = threading.Thread(target=sink.write, args=(LINES[0],), daemon=True)
    writer.start()
    writer.join(30)
    assert not writer.is_alive()
    may_end.set()
    reader.join(30)
    sink.close()


def served_names(run_dir: Path) -> set[str]:
    """All names that a run with every metric of the page may serve."""
    rows = "".join(re.findall(r"^\|([^|]*)\|", (ROOT / "docs/watching.md").read_text(), re.MULTILINE))
    keys = set(re.findall(r"`([a-z]+/[a-zA-Z_/]+)`", rows)) - {"ckpt/outcome", "train/NAME"}
    counters = {key for key in keys if key.startswith("fault/") and "recovery" not in key}
    names = {name_of(key)[0] + ("_total" if key in counters else "") for key in keys}
    assert len({str(name_of(key)) for key in keys}) == len(keys), "no two metrics have one name"
    with scraped(run_dir) as (_, found):
        return names | {name for name, _ in found}


WITHOUT_PANEL = {
    "spare_ckpt_num_bytes": "it changes with the model and the layout alone",
    "spare_epoch": "losses and returns, which change it, have a panel",
    "spare_groups_alive": "the panel of groups has those of every state",
    "spare_last_step": "it is the end of the run, and the list of runs is made of it",
    "spare_run_info": "it has labels alone",
    "spare_step": "the tokens trained on have a panel",
}
"""All other metrics have one, but those that a program names."""


def test_alarms_and_dashboard_ask_for_what_is_served(tmp_path: Path) -> None:
    served = served_names(unpack("wiped_out", tmp_path))
    rules = yaml.safe_load((ROOT / "launch/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((ROOT / "launch/prometheus/dashboard.json").read_text())["panels"]
    for asked in ([rule["expr"] for rule in rules], [one["expr"] for panel in panels for one in panel["targets"]]):
        names = {name for text in asked for name in re.findall(r"spare_[a-z_]+", text)}
        assert len(names) >= 8
        assert names <= served
    assert served - names == set(WITHOUT_PANEL), "of the dashboard, which is the last"
    assert len({rule["alert"] for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["metrics.prometheus_port=0"], "metrics.prometheus_port=0 lies outside 1 to 65535"),
        (["metrics.prometheus_port=65536"], "metrics.prometheus_port=65536 lies outside"),
        (["metrics.prometheus_port=9400", "metrics.prometheus_address=node3"], "is not an IP address"),
        (["metrics.prometheus_address=0.0.0.0"], "has no effect without metrics.prometheus_port"),
    ],
)
def test_wrong_places_are_refused(settings: list[str], problem: str) -> None:
    assert problem in only_problem(*settings)


def test_a_port_that_is_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert not _can_listen("127.0.0.1", port)
        with pytest.raises(ValueError, match=f"metrics.prometheus_port={port}: Address already in use; choose another"):
            open_sinks(configured(f"metrics.prometheus_port={port}"), tmp_path, lambda event: None)
    (text,) = metrics_problems(MetricsConfig(prometheus_port=9400), can_serve=False)
    assert "metrics.prometheus_port=9400: this machine cannot listen there at metrics.prometheus_address=" in text
    assert problems(configured("metrics.prometheus_port=9400"), CPU) == []
