"""Checkpoints of whole runs: never torn, gone on from, saved by ranks alone, and never used where state was wrong."""

import json
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spare_megatron.cli.train import unsaved_end
from spare_megatron.commands import app
from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import BlendedCorpus, DataConfig
from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.events import Event
from spare_megatron.driver.run import rank_main, start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import CheckpointRecord, FaultRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.machine.lock import Locked
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.reports import RanksReady, RunEvent
from spare_megatron.process.specs import RankMain, RankSpec
from spare_megatron.rank import assembly, rank, train_step
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.train_step import Components, read_entry
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint import saver
from spare_megatron.state.checkpoint.checkpoint_folder import aside_path, checkpoint_path, visible_steps
from spare_megatron.state.checkpoint.start_checkpoint import resumed
from spare_megatron.state.checkpoint.verification import newest_valid, refusal_of, verify
from spare_megatron.state.rank_context import RankContext
from spare_megatron.voting.agreement import Fenced
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    REPLICATED,
    Run,
    complete_run,
    entries_of,
    kill,
    losses_of,
    read_run,
    tiny_config,
)
from tests.unit.tiny_corpus import write_tiny_corpus

pytestmark = pytest.mark.timeout(120)

STAGES = LayoutConfig(num_groups=4, pipeline_parallel=2)
ONE_RANK = LayoutConfig(num_groups=4)
EVERY = 2


def config_of(
    corpus: Path,
    layout: LayoutConfig = ONE_RANK,
    *,
    steps: int = 6,
    faults: Sequence[FaultConfig] = (),
    **checkpoint: Any,
) -> RunConfig:
    """Checkpoints every two steps, each of which is on the disk before training goes on unless it says otherwise."""
    config = tiny_config(corpus, layout, steps=steps, mode="reproducible", hidden_dropout=0.1)
    settings = {"interval_steps": EVERY, "asynchronous": False, "keep_last": 9, **checkpoint}
    return replace(
        config,
        checkpoint=replace(config.checkpoint, **settings),
        faults=replace(config.faults, trace=tuple(faults)),
    )


def saves_of(journal: Journal) -> list[tuple[int, int, str]]:
    """Group, steps and outcome of every save that a group survived to report."""
    return sorted((record.step, record.group, record.outcome) for record in journal.of(CheckpointRecord))


def assert_proven(run: Run) -> None:
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary


def test_a_run_goes_on_from_its_checkpoint_bitwise(text_corpus: Path, tmp_path: Path) -> None:
    config = config_of(text_corpus, STAGES, asynchronous=True)
    whole = complete_run(config, tmp_path / "whole")
    assert_proven(whole)
    folder = tmp_path / "whole" / "checkpoints"
    # The groups take turns, so that none is still writing when it is asked again.
    assert saves_of(whole.journal) == [(2, 0, "saved"), (4, 1, "saved"), (6, 2, "saved")]
    assert visible_steps(folder) == [6, 4, 2]
    assert [name.name for name in folder.glob("*.tmp")] == []
    found = verify(checkpoint_path(folder, 4)).manifest
    assert (found.num_samples, found.group, found.epoch, found.log_head) == (4 * 8, 1, 0, 4)
    assert found.num_bytes == next(r.num_bytes for r in whole.journal.of(CheckpointRecord) if r.step == 4)

    [first] = whole.journal.of(RunRecord)
    assert first.corpus == found.terms["data.identity"] != ""

    resumed = complete_run(config_of(text_corpus, STAGES, load=str(checkpoint_path(folder, 2))), tmp_path / "resumed")
    assert_proven(resumed)
    assert resumed.summary.steps_committed == 4
    expected = {step: losses for step, losses in losses_of(whole.journal).items() if step >= 2}
    assert losses_of(resumed.journal) == expected
    assert resumed.summary.params_sha256 == whole.summary.params_sha256


