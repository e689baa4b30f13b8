"""What lets a supervisor stand on another machine: its connection, its place, its end without a driver."""

import errno
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import RunConfig, SlurmConfig
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, encode_entry
from spare_megatron.core.machines.failure_detector import ENDED
from spare_megatron.driver.slurm.allocation import Claims, SrunLauncher, node_step, step_command
from spare_megatron.formats.codec import decode, encode
from spare_megatron.formats.frames import Address
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import EndRecord
from spare_megatron.process.node_connection import Listener, connect
from spare_megatron.process.reports import ExitCode, StoreAway
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member
from spare_megatron.store import keys as keys_of_run
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process
from spare_megatron.supervisor.run_end import end_in_log, end_without_driver, outcome_of, wait_for_others, write_end
from spare_megatron.supervisor.store_watch import FenceWanted, NodeReplaced, StoreLink
from tests.unit.memory_store import MemoryStore

REPORT = StoreAway(limit_s=2.0)
WAIT_S = 30.0


# ------------------------------------------------------------------------------------------------------ connection


def accepted(listener: Listener) -> Any:
    assert wait([listener.fileno()], WAIT_S)
    return listener.accept()


def test_a_supervisor_finds_the_driver_by_the_run_directory_and_both_get_messages(tmp_path: Path) -> None:
    listener = Listener(tmp_path, 3, "127.0.0.1")
    (file,) = (tmp_path / "nodes").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(connect(tmp_path, 3, WAIT_S)))
    thread.start()
    driver = accepted(listener)
    thread.join(WAIT_S)
    (supervisor,) = found
    driver.send("spec")
    assert supervisor.recv() == "spec"
    supervisor.send(REPORT)
    assert driver.recv() == REPORT
    listener.close()
    assert not file.exists()


def test_a_client_without_the_key_is_not_served(tmp_path: Path) -> None:
    """Others keep their key, and the listener stays open for clients that have it."""
    listener, other = Listener(tmp_path / "a", 0, "127.0.0.1"), Listener(tmp_path / "b", 0, "127.0.0.1")
    (file,), (theirs,) = (tmp_path / "a/nodes").iterdir(), (tmp_path / "b/nodes").iterdir()
    port = decode(file.read_text(), Address).port
    theirs.write_text(encode(replace(decode(theirs.read_text(), Address), port=port)))
    failures: list[Exception] = []

    def knock() -> None:
        try:
            connect(tmp_path / "b", 0, 0.0)
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=knock)
    thread.start()
    assert accepted(listener) is None
    thread.join(WAIT_S)
    assert "is not awaited by a driver" in str(failures[0])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
        stranger.shutdown(socket.SHUT_WR)
        assert accepted(listener) is None
    listener.close()
    other.close()


def test_a_node_that_is_not_awaited_is_answered_with_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"node 1 is not awaited by a driver .* start `spare train` \(or `spare doc"):
        connect(tmp_path, 1, 0.0)


def test_a_file_that_shared_storage_has_lost_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver replaces it whenever it awaits the node again; a read at that moment ended the node's supervisor."""
    listener = Listener(tmp_path, 1, "127.0.0.1")
    text = next((tmp_path / "nodes").iterdir()).read_text()
    reads = [OSError(errno.ESTALE, "Stale file handle"), FileNotFoundError(), text]

    def read(file: Path) -> str:
        found = reads.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(Path, "read_text", read)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(connect(tmp_path, 1, WAIT_S)))
    thread.start()
    driver = accepted(listener)
    thread.join(WAIT_S)
    driver.send("spec")
    assert found[0].recv() == "spec"
    assert reads == []
    listener.close()


# ------------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize(
    ("codes", "outcome"),
    [
        ([0, 0], "finished"),
        ([0, ExitCode.WIPE_OUT], "wipe_out"),
        ([ExitCode.HALTED, ExitCode.WIPE_OUT], "halted"),
        ([0, ExitCode.RAISED], "failed"),
        ([ExitCode.STOPPED, ExitCode.STOPPED], "stopped"),
        ([ExitCode.STOPPED, 0], "failed"),
        ([], "failed"),
    ],
)
def test_how_ranks_have_ended_says_how_the_run_has(codes: list[int], outcome: str) -> None:
    assert outcome_of(codes) == outcome


