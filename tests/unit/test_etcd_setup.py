"""etcd around a run: user and password, members that do not answer, and a job's own members."""

import dataclasses
import io
import ipaddress
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import ControlConfig, RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.driver import run
from spare_megatron.driver.slurm.etcd import issue, member_commands
from spare_megatron.process.reports import Message, RunEvent
from spare_megatron.store import etcd_gateway
from spare_megatron.store.open_store import etcd_spec
from spare_megatron.store.spec import Credentials
from spare_megatron.tools.doctor import node_survey as node_facts
from spare_megatron.tools.doctor.node_survey import FactsWanted, examine_node
from tests.unit.tiny_corpus import write_tiny_corpus

ETCD = ControlConfig(store="etcd", endpoints=("http://127.0.0.1:1",))
VARIABLES = {"SPARE_ETCD_USER": "trainer", "SPARE_ETCD_PASSWORD": "from-the-environment"}


def with_file(path: Path, text: str, mode: int) -> ControlConfig:
    path.write_text(text)
    path.chmod(mode)
    return dataclasses.replace(ETCD, credentials_file=str(path))


def test_no_credentials_are_no_user() -> None:
    assert etcd_spec(ETCD, "run", {}).credentials is None


def test_the_environment_names_a_user() -> None:
    expected = Credentials(user="trainer", password="from-the-environment")
    assert etcd_spec(ETCD, "run", VARIABLES).credentials == expected


def test_a_file_comes_before_the_environment(tmp_path: Path) -> None:
    control = with_file(tmp_path / "secret", "someone:pass:word\n", 0o600)
    assert etcd_spec(control, "run", VARIABLES).credentials == Credentials(user="someone", password="pass:word")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    control = with_file(tmp_path / "secret", "someone:hidden-word", mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600") as refusal:
        etcd_spec(control, "run", {})
    assert "hidden-word" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "hidden-word", ":hidden-word", "someone:"])
def test_a_file_without_user_and_password_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="must hold one line, user:password") as refusal:
        etcd_spec(with_file(tmp_path / "secret", text, 0o600), "run", {})
    assert "hidden-word" not in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"control\.credentials_file=.*absent cannot be read: FileNotFoundError"):
        etcd_spec(dataclasses.replace(ETCD, credentials_file=str(tmp_path / "absent")), "run", {})


@pytest.mark.parametrize("variable", VARIABLES)
def test_half_of_the_credentials_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match="set both SPARE_ETCD_USER and SPARE_ETCD_PASSWORD") as refusal:
        etcd_spec(ETCD, "run", {variable: VARIABLES[variable]})
    assert "from-the-environment" not in str(refusal.value)


def test_a_password_does_not_show() -> None:
    spec = etcd_spec(ETCD, "run", VARIABLES)
    assert "trainer" in repr(spec)
    assert "from-the-environment" not in repr(spec) + str(spec)


def test_no_two_runs_have_one_prefix() -> None:
    prefixes = {etcd_spec(ETCD, "run", {}).prefix for _ in range(100)}
    assert len(prefixes) == 100
    assert all(prefix.startswith("/spare/run-") for prefix in prefixes)


DEMO = Path(__file__).parents[2] / "configs/run/demo_cpu.toml"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("section", "what", "until"),
    [
        ("control", "does not answer", "control.store_timeout_s=60 s at most"),
        ("sites", "cannot be used", "until it can, this site trains alone"),
    ],
)
def test_an_etcd_that_does_not_answer_is_reported_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, what: str, until: str
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
        etcd = [f'{section}.endpoints=["{endpoint}"]', *(["control.store=etcd"] if section == "control" else [])]
        settings = ["cluster.device=cpu", f"data.corpus={tmp_path}/text", *etcd]
        events: list[RunEvent] = []
        with pytest.raises(RuntimeError, match="far enough"):
            run.start_run(load_run_config(DEMO, settings).config, tmp_path / "run", events.append)
    awaited, starting = events
    assert isinstance(awaited, Message)
    assert f"etcd at {endpoint} ({section}.endpoints) {what}: ConnectionRefusedError" in awaited.text
    assert until in awaited.text
    assert isinstance(starting, Message)
    assert starting.text.startswith("starting: ")


