"""Checkpoints in a folder: visible whole or not at all, and damage that is found and named."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import differences, other_corpus, sequences_before, step_of, terms_of
from spare_megatron.core.log.actions import LoadCheckpoint, RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.entries import Fence, Retry, encode_entry
from spare_megatron.faults.points import FaultPoint
from spare_megatron.machine.lock import locked
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.checkpoint_folder import (
    MANIFEST,
    StoredFile,
    aside_path,
    checkpoint_path,
    clear_leftovers,
    drop,
    manifest_of,
    publish,
    require_folder,
    visible_steps,
)
from spare_megatron.state.checkpoint.saver import SaveJob, Saver
from spare_megatron.state.checkpoint.start_checkpoint import last_checkpoint, resolve_load, resumed
from spare_megatron.state.checkpoint.verification import (
    REFUSAL,
    DamagedCheckpoint,
    mark_refused,
    newest_valid,
    read_manifest,
    refusal_in_log,
    refusal_of,
    refuse,
    verify,
)
from spare_megatron.store.decision_log import DecisionLog
from tests.rank_context import rank_context
from tests.unit.memory_store import MemoryStore

CONFIG = RunConfig()
STACKED = replace(CONFIG, optimizer=replace(CONFIG.optimizer, sharding="stacked", redundancy=1))
MEMBERS = tuple(Member(GroupId(group)) for group in range(3))


class Died(Exception):
    """The process is gone."""


def dying_at(stage: FaultPoint | None) -> Callable[[FaultPoint], None]:
    def probe(phase: FaultPoint) -> None:
        if phase is stage:
            raise Died

    return probe


def save(
    folder: Path,
    step: int,
    *,
    dies_at: FaultPoint | None = None,
    config: RunConfig = CONFIG,
    writers: Sequence[Member] = (),
    audited_steps: int | None = None,
) -> Path:
    """A checkpoint of two files, published; with state partitions where there are writers of them."""
    action = SaveCheckpoint(step=step, member=MEMBERS[0], voters=MEMBERS, epoch=1, audited_steps=audited_steps)
    if writers:
        action = replace(action, hosts=tuple((member,) for member in MEMBERS), owners=MEMBERS)
    aside = aside_path(folder, step, MEMBERS[0])
    aside.mkdir(parents=True)
    files = {}
    for number in range(2):
        content = bytes([number, step]) * 1000
        (aside / f"{number}.distcp").write_bytes(content)
        files[f"{number}.distcp"] = StoredFile(num_bytes=2000, sha256=hashlib.sha256(content).hexdigest())
    return publish(aside, manifest_of(config, action, 7, files, writers), dying_at(dies_at)).path


def test_a_checkpoint_is_what_was_published(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    assert path == checkpoint_path(tmp_path, 10)
    assert (step_of(path), visible_steps(tmp_path)) == (10, [10])
    manifest = verify(path).manifest
    assert manifest == read_manifest(path)
    assert (manifest.step, manifest.num_bytes, manifest.log_head, manifest.epoch) == (10, 4000, 7, 1)
    assert (manifest.num_samples, manifest.terms) == (10 * 4 * 4 * 2, terms_of(CONFIG))


def test_a_manifest_names_the_writers_of_the_state_partitions(tmp_path: Path) -> None:
    assert verify(save(tmp_path, 1)).manifest.optimizer == {"sharding": "replicated"}
    found = verify(save(tmp_path, 2, config=STACKED, writers=[MEMBERS[2], MEMBERS[0], MEMBERS[2]])).manifest
    assert found.optimizer == {"sharding": "stacked", "num_slices": 3, "redundancy": 1, "writers": [0, 2]}


@pytest.mark.parametrize("stage", [FaultPoint.SAVE_MANIFEST, FaultPoint.SAVE_RENAME])
def test_what_dies_before_the_rename_is_never_visible_and_is_cleared_by_the_next_save(
    tmp_path: Path, stage: FaultPoint
) -> None:
    save(tmp_path, 10)
    with pytest.raises(Died):
        save(tmp_path, 20, dies_at=stage)
    assert visible_steps(tmp_path) == [10]
    found, rejected = newest_valid(tmp_path)
    assert found is not None
    assert (found.manifest.step, rejected) == (10, [])
    clear_leftovers(tmp_path, MEMBERS)
    assert len(list(tmp_path.glob("*.tmp"))) == 1, "a group that takes part may still be writing"
    clear_leftovers(tmp_path, MEMBERS[1:])
    assert list(tmp_path.glob("*.tmp")) == []
    assert visible_steps(tmp_path) == [10]


def test_leftovers_of_an_earlier_incarnation_are_cleared(tmp_path: Path) -> None:
    for incarnation in (0, 1):
        aside_path(tmp_path, 5, Member(GroupId(2), incarnation)).mkdir()
    clear_leftovers(tmp_path, [Member(GroupId(2), 1)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005.group-0002-life-1.tmp"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    damaged = save(tmp_path, 10)
    (damaged / "0.distcp").unlink()
    verify(save(tmp_path, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["1.distcp", MANIFEST])
@pytest.mark.parametrize("harm", [cut_short, flip_a_bit, Path.unlink])
def test_damage_is_named_and_the_checkpoint_before_takes_its_place(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    path = checkpoint_path(tmp_path, 20)
    harm(path / name)
    with pytest.raises(DamagedCheckpoint, match=f"step-00000020: {name}"):
        verify(path)
    found, [rejected] = newest_valid(tmp_path)
    assert found is not None
    assert found.manifest.step == 10
    assert rejected.path == path
    assert name in rejected.reason


def test_every_single_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    content = (path / MANIFEST).read_bytes()
    expected = json.loads(content)
    for index in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[index] ^= 2
        (path / MANIFEST).write_bytes(flipped)
        try:
            assert json.loads(flipped) == expected  # white space says nothing
        except (ValueError, AssertionError):
            with pytest.raises(DamagedCheckpoint):
                read_manifest(path)


def test_a_folder_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "missing") == (None, [])
    (tmp_path / "step-00000010").mkdir()
    found, rejected = newest_valid(tmp_path)
    assert found is None
    assert [item.reason for item in rejected] == [f"step-00000010: {MANIFEST} is missing"]


def test_dropped_checkpoints_are_gone_and_dropping_twice_is_no_error(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    drop(tmp_path, [10, 30])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


# ------------------------------------------------------------------------------------------------- what is loaded


def load_config(load: Path, **checkpoint: object) -> RunConfig:
    return replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, load=str(load), **checkpoint))


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step-00000010"])
def test_a_run_a_folder_and_a_checkpoint_can_be_loaded(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "checkpoints"
    for step in (5, 10):
        save(folder, step)
    config = resolve_load(load_config(tmp_path / where), tmp_path / "new", pytest.fail)
    assert config.checkpoint.load == str(checkpoint_path(folder, 10))


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    cut_short(checkpoint_path(tmp_path, 10) / "0.distcp")
    refused = []
    config = load_config(tmp_path, interval_steps=5)
    assert resolve_load(config, tmp_path, refused.append).checkpoint.load.endswith("step-00000005")
    assert [item.reason for item in refused] == ["step-00000010: 0.distcp has 1999 bytes, and 2000 were written"]


def test_a_checkpoint_that_is_named_and_damaged_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    cut_short(path / "0.distcp")
    with pytest.raises(ValueError, match=r"load=.* cannot be used: step-00000010: 0\.distcp has 1999 bytes"):
        resolve_load(load_config(path), tmp_path / "new", pytest.fail)


WRONG = RefuseCheckpoint(step=10, member=MEMBERS[0], epoch=1, reason="group 0: its parameters differ")
REFUSED = "step-00000010 is refused: group 0: its parameters differ"


def test_a_refused_checkpoint_stays_and_the_one_before_takes_its_place(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    refuse(tmp_path, WRONG)
    refuse(tmp_path, replace(WRONG, reason="refused twice"))
    assert visible_steps(tmp_path) == [10, 5]
    with pytest.raises(DamagedCheckpoint, match=REFUSED):
        verify(checkpoint_path(tmp_path, 10))
    refused = []
    config = load_config(tmp_path, interval_steps=5)
    assert resolve_load(config, tmp_path, refused.append).checkpoint.load.endswith("step-00000005")
    assert [item.reason for item in refused] == [REFUSED]
    with pytest.raises(ValueError, match=f"cannot be used: {REFUSED}; choose an earlier one"):
        resolve_load(load_config(checkpoint_path(tmp_path, 10)), tmp_path, pytest.fail)
    assert not refusal_of(save(tmp_path, 10)), "one that is saved again is another"


@pytest.mark.parametrize("other", [{"epoch": 2}, {"member": MEMBERS[1]}, {"member": Member(GroupId(0), 1)}])
def test_what_another_has_saved_of_the_same_step_is_not_refused(tmp_path: Path, other: dict[str, object]) -> None:
    path = save(tmp_path, 10)
    refuse(tmp_path, replace(WRONG, **other))
    verify(path)
    assert (refusal_of(path), visible_steps(tmp_path)) == ("", [10])


def test_what_is_refused_before_it_is_visible_never_becomes_so(tmp_path: Path) -> None:
    with pytest.raises(Died):
        save(tmp_path, 10, dies_at=FaultPoint.SAVE_RENAME)
    refuse(tmp_path, replace(WRONG, member=MEMBERS[1]))
    assert len(list(tmp_path.iterdir())) == 1
    refuse(tmp_path, WRONG)
    assert list(tmp_path.iterdir()) == []
    refuse(tmp_path / "gone", WRONG)


def test_what_the_log_refuses_since_the_save_began_is_not_to_become_visible() -> None:
    """Also where much has been written since, and nothing for what was written before."""
    log, head = DecisionLog(MemoryStore()), 3  # type: ignore[arg-type]
    action = SaveCheckpoint(step=10, member=MEMBERS[0], voters=MEMBERS, epoch=1)
    wrong = Fence(group=GroupId(0), reason="its parameters differ", discard=True)
    retries = [Retry(step=10, attempt=attempt) for attempt in range(100)]
    for index, entry in enumerate((wrong, *retries)):
        log.append(index, encode_entry(entry))
    assert refusal_in_log(log, head, action) == ""
    log.append(1 + len(retries), encode_entry(wrong))
    assert refusal_in_log(log, head, action) == WRONG.reason


def test_a_mark_that_cannot_be_read_still_refuses(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / REFUSAL).write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"step-00000010 is refused: refused\.json cannot be read"):
        verify(path)


def test_a_run_that_is_resumed_begins_with_the_newest_checkpoint_or_as_the_first_did(tmp_path: Path) -> None:
    first = load_config(tmp_path / "elsewhere")
    assert resumed(first, tmp_path) == first
    save(tmp_path, 5)
    assert resumed(first, tmp_path).checkpoint.load == str(tmp_path)


def complaint(load: Path) -> str:
    with pytest.raises(ValueError, match=r"checkpoint\.load=") as error:
        resolve_load(load_config(load), load / "new", lambda _: None)
    return str(error.value)


def test_a_place_without_a_checkpoint_is_refused_with_what_was_looked_for_and_what_to_set(tmp_path: Path) -> None:
    to_set = "; set it to a checkpoint (step-NNNNNNNN), to a folder of them, or to the directory of a run that has"
    gone, run_dir = tmp_path / "step-00000010", tmp_path / "run"
    assert f"checkpoint.load={gone}: there is no such directory{to_set}" in complaint(gone)
    run_dir.mkdir()
    nothing = f"checkpoint.load={run_dir} holds no checkpoint: there is no step-NNNNNNNN in {run_dir}"
    assert f"{nothing}, and no checkpoints below it{to_set}" in complaint(run_dir)
    (run_dir / "config.toml").write_text('[checkpoint]\nfolder = "/elsewhere"\n')
    instead = "; its run has saved in checkpoint.folder=/elsewhere: set checkpoint.load=/elsewhere"
    assert complaint(run_dir) == f"{nothing}, and no checkpoints below it{instead}"
    (run_dir / "config.toml").write_text("[checkpoint]\nfolder = ''\n")
    with pytest.raises(Died):
        save(run_dir / "checkpoints", 10, dies_at=FaultPoint.SAVE_RENAME)
    assert f"{nothing}/checkpoints, but unfinished saves, which nothing can use{to_set}" in complaint(run_dir)
    cut_short(save(run_dir / "checkpoints", 20) / "0.distcp")
    damaged = "holds no checkpoint that can be used (step-00000020: 0.distcp has 1999 bytes, and 2000 were written)"
    assert f"checkpoint.load={run_dir} {damaged}{to_set}" in complaint(run_dir)


def test_a_checkpoint_of_another_training_is_refused_with_every_difference(tmp_path: Path) -> None:
    other = replace(CONFIG, model=replace(CONFIG.model, hidden_size=128), train=replace(CONFIG.train, seed=7))
    save(tmp_path, 10, config=other)
    with pytest.raises(ValueError, match="is of another training") as error:
        resolve_load(load_config(tmp_path), tmp_path, pytest.fail)
    assert "model.hidden_size = 64, and the checkpoint was trained with 128" in str(error.value)
    assert "train.seed = 1234, and the checkpoint was trained with 7" in str(error.value)


def test_a_run_with_another_batch_goes_on_where_the_checkpoint_stands_in_the_data(tmp_path: Path) -> None:
    """32 sequences in each of 10 steps, then 12 in each of 3, then 32 again."""
    runs = [CONFIG, replace(CONFIG, train=replace(CONFIG.train, micro_batch_size=1)), CONFIG]
    runs[1] = replace(runs[1], spare=replace(CONFIG.spare, microbatches_per_shard=3))
    for step, expected, config in zip((10, 13, 15), (320, 356, 420), runs, strict=True):
        config = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path) if step > 10 else ""))
        config = resolve_load(config, tmp_path, pytest.fail)
        assert sequences_before(config, step) == expected
        found = save(tmp_path, step, config=config)
        assert read_manifest(found).num_samples == expected
        again = resolve_load(resumed(config, tmp_path), tmp_path, pytest.fail)
        assert again.data.offset == config.data.offset, "that of the same batch"


def test_a_training_is_extended_by_more_steps() -> None:
    assert differences(terms_of(CONFIG), replace(CONFIG, train=replace(CONFIG.train, steps=999))) == []


def test_a_checkpoint_of_an_earlier_order_of_samples_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That order depended on the number of steps."""
    earlier = {key: value for key, value in terms_of(CONFIG).items() if key != "data.order"}
    earlier["train.steps"] = CONFIG.train.steps
    monkeypatch.setattr("spare_megatron.state.checkpoint.checkpoint_folder.terms_of", lambda _: earlier)
    save(tmp_path, 10)
    with pytest.raises(ValueError, match="is of another training:\n  - it was trained in order 1 of the samples, and"):
        resolve_load(load_config(tmp_path), tmp_path, pytest.fail)


