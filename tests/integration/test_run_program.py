"""Whole runs of programs: losses change no bit; faults are masked where that is right, and reported where not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, ProgramConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import EndRecord, EntryRecord, UpdateRecord
from spare_megatron.process.reports import GroupLost
from tests.integration.broken_rank import BROKEN_GROUP, diverging, forgetful, outlived, unconnected, unreadable
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    entries_of,
    fenced_groups,
    kill,
    losses_of,
    params_of,
    read_run,
    retries_of,
    tiny_config,
)
from tests.unit.journal_in_memory import check_journal

pytestmark = pytest.mark.timeout(150)

EXAMPLE = Path(__file__).parents[2] / "examples" / "sums"
STEPS = 12
TRACE = (
    'faults.trace=[{step=4, group=3, rank=0, phase="backward", kind="kill"}, '
    '{step=8, group=1, rank=0, phase="in_reduce", kind="kill"}]'
)
"""The losses of the example, in earlier steps."""
CALL = """
received = []
summary = pretrain(
    {config!r},
    model_provider=model_provider,
    forward_step=forward_step,
    datasets_provider=datasets_provider,
    loss_terms=loss_terms,
    overrides=["faults.trace=[]", "train.params_check_every_steps=1", "train.steps={steps}"],
    run_dir={run_dir!r},
    on_step=lambda metrics, is_new: received.append((metrics["step"], is_new, metrics["train/correct"])),
)
import json
print(json.dumps([summary.outcome, summary.verdict, received]))
"""


def run_without_losses(folder: Path) -> tuple[Run, list[tuple[int, bool, float]]]:
    """A run by a script without a guard, and what its hook received."""
    program = (EXAMPLE / "program.py").read_text()
    script, run_dir = folder / "script.py", folder / "calm"
    call = CALL.format(config=str(EXAMPLE / "config.toml"), run_dir=str(run_dir), steps=STEPS)
    script.write_text(program[: program.index("if __name__")] + call)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcome, verdict, received = json.loads(done.stdout.splitlines()[-1])
    assert (outcome, verdict) == ("finished", "valid")
    config = load_run_config(run_dir / "config.toml").config
    assert config.program.file == str(script)
    return read_run(config, run_dir, ()), [tuple(one) for one in received]


def test_a_program_through_two_losses_ends_bitwise_as_without(tmp_path: Path) -> None:
    calm, received = run_without_losses(tmp_path)
    own = [f"program.file={EXAMPLE / 'program.py'}", "train.params_check_every_steps=1", f"train.steps={STEPS}", TRACE]
    hit = complete_run(load_run_config(EXAMPLE / "config.toml", own).config, tmp_path / "hit")
    assert_masked(hit)
    assert (fenced_groups(hit.journal), fenced_groups(calm.journal)) == ({1, 3}, set())
    assert hit.summary.params_sha256 == calm.summary.params_sha256 is not None
    assert losses_of(hit.journal) == losses_of(calm.journal)
    assert params_of(hit)[STEPS] == params_of(calm)[STEPS]
    terms = {record.step: record.terms for record in hit.journal.of(UpdateRecord)}
    assert terms == {record.step: record.terms for record in calm.journal.of(UpdateRecord)}
    assert all(set(one) == {"z", "correct"} for one in terms.values())
    assert terms[STEPS - 1]["correct"] > terms[0]["correct"]
    lines = [json.loads(line) for line in (hit.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/correct"]) for line in lines] == [(s, terms[s]["correct"]) for s in range(STEPS)]
    assert received == [(step, True, terms[step]["correct"]) for step in range(STEPS)]
    assert len(load_run_config(hit.run_dir / "config.toml").config.program.sha256) == 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("Sums.__getitem__ = lambda self, number: {'tokens': 1 // number}", "ZeroDivisionError"),
    ],
    ids=["import", "sample"],
)
def test_a_program_that_fails_is_refused_before_any_rank_starts(tmp_path: Path, change: str, reason: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"{(EXAMPLE / 'program.py').read_text()}\n{change}\n")
    config = load_run_config(EXAMPLE / "config.toml", [f"program.file={file}"]).config
    with pytest.raises(ValueError, match=reason):
        start_run(config, tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()


TWICE = """
from spare_megatron import LossTerm, gpt_forward_step

