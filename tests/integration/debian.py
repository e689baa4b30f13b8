"""Programs of Debian that tests need, fetched into a cache without any change to the system."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_LIBRARIES = ("usr/lib/*-linux-gnu", "lib/*-linux-gnu", "usr/lib/*-linux-gnu/pulseaudio")


def fetch_packages(cache: Path, found: Path, *names: str) -> None:
    """Unpacks packages below the cache unless this file of theirs is there. Skips the test where they cannot be had.

    Tests in other processes that need the same wait.
    """
    _fetch_once(cache, found, ("download",), names)


def fetch_with_dependencies(cache: Path, found: Path, *names: str) -> None:
    """As `fetch_packages`, with all that they need and this machine has not installed."""
    _fetch_once(cache, found, ("install", "--download-only", "--no-install-recommends", "--yes"), names)


def with_libraries(cache: Path) -> dict[str, str]:
    """The environment in which programs of the cache find the libraries that were fetched with them."""
    folders = [folder for pattern in _LIBRARIES for folder in cache.glob(pattern)]
    before = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *before])}


def _fetch_once(cache: Path, found: Path, command: tuple[str, ...], names: tuple[str, ...]) -> None:
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _fetch(cache, command, names)


def _fetch(cache: Path, command: tuple[str, ...], names: tuple[str, ...]) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip(f"needs {names[0]}: none in PATH, and no apt-get to fetch Debian's with")
    lists, packages = cache / "lists", cache / "packages"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    (packages / "archives/partial").mkdir(parents=True, exist_ok=True)
    settings = (f"Dir::State::Lists={lists}", f"Dir::Cache={packages}", "APT::Sandbox::User=", "Debug::NoLocking=true")
    apt = ["apt-get", "-qq", *(word for setting in settings for word in ("-o", setting))]
    try:
        for words in (("update",), (*command, *names)):
            subprocess.run(
                [*apt, *words], cwd=packages / "archives", check=True, capture_output=True, text=True, timeout=180
            )
        for package in sorted((packages / "archives").glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, cache], check=True, capture_output=True, text=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"needs {names[0]}: none in PATH, and apt-get could not fetch Debian's: {error.stderr or error!s}")
