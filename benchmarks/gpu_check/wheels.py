"""Makes the folder of wheels for a machine without a network, which has torch: what it lacks of what the check imports.

Everything follows from the packages' metadata: what the check imports of the declared dependencies, which versions
pip's resolver takes for that machine, and what the machine has.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.scene import ROOT

_IMPORTED = (
    "benchmarks.gpu_check.on_device",
    "benchmarks.gpu_check.training",
    "benchmarks.gpu_check.versions",
    "spare_megatron.tools.bench.plain_megatron",
    "spare_megatron.tools.bench.bench_throughput",
    "spare_megatron.commands",
    "spare_megatron.config.loader",
    "spare_megatron.rank.rank",
    "pytest_timeout",
    "xdist",
    "tests.conftest",
    "tests.gpu.test_communicators",
    "tests.gpu.test_one_device",
    "tests.gpu.test_whole_runs",
)
"""All that the check imports, in its processes and in those of its runs and tests."""
_GLIBC = range(17, 29)
"""Minor versions of glibc 2 that wheels may have been built for: the machine has 2.28 or a later one."""


def add_wheel_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("wheels for a machine without a network")
    group.add_argument("--make-wheels", type=Path, metavar="DIR", help="download what that machine lacks, and end")
    group.add_argument("--python", default="3.12", metavar="VERSION", help="its Python [default: 3.12]")
    group.add_argument("--torch", default="2.13.0", metavar="VERSION", help="its torch [default: 2.13.0]")
    group.add_argument(
        "--have",
        type=Path,
        metavar="FILE",
        help="what it has, by `python3 -m pip list --format=freeze` there [default: torch and what torch needs]",
    )


def make_wheels(options: argparse.Namespace) -> int:
    """Downloads the wheels and prints their size. CalledProcessError: pip failed, and has reported why."""
    torch = f"torch=={options.torch}"
    if options.have:
        have = {_name(line) for line in options.have.read_text().split() if line[0].isalpha()} | {"torch"}
    else:
        have = set(_resolved(options.python, [torch]))
    requirements = list(_requirements())
    resolved = _resolved(options.python, [torch, *requirements])
    names = lacking_of(resolved, map(_name, requirements), have)
    lacking = [f"{name}=={resolved[name].version}" for name in sorted(names)]
    if lacking:
        folder = ("--dest", str(options.make_wheels))
        _pip("download", options.python, "--quiet", "--no-deps", *folder, *lacking)
    size = sum(file.stat().st_size for file in options.make_wheels.glob("*.whl"))
    print(f"{options.make_wheels}: {', '.join(lacking) or 'nothing is lacking'}; {size / 1e6:.1f} MB")
    return 0


def lacking_of(resolved: Mapping[str, "Package"], wanted: Iterable[str], have: Collection[str]) -> set[str]:
    """Of the wanted packages and what they need those that are not there; what is there has what it needs."""
    lacking: set[str] = set()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in resolved and name not in have and name not in lacking:
            lacking.add(name)
            waiting += resolved[name].needs
    return lacking


@dataclass(frozen=True, slots=True)
class Package:
    """A package as pip would install it; `needs` has optional ones, too."""

    version: str
    needs: tuple[str, ...]


def _requirements() -> Iterator[str]:
    """The declared dependencies, those of tests too, of which the check imports a module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported = _imported()
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        if _name(requirement) in imported - {"torch", _name(project["name"])}:
            yield requirement


def _imported() -> set[str]:
    """Distributions with a module that the check imports."""
    code = f"import json, sys, {', '.join(_IMPORTED)}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    of_module = importlib.metadata.packages_distributions()
    return {_name(distribution) for module in modules for distribution in of_module.get(module, ())}


def _resolved(python: str, requirements: list[str]) -> dict[str, Package]:
    """Name -> package, of everything that pip would install there."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ("--dry-run", "--ignore-installed", "--quiet", "--target", folder, "--report", str(report))
        _pip("install", python, *words, *requirements)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {
        _name(item["name"]): Package(item["version"], tuple(map(_name, item.get("requires_dist", ()))))
        for item in found
    }


def _pip(command: str, python: str, *words: str) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for platform in platforms for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", command]
    subprocess.run([*pip, *target, *words], check=True)


def _name(requirement: str) -> str:
    """The normalized name of a distribution."""
    found = re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""