loss_terms = {"twice": LossTerm(weight=0.5)}

def forward_step(batch, model, context):
    output, terms = gpt_forward_step(batch, model, context)
    return output, {**terms, "twice": (2 * terms["loss"][0], terms["loss"][1])} if context.post_process else {}
"""


def test_a_term_of_the_last_stage_is_known_to_the_rank_that_journals(text_corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(TWICE)
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    config = tiny_config(text_corpus, layout, faults=[kill("backward", 1, 2)], mode="reproducible", steps=3)
    run = complete_run(replace(config, program=ProgramConfig(file=str(file))), tmp_path / "run")
    assert_masked(run)
    records = run.journal.of(UpdateRecord)
    assert {(record.group, record.step) for record in records} >= {
        (group, step) for group in (0, 1) for step in range(3)
    }
    assert all(record.terms == {"twice": 2 * record.loss} for record in records)


LAYOUT = LayoutConfig(num_groups=4)


def lost_groups(journal: Journal) -> set[int]:
    return {record.entry["group"] for record in journal.of(EntryRecord) if record.entry["entry"] == "fence"}


def test_a_group_whose_schedule_leaves_out_a_microbatch_is_lost_and_nothing_is_missing(
    text_corpus: Path, tmp_path: Path
) -> None:
    events: list[Any] = []
    summary = start_run(tiny_config(text_corpus, LAYOUT), tmp_path / "run", events.append, rank_main=forgetful)
    assert (summary.outcome, summary.verdict, summary.steps_committed) == ("finished", "valid", 4)
    assert lost_groups(read_journal(tmp_path / "run")) == {BROKEN_GROUP}
    (lost,) = [event for event in events if isinstance(event, GroupLost)]
    assert "the schedule ran" in lost.record.cause


@pytest.mark.parametrize("layout", [LAYOUT, LayoutConfig(num_groups=4, pipeline_parallel=2)], ids=["one", "stages"])
def test_an_unreadable_microbatch_stops_the_run_before_it_costs_every_group(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    """The stage that does not raise loses its peer, and must not report first: it knows of no reason."""
    summary = start_run(tiny_config(text_corpus, layout), tmp_path / "run", lambda _: None, rank_main=unreadable)
    assert summary.outcome == "halted"
    assert "two groups raised the same" in summary.outcome_reason
    assert "sample 42 of the corpus is damaged" in summary.outcome_reason
    assert summary.groups_lost == 2
    assert (summary.verdict, summary.steps_committed) == ("unknown", 1)


def test_a_rank_that_loses_the_control_store_alone_is_a_lost_group(text_corpus: Path, tmp_path: Path) -> None:
    summary = start_run(tiny_config(text_corpus, LAYOUT), tmp_path / "run", lambda _: None, rank_main=unconnected)
    assert (summary.outcome, summary.verdict, summary.steps_committed) == ("finished", "valid", 4)
    assert lost_groups(read_journal(tmp_path / "run")) == {BROKEN_GROUP}


def test_a_group_is_lost_for_what_its_rank_raised_though_a_peer_ended_first(text_corpus: Path, tmp_path: Path) -> None:
    """A rank that loses a peer may be reaped before the peer."""
    events: list[Any] = []
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3, pipeline_parallel=2))
    summary = start_run(config, tmp_path / "run", events.append, rank_main=outlived)
    assert (summary.outcome, summary.verdict, summary.steps_committed) == ("finished", "valid", 4)
    (lost,) = [event for event in events if isinstance(event, GroupLost)]
    assert (lost.record.group, lost.record.rank, lost.record.cause) == (BROKEN_GROUP, 1, "ValueError: of rank 1")
    assert lost.traceback.startswith("Traceback")


def test_two_groups_with_different_parameters_have_no_majority_and_halt(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    summary = start_run(config, tmp_path / "run", lambda _: None, rank_main=diverging)
    assert (summary.outcome, summary.steps_committed) == ("halted", 2)
    assert "groups have different parameters" in summary.outcome_reason
    assert f"groups [{BROKEN_GROUP}]" in summary.outcome_reason
    assert summary.verdict == "invalid"
    assert any("after 2 steps the groups hold different parameters" in reason for reason in summary.reasons)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
@pytest.mark.parametrize("layout", [LAYOUT, LayoutConfig(num_groups=3, pipeline_parallel=2)], ids=["one", "stages"])
def test_training_that_diverges_halts_and_says_so_instead_of_losing_group_after_group(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig, mode: str
) -> None:
    """The first update makes all parameters useless, and every group finds it out by itself."""
    config = tiny_config(text_corpus, layout, mode=mode)
    config = replace(config, optimizer=OptimizerConfig(learning_rate=1e30))
    events: list[Any] = []
    summary = start_run(config, tmp_path / "run", events.append)
    assert summary.outcome == "halted", summary.outcome_reason
    assert "two groups raised the same in one step" in summary.outcome_reason
    assert "the gradient of step 1 is not finite" in summary.outcome_reason
    assert "the training diverged" in summary.outcome_reason
    assert (summary.verdict, summary.steps_committed) == ("unknown", 1)
    assert all("the gradient of step 1" in event.record.cause for event in events if isinstance(event, GroupLost))


@pytest.mark.parametrize("num_groups", [4, 12])
def test_a_group_whose_parameters_have_changed_is_fenced_before_it_is_counted(
    text_corpus: Path, tmp_path: Path, num_groups: int
) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=num_groups), mode="reproducible")
    expected = start_run(config, tmp_path / "none", lambda _: None)
    summary = start_run(config, tmp_path / "run", lambda _: None, rank_main=diverging)
    assert (summary.outcome, summary.verdict, summary.steps_committed) == ("finished", "valid", 4), summary.reasons
    journal = read_journal(tmp_path / "run")
    (fence,) = [entry for entry in entries_of(journal) if entry["entry"] == "fence"]
    assert (fence["group"], fence["discard"]) == (BROKEN_GROUP, True)
    assert retries_of(journal) == {2: 1}
    assert summary.params_sha256 == expected.params_sha256
    assert summary.final_loss == expected.final_loss


@pytest.mark.parametrize("layout", [LAYOUT, LayoutConfig(num_groups=3, pipeline_parallel=2)], ids=["one", "stages"])
def test_a_group_lost_after_the_last_commit_changes_nothing(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    config = tiny_config(text_corpus, layout, faults=[kill(FaultPoint.AFTER_COMMIT, 3, 1)])
    run = complete_run(config, tmp_path / "run")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert run.summary.steps_committed == 4


def test_an_end_as_a_wipe_out_is_not_believed_while_every_shard_has_a_host(text_corpus: Path, tmp_path: Path) -> None:
    run = complete_run(tiny_config(text_corpus, LAYOUT, faults=[kill(FaultPoint.FORWARD, 1, 2)]), tmp_path / "run")
    assert_masked(run)
    file = run.run_dir / "journal" / "driver.jsonl"
    assert run.journal.of(EndRecord)[0].outcome == "finished"
    file.write_text(file.read_text().replace('"outcome":"finished"', '"outcome":"wipe_out"'))
    verdict = check_journal(read_journal(run.run_dir))
    assert verdict.verdict == "invalid"
    assert any("every shard has a surviving host" in reason for reason in verdict.reasons)