def test_a_node_without_a_group_in_the_run_does_not_know_its_end() -> None:
    zero, one = GroupId(0), GroupId(1)
    exits = {(zero, 0): 0, (one, 0): int(ExitCode.GROUP_BROKEN)}
    end = end_without_driver(exits, {one})
    assert end is not None
    assert (end.outcome, end.reason) == ("finished", "")
    assert end_without_driver(exits, {zero, one}) is None


def test_a_lost_group_that_reads_of_the_wipe_out_says_how_the_run_has_ended() -> None:
    """The driver's node had the only whole state, and a group copied it: no node journaled the end of the run."""
    one = GroupId(1)
    end = end_without_driver({(one, 0): int(ExitCode.WIPE_OUT), (one, 1): int(ExitCode.GROUP_BROKEN)}, {one})
    assert end is not None
    assert end.outcome == "wipe_out"


@pytest.mark.parametrize(
    ("entries", "outcome"),
    [
        ([], None),
        ([Fence(group=GroupId(0))], None),
        ([Fence(group=GroupId(group)) for group in range(4)], "wipe_out"),
        ([Halt(step=0, reason="why")], "halted"),
        ([Commit(step=0, attempt=0, is_last=True, is_asked=True)], "stopped"),
        ([Commit(step=0, attempt=0, is_last=True)], "finished"),
    ],
)
def test_nodes_without_a_group_that_knows_the_end_read_it_in_the_log(entries: list[Entry], outcome: str | None) -> None:
    """The driver's node took the last whole state with it, and no restart was left: the journal had no end."""
    log = {keys_of_run.entry(index): encode_entry(entry) for index, entry in enumerate(entries)}
    end = end_in_log(MemoryStore(log), RunConfig())  # type: ignore[arg-type]
    assert (None if end is None else end.outcome) == outcome


def test_a_supervisor_with_other_code_than_the_driver_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    driver, ours = Pipe()
    monkeypatch.setattr(node_process, "connect", lambda *_: ours)
    monkeypatch.setattr("importlib.import_module", lambda _: None)  # Megatron
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    driver.send(
        NodeSpec(config=RunConfig(), run_dir=tmp_path, node=1, store=store, faults=(), rank_main=no_main, code="0" * 64)
    )
    with pytest.raises(ValueError, match=r"the driver of the run has 0{12}: install the same on all nodes"):
        node_process.look_after_node(tmp_path, 1, 0.0)


def test_the_end_is_journaled_also_where_the_file_has_been_closed(tmp_path: Path) -> None:
    """The driver may be lost while it reads the last report."""
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    spec = NodeSpec(config=RunConfig(), run_dir=tmp_path, node=1, store=store, faults=(), rank_main=no_main)
    zero, one = GroupId(0), GroupId(1)
    write_end(spec, end_without_driver({(zero, 0): 0}, {zero}))
    write_end(spec, end_without_driver({(zero, 0): 0, (one, 0): int(ExitCode.WIPE_OUT)}, {zero}))
    (end,) = read_journal(tmp_path).of(EndRecord)
    assert end.outcome == "wipe_out"


def no_main(spec: object, pipe: object) -> None:
    raise AssertionError("no rank is started")


class Beats:
    """A store in which nodes beat, one more at every look, until each comes to its end."""

    def __init__(self, ends_after: dict[int, int | None]) -> None:
        self._ends_after = ends_after
        self.num_looks = 0

    def get(self, keys: Sequence[str]) -> list[str | None]:
        self.num_looks += 1
        return [self._beat(int(key.removeprefix("beat/"))) for key in keys]

    def _beat(self, node: int) -> str | None:
        after = self._ends_after[node]
        if after is None:
            return "7"  # it does not move any more
        return ENDED if self.num_looks >= after else str(self.num_looks)


def test_others_are_waited_for_until_they_have_ended_and_not_if_they_are_silent() -> None:
    beats = Beats({1: 3, 2: None, 3: 5})
    wait_for_others(beats, 0, 4, 0.01)  # type: ignore[arg-type]
    assert beats.num_looks >= 5


