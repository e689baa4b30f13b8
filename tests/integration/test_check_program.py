"""`spare check-program`: six planted sins are found, each by its rule, and a clean program passes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import (
    LayoutConfig,
    ModelConfig,
    ProfileConfig,
    ProgramConfig,
    ReduceConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.tools.doctor.check_program import ADVICE, _alone, findings_of, run_trials
from spare_megatron.tools.doctor.program_trial import work_of

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "sums"

CLEAN = """
import os, random
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import MegatronModule
from torch.utils.checkpoint import checkpoint

class Samples:
    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(4, generator=generator)
        # sample
        return {"values": values}

class Model(MegatronModule):
    def __init__(self, context):
        super().__init__(context.transformer)
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.seen = 0
    def forward(self, values):
        # forward
        return torch.nn.functional.dropout(self.layer(values), 0.5)

def model_provider(context):
    return Model(context)

def datasets_provider(config):
    return Samples()

def forward_step(batch, model, context):
    output = model(batch["values"])
    loss, count = output.square().sum(), output.numel()
    # loss
    return output, {"loss": (loss, count)}
"""

SINS = {
    "global random state": ("# sample", "values = values * random.random()", {"random"}),
    "random state of numpy in the model": ("# forward", "values = values + np.random.rand()", {"random"}),
    "rank-dependent data": ("# sample", "values = values + int(os.environ['RANK'])", {"environment"}),
    "a buffer that learns": (
        "# forward",
        "self.mean.mul_(0.9).add_(values.detach().mean(0)); values = values - self.mean",
        {"state"},
    ),
    "a collective over another group": ("# loss", "dist.all_reduce(loss.detach())", {"collective"}),
    "a collective over Megatron's data-parallel group": (
        "# loss",
        "dist.all_reduce(loss.detach(), group=context.groups.dp)",
        {"collective"},
    ),
    "a set's order": (
        "# forward",
        "values = values * torch.tensor([float(len(key)) for key in {'a', 'bb', 'ccc', 'dddd'}])",
        {"hash_order"},
    ),
    "a normaliser of its own group": (
        "# forward",
        "self.seen += len(values); values = values / self.seen",
        {"position"},
    ),
    "a gradient in parts, with reduce.overlap": (
        "# forward",
        "for _ in 'ab': values = checkpoint(self.layer, values.requires_grad_(), use_reentrant=True)",
        {"raises"},
    ),
    "an error": ("# loss", "loss.missing", {"raises"}),
}


def written(folder: Path, name: str, text: str) -> RunConfig:
    file = folder / f"{name.replace(' ', '_')}.py"
    file.write_text(text)
    config = RunConfig(
        model=ModelConfig(hidden_size=16, num_attention_heads=1),
        layout=LayoutConfig(num_groups=2, pipeline_parallel=2),
        reduce=ReduceConfig(overlap=True),
        program=ProgramConfig(file=str(file)),
    )
    return _alone(config)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[dict[str, Any]]]:
    """What each trial of each program observed; all are tried in the same three processes."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {name: CLEAN.replace(place, sin) for name, (place, sin, _) in SINS.items()} | {"clean": CLEAN}
    configs = {name: written(folder, name, text) for name, text in programs.items()}
    own = [f"program.file={EXAMPLE / 'program.py'}"]
    masked = CLEAN.replace('"values": values}', '"values": values, "loss_mask": torch.ones(64)}')
    for name, text in (("a mask that it leaves out", masked), ("a mask that its samples lack", CLEAN)):
        configs[name] = replace(written(folder, name, text), data=DataConfig(eod_mask_loss=True))
    configs["example"] = _alone(load_run_config(EXAMPLE / "config.toml", own).config)
    return dict(zip(configs, run_trials([*configs.values()]), strict=True))


def rules_of(trials: Sequence[Mapping[str, Any]]) -> set[str]:
    return {one.rule for one in findings_of(trials)}


