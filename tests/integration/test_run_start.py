"""The start of a run and of its groups: ranks that fail or are late, other code, and open files that lack."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import FaultRecord, LossRecord, RankRecord, UpdateRecord, VoteRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.reports import GroupLost, Message, RunEvent
from spare_megatron.process.specs import RankMain, RankSpec
from spare_megatron.rank import rank
from spare_megatron.rank.rank import run_rank
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.version import PACKAGE, code_digest
from tests.integration.short_rank import short_ranks
from tests.integration.whole_run import (
    Run,
    complete_run,
    entries_of,
    fenced_groups,
    kill,
    losses_of,
    read_run,
    tiny_config,
)
from tests.search_path import with_checkout

ERROR = "ImportError: libcudart.so.12: cannot open shared object file"
STEPS = 2
SHORT_S, LATE_S = 3.0, 6.0
"""A timeout of the groups, and what takes longer."""


def unimportable(groups: frozenset[int], spec: RankSpec, reports: Connection) -> None:
    """In these groups what a rank is made of cannot be imported."""
    if spec.group in groups:
        raise ImportError(ERROR.partition(": ")[2])
    rank.run_rank(spec, reports)


def crashing(spec: RankSpec, reports: Connection) -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def late(spec: RankSpec, reports: Connection) -> None:
    """The second stage comes late."""
    if spec.rank == 1:
        time.sleep(LATE_S)
    rank.run_rank(spec, reports)


def loads_late(spec: RankSpec, reports: Connection) -> None:
    """The second stage reads its part of the checkpoint from slow storage."""
    if spec.rank == 1:
        load = GroupTrainer.load_checkpoint

        def load_late(trainer: GroupTrainer, *args: Any) -> None:
            (spec.run_dir / f"late-{spec.group}").touch()
            time.sleep(LATE_S)
            load(trainer, *args)

        GroupTrainer.load_checkpoint = load_late  # type: ignore[method-assign]
    rank.run_rank(spec, reports)


def started(config: RunConfig, run_dir: Path, rank_main: RankMain) -> Run:
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=rank_main)
    return read_run(config, run_dir, events)


@pytest.mark.timeout(120)
def test_a_healthy_run_names_its_kernels_and_leaves_all_logs_empty(text_corpus: Path, tmp_path: Path) -> None:
    """c10d warned in every rank that it had no host name for a socket, because no name server is asked."""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=2)
    run = started(tiny_config(text_corpus, layout, steps=STEPS), tmp_path / "run", rank.run_rank)
    assert run.summary.verdict == "valid"
    texts = [event.text for event in run.events if isinstance(event, Message)]
    assert "layers: megatron-core, adam: torch, fusions: none" in texts
    logs = {file.name: file.read_text() for file in (run.run_dir / "logs").iterdir()}
    assert len(logs) == 5, "four ranks and a supervisor"
    assert not any(logs.values()), logs


def num_losses(run: Run) -> Counter[int]:
    """Group -> how often it was lost."""
    return Counter(loss.group for loss in run.journal.of(LossRecord))


@pytest.mark.timeout(120)
def test_what_all_ranks_raise_at_the_start_ends_the_run_at_once_and_is_its_reason(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Each group used up its restarts, and the run was reported as wiped out."""
    # A group waits for a heartbeat until it is started for the third time.
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), rejoins=3, max_restarts=3)
    run = started(config, tmp_path / "run", partial(unimportable, frozenset(range(3))))
    assert (run.summary.outcome, run.summary.steps_committed) == ("failed", 0)
    assert "raised the same before training began" in run.summary.outcome_reason
    assert run.summary.outcome_reason.endswith(ERROR)
    assert max(num_losses(run).values()) <= 2, "the first to raise may have started again before the next one raised"
    lost = [event for event in run.events if isinstance(event, GroupLost)]
    assert {event.record.group for event in lost} > {lost[0].record.group}
    assert all(ERROR in event.traceback for event in lost)
    for event in lost:
        (log,) = (run.run_dir / "logs").glob(f"group-{event.record.group:04d}-rank-0.log")
        assert ERROR in log.read_text()


@pytest.mark.timeout(120)
def test_groups_that_all_crash_at_the_start_end_the_run(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), rejoins=3, max_restarts=3)
    run = started(config, tmp_path / "run", crashing)
    assert run.summary.outcome == "failed"
    assert run.summary.outcome_reason.startswith("all groups were lost before training began; group ")
    assert run.summary.outcome_reason.endswith(": rank 0: SIGABRT")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_groups", "num_nodes", "broken"), [(3, 1, {1}), (4, 2, {2, 3})])
