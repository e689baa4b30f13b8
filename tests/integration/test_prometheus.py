"""A run that Prometheus watches: Debian's reads it while it trains, and Prometheus' own tool takes the alarms."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from spare_megatron.config.schema import LayoutConfig, MetricsConfig
from spare_megatron.config.training.terms import sequences_before
from spare_megatron.process.reports import RunEvent, StepCommitted
from tests.integration.debian import fetch_packages
from tests.integration.whole_run import assert_masked, complete_run, kill, tiny_config

pytestmark = pytest.mark.timeout(300)

ALERTS = Path(__file__).parents[2] / "launch/prometheus/alerts.yml"
STEPS = 4
LIMIT_S = 60.0


def find_programs(cache: Path) -> tuple[Path, Path]:
    """`prometheus` and `promtool` of this machine, or Debian's in the cache."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    if all(found):
        return Path(str(found[0])), Path(str(found[1]))
    folder = cache / "usr/bin"
    fetch_packages(cache, folder / "prometheus", "prometheus")
    return folder / "prometheus", folder / "promtool"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def watching(prometheus: Path, folder: Path, target: int) -> Iterator[int]:
    """Prometheus, which reads a port each second; yields its own port."""
    port = free_port()
    jobs = [{"job_name": "spare", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    settings = {"global": {"scrape_interval": "1s"}, "rule_files": [str(ALERTS)], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [
        *(prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield port
        finally:
            process.terminate()
            process.wait(30)


def asked(port: int, query: str) -> dict[str, float]:
    """Value of each series by its label `state`, or the empty text."""
    with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}", timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
    return {one["metric"].get("state", ""): float(one["value"][1]) for one in found}


def test_prometheus_sees_a_loss_and_the_last_step_of_a_run(
    text_corpus: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    prometheus, promtool = find_programs(pytestconfig.cache.mkdir("prometheus"))
    rules = subprocess.run(
        [promtool, "check", "rules", ALERTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert "SUCCESS: 7 rules found" in rules.stdout, rules.stderr
    target = free_port()
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), steps=STEPS, faults=[kill("backward", 1, 1)])
    config = replace(config, metrics=MetricsConfig(prometheus_port=target))
    seen: list[dict[str, float]] = []

    def on_event(event: RunEvent) -> None:
        """Holds the driver back at the first report of the last step, until Prometheus has it."""
        if isinstance(event, StepCommitted) and event.step == STEPS - 1 and not seen:
            ends_at_s = time.monotonic() + LIMIT_S
            tokens = float(sequences_before(config, STEPS) * config.model.seq_length)
            while asked(port, "spare_train_tokens") != {"": tokens}:
                assert time.monotonic() < ends_at_s, (tmp_path / "log").read_text()
                time.sleep(0.2)
            seen.extend(asked(port, query) for query in ("spare_groups", "spare_fault_groups_lost_total", "up"))

    with watching(prometheus, tmp_path, target) as port:
        run = complete_run(config, tmp_path / "run", on_event=on_event)
    assert_masked(run)
    groups, lost, is_up = seen
    assert {state: num for state, num in groups.items() if num} == {"alive": 2.0, "lost": 1.0}
    assert (lost, is_up) == ({"": 1.0}, {"": 1.0})