def test_fields_of_megatron_that_make_another_model_are_terms_of_the_training() -> None:
    """With another activation function the parameters fit, and training went on with an untrained model."""
    silu = replace(CONFIG, megatron={"activation_func": "silu", "recompute_granularity": "selective"})
    (text,) = differences(terms_of(CONFIG), silu)
    assert text == (
        "model.activation = silu, and the checkpoint was trained with gelu; set it to that, or set "
        'checkpoint.allow_changes=["model.activation"] to go on with this one'
    )
    assert differences(terms_of(silu), CONFIG) != []
    assert differences(terms_of(silu), replace(CONFIG, megatron={"activation_func": "silu"})) == []
    assert differences(terms_of(CONFIG), replace(CONFIG, megatron={"normalization": "LayerNorm"})) == []
    earlier = {key: value for key, value in terms_of(CONFIG).items() if key != "[megatron]"}
    assert differences(earlier, silu) == [], "a checkpoint of an earlier version"


def test_the_optimizer_is_a_term_of_the_training() -> None:
    """The state of one has no place in the other."""
    muon = replace(CONFIG, optimizer=replace(CONFIG.optimizer, kind="muon"))
    text = "optimizer.kind = {}, and the checkpoint was trained with {}; set it to that"
    assert differences(terms_of(CONFIG), muon) == [text.format("muon", "adam")]
    assert differences(terms_of(muon), CONFIG) == [text.format("adam", "muon")]
    assert differences(terms_of(muon), muon) == []


