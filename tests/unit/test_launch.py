"""What the launchers do with environments, and `launch/test` with the calls of pytest that it consists of."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.search_path import ROOT, put_checkout_first, with_checkout

LAUNCH = Path(__file__).parents[2] / "launch"
TIMEOUT_S = 30.0

ENVIRONMENT = """
cd "$(dirname "${BASH_SOURCE[0]}")/.." && root="$PWD" venv="$PWD/venv" newest_version=3.13
say() { printf "%s\\n" "$*"; }
fail() { say "$*" && exit 1; }
python_version_of() { echo 3.11; }
find_newest_python() { [ -e newest/bin/python ] && echo "found"; }
newest_environment() { echo "$1" >>made && echo "$root/newest/bin/python"; }
"""
PYTEST = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>calls
case "$*" in
    *tests/slurm) trap 'touch jobs-ended; exit 2' INT ;;
    *) trap 'exit 2' INT ;;
esac
echo >>ready
while :; do sleep 0.02; done
"""
"""It is interrupted as pytest is: with a code of its own."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout in which all tools are stubs."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "launch/test").write_bytes((LAUNCH / "test").read_bytes())
    (tmp_path / "launch/environment.sh").write_text(ENVIRONMENT)
    for name, text in {"python": PYTEST, "ruff": "#!/bin/sh\n", "mypy": "#!/bin/sh\n"}.items():
        tool = tmp_path / "venv/bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    return tmp_path


def test_ctrl_c_in_a_call_of_pytest_ends_the_whole(root: Path) -> None:
    """It went on to the next call, which takes longer."""
    process = subprocess.Popen(["bash", "launch/test"], cwd=root, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + TIMEOUT_S
        while not (root / "ready").exists() or (root / "ready").read_text().count("\n") < 2:  # with that of jobs
            assert time.monotonic() < end_s
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        first, second = sorted((root / "calls").read_text().splitlines(), key=len)
        assert (first, second.split()[2]) == ("-m pytest -m not nightly and slurm tests/slurm", "--numprocesses")
        assert (root / "jobs-ended").exists()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("part", ["slurm tests/slurm", "not (alone", "tests/unit tests/protocol", "and (alone or gpu)"])
def test_a_failure_in_any_call_of_pytest_is_that_of_the_whole_which_goes_on(root: Path, part: str) -> None:
    stub = f"""#!/usr/bin/env bash\nprintf '%s\\n' "$*" >>calls\ncase "$*" in *"{part}"*) exit 3 ;; esac\n"""
    (root / "venv/bin/python").write_text(stub)
    done = subprocess.run(["bash", "launch/test"], cwd=root, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, check=False)
    calls = (root / "calls").read_text().splitlines()
    assert (done.returncode, len(calls), sum(part in call for call in calls)) == (3, 4, 1)
    [most] = [call for call in calls if "--ignore" in call]
    assert most.partition("and not (")[2].partition(") ")[0] == "alone or gpu", "what another call has"
    others = {
        word for call in calls for word in call.split() if word in ("tests/slurm", "tests/unit", "tests/protocol")
    }
    assert others == {word.removeprefix("--ignore=") for word in most.split() if word.startswith("--ignore=")}


def test_tests_that_run_alone_are_looked_for_in_the_files_that_have_them(root: Path) -> None:
    texts = {"gpu/test_a": "@pytest.mark.gpu(count=2)", "integration/test_b": "[timeout, pytest.mark.alone]"}
    for name, text in (texts | {"integration/test_c": "pytest.mark.slow", "unit/test_d": "pytest.mark.alone"}).items():
        (root / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "tests" / name).with_suffix(".py").write_text(text)
    (root / "venv/bin/python").write_text('#!/bin/sh\necho "$*" >>calls\n')
    subprocess.run(["bash", "launch/test"], cwd=root, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, check=True)
    [call] = [call for call in (root / "calls").read_text().splitlines() if "and (alone or gpu)" in call]
    assert call.partition("gpu) ")[2].split() == [f"tests/{name}.py" for name in texts]


def test_the_night_has_all_tests_and_programs(root: Path) -> None:
    (root / "venv/bin/python").write_text('#!/bin/sh\necho "$*" >>calls\n')
    command = ["bash", "launch/test", "nightly"]
    subprocess.run(command, cwd=root, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, check=True)
    calls = (root / "calls").read_text().splitlines()
    assert not [call for call in calls if "nightly" in call]
    programs = ["protocol --histories 10000", "matrix", "stages", "interrupts"]
    assert [call.removeprefix("-m tests.") for call in calls if call.startswith("-m tests.")] == programs


