"""What programs have to do with the masks of `[data]`, and with what a batch holds."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import (
    LayoutConfig,
    ModelConfig,
    ProgramConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.config.schema_sections import DataConfig, EvalConfig
from spare_megatron.driver.run import start_run
from spare_megatron.mcore.model.batches import (
    BadSample,
    RecordedBatch,
    UnreadMask,
    keys_needed,
    masks_to_read,
    stacked,
)
from spare_megatron.mcore.model.program import program_of
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.program_check import check_program
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.tools.doctor.check_program import findings_of
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration.mcore_group import CPU, all_work, run_group

END = 0
LENGTH = 16
KEYS = {"eod_mask_loss": "loss_mask", "reset_attention_mask": "attention_mask", "reset_position_ids": "position_ids"}

# ----------------------------------------------------------------------------------------------------- what is read

TAKES: Mapping[str, Callable[[Any], object]] = {
    "its key": lambda batch: batch["loss_mask"],
    "get": lambda batch: batch.get("loss_mask"),
    "get with a default": lambda batch: batch.get("loss_mask", 1),
    "dict": lambda batch: dict(batch),
    "a display": lambda batch: {**batch},
    "keywords": lambda batch: (lambda **found: found)(**batch),
    "items": lambda batch: list(batch.items()),
    "values": lambda batch: list(batch.values()),
    "all of its keys": lambda batch: [batch[key] for key in batch],
    "pop": lambda batch: batch.pop("loss_mask"),
    "setdefault": lambda batch: batch.setdefault("loss_mask", 1),
    "copy": lambda batch: batch.copy(),
    "copy.copy": copy.copy,
    "a union": lambda batch: batch | {"more": 1},
    "a union from the right": lambda batch: {"more": 1} | batch,
    "an update of another": lambda batch: {}.update(batch),
}


@pytest.mark.parametrize("way", TAKES)
def test_a_batch_records_what_is_read_of_it(way: str) -> None:
    batch = RecordedBatch({"tokens": torch.ones(1), "loss_mask": torch.zeros(1)})
    assert isinstance(batch, dict)
    TAKES[way](batch)
    assert "loss_mask" in batch.read


def test_looking_at_names_and_other_tensors_reads_no_mask() -> None:
    batch = RecordedBatch({"tokens": torch.ones(1), "loss_mask": torch.zeros(1)})
    assert ("loss_mask" in batch, len(batch), sorted(batch), list(batch.keys())) == (
        True,
        2,
        ["loss_mask", "tokens"],
        ["tokens", "loss_mask"],
    )
    assert batch.get("attention_mask") is None
    batch["more"] = batch["tokens"]
    with pytest.raises(KeyError):
        batch["attention_mask"]
    assert batch.read == {"tokens"}


@pytest.mark.parametrize(
    ("pre_process", "post_process", "keys"),
    [
        (True, True, {"loss_mask", "attention_mask", "position_ids"}),
        (True, False, {"attention_mask", "position_ids"}),
        (False, False, {"attention_mask"}),
        (False, True, {"loss_mask", "attention_mask"}),
    ],
)
def test_a_stage_reads_what_it_needs_alone(pre_process: bool, post_process: bool, keys: set[str]) -> None:
    data = DataConfig(eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True)
    found = masks_to_read(data, pre_process=pre_process, post_process=post_process)
    assert found.keys() == keys
    assert masks_to_read(DataConfig(), pre_process=pre_process, post_process=post_process) == {}


# --------------------------------------------------------------------------------------------------------- programs

FORWARD = """
def forward_step(batch, model, context):
    take = {take}
    masks = {{*{masks}}} & {{*batch}}
    positions = take("position_ids") if "position_ids" in masks else torch.arange(16).expand(2, 16)
    attention = take("attention_mask") if "attention_mask" in masks else None
    losses = model(take("tokens"), positions, attention, labels=take("labels"))
    if "loss_mask" in masks:
        mask = take("loss_mask")
        return losses, {{"loss": ((losses * mask).sum(), mask.count_nonzero())}}
    return losses, {{"loss": (losses.sum(), None)}}
