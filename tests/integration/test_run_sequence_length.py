"""Whole runs that go on with another sequence length or precision, and what they keep."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import FaultConfig, OptimizerConfig
from spare_megatron.config.training.sample_index_folders import epoch_seed
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import RestartRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.numpy_gpt import token_losses
from tests.integration.stacked_checkpoint_groups import contents
from tests.integration.test_run_checkpoint import assert_proven, config_of
from tests.integration.test_sequence_length import by_hand
from tests.integration.whole_run import Run, complete_run, kill, losses_of
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
