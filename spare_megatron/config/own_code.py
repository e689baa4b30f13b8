"""Which code this is: a digest of it, and the commit where it stands in a checkout of its own.

All processes of a run have the same. None of them imports from the working directory, where a user may keep a copy of
this package, or a file that has the name of one of Python's modules.
"""

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

from spare_megatron import __version__

PACKAGE = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"
NUM_DIGITS = 12
"""Of a digest, for people."""
_ANSWER_S = 10.0


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 of the Python files of these packages of ours, of all of them without a name.

    A checkout changes without its version. The files are read once: a process that has imported them, and what is
    forked from it, keeps this digest when they change.
    """
    digest = hashlib.sha256(__version__.encode())
    for folder in [PACKAGE / name for name in packages] or [PACKAGE]:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def code_mismatch(code: str) -> str:
    """How this process's code differs from that of its run; empty if it does not.

    Args:
        code: Digest of the code of the run's driver.
    """
    own = code_digest()
    if own == code:
        return ""
    return f"spare_megatron in {PACKAGE} is code {own[:NUM_DIGITS]}, the driver of the run has {code[:NUM_DIGITS]}"


def start_in_safe_path_mode() -> None:
    """Keeps the working directory off `sys.path` of every Python that this process and those below it start.

    Also of those that multiprocessing starts with `-c`. A command for another machine has `python -P` of its own.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def commit(num_digits: int = 40) -> str:
    """The commit of the checkout, with `-dirty` behind it where that has changes; UNKNOWN where git cannot tell.

    A package that is installed may lie in the checkout of another project, whose commit says nothing of it.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        return _git("describe", "--always", "--dirty", f"--abbrev={num_digits}")
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a file system too slow for it
        return UNKNOWN


def _git(*words: str) -> str:
    command = ["git", "-C", str(PACKAGE), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    return done.stdout.strip()