def test_an_extended_training_is_bitwise_the_longer_one(text_corpus: Path, tmp_path: Path) -> None:
    """From 6 steps to 10 with a loss, over the end of epochs of both corpora of a blend: the order was another one."""
    text = [*text_corpus.with_suffix(".bin").read_bytes()[:2000]]
    blend = (BlendedCorpus(corpus=str(tmp_path / "a"), weight=2.0), BlendedCorpus(corpus=str(tmp_path / "b")))
    for part, tokens in zip(blend, (text[:1200], text[1200:]), strict=True):
        write_tiny_corpus(Path(part.corpus), [tokens])

    def trained(name: str, steps: int, faults: Sequence[FaultConfig] = (), load: str = "") -> Run:
        config = config_of(text_corpus, steps=steps, load=load, faults=faults)
        config = replace(config, data=DataConfig(blend=blend))
        optimizer = replace(config.optimizer, warmup_steps=2, decay_steps=8, decay_style="linear")
        return complete_run(replace(config, optimizer=optimizer), tmp_path / name)

    whole, first = trained("whole", 10), trained("first", 6)
    extended = trained("extended", 10, [kill(FaultPoint.BACKWARD, 7, 1)], load=str(tmp_path / "first"))
    for run in (whole, first, extended):
        assert_proven(run)
    assert losses_of(whole.journal) == losses_of(first.journal) | losses_of(extended.journal)
    assert extended.summary.params_sha256 == whole.summary.params_sha256
    assert extended.summary.groups_lost == 1
    [terms] = whole.journal.of(RunRecord)
    assert terms.order == 2
    assert re.fullmatch(r"0\.666\d* of \w{16}, 1200 tokens \+ 0\.333\d* of \w{16}, 800 tokens", terms.corpus)


def test_a_step_is_left_out_from_a_checkpoint_on_and_shown_with_its_text(text_corpus: Path, tmp_path: Path) -> None:
    """Steps have 8 samples. A later run reads in the place of those of step 3 what follows them."""

    def trained(name: str, *, steps: int = 6, skip: Sequence[str] = (), load: str = "", **settings: Any) -> Run:
        config = config_of(text_corpus, steps=steps, load=load, **settings)
        run = complete_run(replace(config, data=replace(config.data, skip=tuple(skip))), tmp_path / name)
        assert_proven(run)
        return run

    first = trained("first")
    shown = json.loads(
        CliRunner().invoke(app, ["data", str(tmp_path / "first"), "3", "--json", "--tokenizer", "byte"]).stdout
    )
    assert [sample["place"] for sample in shown["samples"]] == list(range(24, 32))
    assert shown["skip"] == ["24-31"]
    text = np.fromfile(text_corpus.with_suffix(".bin"), np.uint16).astype(np.uint8).tobytes().decode()
    whole_texts = [sample["text"] for sample in shown["samples"] if len(sample["documents"]) == 1]
    assert whole_texts
    assert all(one in text for one in whole_texts)
    load = str(checkpoint_path(tmp_path / "first" / "checkpoints", 2))
    faults = [kill(FaultPoint.BACKWARD, 4, 1)]
    skipping = trained("skipping", skip=shown["skip"], load=load, faults=faults)
    whole = trained("whole", skip=shown["skip"])
    before, after = losses_of(first.journal), losses_of(skipping.journal)
    assert losses_of(whole.journal) == {step: before[step] for step in (0, 1)} | after
    assert whole.summary.params_sha256 == skipping.summary.params_sha256 != first.summary.params_sha256
    assert skipping.summary.groups_lost == 1
    assert before[2] == after[2], "its samples come before those that are left out"
    assert before[3] != after[3]
    [terms] = skipping.journal.of(RunRecord)
    assert terms.skip == "24-31"
    late = config_of(text_corpus, load=str(checkpoint_path(tmp_path / "first" / "checkpoints", 4)))
    with pytest.raises(ValueError, match=r"data.skip = 24-31 leaves out other places below 31, the last"):
        start_run(replace(late, data=replace(late.data, skip=("24-31",))), tmp_path / "late", lambda event: None)
    for words, reason in (
        (["6"], "step 6: the run has the steps 0 to 5"),
        (["3", "--microbatch", "4.0"], "--microbatch 4.0: step 3 has 0.0 to"),
        (["3", "--tokenizer", "words"], "--tokenizer words is unknown"),
    ):
        refused = CliRunner().invoke(app, ["data", str(tmp_path / "first"), *words])
        assert refused.exit_code == 2
        assert reason in refused.stderr
    plain = (
        CliRunner().invoke(app, ["data", str(tmp_path / "skipping"), "3", "--microbatch", "0.1"]).stdout.splitlines()
    )
    assert plain[0].startswith("0.1  place ")
    assert plain[-1].startswith('to leave these out of a run that has not read them: --set \'data.skip=["24-31", "3')


