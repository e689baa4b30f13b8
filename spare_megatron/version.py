"""The version, and which code runs: its digest and, if it stands in a checkout of its own, a commit.

All processes of a run must have equal code. None imports from the working directory.
"""

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parent
UNKNOWN = "unknown"
NUM_DIGITS = 12
"""Digits of a digest shown to users."""
_ANSWER_S = 10.0


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 of the Python files of these packages of `spare_megatron`, or of all, and of their tables, which are TOML
    outside `configs`; cached as imported.
    """
    digest = hashlib.sha256(__version__.encode())
    for folder in [PACKAGE / name for name in packages] or [PACKAGE]:
        assert folder.is_dir(), f"{folder} has moved: its changes would not change the digest"
        tables = (file for file in folder.rglob("*.toml") if PACKAGE / "configs" not in file.parents)
        for file in sorted([*folder.rglob("*.py"), *tables]):
            digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def code_mismatch(code: str) -> str:
    """How this process's code differs from that of the run's driver, whose digest is `code`; empty if it does not."""
    own = code_digest()
    if own == code:
        return ""
    return f"spare_megatron in {PACKAGE} is code {own[:NUM_DIGITS]}, the driver of the run has {code[:NUM_DIGITS]}"


def start_in_safe_path_mode() -> None:
    """Keeps the working directory off `sys.path` of this process's Python children; other machines pass `python -P`."""
    os.environ["PYTHONSAFEPATH"] = "1"


def commit(num_digits: int = 40) -> str:
    """The commit of the checkout, with `-dirty` if it has changes; UNKNOWN if git does not track this package there."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        return _git("describe", "--always", "--dirty", f"--abbrev={num_digits}")
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a slow file system
        return UNKNOWN


def _git(*words: str) -> str:
    # No optional locks: git would refresh the index under a lock, in which a command of the user's then fails.
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    return done.stdout.strip()
