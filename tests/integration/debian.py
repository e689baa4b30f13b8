"""Programs of Debian that tests need, fetched into a cache without any change to the system."""

import shutil
import subprocess
from pathlib import Path

import pytest


def fetch_packages(cache: Path, *names: str) -> None:
    """Unpacks packages below the cache; the test is skipped where they cannot be had."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip(f"needs {names[0]}: none in PATH, and no apt-get to fetch Debian's with")
    lists, packages = cache / "lists", cache / "packages"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    (packages / "partial").mkdir(parents=True, exist_ok=True)
    own = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={packages}", "-o", "APT::Sandbox::User="]
    try:
        for command in (["apt-get", *own, "-qq", "update"], ["apt-get", *own, "-qq", "download", *names]):
            subprocess.run(command, cwd=cache, check=True, capture_output=True, text=True, timeout=180)
        for package in (found for name in names for found in cache.glob(f"{name}_*.deb")):
            subprocess.run(["dpkg", "-x", package.name, "."], cwd=cache, check=True, capture_output=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"needs {names[0]}: none in PATH, and apt-get could not fetch Debian's: {error.stderr or error}")
