"""A real run's journal proves the run; the same journal doctored does not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import LayoutConfig
from spare_megatron.journal.files import Line, encode_line, read_journal
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.proofs.proof import check
from spare_megatron.journal.records import RestartRecord
from spare_megatron.journal.run_record import digest_of_terms
from tests.integration.whole_run import Run, assert_masked, complete_run, kill, tiny_config
from tests.unit.journal_in_memory import check_journal

pytestmark = pytest.mark.timeout(120)

Lines = list[dict[str, Any]]
STEP = 2
"""A step after the loss, which all doctoring is about."""


@pytest.fixture(scope="module")
def run(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four groups, two hosts a shard, and group 1 lost in step 1."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), faults=[kill("backward", 1, 1)], redundancy=2)
    run = complete_run(config, tmp_path_factory.mktemp("journal") / "run")
    assert_masked(run)
    return run


# ------------------------------------------------------------------------------------------------------- doctoring


def one(lines: Lines, record: str, **fields: Any) -> dict[str, Any]:
    """The first record of a kind with these fields."""
    wanted = {"record": record, **fields}
    return next(line for line in lines if all(line.get(key) == value for key, value in wanted.items()))


def contributions(lines: Lines) -> dict[int, dict[str, Any]]:
    """Group -> what it brought into the committed attempt of the step."""
    attempt = one(lines, "update", step=STEP)["attempt"]
    return {line["group"]: line for line in lines if line["record"] == "contribution" and line["attempt"] == attempt}


def drop_a_contribution(lines: Lines) -> None:
    lines.remove(contributions(lines)[2])


def drop_a_microbatch(lines: Lines) -> None:
    contributions(lines)[2]["microbatches"]["2"].remove(0)


def count_a_microbatch_twice(lines: Lines) -> None:
    """Group 3 hosts shard 0 and counts what its owner counts, too."""
    by_group = contributions(lines)
    assert 0 in by_group[0]["microbatches"]["0"]
    by_group[3]["microbatches"].setdefault("0", []).append(0)


def move_a_microbatch_to_a_group_that_does_not_host_it(lines: Lines) -> None:
    by_group = contributions(lines)
    by_group[2]["microbatches"]["2"].remove(0)
    by_group[3]["microbatches"]["2"] = [0]


def move_a_microbatch_to_another_host(lines: Lines) -> None:
    """The batch stays whole, but it is not what the groups voted on."""
    by_group = contributions(lines)
    by_group[0]["microbatches"]["0"].remove(0)
    by_group[3]["microbatches"].setdefault("0", []).append(0)


def count_a_lost_group(lines: Lines) -> None:
    by_group = contributions(lines)
    given = by_group[2]["microbatches"].pop("2")
    lines.append({**by_group[2], "group": 1, "source": "group-0001-rank-0", "microbatches": {"2": given}})
    for line in contributions(lines).values():
        line["members"] = [0, 1, 2, 3]


def change_a_digest(lines: Lines) -> None:
    one(lines, "params", step=STEP, group=2)["digest"] = "0" * 64


def drop_the_last_digest(lines: Lines) -> None:
    """Both of them: that which is compared, and that of the end."""
    lines.remove(one(lines, "params", step=4, group=2, sha256=""))
    lines.remove(one(lines, "params", step=4, group=2))


def change_an_entry_at_one_group(lines: Lines) -> None:
    entry = one(lines, "entry", group=2, index=one(lines, "loss")["entry_index"])
    entry["entry"] = {**entry["entry"], "group": 3}


def drop_an_entry(lines: Lines) -> None:
    retry = next(line["index"] for line in lines if line["record"] == "entry" and line["entry"]["entry"] == "retry")
    assert retry == 2
    lines[:] = [line for line in lines if not (line["record"] == "entry" and line["index"] == retry)]


def commit_a_step_twice(lines: Lines) -> None:
    last = max((line for line in lines if line["record"] == "entry"), key=lambda line: line["index"])
    lines.append({**last, "index": last["index"] + 1})


def drop_a_vote(lines: Lines) -> None:
    lines.remove(one(lines, "vote", step=STEP, group=2))


def vote_twice(lines: Lines) -> None:
    lines.append(dict(one(lines, "vote", step=STEP, group=2)))


def vote_against_what_was_committed(lines: Lines) -> None:
    one(lines, "vote", step=STEP, group=2)["is_complete"] = False


def drop_an_update(lines: Lines) -> None:
    lines.remove(one(lines, "update", step=STEP, group=2))


def apply_twice(lines: Lines) -> None:
    lines.append(dict(one(lines, "update", step=STEP, group=2)))


def apply_another_sum(lines: Lines) -> None:
    one(lines, "update", step=STEP, group=2)["loss"] += 1e-9


def apply_another_term(lines: Lines) -> None:
    one(lines, "update", step=STEP, group=2)["terms"] = {"loss/web": 1.0}


def apply_a_sum_of_too_little(lines: Lines) -> None:
    for line in lines:
        if line["record"] == "update" and line["step"] == STEP:
            line["num_microbatches"] -= 1


def apply_another_learning_rate(lines: Lines) -> None:
    one(lines, "update", step=STEP, group=2)["learning_rate"] *= 2


def apply_another_makespan(lines: Lines) -> None:
    one(lines, "update", step=STEP, group=2)["makespan"] += 1


def contribute_in_another_epoch(lines: Lines) -> None:
    contributions(lines)[2]["epoch"] += 1


def vote_on_another_step(lines: Lines) -> None:
    one(lines, "vote", step=STEP, group=2)["step"] += 1


def raise_the_redundancy(lines: Lines) -> None:
    """All that the groups computed is theirs to compute then, too."""
    one(lines, "run")["redundancy"] += 1


def raise_the_redundancy_and_its_digest(lines: Lines) -> None:
    raise_the_redundancy(lines)
    run = one(lines, "run")
    run["terms"] = digest_of_terms(run)


def read_the_samples_in_another_order(lines: Lines) -> None:
    one(lines, "run")["order"] += 1


def change_the_terms_of_a_group(lines: Lines) -> None:
    one(lines, "terms", group=2)["sha256"] = "0" * 64


def drop_the_terms_of_a_group(lines: Lines) -> None:
    lines.remove(one(lines, "terms", group=2))


def blame_another_group(lines: Lines) -> None:
    one(lines, "loss")["group"] = 3


def recover_from_another_loss(lines: Lines) -> None:
    one(lines, "recovery", group=2)["lost"] = [3]


def start_again_without_an_entry(lines: Lines) -> None:
    restart = RestartRecord(group=2, incarnation=1, step=1, rework_steps=1, restart_s=1.0)
    source = "group-0002-rank-0"
    lines.append(json.loads(encode_line(Line(source=source, at_s=lines[-1]["at_s"], record=restart))))


def inject_another_fault(lines: Lines) -> None:
    lines.append({**one(lines, "fault"), "kind": "raise"})


def drop_the_fault(lines: Lines) -> None:
    lines.remove(one(lines, "fault"))


def change_the_code_of_a_rank(lines: Lines) -> None:
    one(lines, "rank", group=2)["code"] = "0" * 64


def drop_the_code_of_a_rank(lines: Lines) -> None:
    lines.remove(one(lines, "rank", group=2))


def change_the_code_of_the_run(lines: Lines) -> None:
    one(lines, "run")["code"] = "0" * 64


def drop_the_code_of_the_run(lines: Lines) -> None:
    del one(lines, "run")["code"]


def drop_the_run(lines: Lines) -> None:
    lines.remove(one(lines, "run"))


def drop_the_end(lines: Lines) -> None:
    lines.remove(one(lines, "end"))


DOCTORED: list[tuple[Callable[[Lines], None], str, str]] = [
    (drop_a_contribution, "unknown", "step 2: the contribution of group 2 is not in the journal"),
    (drop_a_microbatch, "invalid", "step 2: microbatches missing: [(2, 0)]"),
    (count_a_microbatch_twice, "invalid", "step 2: microbatches counted more than once: [(0, 0)]"),
    (move_a_microbatch_to_a_group_that_does_not_host_it, "invalid", "group 3 computed shard 2 without hosting it"),
    (move_a_microbatch_to_another_host, "invalid", "step 2: group 0 voted on other work than it contributed"),
    (count_a_lost_group, "invalid", "step 2: group 1 contributed after it was fenced"),
    (change_a_digest, "invalid", "after 2 steps the groups hold different parameters"),
    (drop_the_last_digest, "unknown", "no digest of the last parameters of group 2"),
    (change_an_entry_at_one_group, "invalid", "groups read different entries at log index 1"),
    (drop_an_entry, "unknown", "log entry 2 is not in the journal"),
    (commit_a_step_twice, "invalid", "steps are not committed one after another, each exactly once"),
    (drop_a_vote, "unknown", "step 2: no vote of group 2 in the journal"),
    (vote_twice, "invalid", "group 2 voted 2 times"),
    (vote_against_what_was_committed, "invalid", "step 2: committed although group 2 lacked the complete sum"),
    (drop_an_update, "unknown", "step 2: no update of group 2 in the journal"),
    (apply_twice, "invalid", "step 2: group 2 applied it 2 times"),
    (apply_another_sum, "invalid", "step 2: groups applied different sums"),
    (apply_another_term, "invalid", "step 2: groups applied different sums"),
    (apply_a_sum_of_too_little, "invalid", "step 2: the sum did not count 8 microbatches"),
    (apply_another_learning_rate, "invalid", "step 2: groups have different learning_rate: "),
    (apply_another_makespan, "invalid", "step 2: groups have different makespan: "),
    (contribute_in_another_epoch, "invalid", "step 2: groups reduced attempt 3 with different member sets"),
    (vote_on_another_step, "invalid", "step 2: group 2 voted on attempt 3 as one of step 3"),
    (raise_the_redundancy, "invalid", "the terms in the run record do not match their digest"),
    (read_the_samples_in_another_order, "invalid", "the terms in the run record do not match their digest"),
    (raise_the_redundancy_and_its_digest, "invalid", "group 0 ran under terms other than those of the run record"),
    (change_the_terms_of_a_group, "invalid", "group 2 ran under terms other than those of the run record"),
    (drop_the_terms_of_a_group, "unknown", "the terms of group 2 in incarnation 0 are not in the journal"),
    (blame_another_group, "invalid", "log entry 1 does not fence incarnation 0 of group 3"),
    (recover_from_another_loss, "invalid", "group 2 recovered from the loss of groups [3] in step 1"),
    (
        start_again_without_an_entry,
        "invalid",
        "group 2, incarnation 1, restarted after 1 steps",
    ),
    (inject_another_fault, "invalid", "the run record lacks an injected fault: raise of group 1"),
    (drop_the_fault, "unknown", "never struck"),
    (
        change_the_code_of_a_rank,
        "invalid",
        "rank 0 of group 2 in incarnation 0 ran code 000000000000, the run record names code",
    ),
    (drop_the_code_of_a_rank, "unknown", "the code of ranks [0] of group 2 in incarnation 0 is not in the journal"),
    (change_the_code_of_the_run, "invalid", "and 3 more ran code"),
    (drop_the_code_of_the_run, "invalid", "the run record names no code"),
    (drop_the_run, "unknown", "0 run records, expected 1"),
    (drop_the_end, "unknown", "the journal has no end"),
]


@pytest.mark.parametrize(("doctor", "verdict", "reason"), DOCTORED, ids=[doctor.__name__ for doctor, _, _ in DOCTORED])
def test_a_doctored_journal_fails_the_check(
    run: Run, tmp_path: Path, doctor: Callable[[Lines], None], verdict: str, reason: str
) -> None:
    lines = read_lines(run.run_dir)
    doctor(lines)
    write_lines(lines, tmp_path)
    answer = check_journal(read_journal(tmp_path))
    assert answer.verdict == verdict
    assert any(reason in text for text in answer.reasons), answer.reasons
    assert check(JournalIndex(tmp_path, stretch_bytes=1)) == answer, "an attempt at a time"
    exit_code = CliRunner().invoke(app, ["check", str(tmp_path)]).exit_code
    assert exit_code == {"invalid": 1, "unknown": 3}[verdict]


def test_the_journal_as_it_was_written_passes_the_check(run: Run, tmp_path: Path) -> None:
    write_lines(read_lines(run.run_dir), tmp_path)
    assert check_journal(read_journal(tmp_path)).verdict == "valid"
    answer = CliRunner().invoke(app, ["check", str(run.run_dir), "--json"])
    assert json.loads(answer.output) == {"verdict": "valid", "reasons": [], "steps_committed": 4}
    assert answer.exit_code == 0


def test_a_doctored_origin_fails_the_check_and_a_journal_that_was_copied_without_one_does_not(
    run: Run, tmp_path: Path
) -> None:
    write_lines(read_lines(run.run_dir), tmp_path)
    origin = json.loads((run.run_dir / "origin.json").read_text())
    file = tmp_path / "origin.json"
    for text, verdict in (
        (None, "valid"),
        (json.dumps(origin), "valid"),
        ('{"version": "1"}', "invalid"),
        ("", "invalid"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        assert check(JournalIndex(tmp_path)).verdict == verdict, text
    file.write_text(json.dumps({**origin, "code": "0" * 64}))
    reason = f"invalid: origin.json names code 000000000000, the run record code {origin['code'][:12]}"
    assert check(JournalIndex(tmp_path)).reasons == (reason,)
    assert CliRunner().invoke(app, ["check", str(tmp_path)]).exit_code == 1


def test_a_run_record_that_is_not_that_of_the_settings_beside_it_fails_the_check(run: Run, tmp_path: Path) -> None:
    """Though every group says so, too: only the file of the settings is as it was."""
    lines = read_lines(run.run_dir)
    raise_the_redundancy_and_its_digest(lines)
    for line in lines:
        if line["record"] == "terms":
            line["sha256"] = one(lines, "run")["terms"]
    write_lines(lines, tmp_path)
    assert CliRunner().invoke(app, ["check", str(tmp_path)]).exit_code == 0
    shutil.copy(run.run_dir / "config.toml", tmp_path)
    answer = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert answer.exit_code == 1
    assert "the run record has redundancy=3, and config.toml 2" in answer.output


def test_only_the_last_line_of_a_writer_may_be_torn(run: Run, tmp_path: Path) -> None:
    write_lines(read_lines(run.run_dir), tmp_path)
    file = tmp_path / "journal" / "group-0001-rank-0.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"record":"vote","sou')
    assert check_journal(read_journal(tmp_path)).verdict == "valid"
    file.write_text('{"record":"vote","sou\n' + whole)
    answer = check_journal(read_journal(tmp_path))
    assert answer.verdict == "invalid"
    assert "damaged line" in answer.reasons[0]


def read_lines(run_dir: Path) -> Lines:
    """All lines of the journal, those of a writer in their order."""
    files = sorted((run_dir / "journal").glob("*.jsonl"))
    return [json.loads(text) for file in files for text in file.read_text().splitlines()]


def write_lines(lines: Lines, run_dir: Path) -> None:
    (run_dir / "journal").mkdir()
    for line in lines:
        with (run_dir / "journal" / f"{line['source']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