"""
WAYS = ("batch.__getitem__", "batch.get", "dict(batch).get", "(lambda **given: given.get)(**batch)", "batch.copy().pop")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("masks") / "text"
    random = Random(1)
    write_corpus(
        [bytes(random.randrange(1, 64) for _ in range(7)) + b"\0" for _ in range(200)],
        prefix,
        tokenizer="byte",
        vocab_size=256,
        noted_end=END,
    )
    return prefix


@pytest.fixture(scope="module")
def make_config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    folder = tmp_path_factory.mktemp("programs")

    def make(text: str, settings: Sequence[str] = (), **others: Any) -> RunConfig:
        file = folder / f"{len([*folder.iterdir()])}.py"
        file.write_text("import torch\n" + text)
        config = RunConfig(
            model=ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=LENGTH, vocab_size=64),
            layout=LayoutConfig(num_groups=2),
            spare=SpareConfig(redundancy=1, microbatches_per_shard=1),
            train=TrainConfig(steps=3),
            data=DataConfig(corpus=str(corpus), split="9,1", end_of_document=END, **dict.fromkeys(settings, True)),
            program=ProgramConfig(file=str(file)),
        )
        config = replace(config, **others)
        prepare_index(config)
        return config

    return make


def judged(_first: RunConfig, configs: Sequence[RunConfig]) -> list[tuple[str, list[str]]]:
    """For each configuration why it is refused before a run, and in each step."""
    return [(_error_of(partial(check_program, config, program_of(config))), _steps(config)) for config in configs]


def _steps(config: RunConfig) -> list[str]:
    trainer, errors = GroupTrainer(config, CPU), []
    for step in range(config.train.steps):
        trainer.begin_step(step)
        errors.append(_error_of(partial(trainer.compute, all_work(config, step))))
    if config.eval.every_steps:
        errors.append(_error_of(partial(trainer.evaluator.compute, [Microbatch(ShardId(0), 0)])))
    return errors


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except UnreadMask as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_program_is_refused_where_it_leaves_out_a_mask_that_is_asked_for(make_config: Any) -> None:
    """All settings with all masks that a forward step uses, each taken in a way that is drawn."""
    random, cases = Random(1), []
    for asked, used in product(subsets(KEYS), subsets(KEYS.values())):
        take = random.choice(WAYS)
        cases.append((asked, used, take, make_config(FORWARD.format(take=take, masks=used), asked)))
    configs = [config for *_, config in cases]
    (answers,) = run_group(judged, configs[0], configs)
    for (asked, used, take, _), (before, steps) in zip(cases, answers, strict=True):
        missing = [name for name in asked if KEYS[name] not in used]
        takes_all = take not in WAYS[:2]  # which counts as reading each mask
        assert [bool(error) for error in (before, *steps)] == [bool(missing), *[bool(missing) and not takes_all] * 3]
        for error in filter(None, (before, *steps)):
            assert error.startswith("forward_step does not ")
            assert all((f'batch["{KEYS[name]}"] (data.{name}=true)' in error) is (name in missing) for name in KEYS)


def subsets(values: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for chosen in product((False, True), repeat=3):
        yield tuple(compress(values, chosen))


def refused(make_config: Any, text: str, settings: Sequence[str], **others: Any) -> tuple[str, list[str]]:
    config = make_config(text, settings, **others)
    ((answer,),) = run_group(judged, config, [config])
    return answer


WITH_LOSS_MASK = FORWARD.format(take="batch.get", masks=("loss_mask",))
WITHOUT = FORWARD.format(take="batch.get", masks=())


@pytest.mark.parametrize("condition", ["context.step == 1", "context.step == 2", "not model.training"])
def test_a_mask_that_some_passes_leave_out_is_found_there(make_config: Any, condition: str) -> None:
    """The first and the last step and evaluations before the run, each other step on its rank."""
    without = WITHOUT.replace("def forward_step", "def other_step")
    text = f"""{WITH_LOSS_MASK}
with_mask = forward_step
{without}
def forward_step(batch, model, context):
    return (other_step if {condition} else with_mask)(batch, model, context)
"""
    before, steps = refused(make_config, text, ["eod_mask_loss"], eval=EvalConfig(every_steps=1))
    expected = ["context.step == 0", "context.step == 1", "context.step == 2", "not model.training"]
    assert [bool(error) for error in steps] == [one == condition for one in expected]
    assert bool(before) is (condition != "context.step == 1")


def test_a_mask_that_is_read_and_not_used_is_found_before_the_run(make_config: Any) -> None:
    text = WITHOUT.replace("losses = ", 'batch["loss_mask"]\n    losses = ')
    before, steps = refused(make_config, text, ["eod_mask_loss"])
    assert before.startswith('forward_step does not use batch["loss_mask"] (data.eod_mask_loss=true)')
    assert steps == ["", "", ""]


def test_a_model_that_drops_a_mask_is_found_before_the_run(make_config: Any) -> None:
    text = """
from spare_megatron import gpt_model

def model_provider(context):
    model = gpt_model(context)
    model.register_forward_pre_hook(lambda _, given, named: ((*given[:2], None), named), with_kwargs=True)
    return model