def test_what_counts_for_the_loss_is_a_term_of_the_training_where_not_every_token_does() -> None:
    masked = replace(CONFIG, data=replace(CONFIG.data, eod_mask_loss=True, end_of_document=0))
    assert terms_of(masked).keys() - terms_of(CONFIG).keys() == {"data.eod_mask_loss", "data.end_of_document"}
    unused = replace(CONFIG, data=replace(CONFIG.data, end_of_document=0))
    assert terms_of(unused) == terms_of(CONFIG)
    allow = 'set it to that, or set checkpoint.allow_changes=["data.{}"] to go on with this one'
    assert [text.partition("; ")[::2] for text in differences(terms_of(CONFIG), masked)] == [
        ("data.eod_mask_loss = True, and the checkpoint was trained with False", allow.format("eod_mask_loss")),
        ("data.end_of_document = 0, and the checkpoint was trained with None", allow.format("end_of_document")),
    ]
    assert differences(terms_of(masked), CONFIG)[0].startswith(
        "data.eod_mask_loss = False, and the checkpoint was trained with True; set it to that"
    )
    other = replace(masked, data=replace(masked.data, end_of_document=1))
    assert differences(terms_of(masked), other) == [
        f"data.end_of_document = 1, and the checkpoint was trained with 0; {allow.format('end_of_document')}"
    ]
    assert differences(terms_of(masked), masked) == []