def test_going_on_with_another_corpus_is_refused_and_on_purpose_recorded(text_corpus: Path, tmp_path: Path) -> None:
    """It was silent. The batch changes, too, and the run reads on behind what the checkpoint's steps have read."""
    other = tmp_path / "other"
    write_tiny_corpus(other, [[number % 256 for number in range(2000)]])
    pair = LayoutConfig(num_groups=2)
    first = complete_run(config_of(text_corpus, pair, steps=4), tmp_path / "first")
    load = str(checkpoint_path(tmp_path / "first" / "checkpoints", 2))
    with pytest.raises(ValueError, match=r"is of another training:\n  - data\.corpus = .*other \("):
        complete_run(config_of(other, pair, steps=4, load=load), tmp_path / "second")
    assert not (tmp_path / "second").exists()
    on_purpose = config_of(other, pair, steps=4, load=load, allow_changes=("corpus",))
    on_purpose = replace(on_purpose, train=replace(on_purpose.train, micro_batch_size=3))
    leases: list[int] = []

    def count_leases(event: RunEvent) -> None:
        if isinstance(event, RanksReady):
            leases.append(len(list((tmp_path / "cache").glob("*.lease-*"))))

    second = complete_run(on_purpose, tmp_path / "second", on_event=count_leases)
    assert_proven(second)
    assert {*leases} == {1}, "its sample index stays as long as it trains"
    assert list((tmp_path / "cache").glob("*.lease-*")) == []
    [before], [after] = (run.journal.of(RunRecord) for run in (first, second))
    assert (before.changes, after.changes) == ({}, {"corpus": [before.corpus, after.corpus]})
    assert (before.phases, after.phases) == ("", "32:8:other")
    saved = verify(checkpoint_path(tmp_path / "second" / "checkpoints", 4)).manifest
    assert saved.terms["data.identity"] == after.corpus != before.corpus
    before_it = verify(Path(load)).manifest.num_samples
    steps_of_it = 2 * after.num_groups * after.microbatches_per_shard * 3
    assert (saved.num_samples, after.offset) == (before_it + steps_of_it, before_it - steps_of_it)


@pytest.mark.parametrize(("what", "bit"), [("param", 10), ("moment", 3)])
def test_a_flip_in_the_last_checkpoint_is_found_and_another_group_saves_it_again(
    text_corpus: Path, tmp_path: Path, what: str, bit: int
) -> None:
    """No group trains after the last step, so that no sum would show it: the vote that ends the run does.

    The flip of the moment is too small to change a parameter, whose digits are of other sizes.
    """
    flip = FaultConfig(phase=FaultPoint.AFTER_COMMIT, step=1, group=0, rank=0, kind=f"{what}_flip", bit=bit)  # type: ignore[arg-type]
    run = complete_run(config_of(text_corpus, steps=2, interval_steps=9, faults=[flip]), tmp_path / "run")
    assert_proven(run)
    assert [record.kind for record in run.journal.of(FaultRecord)] == [f"{what}_flip"]
    fence, retry, finish = entries_of(run.journal)[-3:]
    assert (fence["group"], fence["discard"]) == (0, True)
    found = {"param": "parameters before step 2 differ from those", "moment": "state before step 2 differs from that"}
    assert fence["reason"].startswith(f"its {found[what]} of 3 groups")
    assert [entry["entry"] for entry in (retry, finish)] == ["retry", "finish"]
    newest, _ = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert (newest.manifest.step, newest.manifest.group) == (2, 2)
    assert unsaved_end(config_of(text_corpus, steps=2), tmp_path / "run", run.summary) == ""


def limited(num_bytes: int, spec: RankSpec, reports: Connection) -> None:
    """A rank's main function on a file system that takes no larger files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    rank_main(spec, reports)


def test_a_full_disk_costs_checkpoints_and_nothing_else(text_corpus: Path, tmp_path: Path) -> None:
    """The first tensors fit, and the file that they are in does not."""
    config = config_of(text_corpus, STAGES, steps=4)
    run = finished_with(config, tmp_path / "run", partial(limited, 100_000))
    records = run.journal.of(CheckpointRecord)
    assert [(record.step, record.outcome) for record in records] == [(2, "failed"), (4, "failed")]
    assert all("rank 1: OSError: [Errno 27] File too large" in record.reason for record in records)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["lock"]


def test_a_save_that_cannot_begin_leaves_the_checkpoints_before_it(text_corpus: Path, tmp_path: Path) -> None:
    """Something that is no folder, and cannot be removed as one, stands where group 1 wants to write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    aside_path(folder, 4, Member(GroupId(1))).write_text("in the way")
    run = complete_run(config_of(text_corpus, folder=str(folder)), tmp_path / "run")
    assert_proven(run)
    assert saves_of(run.journal) == [(2, 0, "saved"), (4, 1, "failed"), (6, 2, "saved")]
    [failed] = [record for record in run.journal.of(CheckpointRecord) if record.outcome == "failed"]
    assert "rank 0: FileExistsError" in failed.reason
    for step in (2, 6):
        verify(checkpoint_path(folder, step))