"""
    before, _ = refused(make_config, text, ["reset_attention_mask"])
    assert before.startswith('model_provider does not use batch["attention_mask"] (data.reset_attention_mask=true)')


@pytest.mark.parametrize(
    ("total", "count"),
    [
        ("losses.sum()", "mask.count_nonzero()"),
        ("(losses * torch.ones_like(mask)).sum()", "mask.count_nonzero()"),
        ("(losses * mask.new_ones(mask.shape)).sum()", "mask.count_nonzero()"),
    ],
)
def test_a_mask_that_gives_only_its_shape_or_the_count_is_not_used(make_config: Any, total: str, count: str) -> None:
    text = WITH_LOSS_MASK.replace("(losses * mask).sum()", total).replace("mask.count_nonzero()", count)
    assert refused(make_config, text, ["eod_mask_loss"])[0].startswith('forward_step does not use batch["loss_mask"]')


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("total", "count"),
    [
        ("(losses * mask).sum()", "int(mask.sum())"),
        ("losses[mask.bool()].sum()", "mask.count_nonzero()"),
        ("losses.view(-1)[mask.view(-1).nonzero()].sum()", "mask.count_nonzero()"),
        ("(losses * mask).sum() if losses.isfinite().all() else losses", "mask.count_nonzero()"),
        ("(losses * torch.tensor(mask.tolist())).sum()", "mask.count_nonzero()"),
    ],
)
def test_a_program_that_looks_at_some_values_has_to_use_its_other_masks(
    make_config: Any, total: str, count: str, drops: bool
) -> None:
    text = FORWARD.format(take="batch.get", masks=("loss_mask", "attention_mask"))
    text = text.replace("(losses * mask).sum()", total).replace("mask.count_nonzero()", count)
    if drops:
        text = text.replace("positions, attention,", "positions, None,")
    before, _ = refused(make_config, text, ["eod_mask_loss", "reset_attention_mask"])
    expected = 'forward_step does not use batch["attention_mask"] (data.reset_attention_mask=true)'
    assert before.partition(",")[0] == (expected if drops else "")


@pytest.mark.parametrize("looks", ["batch['tokens'].numpy()", "while batch['tokens'].max() > 0: pass"])
def test_a_program_that_cannot_be_followed_is_left_to_its_ranks(make_config: Any, looks: str) -> None:
    text = WITHOUT.replace(
        "losses = ", f"if type(batch['tokens']) is not torch.Tensor:\n        {looks}\n    losses = "
    )
    before, steps = refused(make_config, text, ["eod_mask_loss"])
    assert (before, [bool(error) for error in steps]) == ("", [True, True, True])


def test_masks_reach_the_loss_through_what_is_written_in_place(make_config: Any) -> None:
    text = (
        WITH_LOSS_MASK.replace("(losses * mask).sum()", "store(losses, mask)")
        + """
def store(losses, mask):
    weights = torch.empty(2, 3, 16)
    weights[:, 1].copy_(mask)
    return (losses * weights[:, 1]).sum()
"""
    )
    assert refused(make_config, text, ["eod_mask_loss"]) == ("", ["", "", ""])


@pytest.mark.parametrize("reads", ["", "batch['attention_mask']"])
@pytest.mark.parametrize("condition", ["context.pre_process", "context.post_process", "False", "True"])
def test_a_stage_that_leaves_out_a_mask_is_found_before_the_run(make_config: Any, condition: str, reads: str) -> None:
    text = f"""
from spare_megatron import gpt_forward_step

def forward_step(batch, model, context):
    {reads}
    if not ({condition}):
        batch = {{key: batch[key] for key in ("tokens", "labels", "position_ids")}}
    return gpt_forward_step(batch, model, context)