def reading(identity: str, config: RunConfig = CONFIG, *, is_allowed: bool = False) -> RunConfig:
    checkpoint = replace(config.checkpoint, allow_changes=("corpus",) if is_allowed else ())
    return replace(config, data=replace(config.data, corpus="OTHER", identity=identity), checkpoint=checkpoint)


def test_another_corpus_is_another_training_unless_that_is_allowed(tmp_path: Path) -> None:
    """Training went on with it silently."""
    theirs, other = "9f86d081, 300 tokens, tokenizer byte", "60303ae2, 300 tokens"
    save(tmp_path, 10, config=reading(theirs))
    with pytest.raises(ValueError, match="is of another training") as error:
        resolve_load(reading(other, load_config(tmp_path)), tmp_path, pytest.fail)
    assert (
        f"data.corpus = OTHER ({other}), and the checkpoint was trained with another corpus ({theirs}); choose that "
        f'one, or set checkpoint.allow_changes=["corpus"] to go on with this one'
    ) in str(error.value)
    with pytest.raises(ValueError, match="is of another training"):
        resolve_load(resumed(reading(other), tmp_path), tmp_path, pytest.fail)
    allowed = resolve_load(reading(other, load_config(tmp_path), is_allowed=True), tmp_path, pytest.fail)
    assert other_corpus(read_manifest(Path(allowed.checkpoint.load)).terms, allowed) == theirs
    for same in (theirs, "9f86d081, 300 tokens", ""):
        resolve_load(reading(same, load_config(tmp_path)), tmp_path, pytest.fail)


