"""Which weights a run begins with, resolved before any rank starts."""

import hashlib
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import AuditConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import differences, terms_of
from spare_megatron.journal.run_record import FirstTerms, digest_of_terms
from spare_megatron.state.checkpoint.checkpoint_folder import WEIGHTS_ALONE, checkpoint_path, publish
from spare_megatron.state.checkpoint.start_checkpoint import check_weights, resolve_load
from spare_megatron.state.checkpoint.verification import read_manifest
from tests.unit.test_checkpoints import CONFIG, cut_short, save


def beginning_with(weights: Path | str, identity: str = "", load: Path | str = "") -> RunConfig:
    checkpoint = CheckpointConfig(load_weights=str(weights), weights_identity=identity, load=str(load))
    return replace(CONFIG, checkpoint=checkpoint)


def resolved(config: RunConfig, folder: Path) -> RunConfig:
    return resolve_load(config, folder / "new", pytest.fail)


def test_the_newest_weights_are_found_and_identified_by_their_content(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path / "checkpoints", step)
    found = resolved(beginning_with(tmp_path), tmp_path).checkpoint
    assert found.load_weights == str(checkpoint_path(tmp_path / "checkpoints", 10))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    moved = resolved(beginning_with(tmp_path / "copy", found.weights_identity), tmp_path).checkpoint
    assert moved.weights_identity == found.weights_identity
    older = resolved(beginning_with(checkpoint_path(tmp_path / "copy", 5)), tmp_path).checkpoint
    assert older.weights_identity != found.weights_identity
    with pytest.raises(ValueError, match=f"is {older.weights_identity}, not checkpoint.weights_identity=0123; load"):
        resolved(beginning_with(checkpoint_path(tmp_path, 5).parent / "copy" / "step-00000005", "0123"), tmp_path)


def test_weights_fit_other_sequences_precision_and_data_but_no_other_model(tmp_path: Path) -> None:
    save(tmp_path, 10)
    config = beginning_with(tmp_path)
    other = replace(config, model=replace(config.model, seq_length=32, precision="bf16"))
    other = replace(other, train=replace(other.train, seed=7, steps=3))
    assert resolved(other, tmp_path).checkpoint.weights_identity
    wide = replace(config, model=replace(config.model, hidden_size=128, rope_base=500.0))
    with pytest.raises(ValueError, match=r"has weights of another model:\n  - model.hidden_size = 128, and") as error:
        resolved(wide, tmp_path)
    assert "rotary_base=500.0" in str(error.value)


def test_weights_that_change_after_the_start_are_refused_by_ranks(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    found = resolved(beginning_with(path), tmp_path).checkpoint
    check_weights(found)
    check_weights(CheckpointConfig())
    save(tmp_path, 10, config=replace(CONFIG, train=replace(CONFIG.train, seed=9)))
    with pytest.raises(ValueError, match=f"is no longer {found.weights_identity}"):
        check_weights(found)
    cut_short(path / "0.distcp")
    with pytest.raises(ValueError, match=r"cannot be used: step-00000010: 0\.distcp has 1999 bytes"):
        check_weights(found)


def test_a_checkpoint_of_the_training_precedes_the_weights_that_it_began_with(tmp_path: Path) -> None:
    save(tmp_path / "weights", 3)
    begun = resolved(beginning_with(tmp_path / "weights"), tmp_path)
    save(tmp_path / "run", 4, config=begun)
    shutil.rmtree(tmp_path / "weights")
    went_on = resolved(beginning_with(tmp_path / "weights", load=tmp_path / "run"), tmp_path).checkpoint
    assert (went_on.load_weights, went_on.weights_identity) == ("", begun.checkpoint.weights_identity)
    with pytest.raises(ValueError, match=r"another training:\n  - checkpoint.weights_identity = 0123, and the checkp"):
        resolved(beginning_with("", "0123", load=tmp_path / "run"), tmp_path)


def test_weights_alone_are_no_state_to_go_on_from(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    manifest = replace(read_manifest(path), optimizer={"sharding": WEIGHTS_ALONE})
    path = publish(path.rename(tmp_path / "step-00000002.import.tmp"), manifest, lambda _: None).path
    with pytest.raises(ValueError, match=r"has weights alone; set checkpoint\.load_weights to it"):
        resolved(beginning_with("", load=path), tmp_path)
    assert resolved(beginning_with(path), tmp_path).checkpoint.weights_identity


def test_terms_have_the_weights_and_those_of_earlier_versions_stay_as_they_were() -> None:
    terms = dict(terms_of(CONFIG))
    del terms["checkpoint.weights_identity"]
    assert differences(terms, CONFIG) == []
    assert len(differences(terms, beginning_with("", "0123"))) == 1
    # Without what later versions do unless it is switched off.
    as_before = replace(CONFIG, spare=replace(CONFIG.spare, deal_by_pace=False), audit=AuditConfig(every_steps=0))
    of_run = terms_of_run(as_before)
    values = [*(of_run[one.name] for one in fields(FirstTerms)), {"order": of_run["order"]}]
    text = json.dumps(values, separators=(",", ":"))
    assert digest_of_terms(of_run) == hashlib.sha256(text.encode()).hexdigest()
    assert digest_of_terms(of_run) != digest_of_terms(terms_of_run(beginning_with("", "0123")))
