"""An etcd that does not answer is reported at once: by a run before it starts anything, and by the doctor."""

import io
import socket
from pathlib import Path

import pytest

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import ControlConfig, RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.driver import run
from spare_megatron.process.reports import Message, RunEvent
from spare_megatron.store import etcd_gateway
from spare_megatron.tools.doctor import node_survey as node_facts
from spare_megatron.tools.doctor.node_survey import FactsWanted, examine_node
from tests.unit.tiny_corpus import write_tiny_corpus

pytestmark = pytest.mark.timeout(60)

DEMO = Path(__file__).parents[2] / "configs/run/demo_cpu.toml"


def test_an_etcd_that_does_not_answer_is_reported_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported when Megatron had been loaded and another minute had passed, in which nothing was reported."""

    def start(_: RunConfig) -> None:
        raise RuntimeError("far enough")

    write_tiny_corpus(tmp_path / "text")
    monkeypatch.setattr(run, "preflight", start)
    monkeypatch.setattr(etcd_gateway, "ANSWER_S", 0.0)
    with socket.socket() as deaf:  # has a port of its own, and accepts no connection
        deaf.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        etcd = ["control.store=etcd", f'control.endpoints=["{endpoint}"]']
        settings = ["cluster.device=cpu", f"data.corpus={tmp_path}/text", *etcd]
        events: list[RunEvent] = []
        with pytest.raises(RuntimeError, match="far enough"):
            run.start_run(load_run_config(DEMO, settings).config, tmp_path / "run", events.append)
    awaited, starting = events
    assert isinstance(awaited, Message)
    assert f"etcd at {endpoint} (control.endpoints) does not answer: ConnectionRefusedError" in awaited.text
    assert "control.store_timeout_s=60 s at most" in awaited.text
    assert isinstance(starting, Message)
    assert starting.text.startswith("starting: ")


def test_the_doctor_finds_an_etcd_that_can_be_connected_to_and_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member without a quorum reports its size, and no run can use it. The limit reported was that of a setting."""
    monkeypatch.setattr(node_facts, "silence_of", lambda _: "etcdserver: no leader")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = ControlConfig(store="etcd", endpoints=(f"http://127.0.0.1:{listener.getsockname()[1]}",))
        found = examine_node(FactsWanted(data=DataConfig(), control=control, ports=(), folder=tmp_path, token="."))
    assert (found.store_failures, found.store_space) == ({}, None)
    assert found.store_refusal == "no member that has a quorum answers within 5 s: etcdserver: no leader"


def test_where_it_should_answer_what_comes_instead_and_how_long_it_is_waited_for_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "silence_of", lambda _: "no leader")
    config = RunConfig(control=ControlConfig(store="etcd", endpoints=("http://a:1", "http://b:1")))
    console = RunConsole(file=io.StringIO())
    with RunProgress(config, console, tmp_path) as progress:
        run._ask_etcd(config, progress.on_event)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "etcd at http://a:1, http://b:1 (control.endpoints) does not answer: no leader" in shown
    assert "control.store_timeout_s=60 s at most" in shown
