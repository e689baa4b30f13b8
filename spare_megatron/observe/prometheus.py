"""What Prometheus reads from the driver: the metrics of the last step, and how the run stands by its journal."""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from spare_megatron.journal.records import SaveOutcome
from spare_megatron.journal.state.follow import Follower
from spare_megatron.journal.state.run_state import GroupStatus, RunState
from spare_megatron.journal.step_values import KINDS
from spare_megatron.observe.metrics import Value

_GROWING = ("fault/groups_lost", "fault/groups_rejoined", "fault/restarts")
"""Metrics that only grow while a driver lives."""
_LABELS = {
    r"perf/lost_(.+)_s": ("perf_lost_seconds", "cause"),
    r"eval/(.+)/loss": ("eval_set_loss", "set"),
    **{f"{begin}(.+)": (f"{begin.replace('/', '_')}by_{kind}", kind) for begin, kind in KINDS.items()},
}
"""Metrics by which several keys become one: pattern of the keys -> name, and the label that tells them apart."""


class PrometheusSink:
    """Answers Prometheus until it is closed. The journal is read when Prometheus asks, not while steps end.

    OSError: the address cannot be listened at.
    """

    def __init__(self, run_dir: Path, run_name: str, address: str, port: int) -> None:
        self._run_dir, self._run_name = run_dir, run_name
        self._follower: Follower | None = None
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._values: dict[str, float] = {}
        self._saves: Counter[str] = Counter()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]
        self._server, self._thread = start_http_server(port, address, registry)
        self.port = self._server.server_port

    def write(self, values: Mapping[str, Value]) -> None:
        with self._lock:
            for key, value in values.items():
                if not isinstance(value, str):
                    self._values[key] = value
                elif key == "ckpt/outcome":
                    self._saves[value] += 1

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """The metrics of now, for prometheus_client, which may ask in several threads."""
        with self._lock:  # which `write` waits for
            found = [*_of_values(self._values), *_of_saves(self._saves)]
        with self._following:  # reading the journal may take long
            if self._follower is None:
                self._follower = Follower(self._run_dir)
            return iter([*found, *self._of_state(self._follower.poll())])

    def _of_state(self, run_state: RunState) -> Iterator[Metric]:
        run, groups = run_state.run, run_state.groups()
        if run is None:
            return
        about = {"name": self._run_name, "version": run.version, "terms": run.terms}
        yield InfoMetricFamily("spare_run", "The run that answers.", about)
        for name, meaning, value in (
            ("spare_last_step", "The last step of the training.", run.num_steps - 1),
            ("spare_commit_timestamp_seconds", "When the last step was committed.", run_state.committed_at_s),
            ("spare_awaited_shards", "Shards without a host, for which training waits.", len(run_state.awaited)),
            ("spare_quarantined_machines", "Machines that wait for an examination.", len(run_state.quarantined)),
        ):
            yield GaugeMetricFamily(name, meaning, value)
        family = GaugeMetricFamily("spare_groups", "Groups in each state.", labels=["state"])
        for status in get_args(GroupStatus):
            family.add_metric([status], groups.count(status))
        yield family


def name_of(key: str) -> tuple[str, dict[str, str]]:
    """Name for Prometheus and labels of a metric: `perf/step_s` is `spare_perf_step_seconds`."""
    for pattern, (name, label) in _LABELS.items():
        if found := re.fullmatch(pattern, key):
            return f"spare_{name}", {label: found[1]}
    name = re.sub(r"[^a-zA-Z0-9_]", "_", key.removeprefix("spare/"))
    spelled = re.sub(r"_s$", "_seconds", name).replace("_per_seconds", "_per_second")
    return f"spare_{spelled}", {}


def _of_values(values: Mapping[str, float]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for key, value in values.items():
        name, labels = name_of(key)
        kind = CounterMetricFamily if key in _GROWING else GaugeMetricFamily
        if name not in families:
            families[name] = kind(name, f"{key.partition('/')[0]} metric of docs/watching.md.", labels=list(labels))
        families[name].add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    yield from families.values()


def _of_saves(saves: Mapping[str, int]) -> Iterator[Metric]:
    family = CounterMetricFamily("spare_ckpt_saves", "Saves of checkpoints that have ended.", labels=["outcome"])
    for outcome in get_args(SaveOutcome):
        family.add_metric([outcome], saves.get(outcome, 0))
    yield family
