"""What ranks have saved by themselves: when it is a checkpoint, and why not."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ParameterRule, RunConfig
from spare_megatron.config.training.terms import step_of
from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.core.log.entries import Commit, Restart, entry_fields
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EntryRecord
from spare_megatron.machine.lock import locked
from spare_megatron.rank import group_saves
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path, manifest_of
from spare_megatron.state.checkpoint.emergency_checkpoint import (
    SavedRank,
    describe,
    emergency_checkpoint_path,
    file_of,
    files_for,
    saved_state,
)
from spare_megatron.state.checkpoint.start_checkpoint import resolve_load, resumed
from spare_megatron.state.checkpoint.verification import newest_valid, verify
from tests.rank_context import rank_context
from tests.unit.journal_in_memory import run_record
from tests.unit.test_checkpoints import CONFIG, STACKED, flip_a_bit, load_config, save
from tests.unit.test_cli_commands import invoke

STEP, NUM_RANKS = 7, 2
MEMBER = Member(GroupId(0))
COMMITS = [Commit(step=step, attempt=step) for step in range(STEP)]
RUN = run_record(4, ranks_per_group=NUM_RANKS)


def write_journal(run_dir: Path, entries: Sequence[Commit | Restart]) -> Path:
    journal = JournalWriter(run_dir, "group-0000")
    journal.write(RUN)
    for index, entry in enumerate(entries):
        journal.write(EntryRecord(group=0, index=index, entry=entry_fields(entry)))
    journal.close()
    return run_dir


def save_rank(
    path: Path,
    run_dir: Path,
    group: int,
    rank: int,
    *,
    content: bytes = b"state",
    rest: str = "",
    partitions: Mapping[str, str] | None = None,
    config: RunConfig = CONFIG,
) -> None:
    """What the rank does when the store is gone, with partitions where the optimizer's state is stacked."""
    file = file_of(path, group, rank)
    file.write_bytes(content)
    member = Member(GroupId(group))
    action = SaveCheckpoint(step=step_of(path), member=member, voters=(member,), epoch=0)
    action = replace(action, hosts=((member,),) * 3 if partitions else ())
    sha256 = hashlib.sha256(content).hexdigest()
    describe(
        path,
        SavedRank(
            run_dir=str(run_dir),
            group=group,
            rank=rank,
            num_ranks=NUM_RANKS,
            num_bytes=len(content),
            sha256=sha256,
            params_sha256="equal" if rest else sha256,
            rest=rest,
            slices=partitions or {},
            manifest=asdict(manifest_of(config, action, STEP, {})),
        ),
    )


def saved(tmp_path: Path, *groups: int, entries: Sequence[Commit | Restart] = COMMITS, **what: Any) -> Path:
    """What these groups have saved in a folder with an earlier checkpoint."""
    folder = tmp_path / "checkpoints"
    save(folder, 5)
    run_dir = write_journal(tmp_path, entries)
    path = emergency_checkpoint_path(CONFIG.checkpoint, run_dir, STEP)
    for group in groups:
        for rank in range(NUM_RANKS):
            save_rank(path, run_dir, group, rank, **what)
    return path


def refused(path: Path) -> str:
    """Why the checkpoint before takes its place."""
    found, [rejected] = newest_valid(path.parent)
    assert found is not None
    assert found.manifest.step == 5
    assert rejected.path == path
    return rejected.reason


def test_what_all_ranks_of_a_group_have_saved_is_the_newest_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2)
    found, rejected = newest_valid(path.parent)
    assert found is not None
    assert (found.path, rejected) == (path, [])
    manifest = found.manifest
    assert (manifest.step, manifest.group, manifest.log_head) == (STEP, 1, STEP)
    assert sorted(manifest.files) == [f"group-0001-rank-{rank}.state" for rank in range(NUM_RANKS)]
    assert files_for(path, manifest.files, 1) == [path / "group-0001-rank-1.state"]
    config = resolve_load(resumed(CONFIG, path.parent), path.parent, pytest.fail)
    assert config.checkpoint.load == str(path)