@pytest.mark.parametrize("name", ["ca_file", "credentials_file"])
def test_a_file_for_the_etcd_of_all_sites_that_cannot_be_used_ends_the_start(name: str) -> None:
    """Each site trained alone to the end."""
    sites, control = SitesConfig(endpoints=("https://a:1",)), ControlConfig(**{name: "absent"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"control.{name}.*absent"):
        run._ask_outer_etcd(RunConfig(sites=sites, control=control), lambda _: None)


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
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


def urls(command: tuple[str, ...], option: str) -> list[str]:
    return [word.partition("=")[2] for word in command if word.startswith(f"--{option}=")]


@pytest.mark.parametrize(("address", "bound"), [("n1", "0.0.0.0"), ("10.0.0.7", "10.0.0.7")])
def test_a_member_listens_at_an_address_and_is_known_by_what_slurm_knows_its_node_by(
    tmp_path: Path, address: str, bound: str
) -> None:
    """etcd takes no names for where it listens: "expected IP in URL for binding"."""
    certificates = issue(tmp_path / "etcd", [address])
    (command,) = member_commands(["n1"], [address], 2379, "job-7", certificates, end_grace_s=25.0)
    listening = [*urls(command, "listen-client-urls"), *urls(command, "listen-peer-urls")]
    hosts = [urlsplit(url).hostname or "" for url in listening]
    assert [str(ipaddress.ip_address(host)) for host in hosts] == [bound, bound]
    assert [urlsplit(url).port for url in listening] == [2379, 2380]
    assert urls(command, "advertise-client-urls") == [f"https://{address}:2379"]
    assert urls(command, "initial-advertise-peer-urls") == [f"https://{address}:2380"]


def test_a_member_may_grow_to_what_etcd_advises_at_most_and_forgets_old_versions(tmp_path: Path) -> None:
    """Of 2 GiB, etcd's default, or without compaction a run of months would find it full."""
    certificates = issue(tmp_path / "etcd", ["10.0.0.7"])
    (command,) = member_commands(["n1"], ["10.0.0.7"], 2379, "job-7", certificates, end_grace_s=25.0)
    assert {"--quota-backend-bytes=8589934592", "--auto-compaction-retention=10m"} <= set(command)


WAIT_S = 60.0


@pytest.mark.parametrize(("number", "grace_s"), [(signal.SIGUSR2, 25.0), (signal.SIGTERM, -1.9)])
def test_a_member_that_is_stopped_leaves_no_data(tmp_path: Path, number: signal.Signals, grace_s: float) -> None:
    """SIGTERM is what Slurm sends where a job is cancelled, or its time is over: the run has some time from then on."""
    etcd, arguments, folders = tmp_path / "bin/etcd", tmp_path / "arguments", tmp_path / "folders"
    etcd.parent.mkdir()
    folders.mkdir()
    etcd.write_text(
        f'#!/bin/sh\ntouch "$2/member"\necho "$@" > {arguments}.new\nmv {arguments}.new {arguments}\nexec sleep 600\n'
    )
    etcd.chmod(0o755)
    certificates = issue(tmp_path / "etcd", ["n1"])
    (command,) = member_commands(["n1"], ["10.0.0.7"], 2379, "job-7", certificates, end_grace_s=grace_s)
    script = command[command.index("sh") :]
    environment = {**os.environ, "PATH": f"{etcd.parent}:{os.environ['PATH']}", "TMPDIR": str(folders)}
    with subprocess.Popen(script, env=environment) as shell:
        end_s = time.monotonic() + WAIT_S
        while not arguments.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        assert arguments.read_text().startswith(f"--data-dir {folders}/")
        assert len(list(folders.iterdir())) == 1
        shell.send_signal(signal.SIGUSR1)
        shell.send_signal(number)
        assert shell.wait(WAIT_S) == 0
    assert list(folders.iterdir()) == []


def test_a_member_that_ends_of_a_signal_to_the_whole_job_is_started_again(tmp_path: Path) -> None:
    """etcd itself gets it, too; without it the run could not commit its last step."""
    etcd, starts, folders = tmp_path / "bin/etcd", tmp_path / "starts", tmp_path / "folders"
    etcd.parent.mkdir()
    folders.mkdir()
    etcd.write_text(f"#!/bin/sh\necho $$ $2 >> {starts}\nexec sleep 600\n")
    etcd.chmod(0o755)
    (command,) = member_commands(["n1"], ["n1"], 2379, "job-7", issue(tmp_path / "etcd", ["n1"]), end_grace_s=25.0)
    environment = {**os.environ, "PATH": f"{etcd.parent}:{os.environ['PATH']}", "TMPDIR": str(folders)}
    with subprocess.Popen(command[command.index("sh") :], env=environment, start_new_session=True) as shell:
        first = starts_in(starts, 1)[0]
        os.killpg(shell.pid, signal.SIGTERM)
        second = starts_in(starts, 2)[1]
        shell.send_signal(signal.SIGUSR2)
        assert shell.wait(WAIT_S) == 0
        os.killpg(shell.pid, signal.SIGKILL)  # what waits for the limit
    assert first.split()[0] != second.split()[0]
    assert first.split()[1] == second.split()[1], "with the same data"
    assert list(folders.iterdir()) == []


def starts_in(file: Path, number: int) -> list[str]:
    end_s = time.monotonic() + WAIT_S
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return file.read_text().splitlines()


def test_the_members_of_etcd_know_each_other_and_none_shares_a_port(tmp_path: Path) -> None:
    """All on one address, as where nodes are rehearsed on one machine."""
    certificates = issue(tmp_path / "etcd", ["127.0.0.1"])
    commands = member_commands(["n1", "n2", "n3"], ["127.0.0.1"] * 3, 2379, "job-7", certificates, end_grace_s=25.0)
    clusters = {word for command in commands for word in command if word.startswith("--initial-cluster=")}
    peers = ",".join(f"member-{i}=https://127.0.0.1:{2380 + 2 * i}" for i in range(3))
    assert clusters == {f"--initial-cluster={peers}"}
    clients = {word for command in commands for word in command if word.startswith("--listen-client-urls=")}
    assert clients == {f"--listen-client-urls=https://127.0.0.1:{port}" for port in (2379, 2381, 2383)}
