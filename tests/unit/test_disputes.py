"""What a journal says about microbatches that groups have computed differently, and what `spare replay` makes of it."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.check import way_back
from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.core.audits.audits import AuditPolicy, Boundary, combined_digest
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart, Retry, entry_fields
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.journal.files import Journal, Line, encode_line
from spare_megatron.journal.fold import fold_log
from spare_megatron.journal.proofs.audit_history import (
    DisputedStep,
    Place,
    Spoiled,
    Stated,
    audit_history,
    disputed_step,
    find_spoiled,
    text_of_spoiled,
)
from spare_megatron.journal.records import AuditRecord, DisputeRecord, EntryRecord, ParamsRecord, Record
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.machine.gpus import Gpu
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.tools.replay.replay import MicrobatchReplay, Replay, ReplayMachine, compared_group
from spare_megatron.tools.replay.replay_command import lines_of
from tests.unit.journal_in_memory import JournalInMemory, run_record
from tests.unit.test_checkpoints import cut_short, save

RUN = run_record(3, audit_every_steps=1)

RIGHT, WRONG, OTHER = "0" * 15 + "1", "0" * 15 + "2", "0" * 15 + "3"


def audit(group: int, attempt: int, digest: str, *boundaries: tuple[Any, ...], step: int = 2) -> AuditRecord:
    """A group has computed microbatch 1 of shard 0, and one that no other group has computed."""
    return AuditRecord(
        group=group,
        step=step,
        attempt=attempt,
        digests=[[0, 1, digest], [1 + group, 0, RIGHT]],
        num_added=2,
        boundaries=[[0, 1, *one] for one in boundaries],
    )


def entries(*of: dict[str, Any]) -> list[Record]:
    return [EntryRecord(group=0, index=index, entry=entry) for index, entry in enumerate(of)]


def commit(step: int, attempt: int) -> dict[str, Any]:
    return {"entry": "commit", "step": step, "attempt": attempt}


def retry(step: int, attempt: int, *, is_disputed: bool = True) -> dict[str, Any]:
    disputes = [{"microbatch": [0, 1], "statements": [[0, 1, []], [1, 2, []]], "asked": [2]}]
    entry: dict[str, Any] = {"entry": "retry", "step": step, "attempt": attempt}
    return {**entry, "disputes": disputes} if is_disputed else {**entry, "recompute": True}


def journal_of(*records: Record) -> JournalInMemory:
    lines = [Line(source="test", at_s=float(number), record=record) for number, record in enumerate((RUN, *records))]
    return JournalInMemory(Journal(lines=lines, damage=[]))


def found_in(view: JournalInMemory, step: int = 2) -> DisputedStep | None:
    return disputed_step(view, fold_log(view.entries, RUN), step)


FENCE = {"entry": "fence", "group": 1, "incarnation": 0, "discard": True, "is_outvoted": True, "reason": "audit"}
LOG = [commit(0, 0), commit(1, 1), retry(2, 2), FENCE, retry(2, 3, is_disputed=False), commit(2, 4)]


def test_all_that_groups_have_stated_about_a_microbatch_in_dispute_is_found_with_what_it_is_made_of() -> None:
    view = journal_of(
        *entries(*LOG),
        audit(0, 2, RIGHT),
        audit(1, 2, WRONG),
        audit(0, 3, RIGHT, ("forward", 0, 0, OTHER)),
        audit(1, 3, WRONG, ("forward", 0, 0, WRONG)),
        audit(2, 3, RIGHT),
        audit(0, 4, OTHER, step=3),
        DisputeRecord(group=2, step=2, attempt=3, outcome="saved"),
        ParamsRecord(group=0, step=2, digest="aa"),
        ParamsRecord(group=1, step=2, digest="bb"),
        ParamsRecord(group=1, step=1, digest="cc"),
    )
    found = found_in(view)
    assert found is not None
    at = Place("forward", 0, 0)
    assert found.stated == {
        (0, 1): {
            0: [Stated(digest=RIGHT, boundaries={at: OTHER})],
            1: [Stated(digest=WRONG, boundaries={at: WRONG})],
            2: [Stated(digest=RIGHT, boundaries={})],
        }
    }
    assert found.params == {0: "aa", 1: "bb"}
    assert found.saved is not None
    assert found.saved.group == 2
    assert found_in(view, 1) is None


def test_a_step_that_is_computed_again_after_a_restart_has_the_disputes_of_its_saved_parameters() -> None:
    restart = {"entry": "restart", "step": 2, "members": [[0, 1], [1, 1], [2, 1]]}
    log = [*LOG, restart, retry(2, 6), commit(2, 7)]
    records = [
        *entries(*log),
        audit(0, 3, RIGHT),
        audit(1, 3, WRONG),
        audit(2, 6, OTHER),
        audit(1, 6, RIGHT),
        DisputeRecord(group=2, step=2, attempt=3, outcome="saved"),
        DisputeRecord(group=0, step=2, attempt=7, outcome="failed", reason="disk full"),
        ParamsRecord(group=0, step=2, digest="aa"),
        ParamsRecord(group=2, step=2, digest="bb", num_restarts=1),
    ]
    view = journal_of(*records)
    assert _digests_in(found_in(view)) == {0: [RIGHT], 1: [WRONG]}, "those parameters are there"
    view = journal_of(*records, DisputeRecord(group=0, step=2, attempt=7, outcome="saved"))
    assert _digests_in(found_in(view)) == {2: [OTHER], 1: [RIGHT]}
    found = found_in(view)
    assert found is not None
    assert found.params == {2: "bb"}


def _digests_in(found: DisputedStep | None) -> dict[int, list[str]]:
    assert found is not None
    return {group: [one.digest for one in reported] for group, reported in found.stated[0, 1].items()}


def test_audited_steps_of_the_journal_are_those_of_the_controller() -> None:
    """The group that was fenced for wrong numbers was last compared in step 0."""
    shared = [audit(group, 0, RIGHT, step=0) for group in range(3)]
    later = [audit(group, 1, RIGHT, step=1) for group in (0, 2)]
    last = [audit(group, 4, RIGHT) for group in (0, 2)]
    view = journal_of(*entries(*LOG[:2]), *shared, *later)
    assert audit_history(view, RUN, fold_log(view.entries, RUN)).audited_steps == 1
    view = journal_of(*entries(*LOG), *shared, *later, *last)
    history = audit_history(view, RUN, fold_log(view.entries, RUN))
    assert (history.audited_steps, history.compared, history.steps) == (1, 3, 3)
    assert history.spoiled == Spoiled(audited_steps=1, num_steps=3, groups=[1])
    assert history.spoiled == find_spoiled(view, RUN, fold_log(view.entries, RUN))
    assert text_of_spoiled(history.spoiled) == (
        "the first of 3 steps is audited; what group 1 computed since is in the parameters"
    )
    restart = {"entry": "restart", "step": 1, "members": [[0, 1], [1, 1], [2, 1]]}
    again = [audit(group, 6, RIGHT, step=1) for group in range(3)]
    view = journal_of(
        *entries({**LOG[0], "save": True}, *LOG[1:], restart, commit(1, 6)), *shared, *later, *last, *again
    )
    history = audit_history(view, RUN, fold_log(view.entries, RUN))
    assert (history.audited_steps, history.spoiled) == (2, None), "what it has computed since is undone"


def drawn_history(random: Random) -> list[Record]:
    """Steps of three groups that audit each other at times, wrong groups among them, and restarts."""
    log: list[dict[str, Any]] = []
    audits: list[Record] = []
    step, members = 0, {0, 1, 2}
    for attempt in range(random.randint(1, 12)):
        audits += [audit(group, attempt, RIGHT, step=step) for group in sorted(members) if random.random() < 0.6]
        if random.random() < 0.2 and len(members) > 1:
            group = random.choice(sorted(members))
            log += [{**FENCE, "group": group}, retry(step, attempt, is_disputed=False)]
            members.discard(group)
        elif random.random() < 0.15:
            step, members, reopened = random.randint(0, step), {0, 1, 2}, attempt
            log.append({"entry": "restart", "step": step, "members": [[group, reopened] for group in range(3)]})
        else:
            log.append(commit(step, attempt))
            step += 1
    return [*entries(*log), *audits]


def test_what_is_spoiled_is_known_while_a_journal_grows_as_from_the_whole() -> None:
    """In drawn histories; lines of one group are read at other times than those of others."""
    random, num_spoiled = Random(5), 0
    for _ in range(1000):
        records = drawn_history(random)
        view = journal_of(*records)
        expected = find_spoiled(view, RUN, fold_log(view.entries, RUN))
        run_state = RunState()
        run_state.add_line(Line(source="test", at_s=0.0, record=RUN))
        for record in random.sample(records, len(records)):
            run_state.add_line(Line(source="test", at_s=1.0, record=record))
        run_state.settle(is_whole=True)
        assert run_state.spoiled == expected, records
        num_spoiled += expected is not None
    assert num_spoiled > 100


@pytest.mark.parametrize(
    ("folder", "saved", "audited", "expected"),
    [
        ("", (2, 5), 3, "--set checkpoint.load={folder}/step-00000002"),
        ("", (5,), 3, "no checkpoint is of so few steps: only a training from the beginning is without it"),
        ("mine", (2, 5), 1, "--set checkpoint.load={folder}/step-00000002 --set checkpoint.folder=ANOTHER"),
        ("mine", (2, 5), 3, "--resume --restart-from audited"),
    ],
)
def test_the_way_back_is_one_that_the_next_run_takes(
    tmp_path: Path, folder: str, saved: tuple[int, ...], audited: int, expected: str
) -> None:
    """It was `--resume --restart-from audited`, which a run without checkpoint.folder refuses."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    checkpoints = tmp_path / folder if folder else run_dir / "checkpoints"
    config = RunConfig(checkpoint=CheckpointConfig(folder=str(checkpoints) if folder else ""))
    (run_dir / "config.toml").write_text(dump_run_config(config))
    for step in saved:
        save(checkpoints, step, audited_steps=audited)
    back = way_back(Spoiled(audited_steps=4, num_steps=9, groups=[1]), run_dir)
    assert back.removeprefix("to go back: spare train ... ") == expected.format(folder=checkpoints)