"""
    layout = LayoutConfig(num_groups=2, pipeline_parallel=3)
    config = make_config(text, ["reset_attention_mask"])
    staged = replace(config, layout=layout, model=replace(config.model, num_layers=3))
    (found,) = run_group(errors_before, config, [config, staged])
    assert [bool(error) for error in found] == [condition == "False", condition != "True"]


def errors_before(_first: RunConfig, configs: Sequence[RunConfig]) -> list[str]:
    return [_error_of(partial(check_program, config, program_of(config))) for config in configs]


def test_a_run_with_such_a_program_is_refused_before_any_rank_starts(make_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'forward_step does not read batch\["loss_mask"\]'):
        start_run(make_config(WITHOUT, ["eod_mask_loss"]), tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------ the samples

IDS, MASK = torch.arange(LENGTH), torch.ones(LENGTH)


def config_with(*settings: str, **others: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(seq_length=LENGTH), data=DataConfig(**dict.fromkeys(settings, True)), **others)


@pytest.mark.parametrize(
    ("config", "has_own_forward_step", "sample", "reason"),
    [
        (config_with("reset_attention_mask"), True, {"inputs": IDS}, r"data\.reset_attention_mask=true needs `tokens`"),
        (config_with("eod_mask_loss"), True, {"tokens": IDS}, r"data\.eod_mask_loss=true needs `loss_mask`"),
        (config_with("reset_position_ids"), True, {"tokens": IDS}, r"reset_position_ids=true needs `position_ids`"),
        (config_with(), False, {"tokens": IDS}, "the default forward_step needs `labels`"),
        (config_with(), False, {"tokens": IDS, "labels": IDS}, "the default forward_step needs `position_ids`"),
        (config_with("eod_mask_loss"), True, {"loss_mask": MASK[1:]}, r"numbers \[model\.seq_length=16\]"),
        (config_with("reset_attention_mask"), True, {"tokens": MASK}, "needs `tokens` in each sample, whole numbers"),
        (
            config_with("reset_attention_mask"),
            True,
            {"tokens": IDS, "attention_mask": MASK},
            "makes `attention_mask`, which a sample has already",
        ),
        (
            config_with(layout=LayoutConfig(context_parallel=2)),
            True,
            {"weight": torch.ones(())},
            r"layout\.context_parallel=2 divides each tensor .* `weight` has another shape",
        ),
        (config_with(), True, (IDS, IDS), "a mapping from names to tensors"),
        (config_with(), True, {"tokens": [1, 2]}, "a mapping from names to tensors"),
    ],
)
def test_a_sample_that_lacks_something_is_refused(
    config: RunConfig, has_own_forward_step: bool, sample: Any, reason: str
) -> None:
    needed = keys_needed(config, has_own_forward_step=has_own_forward_step)
    with pytest.raises(BadSample, match=reason):
        stacked([sample, sample], config, needed)


def test_samples_of_a_microbatch_have_the_same_tensors() -> None:
    with pytest.raises(BadSample, match="differ"):
        stacked([{"tokens": IDS}, {"tokens": IDS[1:]}], config_with(), {})
    with pytest.raises(BadSample, match="differ"):
        stacked([{"tokens": IDS}, {"labels": IDS}], config_with(), {})
    assert stacked([{"tokens": IDS}] * 3, config_with(), {})["tokens"].shape == (3, LENGTH)


OWN_DATA = """
class Samples:
    def __getitem__(self, number):
        text = torch.randint(1, 64, (17,), generator=torch.Generator().manual_seed(number))
        return {{"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(16){more}}}

def datasets_provider(config):
    return Samples()
"""


def test_a_dataset_with_a_mask_of_its_own_is_trained_with_it(make_config: Any) -> None:
    more = ', "loss_mask": (text[:-1] != 5).float()'
    assert refused(make_config, OWN_DATA.format(more=more), ["eod_mask_loss"]) == ("", ["", "", ""])
    config = make_config(OWN_DATA.format(more=""), ["eod_mask_loss"])
    with pytest.raises(RuntimeError, match=r"BadSample: .*data\.eod_mask_loss=true needs `loss_mask`"):
        run_group(judged, config, [config])


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_finds_the_token_that_ends_documents_in_the_note(
    make_config: Any, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any program with such a mask failed, and was blamed for it."""
    config = make_config(WITH_LOSS_MASK, ["eod_mask_loss"])
    tried: list[RunConfig] = []
    answers: list[dict[str, Any]] = [{"faults": [], "parameters": "", "passes": [{}, {}]}] * 3

    def run(configs: Sequence[RunConfig]) -> list[list[dict[str, Any]]]:
        tried.extend(configs)
        return [answers]

    monkeypatch.setattr("spare_megatron.tools.doctor.check_program.run_trials", run)
    settings = (f"data.corpus={corpus}", "data.eod_mask_loss=true", "eval.every_steps=1", "data.split=9,1")
    words = ["check-program", config.program.file, *(word for one in settings for word in ("--set", one))]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "is valid" in done.output) == (0, True), done.output
    assert [(one.data.end_of_document, one.eval.every_steps) for one in tried] == [(END, 1)]
    answers[:] = [{"refused": "data.eod_mask_loss=true needs `loss_mask`"}] * 3
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "check-program: data.eod_mask_loss=true needs `loss_mask`" in done.output) == (2, True)


def test_a_mask_without_effect_is_a_finding() -> None:
    trial = {"faults": [("mask", "forward_step", "it does not read it")], "parameters": "", "passes": [{}, {}]}
    (found,) = findings_of([trial] * 3)
    assert (found.rule, found.where) == ("mask", "forward_step")
    assert "use each mask" in found.advice
