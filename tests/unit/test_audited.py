"""Up to which step a run is audited, which checkpoints are clean of lasting faults, which devices can be compared."""

import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch
from typer.testing import CliRunner

from spare_megatron.cli.resuming import go_back
from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import AuditConfig, ClusterConfig, LayoutConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_sections import CheckpointConfig, DataConfig
from spare_megatron.config.training.audits_and_evaluations import audit_policy
from spare_megatron.core.audits.clean_prefix import AuditedSteps
from spare_megatron.machine import gpus
from spare_megatron.machine.gpus import nvidia
from spare_megatron.machine.lock import locked
from spare_megatron.rank import bootstrap
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.state.checkpoint.audited_checkpoints import audited_steps_in, go_back_to_audited
from spare_megatron.state.checkpoint.checkpoint_folder import MANIFEST, all_checkpoints, digest_of
from spare_megatron.state.checkpoint.start_checkpoint import resolve_load
from spare_megatron.state.checkpoint.verification import mark_refused, read_manifest, refusal_of
from tests.memory_store import MemoryStore
from tests.unit.configured import configured
from tests.unit.test_checkpoints import CONFIG, cut_short, save

ALL = [GroupId(group) for group in range(4)]


def shared(*groups: int) -> list[tuple[GroupId, Microbatch]]:
    """These groups have computed one microbatch."""
    return [(GroupId(group), Microbatch(ShardId(0), min(groups))) for group in groups]


def test_the_group_that_was_audited_longest_ago_decides() -> None:
    audited = AuditedSteps(2)
    assert audited.num_steps == 2, "what a run begins with"
    audited.on_commit(2, shared(0, 1), ALL)
    assert audited.num_steps == 2
    audited.on_commit(5, shared(2, 3), ALL)
    assert audited.num_steps == 3
    audited.on_commit(6, [*shared(0, 1)], ALL)
    assert audited.num_steps == 6
    audited.on_commit(7, [*shared(0, 1), *shared(2, 3)], ALL)
    assert audited.num_steps == 8


def test_a_group_that_no_other_compares_is_not_audited() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(
        0, [*shared(0, 1), (ALL[2], Microbatch(ShardId(1), 0)), *shared(2, 3)], [GroupId(g) for g in (0, 2)]
    )
    assert audited.num_steps == 0, "both partners have been lost before the commit"


def test_what_a_wrong_group_has_computed_since_its_last_audit_spoils_all_later_states() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(0, [*shared(0, 1), *shared(2, 3)], ALL)
    audited.on_commit(1, [*shared(0, 1)], ALL)
    audited.on_wrong(GroupId(3))
    assert audited.spoiled_by == [3]
    left = ALL[:3]
    audited.on_commit(2, shared(0, 1, 2), left)
    assert audited.num_steps == 1
    audited.on_restart(2)
    audited.on_commit(2, shared(0, 1, 2, 3), ALL)
    assert audited.num_steps == 1, "that state has it, too"
    audited.on_restart(1)
    assert (audited.num_steps, audited.spoiled_by) == (1, [])
    audited.on_commit(1, shared(0, 1, 2, 3), ALL)
    assert audited.num_steps == 2


def test_a_group_that_was_audited_in_the_last_step_has_spoiled_nothing() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(0, shared(0, 1, 2, 3), ALL)
    audited.on_wrong(GroupId(3))
    assert audited.spoiled_by == []
    audited.on_commit(1, shared(0, 1, 2), ALL[:3])
    assert audited.num_steps == 2


def test_a_group_that_is_away_holds_nothing_up_until_it_is_back() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(0, shared(0, 1, 2, 3), ALL)
    audited.on_commit(5, shared(0, 1, 2), ALL[:3])
    assert audited.num_steps == 6
    audited.on_wrong(GroupId(3))
    assert audited.num_steps == 1, "it was wrong when it came back, perhaps since its audit in step 0"


