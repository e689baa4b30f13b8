"""Which code this is: a digest of it, and the commit where it stands in a checkout of its own."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

from spare_megatron import __version__

PACKAGE = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"
_ANSWER_S = 10.0


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 of the Python files of these packages of ours, of all of them without a name.

    A checkout changes without its version.
    """
    digest = hashlib.sha256(__version__.encode())
    for folder in [PACKAGE / name for name in packages] or [PACKAGE]:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


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