def test_a_replay_says_which_groups_differ_and_where_first() -> None:
    right = [Boundary(kind, stage, stage, 5) for kind in ("forward", "backward", "gradients") for stage in (0, 1)]
    wrong = [one._replace(digest=6) if (one.kind, one.stage) == ("forward", 1) else one for one in right]

    def stated(boundaries: list[Boundary], *, is_shown: bool = True) -> Stated:
        shown = {Place(one.kind, one.stage, one.position): f"{one.digest:016x}" for one in boundaries if is_shown}
        return Stated(digest=f"{combined_digest(boundaries):016x}", boundaries=shown)

    digest = f"{combined_digest(right):016x}"
    agreeing = compared_group(0, [stated(right)], digest, right)
    differing = compared_group(1, [stated(wrong)], digest, right)
    inconsistent = compared_group(2, [stated(right), stated(wrong)], digest, right)
    silent = compared_group(3, [stated(wrong, is_shown=False)], digest, right)
    assert [one.agrees for one in (agreeing, differing, inconsistent, silent)] == [True, False, False, False]
    assert [one.differs_at for one in (agreeing, differing, inconsistent, silent)] == [
        "",
        "stage 1, forward pass, rank 1",
        "stage 1, forward pass, rank 1",
        "",
    ]
    microbatch = MicrobatchReplay(
        shard=0,
        index=1,
        number=1,
        samples=["sequence 1"],
        digest=digest,
        boundaries=[(one.kind, one.stage, one.position, f"{one.digest:016x}") for one in right],
        groups=[agreeing, differing, inconsistent, silent],
    )
    here = [ReplayMachine(node=0, host="one")]
    found = Replay(
        step=2,
        path="p",
        device="cpu",
        group=None,
        machines=here,
        params={0: "aa", 1: "bb"},
        microbatches=[microbatch],
    )
    assert found.is_confirmed
    text = list(lines_of(found))
    assert text[0] == "step 2, with the parameters of p, computed on cpu by this machine (one)"
    there = replace(found, group=2, machines=[ReplayMachine(node=4, host="four"), ReplayMachine(node=5, host="five")])
    assert next(lines_of(there)).endswith("computed on cpu by group 2: node 4 (four), node 5 (five)")
    assert text[1] == "parameters before the step: aa in groups 0; bb in groups 1 (they differ)"
    assert "  group 0 agrees" in text
    [reported] = [row for row in text if row.startswith("  group 2")]
    assert reported.startswith("  group 2 contradicts itself")
    rows = [row.split() for row in text if row.startswith(("  output of stage 0", "  output of stage 1"))]
    assert [row[6:] for row in rows] == [
        ["0" * 15 + "5", "=", "=", "=", "unknown"],
        ["0" * 15 + "5", "=", "0" * 15 + "6", "0" * 15 + "6", "unknown"],
    ]