NEWEST = """#!/usr/bin/env bash
printf 'newest: %s\\n' "$*" >>calls
case "$*" in *"$FAILS"*) exit 3 ;; esac
"""


def run_tests(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = ["bash", "launch/test", *words]
    return subprocess.run(
        command, cwd=root, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )


@pytest.fixture
def both_ends(root: Path) -> Path:
    """A checkout that finds the newest Python."""
    (root / "venv/bin/python").write_text('#!/bin/sh\necho "$*" >>calls\n')
    (root / "newest/bin").mkdir(parents=True)
    (root / "newest/bin/python").write_text(NEWEST)
    (root / "newest/bin/python").chmod(0o755)
    (root / "tests").mkdir()
    (root / "tests/newest.txt").write_text("tests/some.py\ntests/other.py::test[a b]\n")
    return root


@pytest.mark.parametrize("fails", ["tests/some.py", "train demo_cpu", "check", "nothing"])
def test_the_newest_end_has_chosen_tests_and_the_demo_and_fails_the_whole(both_ends: Path, fails: str) -> None:
    done = run_tests(both_ends, FAILS=fails)
    assert done.returncode == (0 if fails == "nothing" else 3), done.stderr
    calls = (both_ends / "calls").read_text().splitlines()
    newest = [call.removeprefix("newest: -m ") for call in calls if call.startswith("newest: ")]
    assert [call.split()[0] for call in newest] == ["pip", "pytest", "spare_megatron", "spare_megatron"]
    assert newest[1].endswith("-m not nightly and not (alone or gpu) tests/some.py tests/other.py::test[a b]")
    assert newest[2].split()[1:3] == ["train", "demo_cpu"]
    assert len(calls) - len(newest) == 4, "what else there is runs too"
    assert (both_ends / "made").read_text() == "found\n"
    assert "has NOT run" not in done.stdout


def test_the_newest_end_has_all_tests_at_night_and_none_in_a_quick_call(both_ends: Path) -> None:
    assert run_tests(both_ends, "quick", FAILS="nothing").returncode == 0
    assert not (both_ends / "made").exists()
    (both_ends / "calls").unlink()
    assert run_tests(both_ends, "nightly", FAILS="nothing").returncode == 0
    calls = (both_ends / "calls").read_text().splitlines()
    newest = [call.removeprefix("newest: ") for call in calls if call.startswith("newest: ")]
    assert {call for call in newest if "pytest" in call} == {call for call in calls if call.startswith("-m pytest")}
    assert [call.split()[2] for call in newest if "pytest" not in call] == ["list", "train", "check"]


def test_a_machine_without_the_newest_python_says_so_in_its_last_line(root: Path) -> None:
    (root / "venv/bin/python").write_text('#!/bin/sh\necho "$*" >>calls\n')
    done = run_tests(root)
    assert done.returncode == 0
    assert "the newest end has NOT run: no Python 3.13" in done.stdout.splitlines()[-1]
    (root / "calls").unlink()
    required = run_tests(root, NEWEST_END="required")
    assert (required.returncode, (root / "calls").exists()) == (1, False)
    assert "NEWEST_END=required: " in required.stdout


def test_a_machine_without_an_environment_for_the_newest_end_says_so_in_its_last_line(both_ends: Path) -> None:
    with (both_ends / "launch/environment.sh").open("a") as file:
        file.write("newest_environment() { false; }\n")
    done = run_tests(both_ends)
    assert done.returncode == 0
    assert "the newest end has NOT run: no environment" in done.stdout.splitlines()[-1]
    required = run_tests(both_ends, NEWEST_END="required")
    assert required.returncode == 1


@pytest.mark.parametrize("name", ["nightly", "newest"])
def test_tests_that_are_listed_exist(name: str) -> None:
    for line in (LAUNCH.parent / f"tests/{name}.txt").read_text().splitlines():
        file, _, test = line.partition("::")
        text = (LAUNCH.parent / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text, line


def make_environment(checkout: Path, path: str) -> subprocess.CompletedProcess[str]:
    """What a launcher does first, with this PATH, up to what it would have pip fetch."""
    (checkout / "launch").mkdir()
    for name in ("environment.sh", "cuda_stand_ins.py"):
        shutil.copy(LAUNCH / name, checkout / "launch")
    shutil.copy(LAUNCH.parent / "pyproject.toml", checkout)
    environment = {"PATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = ["bash", "-euo", "pipefail", "-c", ". launch/environment.sh"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)


def test_an_environment_of_another_user_is_kept(tmp_path: Path) -> None:
    """It was replaced, and so was one that the quick start has users make by hand."""
    own = tmp_path / ".venv" / "lib" / "own.py"
    own.parent.mkdir(parents=True)
    own.touch()
    ended = make_environment(tmp_path, f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert ended.returncode == 1
    assert "was made by somebody else" in ended.stderr
    assert own.exists()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_launcher_in_its_own_environment_makes_it_again(tmp_path: Path) -> None:
    """It removed the interpreter that it was about to use."""
    environment = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    (environment / "stamp").write_text("of an earlier commit\n")
    ended = make_environment(tmp_path, f"{environment / 'bin'}:{os.environ['PATH']}")
    assert ended.returncode == 1
    assert "pip could not install torch" in ended.stderr  # with an interpreter that is there
    assert (environment / "bin" / "pip").exists()
    assert not (environment / "stamp").exists()


STUB_OF_PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] || printf '%s: %s\\n' "$PYTHONPATH" "$*" >>"$CALLS"
"""


def test_wheels_are_installed_beside_the_python_that_has_torch(tmp_path: Path) -> None:
    """A path that was given comes after them: it was overwritten."""
    stub = tmp_path / "python3"
    stub.write_text(STUB_OF_PYTHON)
    stub.chmod(0o755)
    (tmp_path / "some.whl").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": f"{tmp_path}/calls", "PYTHONPATH": "/given"}
    command = [LAUNCH / "gpu-check", "--wheels", tmp_path, "--dry-run", "--json", "out.json"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=TIMEOUT_S)
    install, check = (tmp_path / "calls").read_text().splitlines()
    path, _, words = install.partition(": ")
    assert path == "/given"
    site = words.partition("--target ")[2].split()[0]
    assert words == (
        f"-m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-compile --target {site} "
        f"{tmp_path}/some.whl"
    )
    assert check == (f"{LAUNCH.parent}:{site}:/given: -m benchmarks.gpu_check --dry-run --json {tmp_path / 'out.json'}")
    assert not Path(site).exists()


STUB_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>calls
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *tomllib*) exec "{python}" "$@" ;;
    *transformer-engine*) exit {code} ;;
esac
"""


@pytest.mark.parametrize(("has_driver", "code"), [(True, 0), (True, 1), (False, 0)])
def test_the_gpu_extra_is_installed_where_a_driver_is_and_its_lack_is_reported(
    tmp_path: Path, code: int, *, has_driver: bool
) -> None:
    """It never was, and presets for GPUs took slower layers silently."""
    text = (LAUNCH / "environment.sh").read_text().replace("/proc/driver/nvidia", str(tmp_path / "driver"))
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/environment.sh").write_text(text)
    shutil.copy(LAUNCH.parent / "pyproject.toml", tmp_path)
    (tmp_path / "python").write_text(STUB_PYTHON.format(python=sys.executable, code=code))
    (tmp_path / "python").chmod(0o755)
    if has_driver:
        (tmp_path / "driver").mkdir()
        (tmp_path / "driver/version").touch()
    script = 'environment=none && . launch/environment.sh && make_environment "$PWD/python" stamp'
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if "transformer-engine" in call]
    assert [call.partition("--no-compile ")[2] for call in calls] == (
        ["--no-build-isolation transformer-engine[pytorch]>=2.9,<2.12"] if has_driver else []
    )
    assert ("slower layers of megatron-core" in ended.stderr) == (code != 0)
    assert (tmp_path / ".venv/stamp").read_text() == "stamp\n"


def test_folders_that_are_there_stay_behind_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were lost, and with them the packages of a machine that has them nowhere else."""
    monkeypatch.setenv("PYTHONPATH", f"/wheels{os.pathsep}{os.pathsep}/more")
    assert with_checkout(Path("/first")).split(os.pathsep) == ["/first", str(ROOT), "/wheels", "/more"]
    for _ in range(2):
        put_checkout_first()
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/wheels", "/more"]
    monkeypatch.delenv("PYTHONPATH")
    assert with_checkout() == str(ROOT)


def test_no_test_replaces_the_search_path() -> None:
    launchers = {ROOT / "tests" / "unit" / name for name in ("test_gpu_check.py", "test_launch.py")}
    own = {Path(__file__), ROOT / "tests" / "search_path.py", *launchers}
    lines = [
        line
        for path in (ROOT / "tests").rglob("*.py")
        if path not in own
        for line in path.read_text().splitlines()
        if "PYTHONPATH" in line and "with_checkout(" not in line
    ]
    assert lines == []