def test_only_the_newest_and_one_of_each_stretch_are_kept(text_corpus: Path, tmp_path: Path) -> None:
    config = config_of(text_corpus, steps=9, interval_steps=1, keep_last=2, keep_every_steps=4)
    assert_proven(complete_run(config, tmp_path / "run"))
    # When the last was begun no group had compared those after 8 and 9 steps in two further ones.
    assert visible_steps(tmp_path / "run" / "checkpoints") == [9, 8, 7, 6, 4, 1]


def test_a_second_job_on_the_directory_is_refused_and_names_the_first(text_corpus: Path, tmp_path: Path) -> None:
    errors: list[str] = []
    config = config_of(text_corpus, steps=2)

    def try_again(event: RunEvent) -> None:
        if isinstance(event, RanksReady) and not errors:
            with pytest.raises(Locked) as error:
                start_run(config, tmp_path / "run", lambda event: None)
            errors.append(str(error.value))

    assert_proven(complete_run(config, tmp_path / "run", on_event=try_again))
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()} on host" in errors[0]


def finished_with(config: RunConfig, run_dir: Path, main: RankMain) -> Run:
    """A run with another main function of its ranks, which has ended well."""
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=main)
    run = read_run(config, run_dir, events)
    assert_proven(run)
    return run


STEPS, LOST_IN = 4, 3
LAYOUT = LayoutConfig(num_groups=2)
TERMS = {"steps": STEPS, "mode": "reproducible", "hidden_dropout": 0.1}


