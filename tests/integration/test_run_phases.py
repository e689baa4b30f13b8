"""Whole runs that go on with another sequence length, batch or precision, or begin with weights alone."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.training.corpus import note_of, read_corpus
from spare_megatron.config.training.sample_index_folders import epoch_seed
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import ContributionRecord, RestartRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from spare_megatron.state.checkpoint.start_checkpoint import weights_identity
from spare_megatron.state.checkpoint.verification import read_manifest, verify
from tests.integration.hf_group import save_random
from tests.integration.mcore_group import run_group
from tests.integration.numpy_gpt import token_losses
from tests.integration.reference import assert_exact
from tests.integration.stacked_checkpoint_groups import contents
from tests.integration.test_run_checkpoint import assert_proven, config_of
from tests.integration.test_sequence_length import by_hand
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, complete_run, kill, losses_of, params_of, patched_in, tiny_config
from tests.unit.journal_in_memory import check_journal
from tests.unit.tiny_corpus import write_tiny_corpus

pytestmark = pytest.mark.timeout(180)

SHORT, LONG, SEQUENCES = 32, 64, 8
"""Of a step, whatever their length."""


def trained(
    corpus: Path,
    run_dir: Path,
    seq_length: int,
    *,
    load: Path | str = "",
    skip: Sequence[str] = (),
    faults: Sequence[FaultConfig] = (),
    allow: Sequence[str] = ("model.seq_length",),
    optimizer: OptimizerConfig | None = None,
    **model: Any,
) -> Run:
    config = config_of(corpus, load=str(load), faults=faults, allow_changes=tuple(allow) if load else ())
    shape = replace(config.model, position_embedding="rope", seq_length=seq_length, **model)
    config = replace(
        config, model=shape, data=replace(config.data, skip=tuple(skip)), optimizer=optimizer or config.optimizer
    )
    run = complete_run(config, run_dir)
    assert_proven(run)
    return run


def after(run: Run, step: int) -> Path:
    return checkpoint_path(run.run_dir / "checkpoints", step)


def test_a_run_goes_on_with_longer_sequences_through_a_loss_and_over_a_further_start(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The bits are those of the run without a loss and without the further start; a later place is left out."""
    first = trained(text_corpus, tmp_path / "first", SHORT)
    with pytest.raises(ValueError, match=r"seq_length = 64, and the checkpoint was trained with 32; .*\[\"model.seq_"):
        trained(text_corpus, tmp_path / "refused", LONG, load=after(first, 2), allow=())
    calm = trained(text_corpus, tmp_path / "calm", LONG, load=after(first, 2), skip=["26-29"])
    lossy = trained(
        text_corpus,
        tmp_path / "lossy",
        LONG,
        load=after(first, 2),
        skip=["26-29"],
        faults=[kill(FaultPoint.BACKWARD, 3, 1)],
    )
    assert lossy.summary.groups_lost == 1
    assert calm.summary.params_sha256 == lossy.summary.params_sha256 != first.summary.params_sha256
    assert losses_of(calm.journal) == losses_of(lossy.journal)
    again = trained(text_corpus, tmp_path / "again", LONG, load=after(lossy, 4), skip=["26-29"], allow=())
    assert again.summary.params_sha256 == calm.summary.params_sha256
    [of_first], [of_calm], [of_again] = (run.journal.of(RunRecord) for run in (first, calm, again))
    assert (of_first.phases, of_calm.phases, of_again.phases) == ("", "32:16", "32:16")
    assert (of_calm.changes, of_again.changes) == ({"model.seq_length": [SHORT, LONG]}, {})
    saved = verify(after(calm, 6)).manifest
    assert (saved.num_samples, saved.terms["data.phases"]) == (6 * SEQUENCES, "32:16")
    shown = CliRunner().invoke(app, ["check", str(calm.run_dir)]).stdout
    assert "went on with another value of model.seq_length: 64, and the checkpoint was trained with 32" in shown
    metrics = (calm.run_dir / "metrics.jsonl").read_text()
    assert f'"train/tokens": {16 * SHORT + 32 * LONG},' in metrics


