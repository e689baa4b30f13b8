"""On which machines `spare replay --group` computes, with stand-ins for them, and that it leaves no process there."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.driver.slurm.allocation import Claims
from spare_megatron.driver.slurm.slurm_commands import note_job
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import PlacesRecord
from spare_megatron.machine.gpus import Gpu, list_file, write_list
from spare_megatron.process.node_connection import Listener, connect
from spare_megatron.tools.replay import replay_ranks
from spare_megatron.tools.replay.replay_parts import (
    ReplayPart,
    Where,
    compute,
    folder_of_replay,
    parts_of,
    parts_of_machine,
)
from spare_megatron.tools.replay.replay_ranks import ComputePart, DescribeMachine, MachineFacts
from spare_megatron.version import code_digest
from tests.unit.journal_in_memory import JournalInMemory

LOOPBACK = "127.0.0.1"
WAIT_S = 60.0
WANTED = replay_ranks.Wanted(step=2, microbatches=[(0, 1)])


def config_of(num_groups: int, num_nodes: int, launcher: str = "hand", **cluster: object) -> RunConfig:
    """Groups of 4 stages."""
    settings = ClusterConfig(num_nodes=num_nodes, launcher=launcher, **cluster)  # type: ignore[arg-type]
    return RunConfig(layout=LayoutConfig(num_groups=num_groups, pipeline_parallel=4), cluster=settings)


def view_of(config: RunConfig, *holdings: list[list[int]]) -> JournalInMemory:
    """Of these assignments each of two supervisors has written a record."""
    num_places = config.cluster.num_nodes
    records = [PlacesRecord(index=index, num_places=num_places, holdings=one) for index, one in enumerate(holdings)]
    lines = [Line(source=source, at_s=0.0, record=one) for source in ("a", "b") for one in reversed(records)]
    return JournalInMemory(Journal(lines=lines, damage=[]))


def parts(config: RunConfig, group: int | None, *holdings: list[list[int]]) -> tuple[ReplayPart, ...]:
    return parts_of(config, view_of(config, *holdings), group)


def placed(found: tuple[ReplayPart, ...]) -> list[tuple[int, list[tuple[int, int | None]]]]:
    return [(part.node, [(one.rank, one.gpu) for one in part.ranks]) for part in found]


@pytest.mark.parametrize(
    ("launcher", "num_nodes", "ranks_per_gpu", "expected"),
    [
        ("hand", 6, 1, [(2, [(0, 0), (1, 1)]), (3, [(2, 0), (3, 1)])]),
        ("local", 6, 1, [(2, [(0, 4), (1, 5)]), (3, [(2, 6), (3, 7)])]),
        ("hand", 1, 1, [(0, [(0, 4), (1, 5), (2, 6), (3, 7)])]),
        ("srun", 1, 2, [(0, [(0, 2), (1, 2), (2, 3), (3, 3)])]),
    ],
)
def test_ranks_are_replayed_with_the_devices_of_their_group(
    launcher: str, num_nodes: int, ranks_per_gpu: int, expected: object
) -> None:
    config = config_of(3, num_nodes, launcher, device="gpu", ranks_per_gpu=ranks_per_gpu)
    found = parts(config, 1)
    assert placed(found) == expected
    assert [one.number for part in found for one in part.ranks] == [4, 5, 6, 7]
    alone = [(rank, rank // ranks_per_gpu) for rank in range(4)]
    assert placed(parts(config, None)) == [(0, alone)], "without a group they are alone on this machine"
    on_cpus = replace(config, cluster=replace(config.cluster, device="cpu"))
    assert {one.gpu for part in parts(on_cpus, 1) for one in part.ranks} == {None}


def test_a_group_is_replayed_by_the_machines_that_hold_its_places_now() -> None:
    """Machine 4 has taken place 0; then the one that replaces machine 0 got place 1, and machine 1 lost it."""
    config = config_of(3, 6)
    holdings = [[4, 0, 1]], [[6, 1, 1]]
    assert [part.node for part in parts(config, 0, *holdings)] == [4, 0]
    assert [part.node for part in parts(config, 1, *holdings)] == [2, 3]
    with pytest.raises(ValueError, match="--group=2: no machine holds its place 4 at the end of the journal"):
        parts(config, 2, *holdings)
    for group in (-1, 3):
        with pytest.raises(ValueError, match=f"--group={group}: the run has groups 0 to 2"):
            parts(config, group, *holdings)


def test_a_machine_whose_place_another_has_taken_is_replayed_with_those_of_its_last_group() -> None:
    """`--group` could not name it, though it is the one that was wrong."""
    config = config_of(3, 6)
    holdings = [[4, 0, 1]], [[6, 1, 1]]
    views = [view_of(config, *holdings[:end]) for end in range(3)]
    assert [parts_of_machine(config, view, 4)[0] for view in views] == [2, 0, 0], "it has taken a place of group 0"
    assert [parts_of_machine(config, view, 0)[0] for view in views] == [0, 0, 0], "machine 6 is in its stead"
    for machine, group, nodes in ((5, 2, [4, 5]), (1, 0, [4, 1]), (3, 1, [2, 3]), (4, 0, [4, 0])):
        found, parts = parts_of_machine(config, views[2], machine)
        assert (found, [part.node for part in parts]) == (group, nodes)
    with pytest.raises(ValueError, match=r"--group=machine:6: the run has machines 0 to 5"):
        parts_of_machine(config, views[2], 6)
    with pytest.raises(ValueError, match=r"--group=machine:0: it has groups 0, 1, 2; name one of them"):
        parts_of_machine(config_of(3, 1), view_of(config_of(3, 1)), 0)


def test_a_group_with_fewer_stages_is_replayed_by_its_first_places() -> None:
    """Group 1 has lost machine 6, whose place machine 7 takes; machine 14 comes for machine 6 later."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=4, least_pipeline_parallel=3)
    config = replace(config_of(2, 8), layout=layout)
    shorter = PlacesRecord(index=0, num_places=8, holdings=[[7, 6, 1]], stages=[[1, 3]])
    grown = PlacesRecord(index=1, num_places=8, holdings=[[14, 7, 1]], stages=[[1, 4]])
    lines = [Line(source="a", at_s=0.0, record=record) for record in (shorter, grown)]
    before, after = (JournalInMemory(Journal(lines=lines[:end], damage=[])) for end in (1, 2))
    assert [(part.node, part.stages) for part in parts_of(config, before, 1)] == [(4, 3), (5, 3), (7, 3)]
    assert parts_of_machine(config, before, 7) == (1, parts_of(config, before, 1))
    assert [(part.node, part.stages) for part in parts_of(config, after, 1)] == [(4, 4), (5, 4), (7, 4), (6, 4)]
    assert {part.stages for part in parts_of(config, before, 0)} == {4}
    assert [part.stages for part in parts_of(config, before, None)] == [4]