class OtherSupervisor:
    """A store that knows of another supervisor of the node, on the machine that replaces this one."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return ['{"holdings":[[6,0,2]]}' if key == keys_of_run.assignment(0) else None for key in keys]

    def exists(self, key: str) -> bool:
        return False

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        pass

    def put(self, key: str, value: str) -> None:
        self.written.append(key)


def test_a_supervisor_that_returns_after_it_was_replaced_fences_no_group_and_learns_why() -> None:
    store = OtherSupervisor()
    inbox, outbox = Pipe(duplex=False)
    link = StoreLink(
        node=0,
        layout=Layout(num_groups=2, num_nodes=2),
        interval_s=0.2,
        connect=lambda: store,  # type: ignore[arg-type, return-value]
        outbox=outbox,
        incarnation=1,
        machine=MachineId(4),
    )
    member = Member(GroupId(0), 0)
    link.fence(FenceWanted(group=member.group, member=member, rank=0, cause="SIGKILL", error="", from_index=0))
    link.start()
    assert inbox.poll(WAIT_S)
    assert isinstance(inbox.recv(), NodeReplaced)
    link.stop(WAIT_S)
    assert [key for key in store.written if not key.startswith("life/")] == []


# ------------------------------------------------------------------------------------------------------ Slurm


def test_a_node_that_another_supervisor_has_is_not_given_away(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.claim("n1", 0)
    assert not claims.claim("n1", 1)
    assert claims.taken() == ("n1",)
    claims.release("n1")
    claims.release("n1")
    assert claims.claim("n1", 1)


def test_supervisors_start_on_the_nodes_in_their_order_and_again_on_a_spare_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = ["n1", "n2", "n3"]
    monkeypatch.setattr("spare_megatron.driver.slurm.allocation.nodes_of", lambda job_id: tuple(present))
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: started.append(tuple(command)))
    launchers = [SrunLauncher(job_id=1, slurm=SlurmConfig(), nodes=("n1", "n2")) for _ in range(2)]
    for node, launcher in enumerate(launchers):
        launcher.start(tmp_path, node, 0)
    launchers[1].release(tmp_path, 1)
    present.remove("n2")
    launchers[1].start(tmp_path, 1, 1)
    assert [next(word for word in command if "nodelist" in word) for command in started] == [
        "--nodelist=n1",
        "--nodelist=n2",
        "--nodelist=n3",
    ]
    assert started[2][-3:] == (str(tmp_path), "--node", "1")
    launchers[1].release(tmp_path, 1)
    present.remove("n3")
    assert launchers[1].start(tmp_path, 1, 2) is None


def test_a_supervisor_gives_up_its_own_node_while_others_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked into the files of all others once, and one of them went between the look and the reading."""
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: None)
    claims = Claims(tmp_path)
    launcher = SrunLauncher(job_id=1, slurm=SlurmConfig(), nodes=("n1", "n2"))
    launcher.start(tmp_path, 1, 0)
    claims.claim("n1", 0)
    (tmp_path / "nodes/on-n0").symlink_to(tmp_path / "gone")  # listed, and gone when it is read
    launcher.release(tmp_path, 1)
    assert claims.taken() == ("n0", "n1")
    claims.claim("n2", 7)
    launcher.release(tmp_path, 1)
    assert claims.taken() == ("n0", "n1", "n2")


def test_a_step_shares_its_node_and_survives_others() -> None:
    command = step_command("node-3", "n4", ("run", "it"))
    assert command[0] == "srun"
    assert command[-2:] == ("run", "it")
    assert {"--overlap", "--no-kill", "--nodelist=n4", "--ntasks=1"} <= set(command)


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        (SlurmConfig(), "srun OPTIONS PYTHON MODULE supervise /run --node 3"),
        (
            SlurmConfig(container=("apptainer", "exec", "--nv", "/i.sif"), python="/opt/venv/bin/python"),
            "srun OPTIONS apptainer exec --nv /i.sif /opt/venv/bin/python MODULE supervise /run --node 3",
        ),
        (
            SlurmConfig(step_options=("--container-image=/i", "--container-mounts=/d,/r"), python="/opt/python"),
            "srun --container-image=/i --container-mounts=/d,/r OPTIONS /opt/python MODULE supervise /run --node 3",
        ),
    ],
    ids=["bare", "apptainer", "pyxis"],
)
def test_a_node_runs_in_the_container_that_is_asked_for(slurm: SlurmConfig, expected: str) -> None:
    command = " ".join(node_step(slurm, "node-3", "n4", ("supervise", "/run", "--node", "3")))
    options = " ".join(step_command("node-3", "n4", ()))[len("srun ") :]
    module = "-P -m spare_megatron"
    for text, name in ((options, "OPTIONS"), (sys.executable, "PYTHON"), (module, "MODULE")):
        command = command.replace(text, name)
    assert command == expected