def test_the_first_loss_of_a_longer_phase_is_that_of_numpy_for_the_text_that_is_left(
    text_corpus: Path, tmp_path: Path
) -> None:
    """By the parameters as torch alone reads them from the checkpoint, and the samples by the page on data."""
    text = np.fromfile(text_corpus.with_suffix(".bin"), np.uint16)[:6000].tolist()
    documents = [text[:7], text[7:2000], text[2000:2900], text[2900:]]
    write_tiny_corpus(tmp_path / "own", documents)
    first = trained(tmp_path / "own", tmp_path / "first", SHORT, hidden_dropout=0.0)
    longer = trained(tmp_path / "own", tmp_path / "longer", LONG, load=after(first, 2), hidden_dropout=0.0)
    samples = [*by_hand(documents, epoch_seed(first.config.train.seed, 0, 0), [(SHORT, 16), (LONG, 8)])][16:]
    tensors, _ = contents(after(first, 2))
    values: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if name.startswith("decoder.layers."):
            rest = name.removeprefix("decoder.layers.")
            for layer, norm in (("self_attention.linear_qkv", "input"), ("mlp.linear_fc1", "pre_mlp")):
                rest = rest.replace(f"{layer}.layer_norm_", f"{norm}_layernorm.")
            values |= {f"decoder.layers.{layer}.{rest}": row.numpy() for layer, row in enumerate(value)}
        elif not name.startswith("optimizer."):
            values[name] = value.numpy()
    tokens, labels = (np.stack(rows) for rows in zip(*samples, strict=True))
    expected = token_losses(longer.config.model, values, tokens, labels).mean()
    [(loss, _)] = losses_of(longer.journal)[2]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_wipe_out_before_the_first_save_of_a_phase_goes_back_to_where_it_began(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The folder also has a checkpoint of the former length from after fewer steps, which is of no use."""
    first = trained(text_corpus, tmp_path / "first", SHORT)
    calm = trained(text_corpus, tmp_path / "calm", LONG, load=after(first, 4))
    own = tmp_path / "struck" / "checkpoints"
    shutil.copytree(after(first, 2), own / after(first, 2).name)
    faults = [kill(FaultPoint.BACKWARD, 5, group) for group in range(4)]
    config = replace(calm.config, faults=replace(calm.config.faults, trace=tuple(faults)))
    settings = replace(config.checkpoint, folder=str(own), max_restarts=1, interval_steps=9)
    struck = complete_run(replace(config, checkpoint=settings), tmp_path / "again")
    assert_proven(struck)
    assert struck.summary.restarts == 1
    [restarted] = {(record.step, *record.rejected) for record in struck.journal.of(RestartRecord)}
    assert restarted == (4, "step-00000002 is of another training: it is not of the phase that this run goes on with")
    assert struck.summary.params_sha256 == calm.summary.params_sha256


@pytest.mark.parametrize("sharding", ["replicated", "stacked"])
def test_a_run_goes_on_in_bf16_and_back(text_corpus: Path, tmp_path: Path, sharding: str) -> None:
    """The change is exact both ways, so a bf16 run that computes nothing more has the bits of the fp32 one."""
    optimizer = OptimizerConfig(sharding=sharding, redundancy=2) if sharding == "stacked" else None  # type: ignore[arg-type]
    first = trained(text_corpus, tmp_path / "first", SHORT, optimizer=optimizer)
    bf16 = trained(
        text_corpus, tmp_path / "bf16", SHORT, load=after(first, 2), allow=["model.precision"], optimizer=optimizer,
        precision="bf16", faults=[kill(FaultPoint.BACKWARD, 3, 1)],
    )  # fmt: skip
    calm = trained(
        text_corpus, tmp_path / "calm", SHORT, load=after(first, 2), allow=["model.precision"], optimizer=optimizer,
        precision="bf16",
    )  # fmt: skip
    assert bf16.summary.params_sha256 == calm.summary.params_sha256
    losses, expected = losses_of(bf16.journal), losses_of(first.journal)
    for step in range(2, 6):
        np.testing.assert_allclose([*losses[step]], [*expected[step]], rtol=2e-2)
    back = trained(
        text_corpus, tmp_path / "back", SHORT, load=after(bf16, 4), allow=["model.precision"], optimizer=optimizer
    )
    np.testing.assert_allclose([*losses_of(back.journal)[4]], [*losses[4]], rtol=2e-2)
    assert [record.changes for record in back.journal.of(RunRecord)] == [{"model.precision": ["bf16", "fp32"]}]


NUM_GROUPS, SIZES = 3, [1, 1, 2, 3, 3]
"""Microbatches of a shard in each step."""
DUMPED = [1, 2, 4]
"""Steps whose gradients are compared with the full model's."""


def test_losses_and_a_restart_to_a_smaller_batch_leave_every_bit_as_it_is(text_corpus: Path, tmp_path: Path) -> None:
    """One loss is masked; that of all others, later, is a wipe-out, and training begins again with small batches.

    Gradients are those of a process with the full model over the batch of each step. The interleaved schedule pads a
    batch that is no multiple of its stages.
    """
    faults = [kill(FaultPoint.BACKWARD, 1, 2), kill(FaultPoint.FORWARD, 3, 0), kill(FaultPoint.FORWARD, 3, 1)]
    layout = LayoutConfig(num_groups=NUM_GROUPS, pipeline_parallel=2, virtual_pipeline=2)
    runs = {}
    for name, trace in (("whole", []), ("run", faults)):
        config = tiny_config(
            text_corpus,
            layout,
            steps=len(SIZES),
            redundancy=2,
            num_microbatches=max(SIZES),
            mode="reproducible",
            faults=trace,
            max_restarts=1,
        )
        config = replace(config, spare=replace(config.spare, ramp_start=1, ramp_steps=3))
        watch = Watch(dump_steps=frozenset(DUMPED)) if name == "whole" else None
        runs[name] = complete_run(config, tmp_path / name, watch)
    whole, run = runs["whole"], runs["run"]
    for each, num_restarts in ((whole, 0), (run, 1)):
        assert (each.summary.outcome, each.summary.verdict) == ("finished", "valid"), each.summary
        assert each.summary.restarts == num_restarts
    assert {record.step for record in run.journal.of(RestartRecord)} == {0}
    assert sum(patched_in(run.journal).values()) > 0
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert all(len(applied) == 1 for applied in losses_of(run.journal).values())
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert_sizes(whole)
    assert_sizes(run)
    assert_exact(whole, DUMPED)


def assert_sizes(run: Run) -> None:
    """Each update counted the microbatches of its step; so do the contributions, the check and the metrics."""
    for record in run.journal.of(UpdateRecord):
        assert record.num_microbatches == NUM_GROUPS * SIZES[record.step]
    if not run.config.faults.trace:
        brought = Counter[int]()
        for contribution in run.journal.of(ContributionRecord):
            brought[contribution.step] += sum(map(len, contribution.microbatches.values()))
        assert [brought[step] for step in range(len(SIZES))] == [NUM_GROUPS * size for size in SIZES]
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    tokens = {row["step"]: row["train/tokens"] for row in rows if "train/tokens" in row}
    assert [tokens[step] for step in sorted(tokens)] == [total * NUM_GROUPS * 32 for total in accumulate(SIZES)]
    for other in ([], [1, 1, 2]):
        verdict = check_journal(with_ramp(run.journal, other))
        assert verdict.verdict == "invalid"
        assert any("the sum did not count" in reason for reason in verdict.reasons), verdict.reasons


def with_ramp(journal: Journal, ramp: list[int]) -> Journal:
    """The journal of a run that says it had another ramp."""
    lines = (
        replace(line, record=replace(line.record, ramp=ramp)) if isinstance(line.record, RunRecord) else line
        for line in journal.lines
    )
    return Journal(lines=tuple(lines))


STEPS = 4


def beginning_with(weights: Path, corpus: Path, **terms: object) -> RunConfig:
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    config = tiny_config(corpus, layout, steps=STEPS, redundancy=2, mode="reproducible", max_restarts=1, **terms)
    return replace(config, checkpoint=replace(config.checkpoint, load_weights=str(weights)))


def with_a_note(corpus: Path, prefix: Path) -> Path:
    """A copy of a corpus, whose documents end with line feeds by its note."""
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus}{ending}", f"{prefix}{ending}")
    facts = replace(read_corpus(prefix), tokenizer="byte", vocab_size=256, end_of_document=10)
    Path(f"{prefix}.json").write_text(note_of(facts))
    return prefix