def test_a_machine_that_is_broken_from_the_start_is_masked(
    text_corpus: Path, tmp_path: Path, num_groups: int, num_nodes: int, broken: set[int]
) -> None:
    """A node with two groups on which nothing can be imported; or one group, as on a broken GPU."""
    cluster = ClusterConfig(device="cpu", num_nodes=num_nodes)
    config = tiny_config(text_corpus, LayoutConfig(num_groups=num_groups), steps=STEPS, rejoins=1, cluster=cluster)
    run = started(config, tmp_path / "run", partial(unimportable, frozenset(broken)))
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert run.summary.steps_committed == STEPS
    assert fenced_groups(run.journal) == set(num_losses(run)) == broken
    assert {loss.cause for loss in run.journal.of(LossRecord)} == {ERROR}


def patient(config: RunConfig) -> RunConfig:
    """Ranks of a group wait for each other for a short time only."""
    return replace(config, control=replace(config.control, group_timeout_s=SHORT_S))


@pytest.mark.timeout(120)
def test_ranks_of_a_group_may_start_far_apart(text_corpus: Path, tmp_path: Path) -> None:
    config = patient(tiny_config(text_corpus, LayoutConfig(num_groups=1, pipeline_parallel=2), steps=STEPS))
    run = started(config, tmp_path / "run", late)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert num_losses(run) == {}


@pytest.mark.timeout(120)
def test_ranks_of_a_group_may_take_a_checkpoint_over_far_apart(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=1, pipeline_parallel=2), steps=STEPS + 1)
    saving = replace(config, checkpoint=replace(config.checkpoint, interval_steps=STEPS, asynchronous=False))
    complete_run(saving, tmp_path / "first")
    first = tmp_path / "first" / "checkpoints" / f"step-{STEPS:08d}"
    config = patient(replace(config, checkpoint=replace(config.checkpoint, load=str(first))))
    run = started(config, tmp_path / "run", loads_late)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert [path.name for path in run.run_dir.glob("late-*")] == ["late-0"]
    assert num_losses(run) == {}


CONSOLE_SCRIPT = """
import atexit, sys
from spare_megatron.commands import app
if __name__ == "__main__":
    atexit.register(lambda: print("the driver has torch:", "torch" in sys.modules))
    app()
"""
APPLIED = "was_applied, gradient_norm, _ = self.megatron.step()\n"
NOT_APPLIED = "gradient_norm, was_applied = 1.0, True\n"


def command(script: Path) -> list[str]:
    """A console script as pip installs it: in a folder that holds no code beside it."""
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    return [sys.executable, str(script)]


def environment() -> dict[str, str]:
    """What finds the code that is tested as if it were installed, and has nothing that a run sets for its own."""
    return {**os.environ, "PYTHONPATH": with_checkout(), "PYTHONSAFEPATH": ""}


def doctored_copy(folder: Path) -> Path:
    """A working directory with a copy of the package that updates no parameters."""
    folder.mkdir()
    shutil.copytree(PACKAGE, folder / "spare_megatron", ignore=shutil.ignore_patterns("__pycache__"))
    optimizer = folder / "spare_megatron" / "mcore" / "optimizer" / "optimizer.py"
    assert APPLIED in optimizer.read_text()
    optimizer.write_text(optimizer.read_text().replace(APPLIED, NOT_APPLIED))
    return folder


def train(words: Sequence[str], corpus: Path, working_folder: Path, run_dir: Path) -> subprocess.CompletedProcess[str]:
    preset = run_dir.with_suffix(".toml")
    preset.write_text(dump_run_config(tiny_config(corpus, LayoutConfig(num_groups=2), steps=2)))
    command = [*words, "train", "--config", str(preset), "--run-dir", str(run_dir)]
    return subprocess.run(
        command, cwd=working_folder, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )


def test_a_copy_of_the_package_in_the_working_directory_is_not_trained_with(text_corpus: Path, tmp_path: Path) -> None:
    """The fork server imported what lay there: the copy trained under the name of the installed code."""
    folder, run_dir = doctored_copy(tmp_path / "work"), tmp_path / "run"
    (folder / "tokenize.py").write_text('raise RuntimeError("this is no module of Python\'s")\n')
    done = train(command(tmp_path / "bin" / "spare"), text_corpus, folder, run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no module of Python's" not in done.stderr
    assert done.stdout.endswith("the driver has torch: False\n"), "its import takes longer than the start of the ranks"
    journal = read_journal(run_dir)
    assert len({update.grad_norm for update in journal.of(UpdateRecord)} - {1.0}) == 2
    # First what a masked loss would hide. Ranks begin in any order.
    assert journal.of(LossRecord) == [], "\n".join(path.read_text() for path in sorted(run_dir.glob("logs/group-*")))
    assert sorted((rank.group, rank.code) for rank in journal.of(RankRecord)) == [
        (0, code_digest()),
        (1, code_digest()),
    ]
    assert [record.code for record in journal.of(RunRecord)] == [code_digest()]
    assert json.loads((run_dir / "origin.json").read_text())["code"] == code_digest()


def test_a_driver_with_other_code_than_the_processes_it_starts_is_refused(text_corpus: Path, tmp_path: Path) -> None:
    """`python -m` looks in the working directory first, and what it starts does not."""
    folder, run_dir = doctored_copy(tmp_path / "work"), tmp_path / "run"
    module = [sys.executable, "-m", "spare_megatron"]
    done = train(module, text_corpus, folder, run_dir)
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(folder / "spare_megatron") in done.stderr
    assert str(PACKAGE) in done.stderr
    assert not run_dir.exists()


UNGUARDED = """
import sys
from pathlib import Path
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run

start_run(load_run_config(Path(sys.argv[1])).config, Path(sys.argv[2]), print)
"""


def test_a_script_without_a_main_guard_gets_an_error_that_asks_for_one(text_corpus: Path, tmp_path: Path) -> None:
    """Each process imports the script, and would start a run of its own; memory was blamed for how the first ended."""
    preset, script = tmp_path / "preset.toml", tmp_path / "script.py"
    preset.write_text(dump_run_config(tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=2)))
    script.write_text(UNGUARDED)
    words = [sys.executable, str(script), str(preset), str(tmp_path / "run")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ValueError: {script} starts a run whenever it is imported")
    assert last.endswith('under `if __name__ == "__main__":`')
    assert done.stderr.count("Traceback") == 1, "of the script itself"
    assert not (tmp_path / "run").exists()


def test_a_rank_whose_code_is_not_that_of_the_run_does_not_begin(tmp_path: Path) -> None:
    """On GPUs each rank imports the files as they are when it starts, which may be days after the run did."""
    spec = RankSpec(
        config=RunConfig(),
        run_dir=tmp_path,
        group=GroupId(1),
        incarnation=1,
        rank=0,
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        faults=(),
        code="0" * 64,
    )
    with pytest.raises(RuntimeError, match=f"is code {code_digest()[:12]}, the driver of the run has 0{{12}}: restore"):
        run_rank(spec, Pipe()[0])
    assert list(tmp_path.iterdir()) == []


LOST, STEP = 3, 2
LACKING = "too many open files; raise `ulimit -n`"


def with_a_loss(corpus: Path, run_dir: Path, layout: LayoutConfig, *short: tuple[int, int], num_failures: int) -> Run:
    config = tiny_config(
        corpus, layout, steps=4, mode="reproducible", faults=[kill(FaultPoint.FORWARD, STEP, LOST)], heartbeat_s=1.0
    )
    start_run(config, run_dir, lambda _: None, rank_main=short_ranks(*short, num_failures=num_failures))
    run = read_run(config, run_dir, ())
    assert len(run.journal.of(FaultRecord)) == 1
    return run


def assert_finished(run: Run) -> None:
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert not any("reduce.timeout_s" in vote.evidence for vote in run.journal.of(VoteRecord)), "none waits in vain"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", [LayoutConfig(num_groups=4), LayoutConfig(num_groups=4, pipeline_parallel=2)])
def test_a_group_that_cannot_connect_once_costs_one_attempt(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    calm = with_a_loss(text_corpus, tmp_path / "calm", layout, num_failures=0)
    failing = layout.pipeline_parallel - 1
    run = with_a_loss(text_corpus, tmp_path / "run", layout, (1, failing), num_failures=1)
    assert_finished(run)
    assert [loss.group for loss in run.journal.of(LossRecord)] == [LOST]
    failures = [entry["failures"] for entry in entries_of(run.journal) if entry["entry"] == "retry"]
    assert [failure for failure in failures if failure] == [[[1, LACKING]]]
    [evidence] = {vote.evidence for vote in run.journal.of(VoteRecord) if vote.group == 0 and LACKING in vote.evidence}
    assert evidence.startswith("group 1: rebuild: [Errno 24] Too many open files")
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert run.summary.params_sha256 == calm.summary.params_sha256


@pytest.mark.timeout(180)
def test_a_group_that_cannot_connect_again_is_lost_alone_with_the_cause(text_corpus: Path, tmp_path: Path) -> None:
    run = with_a_loss(text_corpus, tmp_path / "run", LayoutConfig(num_groups=4), (1, 0), num_failures=99)
    assert_finished(run)
    causes = {loss.group: loss.cause for loss in run.journal.of(LossRecord)}
    assert causes.keys() == {1, LOST}
    assert causes[1] == f"fenced: it could not connect to the others in two attempts of step {STEP}: {LACKING}"


@pytest.mark.timeout(180)
def test_if_no_group_can_connect_the_run_halts_with_the_cause(text_corpus: Path, tmp_path: Path) -> None:
    everyone = [(group, 0) for group in range(4)]
    run = with_a_loss(text_corpus, tmp_path / "run", LayoutConfig(num_groups=4), *everyone, num_failures=99)
    assert run.summary.outcome == "halted", run.summary
    assert run.summary.outcome_reason == f"no group can connect to the others, group 0 for this: {LACKING}"
    assert [loss.group for loss in run.journal.of(LossRecord)] == [LOST]