def test_a_checkpoint_of_an_earlier_version_does_not_say_of_which_corpus_it_is() -> None:
    earlier = {key: value for key, value in terms_of(CONFIG).items() if key != "data.identity"}
    assert differences(earlier, reading("9f86d081, 300 tokens")) == []


def test_a_restart_within_a_run_passes_over_checkpoints_of_another_training(tmp_path: Path) -> None:
    """What an earlier run had left in checkpoint.folder counted for one of this run."""
    from spare_megatron.rank.restart_loader import RestartLoader

    config = replace(reading("60303ae2, 300 tokens"), name="run")
    folder = tmp_path / "checkpoints"
    save(folder, 7, config=replace(config, train=replace(config.train, micro_batch_size=1)))
    save(folder, 5, config=reading("9f86d081, 300 tokens"))
    save(folder, 3, config=config)
    starting = RestartLoader(rank_context(config=config, run_dir=tmp_path), None)
    assert [offer.step for offer in starting.candidates()] == [3]
    place, reason = starting.rejected
    assert place.endswith("its steps have read 112 sequences, and those of this run 224")
    assert reason.startswith("step-00000005 is of another training: data.corpus = OTHER (60303ae2, 300 tokens)")


def test_a_restart_before_the_first_save_loads_what_the_run_began_with(tmp_path: Path) -> None:
    """It took another checkpoint of as many steps in checkpoint.folder, which may be one that was refused."""
    from spare_megatron.rank.restart_loader import RestartLoader

    begun_with, loaded = save(tmp_path / "mirror", 5), []
    mark_refused(save(tmp_path / "checkpoints", 5), "wrong state")
    ctx = rank_context(
        config=replace(load_config(begun_with), name="run"),
        run_dir=tmp_path,
        agreement=SimpleNamespace(is_leader=False),
        controller=SimpleNamespace(num_restarts=1, stages={}),
        send=lambda _: None,
        probe=MagicMock(),
        trainer=SimpleNamespace(load_checkpoint=lambda path, _: loaded.append(path)),
    )
    action = LoadCheckpoint(step=5, rework_steps=2)
    RestartLoader(ctx, None).restart(action, SimpleNamespace(check=lambda _: None))  # type: ignore[arg-type]
    assert loaded == [begun_with]


def test_a_restart_does_not_count_an_earlier_phase_in_batches_of_this_one(tmp_path: Path) -> None:
    """It said how many sequences steps before its first one would have read: a negative number."""
    from spare_megatron.rank.restart_loader import RestartLoader

    config = reading("60303ae2, 300 tokens")
    config = replace(config, name="run", model=replace(config.model, position_embedding="rope", seq_length=16))
    save(tmp_path / "checkpoints", 3, config=config)
    longer = replace(
        config,
        model=replace(config.model, seq_length=32),
        data=replace(config.data, phases=("16:500",), offset=-4000),
        checkpoint=replace(config.checkpoint, allow_changes=("model.seq_length",)),
    )
    starting = RestartLoader(rank_context(config=longer, run_dir=tmp_path), None)
    assert starting.candidates() == ()
    named = "step-00000003 is of another training: it is not of the phase that this run goes on with"
    assert starting.rejected == (named,)


