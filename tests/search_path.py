"""Where the processes that tests start look for modules."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_checkout(*first: Path) -> str:
    """A value for PYTHONPATH: these folders, this checkout, then what is there: perhaps all that a machine has."""
    there = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return os.pathsep.join(dict.fromkeys([*map(str, first), str(ROOT), *there]))


def put_checkout_first() -> None:
    """For the fork server, which does not look where this process does."""
    os.environ["PYTHONPATH"] = with_checkout()
