"""How far a run goes on, how it ends when it cannot, and what the command line says of it."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import FaultsConfig, LayoutConfig, RunConfig
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.machine import end_signal
from spare_megatron.process.reports import GroupLost, Message, RunEvent, RunStopped, StepCommitted
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import assert_masked, complete_run, fenced_groups, kill, tiny_config
from tests.unit.journal_in_memory import check_journal

pytestmark = pytest.mark.timeout(150)

QUICK_S = 30.0
"""Far below every timeout of the run, which a hang would have to wait for; the machine may be busy."""


def test_groups_are_lost_one_after_another_until_the_last_trains_alone(text_corpus: Path, tmp_path: Path) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    faults = [kill("forward", 1, 0), kill("in_reduce", 2, 1, 1), kill("backward", 3, 2)]
    config = tiny_config(text_corpus, layout, steps=6, faults=faults)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(6))))
    assert_masked(run)
    assert_exact(run, range(6))
    assert {record.group for record in run.journal.of(UpdateRecord) if record.step >= 3} == {3}
    last = [record.makespan for record in run.journal.of(UpdateRecord) if record.step == 5]
    assert last == [8]


def test_losing_the_last_host_of_a_shard_stops_the_run_and_names_the_shards(text_corpus: Path, tmp_path: Path) -> None:
    """Shard 1 of 4 is hosted by groups 1 and 0 alone; they are lost in one step, and no group comes back.

    The others save the state that they have committed, and a further run begins with it.
    """
    config = wipe_out_config(text_corpus)
    lost_at_s: list[float] = []

    def note(event: RunEvent) -> None:
        if isinstance(event, GroupLost):
            lost_at_s.append(time.monotonic())

    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset({0, 1})), note)
    assert time.monotonic() - lost_at_s[0] < QUICK_S
    assert run.summary.outcome == "wipe_out"
    why, _, where = run.summary.outcome_reason.partition("; the state is in ")
    assert why == "no surviving group hosts shards [1]"
    saved = Path(where.partition(",")[0])
    assert fenced_groups(run.journal) == {0, 1}
    assert [(event.step, event.reason, event.is_final) for event in run.events if isinstance(event, RunStopped)] == [
        (2, why, True)
    ] * 2
    assert (run.summary.verdict, run.summary.steps_committed) == ("valid", 2)
    assert_exact(run, [0, 1])
    further = replace(config, checkpoint=replace(config.checkpoint, load=str(saved)), faults=FaultsConfig())
    rest = complete_run(further, tmp_path / "rest")
    assert (rest.summary.outcome, rest.summary.verdict, rest.summary.steps_committed) == ("finished", "valid", 2)


@pytest.mark.parametrize("moment", [Message, StepCommitted])
def test_a_run_whose_driver_is_asked_to_end_does_so_with_the_next_steps(
    text_corpus: Path, tmp_path: Path, moment: type[RunEvent]
) -> None:
    """Once it was ignored until the supervisor was there, and the job ran into its time limit; once from then on."""

    def on_event(event: RunEvent) -> None:
        if isinstance(event, moment):
            signal.raise_signal(signal.SIGUSR1)  # to this thread: others of the tests' process would let it through

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with end_signal.blocked():
        config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=5000)
        run = complete_run(config, tmp_path / "run", on_event=on_event)
    assert (run.summary.verdict, run.summary.outcome) == ("valid", "stopped")
    assert run.summary.outcome_reason.startswith("asked to end by SIGUSR1 after ")
    assert run.summary.steps_committed > 0
    assert run.summary.steps_left > 0


def test_the_command_line_ends_a_wipe_out_with_exit_code_3(text_corpus: Path, tmp_path: Path) -> None:
    preset = write_preset(wipe_out_config(text_corpus), tmp_path)
    answer = CliRunner().invoke(app, ["train", "--config", str(preset), "--run-dir", str(tmp_path / "run")])
    assert answer.exit_code == 3, answer.output
    assert "no surviving group hosts shards [1]" in " ".join(answer.output.split())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["verdict"], summary["steps_committed"]) == ("wipe_out", "valid", 2)
    assert check_journal(read_journal(tmp_path / "run")).verdict == "valid"
    assert ranks_left(tmp_path / "run") == []


UNSAFE = {
    "batched transfers when interleaved": (
        ["layout.pipeline_parallel=2", "layout.virtual_pipeline=2", "megatron.batch_p2p_comm=true"],
        "megatron.batch_p2p_comm",
    ),
    "finishing gradients inside the schedule": (
        ["megatron.calculate_per_token_loss=false"],
        "megatron.calculate_per_token_loss",
    ),
    "more hosts than groups": (["spare.redundancy=5"], "spare.redundancy=5"),
    "sequence parallelism on a CPU": (
        ["layout.tensor_parallel=2", "megatron.sequence_parallel=true"],
        "megatron.sequence_parallel",
    ),
    "sequences that ranks cannot split": (["layout.context_parallel=3"], "2 x layout.context_parallel=6"),
    "a decision that cannot be waited for": (["control.decision_timeout_s=10"], "control.decision_timeout_s"),
    "a corpus that is not there": (["data.corpus=nowhere"], "data.corpus=nowhere"),
    "an unknown setting": (["spare.redundency=2"], "spare.redundancy"),
    "a field that Megatron has not": (["megatron.no_such_field=1"], "no_such_field"),
}


@pytest.mark.parametrize(("settings", "named"), UNSAFE.values(), ids=UNSAFE)
def test_what_cannot_run_is_refused_in_one_message_before_anything_starts(
    text_corpus: Path, tmp_path: Path, settings: list[str], named: str
) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), num_layers=4)
    arguments = ["train", "--config", str(write_preset(config, tmp_path)), "--run-dir", str(tmp_path / "run")]
    for setting in settings:
        arguments += ["--set", setting]
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 2, answer.output
    messages = [line for line in answer.output.splitlines() if line.startswith("spare train:")]
    assert len([message for message in messages if not message.startswith("spare train: warning:")]) == 1
    assert named in answer.output
    assert "Traceback" not in answer.output
    assert not (tmp_path / "run").exists()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def wipe_out_config(corpus: Path) -> RunConfig:
    faults = [kill("forward", 2, 0), kill("backward", 2, 1)]
    return tiny_config(corpus, LayoutConfig(num_groups=4), faults=faults, redundancy=2)


def write_preset(config: RunConfig, folder: Path) -> Path:
    preset = folder / "preset.toml"
    preset.write_text(dump_run_config(config))
    return preset


def ranks_left(run_dir: Path) -> list[int]:
    """Processes that hold a log of the run open, as every rank does."""
    logs = str(run_dir / "logs")
    left = []
    for process in psutil.Process().children(recursive=True):
        try:
            left += [process.pid for file in process.open_files() if file.path.startswith(logs)]
        except psutil.NoSuchProcess:
            continue
    return left
