"""What commands say of what a user got wrong, before anything is started for it."""

import fcntl
import io
import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.command import do_each
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.progress import RunProgress
from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver import run
from spare_megatron.journal.files import Line, encode_line
from spare_megatron.machine.lock import LOCK, is_held, locked
from spare_megatron.process.reports import StoreAway, StoreBack
from spare_megatron.state.checkpoint import start_checkpoint as loading
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.tiny_corpus import write_tiny_corpus

DEMO = str(Path(__file__).parents[2] / "configs/run/demo_cpu.toml")
SCENARIO = Scenario(
    name="scenario",
    num_groups=4,
    redundancy=2,
    microbatches_per_shard=2,
    num_steps=3,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.0),
    failures=FailureSpec(kind="system", mean_s=1e9),
)


def spare(*arguments: object, expected: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == expected, result.output
    return result.output


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose journal has no end."""
    lines: list[Line] = []
    simulate(SCENARIO, 1, journal=lines.append)
    folder = tmp_path / "run"
    (folder / "journal").mkdir(parents=True)
    (folder / "journal/driver.jsonl").write_text("".join(encode_line(line) + "\n" for line in lines[:-1]))
    return folder


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    write_tiny_corpus(tmp_path / "corpus")
    return ["train", "--config", DEMO, "--set", f"data.corpus={tmp_path}/corpus"]


def test_all_steps_run_even_if_some_fail_and_every_failure_is_reported() -> None:
    done: list[str] = []

    def fail(error: Exception) -> None:
        raise error

    def left() -> None:
        raise BrokenPipeError

    first, second = partial(fail, ValueError("no room")), partial(fail, OSError("no disk"))
    do_each([partial(done.append, "all")])
    with pytest.raises(ValueError, match=r"^no room; no disk$"):
        do_each([first, partial(done.append, "between"), left, second, partial(done.append, "last")])
    assert done == ["all", "between", "last"]
    with pytest.raises(OSError, match=r"^no disk$"):
        do_each([left, second])
    with pytest.raises(BrokenPipeError):
        do_each([left, left])


def test_an_interrupted_check_has_found_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 would say that the journal is invalid."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("spare_megatron.journal.proofs.proof.check", interrupt)
    assert spare("check", run_dir, expected=130) == "spare check: interrupted\n"


def test_status_says_that_a_run_has_lost_its_driver(run_dir: Path) -> None:
    assert "its driver" not in spare("status", run_dir), "one without a lock, as a simulated one, has none"
    (run_dir / LOCK).touch()
    assert "its driver is gone, and has not written how the run ended" in spare("status", run_dir)
    assert '"driverless": "its driver is gone' in spare("status", run_dir, "--json")
    assert "on other nodes the run may go on" in spare("status", run_dir)
    with (run_dir / LOCK).open() as file:  # as a supervisor that goes on alone
        fcntl.flock(file, fcntl.LOCK_SH)
        assert "on other nodes the run goes on" in spare("status", run_dir)
        assert is_held(run_dir)
    with locked(run_dir):
        assert "its driver" not in spare("status", run_dir)
        assert is_held(run_dir)


def test_status_says_how_much_room_is_left_in_etcd(run_dir: Path) -> None:
    assert "etcd" not in spare("status", run_dir), "a simulated run has no metrics"
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text('{"step": 0, "train/loss": 3.0}\n')
    assert "etcd" not in spare("status", run_dir), "one with the embedded store"
    output = {"step": 1, "spare/store_bytes": 2**30}
    torn = '{"train/loss": 3.0, "spare/store_bytes": 7' + " " * (2**16 - 40) + "}\n"
    metrics.write_text(torn + '{"step": 1}\n')
    assert "etcd" not in spare("status", run_dir), "only the end of a long file is read, from anywhere in a line on"
    metrics.write_text(torn + json.dumps(output) + '\n{"step": 2}\n{"spare/store_bytes": 5')
    assert "etcd holds 1 GiB, as the run last read it\n" in spare("status", run_dir)
    metrics.write_text(json.dumps(output | {"spare/store_limit_bytes": 2**33}) + "\n")
    assert "etcd holds 1 GiB of the 8 GiB of its --quota-backend-bytes, as the" in spare("status", run_dir)
    found = json.loads(spare("status", run_dir, "--json"))
    assert (found["store_bytes"], found["store_limit_bytes"]) == (2**30, 2**33)


def test_status_of_what_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    assert f"there is no directory {tmp_path}/rum" in spare("status", tmp_path / "rum", expected=2)
    assert "holds no journal" in spare("status", tmp_path, "--watch", expected=2)


def test_logs_of_a_run_are_those_of_all_processes_or_of_a_group(run_dir: Path) -> None:
    logs = run_dir / "logs"
    logs.mkdir()
    assert f"nothing to show: all logs of {run_dir} are empty; see `spare status" in spare("logs", run_dir)
    for at_s, (name, text) in enumerate({"group-0001-rank-0": "one\ntwo\n", "supervisor-0": "three\n"}.items()):
        (logs / f"{name}.log").write_text(text)
        os.utime(logs / f"{name}.log", (at_s, at_s))
    (logs / "group-0002-rank-0.log").touch()
    ends = [line.partition(" group-0001-rank-0: ")[2] or line[-19:] for line in spare("logs", run_dir).splitlines()]
    assert ends == ["one", "two", "supervisor-0: three"]
    assert spare("logs", run_dir, "--lines", 1).endswith(" supervisor-0: three\n")
    assert spare("logs", run_dir, 1) == spare("logs", run_dir, 1, "--lines", 0) == "one\ntwo\n"
    assert f"nothing to show: all logs of group 2 of {run_dir} are empty" in spare("logs", run_dir, 2)
    refused = spare("logs", run_dir, 3, expected=2)
    assert f"{run_dir} holds no log of group 3" in refused
    assert "there is no such group; there are those of groups 1, 2" in refused
    assert "nothing to show: no line is of that severity" in spare("logs", run_dir, "--severity", "error")
    assert "--severity bad: there are info, warning, error; name one" in spare(
        "logs", run_dir, "--severity", "bad", expected=2
    )


@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_file_that_cannot_be_made_is_refused_at_once(command: str, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "missing/page"
    output = spare(command, run_dir, "--out", out, expected=2)
    assert f"--out {out}: there is no directory {tmp_path}/missing; make it" in output
    assert f"--out {tmp_path} is a directory; name a file in it" in spare(
        command, run_dir, "--out", tmp_path, expected=2
    )


@pytest.mark.parametrize("command", ["report", "timeline"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_file_in_a_folder_of_another_user_is_refused_at_once(
    command: str, is_named: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is not named: those who may read a run may not all write into its directory."""
    target = run_dir / (f"{command}.html" if command == "report" else f"{command}.json")
    not_mine = run_dir
    # Root may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK or Path(path) != not_mine)
    words = ("--out", target) if is_named else ()
    output = spare(command, run_dir, *words, expected=2)
    assert f"--out {target} cannot be written: {run_dir} is not yours to write; choose another" in output
    target.touch()
    not_mine = target
    assert f"--out {target} cannot be written: {target} is not" in spare(command, run_dir, *words, expected=2)


def test_a_timeline_of_what_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    assert f"there is no directory {tmp_path}/rum" in spare("timeline", tmp_path / "rum", expected=2)


def test_a_note_beside_the_corpus_that_is_not_ours_is_named(train: list[str], tmp_path: Path) -> None:
    """Text of such a name is what Megatron's own preprocessing reads."""
    for text in ('{"text": "a document"}\n{"text": "another"}\n', '{"tokenizer": "byte"}', "[]", ""):
        (tmp_path / "corpus.json").write_text(text)
        output = spare(*train, expected=2)
        assert f"{tmp_path}/corpus.json does not say with which vocabulary the corpus was written" in output
    for name, value in {"end_of_document": "0", "tokenizer": None, "vocab_size": 0}.items():
        (tmp_path / "corpus.json").write_text(json.dumps({"vocab_size": 256, name: value}))
        assert f"{tmp_path}/corpus.json: {name}={value!r} must be " in spare(*train, expected=2)


def test_more_samples_than_memory_has_room_for_are_refused_before_anything_is_started(
    train: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only this process may not take more, as with ulimit -v."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (32, 2**40))
    output = spare(*train, "--set", "model.seq_length=1", expected=2)
    assert (
        "has 5 sequences in an epoch, whose sample index takes 60 B to build, but this machine has 32 B of memory"
        in output
    )


def test_folders_that_cannot_be_written_are_refused_before_anything_is_started(
    train: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "corpus.bin"
    output = spare(*train, "--run-dir", file / "run", expected=2)
    assert f"--run-dir {file}/run cannot be made: {file} is a file; choose another" in output
    output = spare(*train, "--set", "checkpoint.interval_steps=5", "--set", f"checkpoint.folder={file}", expected=2)
    assert f"checkpoint.folder {file} cannot be made" in output


def test_a_run_that_has_no_checkpoints_to_resume_with_does_not_begin_anew_in_silence(train: list[str]) -> None:
    output = spare(*train, "--resume", expected=2)
    assert "--resume starts from the newest checkpoint in checkpoint.folder, which is not set" in output


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_to_resume_a_training_that_is_finished_is_no_error_and_starts_nothing(
    train: list[str], options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 kept a loop that repeats the command until it succeeds from ending."""
    last = tmp_path / "step-00000060"
    monkeypatch.setattr(loading, "last_checkpoint", lambda *_: last)
    monkeypatch.setattr(run, "start_run", lambda *_, **__: pytest.fail("it was started"))
    folder = ("--set", f"checkpoint.folder={tmp_path}")
    result = CliRunner().invoke(app, [*train, *folder, "--run-dir", str(tmp_path / "run"), "--resume", *options])
    assert result.exit_code == 0, result.output
    assert f"{last} holds all of train.steps=" in result.stderr
    assert "the training is finished" in result.stderr
    assert not (tmp_path / "run").exists()
    if options:
        printed = json.loads(result.stdout)
        assert (printed["outcome"], printed["run_dir"], printed["steps_left"]) == ("finished", None, 0)


@pytest.mark.parametrize("command", ["train", "doctor"])
@pytest.mark.parametrize(
    ("presets", "message"),
    [
        (("gone.toml",), "cannot read the preset gone.toml"),
        (("--config", "gone.toml"), "cannot read the preset gone.toml"),
        (
            ("gone.toml", "--config", "other.toml"),
            "given twice, as gone.toml and as --config other.toml",
        ),
        (
            (),
            "the preset of the run is missing; name one of `spare config list`, or a TOML file: spare {command} CONFIG",
        ),
    ],
)
def test_the_preset_is_an_argument_or_an_option(command: str, presets: tuple[str, ...], message: str) -> None:
    assert message.format(command=command) in spare(command, *presets, expected=2)


def test_a_pause_for_the_control_store_is_reported_once(tmp_path: Path) -> None:
    console = RunConsole(file=io.StringIO())
    with RunProgress(RunConfig(), console, tmp_path) as progress:
        for event in (StoreAway(limit_s=60.0), StoreAway(limit_s=60.0), StoreBack(away_s=2.5)):
            progress.on_event(event)
        progress.on_event(StoreBack(away_s=2.6))
    assert isinstance(console.file, io.StringIO)
    assert [line[len("2026-11-23 12:00:00 ") :] for line in console.file.getvalue().splitlines()] == [
        "the control store does not answer; training pauses for it, 60 s at most",
        "the control store answers again after 2.5 s",
    ]


def test_a_port_that_is_taken_is_named(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = spare("serve", run_dir, "--port", port, expected=2)
    assert f"--port {port}: Address already in use; choose another, or 0 for a free one" in output


@pytest.mark.parametrize("corpus", ["", ".", "/"])
def test_a_corpus_without_a_name_is_missing_like_any_other(corpus: str) -> None:
    """`PosixPath('.') has an empty name` was the whole message for an unset value."""
    output = spare("train", "--config", DEMO, "--set", f"data.corpus={corpus}", expected=2)
    assert "spare train: this configuration cannot run:\n  - data.corpus" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("credentials_file", "control.credentials_file=/nope cannot be read: FileNotFoundError"),
        ("ca_file", "cannot use control.ca_file, cert_file, key_file = ['/nope']: [Errno 2] No such file or directory"),
    ],
)
def test_missing_files_for_etcd_are_reported_before_anything_starts(
    setting: str, message: str, train: list[str], tmp_path: Path
) -> None:
    """A missing certificate was a traceback, and missing credentials a run that had failed."""
    etcd = ["--set", "control.store=etcd", "--set", 'control.endpoints=["https://127.0.0.1:1"]']
    output = spare(*train, *etcd, "--set", f"control.{setting}=/nope", "--run-dir", tmp_path / "run", expected=2)
    assert f"spare train: {message}" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["status nowhere", "checkpoint list nowhere", "config list --no"])
def test_an_error_names_its_command_however_the_program_was_started(words: str) -> None:
    result = CliRunner().invoke(app, words.split(), prog_name="python -m spare_megatron")
    assert result.exit_code == 2
    assert result.output.startswith(f"spare {words.rpartition(' ')[0]}: ")