def test_it_is_listed_verified_and_shown_as_other_checkpoints_are(tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    assert invoke("verify", tmp_path)[0] == 0
    assert f"{path}  {STEP} steps" in invoke("list", tmp_path)[1]
    assert "committed steps           7" in invoke("show", path)[1]


def test_ranks_that_are_missing_leave_none(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path / "group-0001-rank-1.json").unlink()
    assert refused(path) == "step-00000007.state: no group has saved the state of all of its ranks"


def test_what_such_ranks_leave_before_the_first_checkpoint_is_in_the_way_of_none(tmp_path: Path) -> None:
    """Each `--resume` of the run was refused, and a job that Slurm requeued ended for good."""
    path = saved(tmp_path, 1)
    (path / "group-0001-rank-1.json").unlink()
    shutil.rmtree(path.with_name("step-00000005"))
    assert resumed(CONFIG, path.parent) == CONFIG
    resolve_load(CONFIG, path.parent, pytest.fail)


def test_ranks_that_were_ended_while_they_saved_leave_what_is_no_damage(tmp_path: Path) -> None:
    """The checkpoint before is whole, and it was reported as damaged."""
    path = saved(tmp_path, 1)
    (path / "group-0001-rank-1.json").unlink()
    code, output = invoke("verify", tmp_path)
    whole, unfinished = output.splitlines()
    assert (code, whole) == (0, f"{path.with_name('step-00000005')}  whole")
    assert "no group has saved the state of all of its ranks: an unfinished save, which nothing uses" in unfinished
    assert unfinished.endswith(f"to remove it: rm -r {path}")
    assert invoke("verify", path)[0] == 2, "it is no checkpoint"


def test_files_may_differ_where_the_state_does_not(tmp_path: Path) -> None:
    """A group that came back lists its optimizer's state in another order."""
    path = saved(tmp_path, 0, 1, rest="of all")
    save_rank(path, tmp_path, 1, 1, content=b"other", rest="of all")
    found, rejected = newest_valid(path.parent)
    assert found is not None
    assert (found.path, rejected) == (path, [])
    save_rank(path, tmp_path, 1, 1, rest="of one")
    assert refused(path) == "step-00000007.state: groups [0, 1] have saved different optimizer state of rank 1"


def test_groups_that_have_saved_different_state_leave_none(tmp_path: Path) -> None:
    path = saved(tmp_path, 0, 1)
    save_rank(path, tmp_path, 1, 1, content=b"other")
    assert refused(path) == "step-00000007.state: groups [0, 1] have saved different optimizer state of rank 1"


@pytest.mark.parametrize(
    "entries", [COMMITS[:-1], [*COMMITS, Restart(step=4, members=())], []], ids=["not read", "undone", "nothing"]
)
def test_a_step_that_the_journal_does_not_prove_to_be_committed_leaves_none(
    tmp_path: Path, entries: Sequence[Commit | Restart]
) -> None:
    assert "does not prove that step 6 was committed" in refused(saved(tmp_path, 0, entries=entries))


def test_without_the_journal_nothing_is_proven(tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    (tmp_path / "journal").rename(tmp_path / "gone")
    assert "nothing proves that step 6 was committed" in refused(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    flip_a_bit(path / "group-0000-rank-1.state")
    assert "group-0000-rank-1.state does not fit its SHA-256" in refused(path)


def test_groups_that_together_have_every_partition_make_a_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, config=STACKED, partitions={"0": "a", "1": "b"})
    assert refused(path).endswith("no group has saved partitions [2] of the optimizer state")
    for rank in range(NUM_RANKS):
        save_rank(path, tmp_path, 2, rank, config=STACKED, partitions={"1": "b", "2": "c"})
    manifest = verify(path).manifest
    assert manifest.optimizer["writers"] == [1, 2]
    assert [file.name for file in files_for(path, manifest.files, 0)] == [
        f"group-{group:04d}-rank-0.state" for group in (1, 2)
    ]
    save_rank(path, tmp_path, 2, 1, config=STACKED, partitions={"1": "another", "2": "c"})
    assert refused(path).endswith("groups [1, 2] have saved different state of partition 1 of rank 1")


def test_state_that_lanes_divide_loads_only_into_the_same_strips(tmp_path: Path) -> None:
    """The size of a bucket decides which elements a rank has the state of; without lanes it decides nothing."""
    lanes = replace(CONFIG, layout=replace(CONFIG.layout, data_parallel=2))
    path = saved(tmp_path, 0, config=lanes)
    own = load_config(path)
    same = replace(own, layout=lanes.layout)
    assert resolve_load(same, tmp_path / "new", pytest.fail).checkpoint.load == str(path)
    other = replace(same, reduce=replace(same.reduce, bucket_mib=2.0))
    with pytest.raises(ValueError, match=r"reduce\.bucket_mib = 2\.0, and it was saved with 32"):
        resolve_load(other, tmp_path / "new", pytest.fail)
    with pytest.raises(ValueError, match=r"layout\.data_parallel = 1, and it was saved with 2"):
        resolve_load(replace(own, layout=replace(own.layout, data_parallel=1)), tmp_path / "new", pytest.fail)


def test_it_loads_only_as_it_was_saved(tmp_path: Path) -> None:
    path = saved(tmp_path, 0)
    other = load_config(path)
    other = replace(other, layout=replace(other.layout, pipeline_parallel=2))
    with pytest.raises(ValueError, match="is the state of single ranks") as error:
        resolve_load(other, tmp_path / "new", pytest.fail)
    assert "layout.pipeline_parallel = 2, and it was saved with 1" in str(error.value)
    own = load_config(path)
    allowed = replace(own.checkpoint, allow_changes=("model.precision",))
    other = replace(own, model=replace(own.model, precision="bf16"), checkpoint=allowed)
    with pytest.raises(ValueError, match=r"model\.precision = bf16, and it was saved with fp32"):
        resolve_load(other, tmp_path / "new", pytest.fail)
    rules = (ParameterRule(pattern="*.bias", learning_rate_factor=0.5),)
    grouped = load_config(path)
    grouped = replace(grouped, optimizer=replace(grouped.optimizer, rules=rules))
    with pytest.raises(ValueError, match=r"optimizer\.rules = \[.*\*\.bias.*\], and it was saved with \[\]"):
        resolve_load(grouped, tmp_path / "new", pytest.fail)
    fewer = load_config(path)
    fewer = replace(
        fewer,
        layout=replace(fewer.layout, num_groups=2),
        spare=replace(fewer.spare, microbatches_per_shard=2 * fewer.spare.microbatches_per_shard),
    )
    assert resolve_load(fewer, tmp_path / "new", pytest.fail).checkpoint.load == str(path)


@pytest.mark.parametrize("max_groups", [None, 4, 6])
def test_it_loads_with_room_for_any_number_of_further_groups(tmp_path: Path, max_groups: int | None) -> None:
    """Also with partitioned state, whose partitions are as many as the groups of the start."""
    path = saved(tmp_path, 0, 1, config=STACKED, partitions={"0": "a", "1": "b", "2": "c"})
    config = replace(STACKED, checkpoint=replace(STACKED.checkpoint, load=str(path)))
    grown = replace(config, layout=replace(config.layout, max_groups=max_groups))
    assert resolve_load(grown, tmp_path / "new", pytest.fail).checkpoint.load == str(path)


def test_it_is_written_to_the_folder_that_the_run_has_locked(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    config = load_config("", interval_steps=5, folder=str(folder))
    own = checkpoint_path(tmp_path / "run" / "checkpoints", STEP).with_suffix(".state")
    assert emergency_checkpoint_path(config.checkpoint, tmp_path / "run", STEP) == own, "its storage is gone"
    with locked(folder):
        assert emergency_checkpoint_path(config.checkpoint, tmp_path / "run", STEP) == folder / own.name


@pytest.mark.parametrize(
    ("run", "num_committed", "is_named"),
    [
        ("linked", 0, True),
        ("linked", STEP + 1, True),
        ("linked", STEP + 2, False),
        ("next", 0, False),
        ("next", 5, False),
    ],
)
def test_the_end_of_a_run_names_what_its_own_ranks_have_saved_at_last(
    tmp_path: Path, run: str, num_committed: int, *, is_named: bool
) -> None:
    """It named what an earlier run had left."""
    path = saved(tmp_path, 0)
    (tmp_path / "linked").symlink_to(tmp_path)
    save_rank(checkpoint_path(path.parent, STEP + 1).with_suffix(".state"), tmp_path / "earlier", 0, 0)
    config = load_config("", interval_steps=5, folder=str(path.parent))
    end = f"; the state is in {path}, for checkpoint.load or --resume" if is_named else ""
    assert saved_state(config.checkpoint, tmp_path / run, num_committed) == end


def test_all_parameters_of_a_rank_with_several_slabs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pipelines of several lengths are possible, stages are cut into slabs."""
    described: list[SavedRank] = []
    monkeypatch.setattr(group_saves, "describe", lambda _, saved: described.append(saved))
    for digests in ("ab", "ab", "ac"):
        trainer = SimpleNamespace(
            save_state=lambda _: (3, "of the file"),
            by_position=lambda of_slab: {4 + slab: of_slab(slab) for slab in range(2)},
            params_sha256=lambda slab=0, digests=digests: digests[slab],
        )
        ctx = rank_context(config=CONFIG, run_dir=tmp_path, trainer=trainer)
        ctx.spec.num_ranks = 1  # type: ignore[misc]
        ctx.optimizer_state = SimpleNamespace(digest_of_rest=lambda: None, digests_by_name=dict)  # type: ignore[assignment]
        group_saves.save_alone(ctx, SaveCheckpoint(step=STEP, epoch=0, member=MEMBER, voters=(MEMBER,)))
    assert [saved.params_sha256 for saved in described] == ["a b", "a b", "a c"]