@pytest.fixture(scope="module")
def whole(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return complete_run(tiny_config(text_corpus, LAYOUT, **TERMS), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("came_back", [False, True], ids=["all there from the start", "one came back"])
@pytest.mark.parametrize(
    ("lanes", "optimizer"),
    [(1, REPLICATED), (1, OptimizerConfig(sharding="stacked", redundancy=2)), (2, REPLICATED)],
    ids=["replicated", "stacked", "divided over lanes"],
)
def test_a_run_goes_on_bitwise_from_what_its_ranks_have_saved(
    text_corpus: Path, tmp_path: Path, whole: Run, lanes: int, optimizer: OptimizerConfig, came_back: bool
) -> None:
    """Checkpoints of fewer steps, which were saved before, are older."""
    fault = FaultConfig(phase=FaultPoint.BEFORE_REDUCE, step=LOST_IN, group=1, rank=0, kind="kill_store")
    layout = replace(LAYOUT, data_parallel=lanes)
    config = tiny_config(text_corpus, layout, **TERMS, optimizer=optimizer, rejoins=int(came_back))
    saving = replace(config.checkpoint, interval_steps=1, asynchronous=False, folder=str(tmp_path / "shared"))
    config = replace(config, checkpoint=saving)
    trace, watch = (fault,), None
    if came_back:
        trace = (kill(FaultPoint.FORWARD, 0, 1), fault)
        watch = Watch(awaited=frozenset({(LOST_IN - 2, Member(GroupId(1), 1))}))
    lost = complete_run(replace(config, faults=replace(config.faults, trace=trace)), tmp_path / "lost", watch)
    assert (lost.summary.outcome, lost.summary.groups_rejoined) == ("failed", int(came_back))
    path = tmp_path / "shared" / f"step-{LOST_IN:08d}.state"
    assert f"the state is in {path}" in lost.summary.outcome_reason

    run = complete_run(resumed(config, tmp_path / "shared"), tmp_path / "resumed")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    [record] = run.journal.of(RunRecord)
    assert record.first_step == LOST_IN
    assert losses_of(run.journal) == {step: losses_of(whole.journal)[step] for step in range(LOST_IN, STEPS)}
    if lanes == 1:  # otherwise it is of another number of ranks
        assert run.summary.params_sha256 == whole.summary.params_sha256


NUM_GROUPS = 4
WRONG_GROUP = GroupId(0)
PATIENCE_S = 60.0


def finished_with_wrong(
    main: Callable[[RankSpec, Connection], None], corpus: Path, run_dir: Path, *, steps: int
) -> Run:
    """A run that saves every two steps, first by the group whose state is wrong, and puts that group out."""
    config: RunConfig = tiny_config(corpus, LayoutConfig(num_groups=NUM_GROUPS), steps=steps)
    config = replace(
        config,
        train=replace(config.train, params_check_every_steps=0),
        checkpoint=replace(config.checkpoint, interval_steps=EVERY, keep_last=9),
    )
    events: list[RunEvent] = []
    start_run(config, run_dir, events.append, rank_main=main)
    run = read_run(config, run_dir, events)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    [fence] = [entry for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    assert (fence["group"], fence["discard"]) == (WRONG_GROUP, True)
    assert {record.group for record in run.journal.of(CheckpointRecord) if record.step == EVERY} <= {WRONG_GROUP}
    return run


# ----------------------------------------------------------------------------------------------- wrong moments


class _WrongMoments(GroupSaves):
    """Its first moment of one parameter changes before it is saved."""

    def save(self, action: SaveCheckpoint) -> None:
        if action.step == EVERY:
            assert action.member.group == WRONG_GROUP, "it is the first to save"
            adam = first_moments(self.ctx.trainer)
            adam["exp_avg"].view(-1)[0] += 0.01
        super().save(action)


def first_moments(trainer: GroupTrainer) -> dict[str, Any]:
    """What torch's Adam keeps of a parameter, the tensors themselves."""
    state = trainer._optimizer.state_dict()["megatron"]  # type: ignore[union-attr]
    each: dict[str, Any] = next(iter(state.get("optimizer", state)["state"].values()))
    return each


def with_wrong_moments(spec: RankSpec, reports: Connection) -> None:
    if spec.group == WRONG_GROUP:
        assembly.GroupSaves = _WrongMoments
    rank.run_rank(spec, reports)


def test_moments_that_are_wrong_when_they_are_saved_refuse_the_checkpoint(text_corpus: Path, tmp_path: Path) -> None:
    """The parameters are right when they are saved; the moments beside them are not, and compared, too."""
    run = finished_with_wrong(with_wrong_moments, text_corpus, tmp_path / "run", steps=3 * EVERY)
    [reason] = [entry["reason"] for entry in entries_of(run.journal) if entry["entry"] == "fence"]
    assert reason == f"its state before step {EVERY} differs from that of 3 groups"
    folder = tmp_path / "run" / "checkpoints"
    if EVERY in visible_steps(folder):  # else it was not written by then, and never is
        assert refusal_of(checkpoint_path(folder, EVERY)) == f"group 0: {reason}"
    assert not [record for record in run.journal.of(CheckpointRecord) if record.outcome == "failed"]
    found, _ = newest_valid(folder)
    assert found is not None
    assert found.manifest.step == 3 * EVERY


# ----------------------------------------------------------------------------------------------- written after that


class _WrongParameter(GroupSaves):
    """A parameter changes before it is saved."""

    def save(self, action: SaveCheckpoint) -> None:
        named = next(iter(self.ctx.trainer.parameters_named()))
        named.parameter.data.view(-1)[0] += 1.0
        super().save(action)


def _read_late(ctx: RankContext, parts: Components, index: int) -> Sequence[Event]:
    """Looks at the group's fence when the group has come to the end of its save."""
    try:
        return read_entry(ctx, parts, index)
    except Fenced:
        [(save, writing)] = parts.saves.saver._under_way
        wait([writing], PATIENCE_S)
        (ctx.spec.run_dir / "ended").write_text(f"{save.outcome}: {save.reason}")
        raise


def save_late(spec: RankSpec, reports: Connection) -> None:
    """The wrong group makes no folder for its save before all others have refused it.

    The next save, which would remove that folder as left behind, waits for the end of it.
    """
    refuse, prepare = saver.refuse, saver.Saver._prepare

    def on_refused(folder: Path, action: RefuseCheckpoint) -> None:
        refuse(folder, action)
        (spec.run_dir / f"refused-by-{spec.group}").touch()

    def prepare_late(*arguments: Any) -> None:
        pattern, number = ("refused-by-*", NUM_GROUPS - 1) if spec.group == WRONG_GROUP else ("ended", 1)
        end_s = time.monotonic() + PATIENCE_S
        while len(list(spec.run_dir.glob(pattern))) < number:
            assert time.monotonic() < end_s, f"there are not {number} of {pattern}"
            time.sleep(0.01)
        prepare(*arguments)

    saver.refuse = on_refused
    saver.Saver._prepare = prepare_late  # type: ignore[method-assign]
    if spec.group == WRONG_GROUP:
        assembly.GroupSaves = _WrongParameter  # type: ignore[misc]
        train_step.read_entry = _read_late
    rank.run_rank(spec, reports)


def test_a_fenced_group_does_not_publish_what_it_begins_to_write_afterwards(text_corpus: Path, tmp_path: Path) -> None:
    finished_with_wrong(save_late, text_corpus, tmp_path / "run", steps=2 * EVERY)
    assert (tmp_path / "run" / "ended").read_text() == (
        "failed: rank 0: what was to be saved does not count: "
        f"group 0: its parameters before step {EVERY} differ from those of 3 groups"
    )
    assert visible_steps(tmp_path / "run" / "checkpoints") == [2 * EVERY]