@pytest.mark.parametrize("sin", SINS)
def test_a_planted_sin_is_found(observed: Mapping[str, list[dict[str, Any]]], sin: str) -> None:
    assert rules_of(observed[sin]) == SINS[sin][2]


@pytest.mark.parametrize("name", ["clean", "example"])
def test_a_clean_program_breaks_no_rule(observed: Mapping[str, list[dict[str, Any]]], name: str) -> None:
    """One uses dropout, which is seeded by the microbatch."""
    assert rules_of(observed[name]) == set()


def test_a_mask_that_is_asked_for_is_read_and_there(observed: Mapping[str, list[dict[str, Any]]]) -> None:
    """Masks were dropped silently, and missing keys were an error of the program."""
    (found,) = findings_of(observed["a mask that it leaves out"])
    assert (found.rule, found.where) == ("mask", "forward_step")
    assert found.what.startswith('forward_step does not read batch["loss_mask"] (data.eod_mask_loss=true)')
    with pytest.raises(ValueError, match=r"data\.eod_mask_loss=true needs `loss_mask` in each sample"):
        findings_of(observed["a mask that its samples lack"])


def observation(**changed: Any) -> dict[str, Any]:
    one = {"batch": "b", "gradients": "g", "terms": ["loss: 1.0 2"]}
    return {"parameters": "p", "passes": [{"step 0": one}, {"step 0": one}], "faults": []} | changed


def test_a_difference_between_processes_names_the_role_that_it_begins_with() -> None:
    base, other = observation(), {"batch": "c", "gradients": "h", "terms": []}
    (found,) = findings_of([base, observation(parameters="q"), observation(parameters="q")])
    assert (found.rule, found.where) == ("environment", "model_provider")
    (found,) = findings_of([base, base, observation(passes=[{"step 0": other}] * 2)])
    assert (found.rule, found.where) == ("hash_order", "datasets_provider, step 0")
    assert findings_of([base] * 3) == []


def checked(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["check-program", *words, "--json"])
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_the_command_prints_the_verdict_and_what_to_do(
    observed: Mapping[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (str(EXAMPLE / "program.py"), str(EXAMPLE / "config.toml"))
    trials = observed["example"]

    def run(configs: Sequence[RunConfig]) -> list[list[dict[str, Any]]]:
        assert [(config.layout.num_groups, config.program.file) for config in configs] == [(4, words[0])]
        return [trials]

    monkeypatch.setattr("spare_megatron.tools.doctor.check_program.run_trials", run)
    assert checked(*words) == (0, {"verdict": "valid", "findings": []})
    what = "it changes buffers of the model"
    trials = [observation(faults=[["state", "forward_step", what]])] * 3
    code, answer = checked(*words)
    assert (code, answer["verdict"]) == (1, "invalid")
    assert answer["findings"] == [{"rule": "state", "where": "forward_step", "what": what, "advice": ADVICE["state"]}]
    done = CliRunner().invoke(app, ["check-program", words[1]])
    assert (done.exit_code, "defines none of model_provider" in done.output) == (2, True)


def test_trials_have_one_rank_per_group_and_no_faults() -> None:
    config = _alone(replace(RunConfig(), layout=LayoutConfig(num_groups=3, tensor_parallel=2)))
    assert (config.parallel.ranks_per_group, config.layout.num_groups, config.reduce.mode) == (1, 3, "fast")


def test_trials_have_what_the_run_has_of_steps_and_microbatches_and_no_profiles() -> None:
    """A rank to profile was refused, and microbatches and steps were tried that the run does not have."""
    ramp = SpareConfig(microbatches_per_shard=4, ramp_start=2, ramp_steps=2)
    whole = RunConfig(spare=ramp, layout=LayoutConfig(num_groups=1), profile=ProfileConfig(steps=(1,), ranks=(1,)))
    assert _alone(whole).profile.steps == ()
    assert work_of(whole) == [(step, Microbatch(ShardId(0), k)) for step, last in ((0, 1), (1, 2)) for k in (0, last)]
    assert {step for step, _ in work_of(replace(whole, train=TrainConfig(steps=1)))} == {0}
