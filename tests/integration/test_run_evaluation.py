"""Evaluation while training: its value, what it leaves alone, and losses in each of its phases."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import FaultConfig, LayoutConfig, ProgramConfig, RunConfig
from spare_megatron.config.schema_sections import EvalConfig, ValidationCorpus
from spare_megatron.core.log.loss_sums import losses_of as losses_in
from spare_megatron.core.log.loss_sums import mean_loss
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import EntryRecord, EvaluationRecord, Record, VoteRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.mcore.model.training_samples import prepare_index, validation_sets
from spare_megatron.tools.report.page import report
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration import numpy_gpt
from tests.integration.reference import applied_in
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    evaluations_of,
    kill,
    losses_of,
    params_of,
    retries_of,
    tiny_config,
)
from tests.unit.journal_in_memory import check_journal
from tests.unit.measured_run import valid_history

pytestmark = pytest.mark.timeout(120)

LAYOUT = LayoutConfig(num_groups=3, pipeline_parallel=2, virtual_pipeline=2)
NUM_WINDOWS = 12
"""Of `validation`."""
NUM_SHORT_WINDOWS = 4
"""Of the 5 that `short` has, as microbatches have 2."""
FAULTS = (
    kill("evaluation", 2, 1, 1),
    kill("evaluation_voted", 2, 0),
)
"""Two of three groups: in the middle of the forward passes, and with its vote cast."""


def config_of(corpus: Path, *, is_evaluated: bool = True, faults: Sequence[FaultConfig] = ()) -> RunConfig:
    short = corpus.with_name("short")
    if not short.with_suffix(".idx").exists():
        write_corpus([bytes(range(32, 127)), bytes(range(126, 31, -1))], short)
    plain = tiny_config(
        corpus,
        LAYOUT,
        steps=4,
        mode="reproducible",
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    settings = EvalConfig(every_steps=2, sequences=NUM_WINDOWS) if is_evaluated else EvalConfig()
    config = replace(
        plain,
        data=replace(plain.data, split="9,1", validation=(ValidationCorpus(name="short", corpus=str(short)),)),
        eval=settings,
        train=replace(plain.train, micro_batch_size=2),
        faults=replace(plain.faults, trace=tuple(faults)),
    )
    assert problems(config, look_at_machine(config)) == []
    return config


@pytest.fixture(scope="module")
def evaluated(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run_dir = tmp_path_factory.mktemp("evaluation") / "run"
    run = complete_run(config_of(text_corpus), run_dir, Watch(dump_steps=frozenset({2})))
    assert_masked(run)
    return run


def test_the_value_is_the_mean_loss_of_the_held_out_text(evaluated: Run) -> None:
    """By a model in NumPy with the parameters of the run, which knows no dropout."""
    config = evaluated.config
    parameters, _ = applied_in(evaluated, 2)  # as they are after two steps
    [(step, sums), (last, _)] = evaluations_of(evaluated.journal)
    assert (step, last) == (2, 4)
    losses, num_tokens = losses_in(sums), {name: num for name, _, num in sums}
    num_windows = {"validation": NUM_WINDOWS, "short": NUM_SHORT_WINDOWS}
    assert num_tokens == {name: 32 * num for name, num in num_windows.items()}
    for name, windows in validation_sets(config).items():
        text = np.stack([windows[number].numpy() for number in range(num_windows[name])])
        expected = numpy_gpt.token_losses(config.model, parameters, text[:, :-1], text[:, 1:]).mean()
        assert losses[name] == pytest.approx(expected, rel=1e-6)


def test_a_set_of_less_than_a_microbatch_is_refused(text_corpus: Path) -> None:
    config = config_of(text_corpus)
    large = replace(config, train=replace(config.train, micro_batch_size=6))
    with pytest.raises(
        ValueError, match=r"validation set short has 5 sequences .* train\.micro_batch_size=6 at a time"
    ):
        prepare_index(large)


def test_metrics_summary_and_events_have_the_value_of_the_log(evaluated: Run) -> None:
    lines = [json.loads(line) for line in (evaluated.run_dir / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "eval/loss", "eval/validation/loss", "eval/short/loss")
    found = [tuple(line[key] for key in keys) for line in lines if "eval/loss" in line]
    values = [(step, mean_loss(sums), losses_in(sums)) for step, sums in evaluations_of(evaluated.journal)]
    assert found == [(step - 1, loss, of["validation"], of["short"]) for step, loss, of in values]
    assert min(values[-1][2].values()) < values[-1][1] < max(values[-1][2].values())
    last = {name: {"step": 4, "loss": loss} for name, loss in values[-1][2].items()}
    assert evaluated.summary.eval == last
    assert json.loads((evaluated.run_dir / "summary.json").read_text())["eval"] == last
    state = read_run_state(evaluated.run_dir)
    assert dict(state.figures())["eval"] == last
    text = ", ".join(f"{name} loss {loss:.4f}" for name, loss in values[-1][2].items())
    assert f"evaluated after 4 steps: {text}" in [event.text for event in state.events()]
    assert "evaluation" in state.goodput(0.0).lost_s
    page = report(valid_history(state), "")
    assert all(f"{loss:.4f} after 4 steps" in page for loss in values[-1][2].values())


def doctored(journal: Journal, kind: type[Record], change: Callable[[Any], Any]) -> Journal:
    """With the first record of the kind on attempt 2, the first evaluation, changed or, by None, left out."""
    lines, is_done = [], False
    for line in journal.lines:
        entry = getattr(line.record, "entry", {})
        if isinstance(line.record, kind) and 2 in (getattr(line.record, "attempt", None), entry.get("attempt")):
            changed = line.record if is_done and kind is not EntryRecord else change(line.record)
            is_done = True
            lines += [] if changed is None else [replace(line, record=changed)]
        else:
            lines.append(line)
    assert is_done
    return Journal(lines=tuple(lines))


@pytest.mark.parametrize(
    ("kind", "change", "verdict", "reason"),
    [
        (EvaluationRecord, lambda record: None, "unknown", "found is not in the journal"),
        (EvaluationRecord, lambda record: replace(record, microbatches={}), "invalid", "microbatches missing"),
        (EvaluationRecord, lambda record: replace(record, sums=[]), "invalid", "other sums than its groups found"),
        (EvaluationRecord, lambda record: replace(record, incarnation=1), "invalid", "another incarnation"),
        (VoteRecord, lambda record: replace(record, is_complete=False), "invalid", "had not computed its part"),
        (
            EntryRecord,
            lambda record: replace(
                record, entry={**record.entry, "sums": [["validation", 1 << 32, 384], ["short", 0, 128]]}
            ),
            "invalid",
            "other sums than its groups found",
        ),
        (
            EntryRecord,
            lambda record: replace(record, entry={"entry": "retry", "step": 2, "attempt": 2}),
            "invalid",
            "before the evaluation that was due",
        ),
    ],
)
def test_the_check_finds(
    evaluated: Run, kind: type[Record], change: Callable[[Any], Any], verdict: str, reason: str
) -> None:
    assert check_journal(evaluated.journal).verdict == "valid"
    found = check_journal(doctored(evaluated.journal, kind, change))
    assert found.verdict == verdict
    assert reason in " ".join(found.reasons)


def test_training_with_and_without_evaluation_is_bitwise_the_same(
    text_corpus: Path, tmp_path: Path, evaluated: Run
) -> None:
    plain = complete_run(config_of(text_corpus, is_evaluated=False), tmp_path / "run")
    assert_masked(plain)
    assert losses_of(evaluated.journal) == losses_of(plain.journal)
    assert params_of(evaluated) == params_of(plain)
    assert evaluated.summary.params_sha256 == plain.summary.params_sha256
    assert plain.summary.eval == {}


def test_losses_in_an_evaluation_cost_patches_and_leave_its_bits(
    text_corpus: Path, tmp_path: Path, evaluated: Run
) -> None:
    run = complete_run(config_of(text_corpus, faults=FAULTS), tmp_path / "run")
    assert_masked(run)
    assert evaluations_of(run.journal) == evaluations_of(evaluated.journal)
    assert run.summary.eval == evaluated.summary.eval
    assert losses_of(run.journal) == losses_of(evaluated.journal)
    assert run.summary.params_sha256 == evaluated.summary.params_sha256
    assert retries_of(run.journal)[2] >= 1


PROGRAM = """
from spare_megatron import gpt_forward_step

def forward_step(batch, model, context):
    output, terms = gpt_forward_step(batch, model, context)
    if model.training:
        return output, terms
    total, count = terms["loss"]
    return output, {"loss": (0.0 * total + (3.0 + context.step) * batch["labels"].numel(), count)}
"""


def test_an_evaluation_calls_the_forward_step_of_a_program(text_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    config = config_of(text_corpus)
    config = replace(
        config,
        layout=LayoutConfig(num_groups=1),
        spare=replace(config.spare, redundancy=1),
        train=replace(config.train, steps=2),
        eval=EvalConfig(every_steps=2, sequences=6),
        program=ProgramConfig(file=str(tmp_path / "program.py")),
    )
    assert problems(config, look_at_machine(config)) == []
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    [(_, sums)] = evaluations_of(run.journal)
    assert losses_in(sums) == {"validation": 5.0, "short": 5.0}
    assert {name: num for name, _, num in sums} == {"validation": 6 * 32, "short": 4 * 32}
    (tmp_path / "program.py").write_text(PROGRAM + "def datasets_provider(config): ...\n")
    found = problems(config, look_at_machine(config))
    assert any("defines datasets_provider, which has none" in problem for problem in found)