@dataclass
class History:
    """Machines that break for good, of which only audits show it; the restarts choose states at random."""

    random: Random
    audited: AuditedSteps = field(default_factory=lambda: AuditedSteps(0))
    members: set[GroupId] = field(default_factory=lambda: set(ALL))
    away: set[GroupId] = field(default_factory=set)
    broken: set[GroupId] = field(default_factory=set)
    new: set[GroupId] = field(default_factory=set)
    wrong_in: list[set[GroupId]] = field(default_factory=list)
    """Of each committed step, the broken groups that have computed in it."""
    found: set[GroupId] = field(default_factory=set)
    known: set[tuple[int, GroupId]] = field(default_factory=set)
    """Committed steps with wrong numbers of a group that has been found since."""

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.03:
            self.broken.add(self.random.choice(ALL))
        elif draw < 0.15 and len(self.members) > 2:
            self._leave(self.random.choice(sorted(self.members)))
        elif draw < 0.3 and self.away:
            group = self.random.choice(sorted(self.away))
            self.away.remove(group)
            self.members.add(group)
            self.new.add(group)
        elif draw < 0.36:
            self._restart(self.random.choice([self.audited.num_steps, self.random.randint(0, len(self.wrong_in))]))
        self._commit(is_due=self.random.random() < 0.4)

    def _leave(self, group: GroupId) -> None:
        self.members.remove(group)
        self.new.discard(group)
        self.away.add(group)

    def _restart(self, step: int) -> None:
        self.audited.on_restart(step)
        del self.wrong_in[step:]
        self.known = {(index, group) for index, group in self.known if index < step}
        self.broken -= self.found  # mended
        self.members, self.away, self.new = set(ALL), set(), set(ALL)

    def _commit(self, *, is_due: bool) -> None:
        """All members audit if it is due, else the new ones; a wrong one is lost, and the step begins again."""
        while len(self.members) > 1:
            seen = self.members if is_due else self.new | set(sorted(self.members)[: 1 if self.new else 0])
            if wrong := sorted(seen & self.broken):
                self.found.add(wrong[0])
                self.known |= {(index, wrong[0]) for index, groups in enumerate(self.wrong_in) if wrong[0] in groups}
                self.audited.on_wrong(wrong[0])
                self._leave(wrong[0])
                continue
            computed = shared(*seen) if len(seen) > 1 else []
            self.audited.on_commit(len(self.wrong_in), computed, frozenset(self.members))
            self.wrong_in.append(self.members & self.broken)
            self.new.clear()
            return
        self._restart(0)

    def known_to_be_spoiled(self) -> set[GroupId]:
        return {group for _, group in self.known}

    def spoiled(self) -> set[GroupId]:
        """Groups with wrong numbers in states that count as audited, those left out that are lost unseen."""
        wrong = set().union(*self.wrong_in[: self.audited.num_steps])
        return wrong - self.away


def test_no_state_that_counts_as_audited_has_numbers_of_a_group_that_takes_part_and_is_broken() -> None:
    num_found, reached = 0, []
    for seed in range(100):
        history = History(Random(seed))
        for _ in range(150):
            history.step()
            assert history.spoiled() == set(), seed
            assert history.known_to_be_spoiled() <= set(history.audited.spoiled_by), seed
            assert history.audited.num_steps <= len(history.wrong_in)
        num_found += len(history.found)
        reached.append(history.audited.num_steps)
    assert num_found > 100
    assert sum(steps > 10 for steps in reached) > 50


def audited_in(folder: Path) -> int | None:
    return audited_steps_in(all_checkpoints(folder))


GOING_ON = replace(CONFIG, train=replace(CONFIG.train, steps=99))


def begun_with(folder: Path) -> str:
    """The checkpoint with which `--resume` begins a run that saves into the folder, too."""
    checkpoint = CheckpointConfig(load=str(folder), folder=str(folder), interval_steps=5)
    config = replace(GOING_ON, checkpoint=checkpoint)
    return Path(resolve_load(config, folder, lambda _: None).checkpoint.load).name


