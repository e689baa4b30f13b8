"""What is found on nodes, which are threads of this process, and how failed ones are reported."""

import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import ClusterConfig, ControlConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.formats.frames import Address
from spare_megatron.process.node_connection import connect
from spare_megatron.tools.doctor import node_survey as node_facts
from spare_megatron.tools.doctor.diagnosis import NodeMeasurements, Rate
from spare_megatron.tools.doctor.node_preflight import examine, serve_examination
from spare_megatron.tools.doctor.node_processes import Meeting, StartNode
from spare_megatron.tools.doctor.node_survey import FactsWanted, Sink, examine_node, send_speed, write_speed

LOOPBACK = "127.0.0.1"
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests need the disk, too."""
    monkeypatch.setattr(node_facts, "_PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(node_facts, "_MOST_PIECES", 2)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for suffix, size in ((".bin", 10), (".idx", 3)):
        (tmp_path / f"corpus{suffix}").write_bytes(bytes(size))
    return RunConfig(
        layout=LayoutConfig(num_groups=3),
        data=DataConfig(corpus=str(tmp_path / "corpus")),
        cluster=ClusterConfig(launcher="hand", num_nodes=3),
    )


def examined(config: RunConfig, folder: Path, num_nodes: int, wait_s: float = WAIT_S) -> list[NodeMeasurements]:
    names = [f"node {index}" for index in range(num_nodes)]
    return examine(config, names, folder / "checkpoints", meeting_in(folder, wait_s))


def meeting_in(folder: Path, wait_s: float = WAIT_S, start: StartNode | None = None) -> Meeting:
    def words(node: int) -> tuple[str, ...]:
        return ("doctor", "--node", str(node), "--folder", str(folder))

    return Meeting(folder=folder, host=LOOPBACK, logs=folder / "doctor", words=words, start=start, wait_s=wait_s)


def serving(folder: Path, node: int) -> threading.Thread:
    thread = threading.Thread(target=serve_examination, args=(folder, node, WAIT_S), daemon=True)
    thread.start()
    return thread


def unanswered() -> socket.socket:
    """Has a port of its own, and accepts no connection."""
    deaf = socket.socket()
    deaf.bind((LOOPBACK, 0))
    return deaf


def test_all_nodes_are_looked_at_and_measured_in_a_ring_and_leave_nothing(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    threads = [serving(folder, 1), serving(folder, 2)]
    reports = examined(config, folder, 3)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert [(report.failure, report.link_to) for report in reports] == [("", "node 1"), ("", "node 2"), ("", "node 0")]
    for report in reports:
        assert report.facts is not None
        assert report.clock is not None
        assert report.write is not None
        assert report.link is not None
        assert report.facts.sees_folder
        assert report.facts.corpus_bytes == (10, 3)
        assert abs(report.clock.ahead_s) <= report.clock.error_s + 1e-3  # they are the same clock
        assert report.write.bytes_per_s > 0
        assert report.link.bytes_per_s > 0
    assert not folder.parent.exists()


def test_a_node_that_ends_under_way_is_reported_and_the_others_are_measured_without_it(
    config: RunConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"

    def end_early() -> None:
        with connect(folder, 1, WAIT_S) as driver:
            driver.recv()

    thread = threading.Thread(target=end_early, daemon=True)
    thread.start()
    serving(folder, 2)
    reports = examined(config, folder, 3)
    thread.join(WAIT_S)
    assert "its process ended before its answer" in reports[1].failure
    assert (reports[0].link_to, reports[2].link_to) == ("node 2", "node 0")


def test_a_node_that_does_not_come_is_reported_with_a_remedy(config: RunConfig, tmp_path: Path) -> None:
    reports = examined(config, tmp_path / "folder", 2, wait_s=0.0)
    assert reports[0].facts is not None
    assert reports[0].link is None
    folder = tmp_path / "folder"
    assert f"`spare doctor --node 1 --folder {folder}` did not connect" in reports[1].failure
    assert f"is {folder} on storage that all nodes share?" in reports[1].failure


def test_a_step_that_ends_before_it_comes_is_reported_with_its_last_output(config: RunConfig, tmp_path: Path) -> None:
    def start(node: int, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(["sh", "-c", "echo one; echo python: not found; exit 127"], stdout=file)

    reports = examine(config, ["n1", "n2"], tmp_path, meeting_in(tmp_path / "folder", start=start))
    assert [(report.name, report.failure) for report in reports] == [
        ("n1", "its step has ended: python: not found"),
        ("n2", "its step has ended: python: not found"),
    ]
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_cannot_be_written_is_reported(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/checkpoints cannot be written from here: Not a directory"):
        examined(config, tmp_path / "file", 1)


def test_files_that_were_there_stay(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    examined(config, tmp_path / "folder", 2, wait_s=0.0)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["mine"]


def test_what_a_node_lacks_it_says(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken, unanswered() as deaf:
        answering, deaf_port = taken.getsockname()[1], deaf.getsockname()[1]
        wanted = FactsWanted(
            data=DataConfig(corpus=str(tmp_path / "none")),
            control=ControlConfig(endpoints=(f"http://{LOOPBACK}:{answering}", f"http://{LOOPBACK}:{deaf_port}")),
            ports=(answering, 0),  # some port is always free
            folder=tmp_path / "elsewhere",
            token="token",
        )
        facts = examine_node(wanted, visible_s=0.0)
    assert facts.busy_ports == (answering,)
    assert facts.store_failures == {f"http://{LOOPBACK}:{deaf_port}": "Connection refused"}
    assert facts.corpus_bytes == (None, None)
    assert not facts.sees_folder
    assert facts.versions["torch"]
    assert facts.versions["spare_megatron"].startswith("0.1.0 (")


@pytest.mark.gpu
def test_gpus_are_seen_with_their_memory(tmp_path: Path) -> None:
    facts = examine_node(FactsWanted(data=DataConfig(), control=ControlConfig(), ports=(), folder=tmp_path, token="."))
    assert facts.gpus
    assert all(0 < gpu.free_bytes <= gpu.memory_bytes for gpu in facts.gpus)
    assert facts.gpu_driver
    assert facts.versions["NCCL"]


def test_a_failed_write_is_reported_and_its_partial_files_are_removed(tmp_path: Path) -> None:
    assert write_speed(tmp_path / "none" / "file") == Rate(failure="No such file or directory")
    assert write_speed(tmp_path / "file").bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_bytes_go_to_whom_they_are_for() -> None:
    with Sink(LOOPBACK) as sink:
        assert send_speed(sink.address).bytes_per_s > 0
        assert send_speed(replace(sink.address, token="00" * 32)).failure
    with unanswered() as deaf:
        address = Address(host=LOOPBACK, port=deaf.getsockname()[1], token="00" * 32)
        assert "Connection refused" in send_speed(address).failure