# ---------------------------------------------------------------------------------------------------- other machines


def attending(run_dir: Path, node: int, serve: Callable[[Connection], None]) -> threading.Thread:
    """A process of another machine, which is a thread."""

    def attend() -> None:
        with connect(folder_of_replay(run_dir), node, WAIT_S) as asking, contextlib.suppress(EOFError, OSError):
            serve(asking)

    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    return thread


def answering(*answers: object, requests: list[object]) -> Callable[[Connection], None]:
    """Answers one request after another, and ends with the next one."""

    def serve(asking: Connection) -> None:
        for answer in answers:
            requests.append(asking.recv())
            asking.send(answer)
        requests.append(asking.recv())

    return serve


TWO_GPUS = tuple(Gpu(uuid=f"GPU-{letter}", name="H100", memory_bytes=1, free_bytes=1) for letter in "ab")
FIT = MachineFacts(host="other", gpus=("GPU-a", "GPU-b"), code=code_digest())


@pytest.mark.parametrize(
    ("answers", "device", "message"),
    [
        ([replace(FIT, code="0" * 64)], "cpu", r"node 3 \(other\) has code 0+ of spare_megatron, and this process "),
        (
            [replace(FIT, gpus=("GPU-a",))],
            "gpu",
            r"group 1 needs 2, and node 3 \(other\) shows 1; use a machine of the ",
        ),
        ([], "cpu", "node 3: its process ended before its answer"),
        ([FIT, ValueError("rank 2 ended")], "cpu", r"node 3 \(other\): rank 2 ended"),
        ([FIT], "cpu", r"node 3 \(other\): its process ended before its answer"),
    ],
)
def test_a_machine_that_is_unfit_or_fails_ends_the_replay_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[object], device: str, message: str
) -> None:
    monkeypatch.setattr("spare_megatron.tools.replay.replay_ranks.visible_gpus", lambda: TWO_GPUS)
    config = config_of(3, 6, device=device)
    requests: list[object] = []
    thread = attending(tmp_path, 3, answering(*answers, requests=requests))
    messages: list[str] = []
    others = psutil.Process().children()  # a fork server of earlier tests
    with pytest.raises(ValueError, match=message):
        compute(config, tmp_path, parts(config, 1), WANTED, Where(group=1, wait_s=WAIT_S, on_awaited=messages.append))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert messages == ["this machine acts as node 2 of group 1", f"on node 3: spare replay {tmp_path} --node 3"]
    assert psutil.Process().children() == others, "the ranks of this machine have ended, too"
    orders = [one for one in requests if isinstance(one, ComputePart)]
    assert len(orders) == (answers[:1] == [FIT])
    assert [path.name for path in folder_of_replay(tmp_path).rglob("*")] == ["lock"]