def test_a_checkpoint_of_an_earlier_version_says_nothing_and_can_be_read(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    content = json.loads((path / MANIFEST).read_text())
    del content["sha256"], content["audited_steps"]
    (path / MANIFEST).write_text(json.dumps({**content, "sha256": digest_of(content)}))
    assert read_manifest(path).audited_steps is None
    assert audited_in(tmp_path) is None
    with pytest.raises(ValueError, match=r"no checkpoint in .* says how many steps are audited"):
        go_back_to_audited(tmp_path, GOING_ON)


def test_the_newest_checkpoint_says_of_the_others_whether_they_are_audited(tmp_path: Path) -> None:
    for step, steps in ((5, 0), (10, 7), (15, 14), (20, 14)):
        save(tmp_path, step, audited_steps=steps)
    assert audited_in(tmp_path) == 14
    listed = json.loads(CliRunner().invoke(app, ["checkpoint", "list", str(tmp_path), "--json"]).output)
    assert [(one["step"], one["audited_steps"], one["is_audited"]) for one in listed] == [
        (20, 14, False),
        (15, 14, False),
        (10, 7, True),
        (5, 0, True),
    ]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    saved_there = replace(CONFIG, checkpoint=CheckpointConfig(folder=str(tmp_path), interval_steps=5))
    (run_dir / "config.toml").write_text(dump_run_config(saved_there))
    text = CliRunner().invoke(app, ["checkpoint", "list", str(run_dir)]).output
    assert "20 steps  4 kB  of steps that are not audited (14 were at its save)" in text
    assert "10 steps  4 kB  of steps that are audited (7 were at its save)" in text


def test_a_training_goes_back_to_the_newest_audited_checkpoint_and_stays_there(tmp_path: Path) -> None:
    """The second start loads the same checkpoint, though that was saved before anything had shown it to be clean."""
    for step, steps in ((5, 0), (10, 7), (15, 14), (20, 14)):
        save(tmp_path, step, audited_steps=steps)
    assert begun_with(tmp_path) == "step-00000020"
    for refused in (["step-00000020", "step-00000015"], []):
        found = go_back_to_audited(tmp_path, GOING_ON)
        assert found is not None
        path, _, later = found
        assert (path.name, [one.name for one in later]) == ("step-00000010", refused)
        assert begun_with(tmp_path) == "step-00000010"
    assert "it is later: the first 14 steps are audited" in refusal_of(tmp_path / "step-00000015")
    save(tmp_path, 15, audited_steps=11)
    assert audited_in(tmp_path) == 11, "the run that went back takes what it began with for audited"
    assert begun_with(tmp_path) == "step-00000015"


def test_checkpoints_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    for step, steps in ((5, 0), (10, 7), (15, 14), (20, 14), (25, 14)):
        save(tmp_path, step, audited_steps=steps)
    cut_short(tmp_path / "step-00000010" / "0.distcp")
    mark_refused(tmp_path / "step-00000025", "wrong state")
    found = go_back_to_audited(tmp_path, GOING_ON)
    assert found is not None
    path, _, later = found
    assert (path.name, len(later)) == ("step-00000005", 2)


def test_a_folder_without_an_audited_checkpoint_is_refused_and_an_empty_one_is_none(tmp_path: Path) -> None:
    assert go_back_to_audited(tmp_path, GOING_ON) is None
    save(tmp_path, 10, audited_steps=7)
    with pytest.raises(ValueError, match=r"the first 7 steps are audited, and no valid checkpoint in .* is of so few"):
        go_back_to_audited(tmp_path, GOING_ON)
    assert refusal_of(tmp_path / "step-00000010") == ""
    save(tmp_path, 5, audited_steps=5)
    with pytest.raises(ValueError, match="is of another training"):  # the folder of another one: all of it stays
        go_back_to_audited(tmp_path, replace(GOING_ON, train=replace(GOING_ON.train, seed=9)))
    assert refusal_of(tmp_path / "step-00000010") == ""
    with locked(tmp_path), pytest.raises(ValueError, match="is in use by"):
        go_back_to_audited(tmp_path, GOING_ON)


@pytest.mark.parametrize(("folder", "resume"), [("", True), ("somewhere", False)])
def test_going_back_needs_the_folder_of_the_training(folder: str, resume: bool) -> None:
    config = replace(CONFIG, checkpoint=CheckpointConfig(folder=folder))
    with pytest.raises(ValueError, match="it needs --resume, and that setting"):
        go_back(config, is_resumed=resume)


def test_going_back_says_what_is_loaded_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(GOING_ON, checkpoint=CheckpointConfig(folder=str(tmp_path)))
    go_back(config, is_resumed=True)
    for step in (5, 10):
        save(tmp_path, step, audited_steps=5)
    go_back(config, is_resumed=True)
    text = capsys.readouterr().err
    assert f"the first 5 steps are audited, {tmp_path}/step-00000005 is the newest checkpoint of at most so" in text
    assert text.endswith("later ones, refused from now on: step-00000010\n")


ON_GPUS = RunConfig(
    data=DataConfig(corpus="none"),
    layout=LayoutConfig(num_groups=3),
    spare=SpareConfig(redundancy=3),
    reduce=ReduceConfig(mode="reproducible"),
    cluster=ClusterConfig(device="gpu"),
)


def test_a_group_on_another_processor_than_the_first_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    store, device = MemoryStore({}), torch.device("cpu")
    monkeypatch.setattr(bootstrap, "processor", lambda: "EPYC")
    for group in range(2):
        bootstrap.check_same_device(device, GroupId(group), store)
    monkeypatch.setattr(bootstrap, "processor", lambda: "Xeon")
    with pytest.raises(ValueError, match=r"group 2 has Xeon, the first group EPYC; .*audit.every_steps=0"):
        bootstrap.check_same_device(device, GroupId(2), store)


def test_audits_are_off_by_default_where_sums_inside_groups_may_be_added_in_another_order() -> None:
    two, four = (replace(ON_GPUS, layout=replace(ON_GPUS.layout, tensor_parallel=number)) for number in (2, 4))
    assert audit_policy(two) is not None
    assert audit_policy(four) is None
    assert audit_policy(replace(four, audit=AuditConfig(every_steps=5))) is not None
    assert audit_policy(replace(four, cluster=ClusterConfig(device="cpu"))) is not None


def test_audits_that_an_interleaved_schedule_pads_to_rounds_cost_a_percent_by_default() -> None:
    words = ("layout.pipeline_parallel=4", "layout.virtual_pipeline=2", "spare.microbatches_per_shard=16")
    policy = audit_policy(configured("cluster.device=cpu", *words))
    assert policy is not None
    more = policy.rounds.num_rounds(17) - policy.rounds.num_rounds(16)
    assert more / (16 * policy.every_steps) == 0.01


def test_clocks_are_read_beside_the_caller_and_only_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def read(_shown: gpus.Shown) -> tuple[str, ...]:
        asked.release()
        may_answer.wait(30.0)
        return ("power cap",)

    monkeypatch.setattr(nvidia, "reduced_clocks", read)
    clocks = gpus.ClockReader()
    assert (clocks(), clocks()) == ((), ())
    assert asked.acquire(timeout=30.0)
    assert not asked.acquire(blocking=False), "the library has not answered yet"
    may_answer.set()
    assert clocks._thread is not None
    clocks._thread.join(30.0)
    assert clocks() == ("power cap",)
