"""Tries the newest releases of all dependencies, beyond the project's bounds, and says which of them break a test.

An environment (2.3 GB below TMPDIR, removed at the end) gets of every package the newest that pip offers this Python,
and stand-ins for the libraries of CUDA where there is no NVIDIA driver. A copy of the checkout without upper bounds
runs quick tests. If some fail, each package beyond its bounds is put back in turn to the newest within them: it broke
what passes then. Exit codes: 0 nothing broke, 1 something did, 2 the canary could not be run.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICK = (
    "tests/unit/test_codec.py",
    "tests/unit/test_config_loader.py",
    "tests/unit/test_controller.py",
    "tests/unit/test_quick_import.py",
    "tests/integration/test_experts.py",
    "tests/integration/test_optimizer_parity.py",
)
EXTRAS = ("hf", "metrics", "text", "test")
INSTALL_S = 3600.0
TESTS_S = 1800.0
UPPER_BOUND = re.compile(r",\s*<=?[\w.]+|==[\w.]+")
RANGES = Path("spare_megatron/config/supported_versions.toml")
COPIED = ("spare_megatron", "configs", "tests", "launch", "docs", "examples", "benchmarks")


def requirements(project: dict[str, Any]) -> Iterator[str]:
    """What the project and its tests need, but the project itself."""
    tables = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    for table in tables:
        yield from (one for one in table if not one.startswith("spare_megatron"))


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


class Canary:
    """An environment and a copy of the checkout in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv/bin/python"
        self.copy = folder / "copy"

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)

    def install(self, *wanted: str) -> str:
        """What pip says of an error; empty if all were installed."""
        done = self.pip("install", "--quiet", "--no-compile", "--upgrade", "--upgrade-strategy", "eager", *wanted)
        return "" if done.returncode == 0 else done.stderr.strip()

    def install_torch(self, wanted: str) -> str:
        stand_ins = [self.python, ROOT / "launch/cuda_stand_ins.py"]
        check = subprocess.run([*stand_ins, "--check"], capture_output=True, timeout=INSTALL_S, check=False)
        if check.returncode != 0:
            return self.install(wanted)
        if error := self.install("--no-deps", wanted):
            return error
        return subprocess.run(stand_ins, capture_output=True, text=True, timeout=INSTALL_S, check=False).stderr

    def versions(self) -> dict[str, str]:
        listed = json.loads(self.pip("list", "--format=json").stdout)
        return {name_of(one["name"]): one["version"] for one in listed}

    def is_within(self, requirement: str, version: str) -> bool:
        program = "import sys; from packaging.requirements import Requirement as R; "
        program += "sys.exit(not R(sys.argv[1]).specifier.contains(sys.argv[2], prereleases=True))"
        command = [self.python, "-c", program, requirement, version]
        return subprocess.run(command, timeout=60.0, check=False).returncode == 0

    def copy_checkout(self) -> None:
        self.copy.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, self.copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.copy)
        ranges = (self.copy / RANGES).read_text()
        raised = re.sub(r'^before = "[\d.]+"', 'before = "9999"', ranges, flags=re.MULTILINE)
        assert raised != ranges, f"{RANGES} has other ranges than this script expects"
        (self.copy / RANGES).write_text(raised)

    def failures(self, tests: Sequence[str]) -> set[str]:
        """Ids of the tests that fail; the end of pytest's output if it could not run them."""
        command = [self.python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfE", "--durations=0", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.copy)}
        try:
            done = subprocess.run(
                command, cwd=self.copy, env=environment, capture_output=True, text=True, timeout=TESTS_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {f"all: not done after {TESTS_S:.0f} s"}
        found = set(re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", done.stdout, re.MULTILINE))
        if done.returncode != 0 and not found:
            found = {f"all: {(done.stderr or done.stdout).strip()[-2000:]}"}
        return found


def try_newest(canary: Canary, wanted: Sequence[str], tests: Sequence[str]) -> int:
    newest = [UPPER_BOUND.sub("", one) for one in wanted]
    of_torch = next(one for one in newest if name_of(one) == "torch")
    others = [one for one in newest if one != of_torch]
    print(f"installing the newest releases of {len(newest)} packages", flush=True)
    if error := canary.install_torch(of_torch) or canary.install(*others):
        print(f"pip cannot install them together:\n{error}")
        return 1
    versions = canary.versions()
    beyond = [one for one in wanted if not canary.is_within(one, versions[name_of(one)])]
    for one in wanted:
        print(f"  {name_of(one)} {versions[name_of(one)]}{f', beyond {one}' if one in beyond else ''}")
    failed = canary.failures(tests)
    if not failed:
        print(f"nothing broke in {', '.join(tests)}")
        return 0
    print("\n".join(["with all of these fail:", *sorted(f"  {test}" for test in failed)]), flush=True)
    again = [test for test in failed if not test.startswith("all: ")] or tests
    for one in beyond:
        put_back = canary.install_torch if name_of(one) == "torch" else canary.install
        if error := put_back(one):
            print(f"{one} cannot be put back: {error}")
            continue
        mended = failed - canary.failures(again)
        text = f"breaks {len(mended)} of them" if mended else "breaks none of them by itself"
        print(f"{name_of(one)} {versions[name_of(one)]} {text}", *sorted(mended), sep="\n    ", flush=True)
        put_back(f"{name_of(one)}=={versions[name_of(one)]}")
    print("tests that no package above breaks fail by a release within its bounds, or by several together")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=QUICK, help=f"arguments of pytest [default: {' '.join(QUICK)}]")
    tests = parser.parse_args().tests
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory(prefix="spare-canary-") as scratch:
        canary = Canary(Path(scratch))
        subprocess.run([sys.executable, "-m", "venv", canary.python.parents[1]], check=True, timeout=INSTALL_S)
        canary.copy_checkout()
        return try_newest(canary, list(requirements(project)), tests)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # removes the environment
    try:
        sys.exit(main())
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the canary could not be run: {error}", file=sys.stderr)
        sys.exit(2)