@pytest.mark.parametrize(
    ("records", "arguments", "message"),
    [
        (
            (),
            ["--step", "1"],
            "--step=1: the run has no mismatch in this step; the run has saved the parameters of no step",
        ),
        (("saved",), ["--step", "1"], "choose one whose parameters were saved: 2"),
        (
            (),
            ["--step", "2", "--microbatch", "0.1.2"],
            "--microbatch=0.1.2 is not of the form SHARD.INDEX",
        ),
        ((), ["--step", "2", "--microbatch", "1.0"], "--microbatch=1.0 is not in dispute in step 2; choose one of 0.1"),
        ((), ["--step", "2"], "the run ended, or the group that was to save them, before they were saved"),
        (("saved",), ["--step", "2"], "the run keeps those of the newest 3 steps with disputes"),
        (("failed",), ["--step", "2"], "their save failed: OSError: [Errno 28] No space left on device"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    tmp_path: Path, records: tuple[str, ...], arguments: list[str], message: str
) -> None:
    reason = "OSError: [Errno 28] No space left on device" if "failed" in records else ""
    saves = [DisputeRecord(group=2, step=2, attempt=3, outcome=one, reason=reason) for one in records]  # type: ignore[arg-type]
    write_run(tmp_path, *saves)
    refused = CliRunner().invoke(app, ["replay", str(tmp_path), *arguments])
    assert refused.exit_code == 2
    assert message in refused.output


def write_run(run_dir: Path, *saves: DisputeRecord) -> None:
    reported = [RUN, *entries(*LOG), audit(0, 3, RIGHT), audit(1, 3, WRONG), *saves]
    (run_dir / "journal").mkdir()
    text = "".join(f"{encode_line(Line(source='driver', at_s=0.0, record=one))}\n" for one in reported)
    (run_dir / "journal" / "driver.jsonl").write_text(text)


def test_parameters_that_are_damaged_and_devices_that_are_not_here_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, DisputeRecord(group=2, step=2, attempt=3, outcome="saved"))
    saved = save(tmp_path / "disputes", 2)

    def refusal() -> str:
        refused = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "2"])
        assert refused.exit_code == 2
        return refused.output

    assert f"{tmp_path} is no run's directory" in refusal()
    config = RunConfig(cluster=ClusterConfig(device="gpu"), layout=LayoutConfig(pipeline_parallel=4))
    (tmp_path / "config.toml").write_text(dump_run_config(config))
    gpu = Gpu(uuid="GPU-a", name="H100", memory_bytes=1, free_bytes=1)
    monkeypatch.setattr("spare_megatron.tools.replay.replay_ranks.visible_gpus", lambda: (gpu, gpu))
    assert "CPUs give other bits: a group needs 4, and this machine shows 2; use a machine of the run" in refusal()
    cut_short(saved / "0.distcp")
    assert "its parameters in" in refusal()
    assert "step-00000002: 0.distcp has 1999 bytes, and 2000 were written" in refusal()


