"""Custom programs: what the driver reads of a file, what a rank imports, what a checkpoint remembers."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import spare_megatron
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.program_file import (
    MODULE,
    LossTerm,
    ProgramImported,
    import_program,
    read_program,
    resolved_program,
)
from spare_megatron.config.schema import ProgramConfig, RunConfig
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import differences, terms_of
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.run_record import digest_of_terms

GUARDED = """
from spare_megatron import pretrain

def forward_step(batch, model, context):
    return 1

if __name__ == "__main__":
    datasets_provider = None
    pretrain("demo_cpu", forward_step=forward_step)
"""
UNGUARDED = """
from spare_megatron import pretrain

def forward_step(batch, model, context):
    return 1

summary = pretrain("demo_cpu", forward_step=forward_step)
raise AssertionError("a rank must not come here")
"""


@pytest.fixture(autouse=True)
def _no_program_is_imported() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.modules.pop(MODULE, None)
    sys.path[:] = before


def program(tmp_path: Path, text: str) -> ProgramConfig:
    file = tmp_path / "program.py"
    file.write_text(text)
    return ProgramConfig(file=str(file))


@pytest.mark.parametrize("text", [GUARDED, UNGUARDED], ids=["guarded", "unguarded"])
def test_a_script_gives_its_roles_with_or_without_a_guard(tmp_path: Path, text: str) -> None:
    config = program(tmp_path, text)
    assert read_program(config).names == {"forward_step"}
    roles = import_program(config)
    assert roles.keys() == {"forward_step"}
    assert (roles["forward_step"](0, 0, 0), roles["forward_step"].__module__) == (1, MODULE)


def test_the_driver_reads_names_however_they_are_bound_and_runs_nothing(tmp_path: Path) -> None:
    text = """
from helpers import build as model_provider
loss_terms: dict = {}
try:
    forward_step = lambda *_: None
except OSError:
    raise
if 1 > 0:
    def datasets_provider(config): ...
raise SystemExit(3)
"""
    names = read_program(program(tmp_path, text)).names
    assert names == {"model_provider", "forward_step", "datasets_provider", "loss_terms"}


def test_a_program_imports_modules_beside_it_which_hide_no_others(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("def forward_step(*_): return 7")
    (tmp_path / "json.py").write_text("raise AssertionError('hides an installed module')")
    roles = import_program(program(tmp_path, "import json\nfrom beside_it import forward_step"))
    assert roles["forward_step"]() == 7


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", "defines none of model_provider, forward_step, datasets_provider"),
        ("def forward_step(:", "is no Python"),
        ("forward_step = 3", "forward_step must be a function"),
        ("if 1 > 2:\n    def forward_step(): ...\ndef model_provider(): ...", "defines forward_step depends on where"),
        ("def forward_step(): ...\nloss_terms = {'loss': None}", "loss, grad_norm, learning_rate, tokens are taken"),
        ("def forward_step(): ...\nloss_terms = {'Z': 1}", "maps names, of small letters"),
        ("def forward_step(): ...\nloss_terms = 3", "maps names"),
    ],
)
def test_a_file_that_is_no_program_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        import_program(program(tmp_path, text))


def test_a_file_that_is_missing_or_another_one_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = program(tmp_path, GUARDED)
    resolved = resolved_program(config)
    assert resolved.sha256 == hashlib.sha256(GUARDED.encode()).hexdigest()
    Path(config.file).write_text(GUARDED + "\n")
    for wrong, reason in (
        (resolved, f"not program.sha256={resolved.sha256}"),
        (ProgramConfig(file=str(tmp_path / "none.py")), "cannot be read: No such file"),
    ):
        run = RunConfig(program=wrong)
        found = problems(run, replace(look_at_machine(run), has_corpus=True))
        assert any(reason in text for text in found), found
        with pytest.raises(ValueError, match=reason):
            import_program(wrong)


def test_only_data_of_its_own_spares_a_program_the_corpus(tmp_path: Path) -> None:
    def reasons(text: str) -> list[str]:
        run = RunConfig(program=program(tmp_path, text))
        return [reason for reason in problems(run, look_at_machine(run)) if "corpus" in reason]

    assert reasons("def datasets_provider(config): ...") == []
    assert reasons("def forward_step(config): ...") == [
        "data.corpus is empty; set it to the path prefix that `spare preprocess` wrote"
    ]


def test_a_training_goes_on_with_its_own_program_alone(tmp_path: Path) -> None:
    plain = RunConfig()
    with_one = RunConfig(program=resolved_program(program(tmp_path, GUARDED)))
    other = RunConfig(program=resolved_program(program(tmp_path, UNGUARDED)))
    assert differences(terms_of(with_one), with_one) == []
    earlier = {key: value for key, value in terms_of(plain).items() if key != "program.sha256"}
    assert differences(earlier, plain) == []
    for theirs, ours in ((with_one, other), (with_one, plain), (plain, with_one)):
        (reason,) = differences(terms_of(theirs), ours)
        assert 'choose that one, or set checkpoint.allow_changes=["program"]' in reason
        allowed = replace(ours, checkpoint=replace(ours.checkpoint, allow_changes=("program",)))
        assert differences(terms_of(theirs), allowed) == []


def test_the_digest_of_a_program_is_among_the_terms_of_a_run(tmp_path: Path) -> None:
    plain, with_one = RunConfig(), RunConfig(program=resolved_program(program(tmp_path, GUARDED)))
    assert terms_of_run(with_one)["program"] == with_one.program.sha256
    assert digest_of_terms(terms_of_run(with_one)) != digest_of_terms(terms_of_run(plain))
    without = {key: value for key, value in terms_of_run(plain).items() if key != "program"}
    assert digest_of_terms({**without, "program": ""}) == digest_of_terms(terms_of_run(plain))


def call_of_pretrain(tmp_path: Path, text: str) -> dict[str, Any]:
    """The names of a script that ran up to a call of pretrain that fails before it starts anything."""
    file = tmp_path / "script.py"
    file.write_text(text)
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    exec(compile(text, str(file), "exec"), names)
    return names


@pytest.mark.parametrize(
    "call",
    [
        "forward_step=lambda *_: None",
        "forward_step=forward_step, model_provider=forward_step",
        "model_provider=forward_step",
    ],
)
def test_pretrain_refuses_what_ranks_would_not_find(tmp_path: Path, call: str) -> None:
    text = GUARDED.replace("forward_step=forward_step", call).replace("    datasets_provider = None\n", "")
    with pytest.raises(ValueError, match=r"ranks find .* at its top level"):
        call_of_pretrain(tmp_path, text)


def test_pretrain_while_a_rank_imports_ends_the_script(tmp_path: Path) -> None:
    sys.modules[MODULE] = sys
    with pytest.raises(ProgramImported):
        spare_megatron.pretrain("demo_cpu")


def test_the_public_names_are_there_and_come_without_torch_until_they_are_used() -> None:
    code = (
        "import sys, spare_megatron\n"
        "from spare_megatron import LossTerm, pretrain\n"
        "print([name for name in ('torch', 'megatron.core', 'numpy') if name in sys.modules])\n"
        "print([getattr(spare_megatron, name) is None for name in spare_megatron.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded, missing = done.stdout.splitlines()
    assert "torch" not in loaded
    assert "megatron" not in loaded
    assert "True" not in missing
    assert LossTerm().weight == 0.0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spare_megatron.nothing


def test_a_machine_knows_nothing_of_a_program_by_default() -> None:
    assert MachineResources(num_gpus=0, num_cores=1, has_corpus=True).program == frozenset()
