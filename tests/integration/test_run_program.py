"""Whole runs of the example program: losses change no bit, and a script trains by itself, without a guard too."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import LayoutConfig, ProgramConfig
from spare_megatron.driver.run import start_run
from spare_megatron.journal.records import UpdateRecord
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    fenced_groups,
    kill,
    losses_of,
    params_of,
    read_run,
    tiny_config,
)

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
