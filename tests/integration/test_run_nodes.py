"""Supervisors in processes of their own, as on other machines: lost ones are replaced, and the driver may be lost."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import ClusterConfig, FaultConfig, LayoutConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import EndRecord, LossRecord
from tests.integration.etcd_cluster import EtcdCluster
from tests.integration.whole_run import tiny_config
from tests.unit.journal_in_memory import check_journal

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]

TIMEOUT_S = 200.0
_POLL_S = 0.05
NUM_STEPS = 1_000_000
"""More than are committed by the time at which the test has the run end."""
UNHURRIED_S, NUM_UNHURRIED = 0.3, 300
"""How long its first steps take, which leave the processors to the supervisors that start meanwhile."""
SPARE = (sys.executable, "-m", "spare_megatron")
POD = Path(__file__).parents[2] / "launch/pod"
SCONTROL = """#!/bin/sh
case "$*" in
    *"show job"*) echo "JobId=7 JobState=RUNNING NodeList=n[1-3] ExitCode=0:0" ;;
    *"show hostnames"*) printf 'n1\\nn2\\nn3\\n' ;;
    *) exit 1 ;;
esac
"""
SRUN = """#!/bin/sh
# Runs the command here, and notes for which node of Slurm.
for word; do
    case "$word" in
        --nodelist=*) on=${word#--nodelist=}; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
echo $$ > "$(dirname "$0")/pid-$on"
exec "$@"
"""
SCANCEL = """#!/bin/sh
echo "$1" >> "$(dirname "$0")/cancelled"
"""


def test_a_lost_supervisor_is_replaced_on_a_spare_node_and_the_nodes_prove_the_run_without_a_driver(
    text_corpus: Path, tmp_path: Path, etcd_cluster: EtcdCluster
) -> None:
    """Against commands of Slurm that run everything here."""
    bin_dir, run_dir = tmp_path / "bin", tmp_path / "run"
    bin_dir.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("scancel", SCANCEL)):
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    environment = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SPARE_REQUEUES": "0"}
    preset = write_preset(text_corpus, tmp_path, etcd_cluster, "srun")
    command = ("train", "--config", str(preset), "--run-dir", str(run_dir))
    with supervisors_ended(bin_dir, run_dir), started(tmp_path, *command, **environment) as driver:
        wait_until(lambda: committed(run_dir) > 0, driver)
        os.kill(pid_on(bin_dir, "n2"), signal.SIGKILL)
        # The spare node, not the one that has lost its supervisor.
        wait_until(lambda: "rejoined" in output_of(tmp_path), driver)
        supervisors = [psutil.Process(pid_on(bin_dir, name)) for name in ("n1", "n3")]
        below = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait(TIMEOUT_S)
        before = committed(run_dir)
        wait_until(lambda: committed(run_dir) > before + 3)
        for supervisor in supervisors:
            supervisor.send_signal(signal.SIGUSR1)
        assert psutil.wait_procs([*supervisors, *below], timeout=TIMEOUT_S)[1] == []
    journal = read_journal(run_dir)
    verdict = check_journal(journal)
    assert verdict.verdict == "valid", verdict.reasons
    losses = {(loss.group, loss.incarnation): loss.cause for loss in journal.of(LossRecord)}
    assert list(losses) == [(1, 0)], losses
    assert [end.outcome for end in journal.of(EndRecord)] == ["stopped"] * 2
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["groups_lost"], summary["groups_rejoined"]) == (1, 1)
    assert summary["steps_left"] == NUM_STEPS - verdict.steps_committed > 0
    assert (bin_dir / "cancelled").read_text().split() == ["7", "7"]


def test_pods_that_replace_lost_ones_bring_a_node_back_and_conclude_a_run_without_its_driver(
    text_corpus: Path, tmp_path: Path, etcd_cluster: EtcdCluster
) -> None:
    """Pods of a Job of Kubernetes as processes of this machine: `spare supervise` by hand, and no driver at the end."""
    run_dir, path = tmp_path / "run", path_with_spare(tmp_path)
    preset = write_preset(text_corpus, tmp_path, etcd_cluster, "hand")

    def pod(index: int, name: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return started(tmp_path / name, preset, run_dir, command=(POD,), JOB_COMPLETION_INDEX=str(index), PATH=path)

    with pod(0, "driver") as driver, pod(1, "lost") as lost:
        wait_until(lambda: committed(run_dir) > 0, driver, lost)
        end_machine(lost)
        before_return = committed(run_dir, 1)
        with pod(1, "node") as node:
            wait_until(lambda: committed(run_dir, 1) > before_return, driver, node)
            end_machine(driver)
            before = committed(run_dir, 1)
            with pod(0, "replacement") as replacement:
                wait_until(lambda: committed(run_dir, 1) > before + 3, node, replacement)
                node.send_signal(signal.SIGUSR1)
                assert exit_code(node, tmp_path / "node") == 0
                assert exit_code(replacement, tmp_path / "replacement") == 11, "steps are left"
    assert "the run has ended: stopped valid" in output_of(tmp_path / "replacement")
    verdict = check_journal(read_journal(run_dir))
    assert verdict.verdict == "valid", verdict.reasons


def test_pods_that_are_all_to_end_save_the_run(text_corpus: Path, tmp_path: Path, etcd_cluster: EtcdCluster) -> None:
    """As where their Job is deleted. The groups of a pod that is to end alone leave, and the run goes on."""
    run_dir = tmp_path / "run"
    preset = write_preset(text_corpus, tmp_path, etcd_cluster, "hand", f"{tmp_path}/spare-notice-{{node}}")
    common = {"PATH": path_with_spare(tmp_path), "TMPDIR": str(tmp_path)}
    with (
        started(tmp_path / "0", preset, run_dir, command=(POD,), JOB_COMPLETION_INDEX="0", **common) as driver,
        started(tmp_path / "1", preset, run_dir, command=(POD,), JOB_COMPLETION_INDEX="1", **common) as node,
    ):
        wait_until(lambda: committed(run_dir) > 0, driver, node)
        node.terminate()
        wait_until(lambda: '"drain":[[1,0]]' in journal_of(run_dir), driver, node)
        driver.terminate()
        assert exit_code(driver, tmp_path / "0") == 15
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["verdict"], summary["groups_lost"]) == ("stopped", "valid", 0), summary
    assert "requests to all groups to leave" in summary["outcome_reason"]
    assert (run_dir / f"checkpoints/step-{summary['steps_committed']:08d}").is_dir()


def test_a_node_that_loses_its_store_with_the_driver_concludes_the_run(text_corpus: Path, tmp_path: Path) -> None:
    """An embedded store ends with the driver. The node ended with exit code 0, and the run had no end."""
    run_dir = tmp_path / "run"
    preset = write_preset(text_corpus, tmp_path, None, "hand")
    with started(tmp_path / "0", "train", "--config", preset, "--run-dir", run_dir) as driver:
        wait_until(lambda: (run_dir / "config.toml").exists(), driver)
        with started(tmp_path / "1", "supervise", run_dir, "--node", "1") as node:
            wait_until(lambda: committed(run_dir, 1) > 0, driver, node)
            driver.kill()
            assert exit_code(node, tmp_path / "1") == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert "the driver is lost; the state is in " in summary["outcome_reason"], summary
    (end,) = read_journal(run_dir).of(EndRecord)
    assert (end.outcome, end.reason) == (summary["outcome"], summary["outcome_reason"])


def journal_of(run_dir: Path) -> str:
    return "".join(file.read_text() for file in run_dir.glob("journal/group-*.jsonl"))


def end_machine(pod: subprocess.Popen[bytes]) -> None:
    """Kills a pod and the command in it; what it has started ends by itself."""
    below = psutil.Process(pod.pid).children(recursive=True)
    for process in (*psutil.Process(pod.pid).children(), pod):
        process.kill()
    pod.wait(TIMEOUT_S)
    assert psutil.wait_procs(below, timeout=TIMEOUT_S)[1] == []


def write_preset(corpus: Path, folder: Path, etcd: EtcdCluster | None, launcher: str, notice_file: str = "") -> Path:
    config = tiny_config(
        corpus,
        LayoutConfig(num_groups=2),
        steps=NUM_STEPS,
        rejoins=3,
        faults=[
            FaultConfig(phase=FaultPoint.FORWARD, step=step, group=0, rank=0, kind="delay", seconds=UNHURRIED_S)
            for step in range(2, NUM_UNHURRIED)
        ],
        cluster=ClusterConfig(device="cpu", num_nodes=2),
    )
    control = dataclasses.replace(
        config.control,
        store="embedded" if etcd is None else "etcd",
        endpoints=() if etcd is None else etcd.endpoints,
        heartbeat_interval_s=4.0,  # no other group may be lost, however busy the machine
        startup_timeout_s=TIMEOUT_S,  # supervisors import Megatron one by one
    )
    cluster = dataclasses.replace(config.cluster, launcher=launcher, notice_file=notice_file)
    slurm = dataclasses.replace(config.slurm, num_spare_nodes=1)
    preset = folder / "preset.toml"
    preset.write_text(dump_run_config(dataclasses.replace(config, control=control, cluster=cluster, slurm=slurm)))
    return preset


@contextlib.contextmanager
def started(
    folder: Path, *words: str | Path, command: Sequence[str | Path] = SPARE, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A `spare` command, or another, whose output goes to a file. It and all below it are ended with the block."""
    folder.mkdir(exist_ok=True)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, *words], stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        below: Sequence[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(TIMEOUT_S)
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def supervisors_ended(bin_dir: Path, run_dir: Path) -> Iterator[None]:
    """None outlives the block, whatever becomes of the driver."""
    try:
        yield
    finally:
        for file in bin_dir.glob("pid-*"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(file.read_text()))
                if str(run_dir) in process.cmdline():
                    process.kill()


def pid_on(bin_dir: Path, name: str) -> int:
    """The process that was last started on a node of Slurm."""
    return int((bin_dir / f"pid-{name}").read_text())


def output_of(folder: Path) -> str:
    return (folder / "output").read_text()


def exit_code(process: "subprocess.Popen[bytes]", folder: Path) -> int:
    """The output is shown if it is another than expected, or none comes in time."""
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"it has not ended: {output_of(folder)}\n{state_of(process.pid, folder)}") from error
    print(output_of(folder))
    return code


def state_of(pid: int, folder: Path) -> str:
    """What runs below the process, and the ends of what the run beside the folder has written."""
    below = [f"{one.pid} {one.status()} {one.cmdline()[-3:]}" for one in psutil.Process(pid).children(recursive=True)]
    files = sorted(file for part in ("journal", "logs") for file in (folder.parent / "run" / part).glob("*"))
    return "\n".join([*below, *(f"{file.name}: {file.read_text()[-500:]}" for file in files)])


def committed(run_dir: Path, group: int = 0) -> int:
    """Updates that the incarnations of the group have journaled."""
    files = (run_dir / "journal").glob(f"group-{group:04d}-rank-0*.jsonl")
    return sum(file.read_text().count('"record":"update"') for file in files)


def path_with_spare(folder: Path) -> str:
    """A PATH with this Python and the command of the package, which need not be installed."""
    command = folder / "bin" / "spare"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m spare_megatron "$@"\n')
    command.chmod(0o755)
    return os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])


def wait_until(is_so: Callable[[], bool], *needed: subprocess.Popen[bytes]) -> None:
    """Waits for it while these processes run."""
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s, "not in time"
        assert [process.poll() for process in needed] == [None] * len(needed), "it ended"
        time.sleep(_POLL_S)