def test_a_run_begins_with_weights_of_another_layout_and_begins_with_them_again_after_a_wipe_out(
    text_corpus: Path, tmp_path: Path
) -> None:
    source = tiny_config(text_corpus, LayoutConfig(num_groups=2, tensor_parallel=2))
    prepare_index(source)
    run_group(save_random, source, tmp_path / "source")
    corpus = with_a_note(text_corpus, tmp_path / "noted")
    whole = complete_run(beginning_with(tmp_path / "source", corpus), tmp_path / "whole")
    faults = [kill(FaultPoint.FORWARD, 2, 0), kill(FaultPoint.BACKWARD, 2, 1), kill(FaultPoint.BACKWARD, 2, 2)]
    run = complete_run(beginning_with(tmp_path / "source", corpus, faults=faults), tmp_path / "run")
    for found in (whole, run):
        assert (found.summary.outcome, found.summary.verdict) == ("finished", "valid"), found.summary.reasons
    assert (whole.summary.restarts, run.summary.restarts) == (0, 1)
    assert run.summary.params_sha256 == whole.summary.params_sha256
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert params_of(run)[STEPS] == params_of(whole)[STEPS]

    path = tmp_path / "source" / "checkpoints" / "step-00000003"
    identity = weights_identity(read_manifest(path))
    [record] = run.journal.of(RunRecord)
    assert record.weights == identity
    saved = load_run_config(run.run_dir / "config.toml").config
    assert (saved.checkpoint.load_weights, saved.checkpoint.weights_identity) == (str(path), identity)
    assert saved.data.end_of_document == 10, (
        "the note of the corpus, which exports need where the corpus is not at hand"
    )
    first = min(loss for loss, _ in losses_of(run.journal)[0])
    assert first > 5.8, "random weights of this size, not those that the seed gives, which start near log(256)"
    assert json.loads((run.run_dir / "summary.json").read_text())["verdict"] == "valid"