@pytest.mark.parametrize(
    ("shown", "kept", "expected"),
    [
        ("ba", "ab", "ab"),  # as in the run, whatever it is shown now
        ("abc", "", "ab"),  # it was in no run
        ("cd", "ab", "cd"),  # another machine takes part in its stead
        ("bc", "ab", r"group 1 has computed on GPU-a, which node 3 \(other\) does not show now; repair it"),
    ],
)
def test_a_replay_has_the_gpus_that_the_ranks_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, kept: str, expected: str
) -> None:
    monkeypatch.setattr("spare_megatron.tools.replay.replay_ranks.visible_gpus", lambda: TWO_GPUS)
    if kept:
        write_list(list_file(tmp_path, 3), [f"GPU-{letter}" for letter in kept])
    config, requests = config_of(3, 6, device="gpu"), list[object]()
    facts = replace(FIT, gpus=tuple(f"GPU-{letter}" for letter in shown))
    is_refused = len(expected) > 2
    answers = [facts] if is_refused else [facts, ValueError("enough")]
    thread = attending(tmp_path, 3, answering(*answers, requests=requests))
    with pytest.raises(ValueError, match=expected if is_refused else "enough"):
        compute(config, tmp_path, parts(config, 1), WANTED, Where(group=1, wait_s=WAIT_S))
    thread.join(WAIT_S)
    orders = [one for one in requests if isinstance(one, ComputePart)]
    gpus = [(rank.gpu, order.gpus[rank.gpu or 0]) for order in orders for rank in order.ranks]
    assert gpus == ([] if is_refused else [(at, f"GPU-{letter}") for at, letter in enumerate(expected)])


def test_a_machine_that_does_not_come_is_named_and_no_rank_starts(tmp_path: Path) -> None:
    config = config_of(3, 6)
    missing = f"node 3: `spare replay {tmp_path} --node 3` did not connect from there within 0 s; is .* on storage that"
    others = psutil.Process().children()
    with pytest.raises(ValueError, match=missing):
        compute(config, tmp_path, parts(config, 1), WANTED, Where(group=1, wait_s=0.0))
    assert psutil.Process().children() == others


# ----------------------------------------------------------------------------------------------------------- a job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of a run in the folder of job 17_2, with the nodes n1 to n4, where steps end at once."""
    commands = tmp_path / "slurm"
    commands.mkdir()
    answers = (
        'case "$*" in *"show job 17_2"*) echo "JobId=19 ArrayJobId=17 NodeList=n[1-4]";; '
        '*hostnames*) printf "n1\\nn2\\nn3\\nn4\\n";; *"show node"*) echo NodeAddr=127.0.0.1;; esac'
    )
    for name, text in (("scontrol", answers), ("srun", 'echo "$@" >> $0.calls; echo srun: no such node; exit 1')):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    note_job(tmp_path, "17_2")
    return tmp_path / "attempt-000"


def refusal(config: RunConfig, run_dir: Path, group: int) -> str:
    with pytest.raises(ValueError, match="node") as refused:
        compute(config, run_dir, parts(config, group, [[4, 0, 1]]), WANTED, Where(group=group, wait_s=WAIT_S))
    return str(refused.value)


