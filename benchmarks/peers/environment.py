"""A virtual environment for the peers, made once in the user's cache folder: never the one that trains."""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
TORCHFT = "torchft-nightly==2026.10.26"
NVRX = "nvidia-resiliency-ext==0.4.1"
_INSTALL_TIMEOUT_S = 1800


def peer_python() -> Path:
    """The interpreter of an environment with the peers, the same torch and megatron-core as ours, and what they need.

    An environment without its stamp, written last, is half made and is made again.

    Raises:
        RuntimeError: pip could not install something; its last lines are in the text.
    """
    packages = [TORCHFT, NVRX, *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
    made_from = "\n".join([sys.version, sys.executable, TORCH, *packages])
    folder = _cache_folder() / hashlib.sha256(made_from.encode()).hexdigest()[:16]
    python, stamp = folder / "bin" / "python", folder / "stamp"
    if stamp.is_file():
        return python
    print(f"making {folder} (a few minutes the first time)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    try:
        _run(_pip(python, f"{TORCH}+cpu"))
    except RuntimeError:
        print("no index that pip knows offers torch for CPUs: taking the default build, several GB", file=sys.stderr)
        _run(_pip(python, TORCH))
    _run(_pip(python, *packages))
    stamp.write_text(made_from)
    return python


def peer_variables() -> dict[str, str]:
    """The environment variables of a peer's process: one thread for operations, everything on the loopback."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "no_proxy": "127.0.0.1"}
    return {**os.environ, **own}


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spare_megatron" / "peers"


def _pip(python: Path, *packages: str) -> list[str]:
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *packages]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")