def test_a_checkpoint_that_holds_all_steps_leaves_nothing_to_train(tmp_path: Path) -> None:
    save(tmp_path, CONFIG.train.steps)
    with pytest.raises(ValueError, match="nothing left to train"):
        resolve_load(load_config(tmp_path), tmp_path, pytest.fail)


def test_a_training_is_finished_when_a_whole_checkpoint_of_its_own_holds_all_steps(tmp_path: Path) -> None:
    num_steps = CONFIG.train.steps
    assert last_checkpoint(CONFIG, tmp_path / "none") is None
    save(tmp_path, num_steps - 1)
    assert last_checkpoint(CONFIG, tmp_path) is None
    last = save(tmp_path, num_steps)
    assert last_checkpoint(CONFIG, tmp_path) == last
    assert last_checkpoint(replace(CONFIG, train=replace(CONFIG.train, seed=7)), tmp_path) is None, "of another"
    cut_short(last / "0.distcp")
    assert last_checkpoint(CONFIG, tmp_path) is None, "the last step is to be trained again"


def test_later_checkpoints_in_the_folder_are_not_written_over(tmp_path: Path) -> None:
    first, _ = save(tmp_path, 5), save(tmp_path, 10)
    with pytest.raises(ValueError, match="holds checkpoints after 10 steps, and the run begins after 5"):
        resolve_load(load_config(first, interval_steps=5), tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="holds checkpoints after 10 steps, and the run begins after 0"):
        resolve_load(load_config("", interval_steps=5), tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="holds checkpoints after 10 steps"):
        resolve_load(load_config(""), tmp_path, pytest.fail)  # a request to end it would save there


def test_a_run_replaces_checkpoints_of_its_own_training_alone(tmp_path: Path) -> None:
    """One that began elsewhere after as many steps dropped those of another training as superseded."""
    first, other = save(tmp_path / "first", 10), tmp_path / "other"
    own = replace(CONFIG, metrics=replace(CONFIG.metrics, run_id="own"))
    save(other, 4, config=own)
    with pytest.raises(ValueError, match="holds step-00000004 of another training"):
        resolve_load(load_config(first), other, pytest.fail)
    assert resolve_load(load_config(first), first.parent, pytest.fail).checkpoint.load == str(first)
    continued = save(tmp_path / "second", 10, config=own)
    assert resolve_load(load_config(continued), other, pytest.fail).checkpoint.load == str(continued)
    (other / "step-00000004" / MANIFEST).write_text("damaged")
    assert resolve_load(load_config(first), other, pytest.fail).checkpoint.load == str(first)


def test_what_was_damaged_when_the_run_began_supersedes_nothing(tmp_path: Path) -> None:
    """The run began with step 10. Once it was past the damaged step 20, that counted as the newest right one."""
    for step in (10, 15, 20):
        save(tmp_path, step)
    controller: Any = SimpleNamespace(saved=frozenset({10, 15, 25}))
    config = load_config("", interval_steps=5, keep_last=1)
    saver = object.__new__(Saver)  # without a process group
    saver._ctx, saver._folder = rank_context(config=config, controller=controller), tmp_path
    saver._store = MemoryStore()  # type: ignore[assignment]
    action = SaveCheckpoint(step=25, member=MEMBERS[0], voters=MEMBERS, epoch=1, doubtful=(25,))
    job = SaveJob(action=action, head=0, folder=tmp_path)
    job.aside.mkdir()
    saver._publish(job, {}, ())
    assert (job.outcome, visible_steps(tmp_path)) == ("saved", [25, 20, 15])


def test_an_empty_place_where_the_folder_was_is_not_the_folder(tmp_path: Path) -> None:
    folder, away = tmp_path / "checkpoints", tmp_path / "away"
    with locked(folder):
        require_folder(folder)
        folder.rename(away)
        with pytest.raises(FileNotFoundError, match="put that back"):
            require_folder(folder)
        folder.mkdir()  # as a mount point is there without its storage
        with pytest.raises(FileNotFoundError, match="put that back"):
            require_folder(folder)
        folder.rmdir()
        away.rename(folder)
        require_folder(folder)