def test_a_list_of_audits_says_of_which_steps_the_parameters_are_saved(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        DisputeRecord(group=2, step=2, attempt=3, outcome="saved"),
        DisputeRecord(group=2, step=9, attempt=12, outcome="failed", reason="disk full"),
    )
    text = CliRunner().invoke(app, ["audit", str(tmp_path)]).output
    assert f"step 2: its parameters are saved; spare replay {tmp_path} --step 2 computes it again" in text
    assert "step 9: its parameters are not saved: disk full" in text


@pytest.mark.parametrize("seed", range(6))
def test_journal_and_controller_agree_on_the_steps_that_are_audited(seed: int) -> None:
    """Through losses, verdicts, returns and restarts, with a journal written as the groups write it."""
    random, num_groups = Random(seed), 4
    setup = ControllerSetup(
        placement=make_placement("golomb", num_groups, num_groups),
        microbatches_per_shard=2,
        num_steps=60,
        audits=AuditPolicy(every_steps=3, seed=seed),
    )
    run = run_record(num_groups, microbatches_per_shard=2, num_steps=60, audit_every_steps=3)
    controller, log, records = Controller(setup), [], []
    controller.handle(RunStarted(), now_s=0.0)
    incarnations = dict.fromkeys(range(num_groups), 0)

    def fold(entry: Entry) -> None:
        log.append(EntryRecord(group=0, index=len(log), entry=json.loads(json.dumps(entry_fields(entry)))))
        controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)

    seen = set()
    while controller.step < 40 and len(log) < 120:
        away = sorted(set(range(num_groups)) - set(controller.members))
        if random.random() < 0.15 and len(controller.members) > 2:
            lost, is_wrong = random.choice(controller.members), random.random() < 0.3
            fold(Fence(group=lost, incarnation=incarnations[lost], discard=is_wrong))
            fold(Retry(step=controller.step, attempt=controller.attempt, recompute=is_wrong))
        elif random.random() < 0.08:
            members = tuple(Member(GroupId(group), number + 1) for group, number in incarnations.items())
            incarnations = {member.group: member.incarnation for member in members}
            step = random.choice([controller.audited_steps or 0, random.randint(0, controller.step)])
            fold(Restart(step=step, members=members))
        audits = controller._plans[0].audits
        for group, microbatch in [(group, one.microbatch) for one in audits for group in (one.auditor, one.owner)]:
            digests = [[int(microbatch.shard), microbatch.index, RIGHT]]
            if group in controller.members:
                found = {"step": controller.step, "attempt": controller.attempt, "digests": digests, "num_added": 2}
                records.append(AuditRecord(group=group, **found))
        admit = ()
        if away and random.random() < 0.5:
            incarnations[away[0]] += 1
            admit = (Member(GroupId(away[0]), incarnations[away[0]]),)
        fold(Commit(step=controller.step, attempt=controller.attempt, save=True, admit=admit))
        if len(log) % 4:
            continue
        lines = [Line(source="test", at_s=0.0, record=one) for one in (run, *log, *records)]
        view = JournalInMemory(Journal(lines=lines, damage=[]))
        history = audit_history(view, run, fold_log(view.entries, run))
        assert history.audited_steps == controller.audited_steps
        seen.add(controller.audited_steps)
    assert len(seen) > 2