def test_in_a_job_the_machines_of_a_group_are_steps_of_it(job: Path) -> None:
    """Node 4 has place 0, and its last supervisor was on another machine than the first. All supervisors have ended."""
    config, claims, calls = config_of(3, 6, "srun"), Claims(job), job.parent / "slurm/srun.calls"
    for node, name in ((1, "n2"), (4, "n3"), (4, "n4")):
        assert claims.claim(name, node)
        claims.release(name)
    has_ended = "its step has ended: srun: no such node"
    assert refusal(config, job, 0) == f"node 1: {has_ended}; node 4: {has_ended}"
    first, second = sorted(calls.read_text().splitlines(), key=lambda call: "replay-4" in call)
    assert "--nodelist=n2 --job-name=replay-1" in first
    assert "--nodelist=n4 --job-name=replay-4" in second
    for call, node in ((first, 1), (second, 4)):
        assert call.startswith("--jobid=19 ")
        assert call.endswith(f"spare_megatron replay {job} --node {node} --wait-s {WAIT_S}")


def test_machines_of_a_group_that_are_not_in_a_job_are_named(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, claims = config_of(3, 6, "srun"), Claims(job)
    claims.claim("n3", 2)
    assert f"--group: {job / 'nodes'} does not say which machine node 3 is" in refusal(config, job, 1)
    claims.claim("n9", 3)
    remedy = "start it in one that has n3, n9, as by `salloc --nodelist=n3,n9`"
    assert refusal(config, job, 1) == f"job 17_2 does not have n9: {remedy}"
    monkeypatch.setenv("SLURM_JOB_ID", "23")
    assert refusal(config, job, 1) == f"job 23 has no nodes: it has ended; job 17_2 does not have n9: {remedy}"
    monkeypatch.delenv("SLURM_JOB_ID")
    (job.parent / "job.json").unlink()
    assert refusal(config, job, 1) == f"this process is in no Slurm job: {remedy}"
    assert not (job.parent / "slurm/srun.calls").exists()


# ------------------------------------------------------------------------------------------- processes and the command


@pytest.fixture
def silent_store() -> Iterator[tuple[str, int]]:
    """Ranks connect to it, and wait."""
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[:2]


@pytest.mark.parametrize("how", ["the command ends", "SIGTERM", "SIGKILL"])
def test_ranks_end_with_the_command_and_with_the_process_that_started_them(
    tmp_path: Path, silent_store: tuple[str, int], how: str
) -> None:
    (tmp_path / "config.toml").write_text(dump_run_config(config_of(1, 2)))
    listener = Listener(folder_of_replay(tmp_path), 1, LOOPBACK)
    command = [sys.executable, "-m", "spare_megatron", "replay", str(tmp_path), "--node", "1"]
    part = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert wait([listener.fileno()], WAIT_S)
        asking = listener.accept()
        assert asking is not None
        asking.send(DescribeMachine())
        assert asking.recv().host == socket.gethostname()
        alone, text = replay_ranks.PartRank(rank=0, gpu=None, number=0), dump_run_config(config_of(1, 1))
        asking.send(ComputePart(config=text, store=silent_store, stages=4, wanted=WANTED, ranks=(alone,), gpus=()))
        (rank,) = until(lambda: psutil.Process(part.pid).children())
        if how == "the command ends":
            asking.close()
        else:
            part.send_signal(signal.Signals[how])
        _, stderr = part.communicate(timeout=WAIT_S)
        waits = f"node 1 waits up to 300 s for `spare replay {tmp_path} --step N --group G` elsewhere"
        assert (part.returncode, stderr.splitlines()) == {
            "the command ends": (0, [waits]),
            "SIGTERM": (130, [waits, "spare replay: interrupted"]),
            "SIGKILL": (-signal.SIGKILL, [waits]),
        }[how]
        assert psutil.wait_procs([rank], WAIT_S) == ([rank], [])
    finally:
        listener.close()
        part.kill()
        part.wait()


def until(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    end_s = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--step is missing; `spare audit RUN_DIR` lists steps with a mismatch"),
        (
            ["--node", "1", "--group", "2"],
            "--node takes RUN_DIR and --wait-s alone",
        ),
        (["--node", "1", "--wait-s", "0"], "node 1 is not awaited by a driver"),
        (["--node", "1"], "--node=1: with cluster.launcher=local all groups of"),
    ],
)
def test_what_cannot_be_started_is_explained(tmp_path: Path, words: list[str], message: str) -> None:
    launcher = "local" if "launcher=local" in message else "hand"
    (tmp_path / "config.toml").write_text(dump_run_config(config_of(1, 2, launcher)))
    refused = CliRunner().invoke(app, ["replay", str(tmp_path), *words])
    assert (refused.exit_code, message in refused.output) == (2, True), refused.output
