"""A whole run of the example program: losses change no bit, and the script trains by itself, without a guard too."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import FaultsConfig
from spare_megatron.journal.records import UpdateRecord
from tests.integration.whole_run import assert_masked, complete_run, fenced_groups, losses_of, params_of

pytestmark = pytest.mark.timeout(150)

EXAMPLE = Path(__file__).parents[2] / "examples" / "sums"


def test_a_program_through_two_losses_ends_bitwise_as_without(tmp_path: Path) -> None:
    own = [f"program.file={EXAMPLE / 'program.py'}", "train.params_check_every_steps=1"]
    config = load_run_config(EXAMPLE / "config.toml", own).config
    calm = complete_run(replace(config, faults=FaultsConfig()), tmp_path / "calm")
    hit = complete_run(config, tmp_path / "hit")
    assert_masked(hit)
    assert fenced_groups(hit.journal) == {1, 3}
    assert hit.summary.params_sha256 == calm.summary.params_sha256 is not None
    assert losses_of(hit.journal) == losses_of(calm.journal)
    assert params_of(hit)[40] == params_of(calm)[40]
    terms = {record.step: record.terms for record in hit.journal.of(UpdateRecord)}
    assert terms == {record.step: record.terms for record in calm.journal.of(UpdateRecord)}
    assert all(set(one) == {"z", "correct"} for one in terms.values())
    assert terms[39]["correct"] > terms[0]["correct"]
    lines = [json.loads(line) for line in (hit.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["train/correct"] for line in lines} == {s: one["correct"] for s, one in terms.items()}
    recorded = load_run_config(hit.run_dir / "config.toml").config.program
    assert recorded.file == str(EXAMPLE / "program.py")
    assert len(recorded.sha256) == 64


def test_a_script_trains_without_a_guard_and_hears_of_every_step(tmp_path: Path) -> None:
    text = (EXAMPLE / "program.py").read_text()
    place = text.index("if __name__")
    script = tmp_path / "script.py"
    script.write_text(
        text[:place]
        + "heard = []\n"
        + "summary = pretrain(\n"
        + f"    {str(EXAMPLE / 'config.toml')!r}, model_provider=model_provider, forward_step=forward_step,\n"
        + "    datasets_provider=datasets_provider, loss_terms=loss_terms,\n"
        + "    overrides=['train.steps=3', 'faults.trace=[]'],\n"
        + f"    run_dir={str(tmp_path / 'run')!r}, on_step=lambda metrics, is_new: heard.append((metrics, is_new)),\n"
        + ")\n"
        + "print('end', summary.outcome, [(one['step'], new, one['train/z'] > 0) for one, new in heard])\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "end finished [(0, True, True), (1, True, True), (2, True, True)]"
