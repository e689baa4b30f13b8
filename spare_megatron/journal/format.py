"""Which format a journal is of, and whether this version reads it."""

import json
from pathlib import Path
from typing import Any

from spare_megatron import __version__
from spare_megatron.journal.lines import FORMAT
from spare_megatron.journal.origin import origin_field


def require_known_format(run_dir: Path) -> None:
    """Returns if the journal, which may be without its first record yet, is of a format that this version reads.

    Raises:
        ValueError: It is of a later one.
    """
    found = _first_record(run_dir).get("format", FORMAT)
    if found not in range(FORMAT + 1):
        raise ValueError(
            f"the journal of {run_dir} is of format {found!r} ({_origin(run_dir)}); spare_megatron {__version__} reads "
            f"formats 1 to {FORMAT}: use the version that wrote it, or a later one"
        )


def _first_record(run_dir: Path) -> dict[str, Any]:
    try:
        with (run_dir / "journal" / "driver.jsonl").open("rb") as file:
            record = json.loads(file.readline())
    except (OSError, ValueError):  # what is missing or damaged is told by whoever reads all of it
        return {}
    return record if isinstance(record, dict) else {}


def _origin(run_dir: Path) -> str:
    """Which code wrote it, as the run's directory says."""
    version, commit = origin_field(run_dir, "version"), origin_field(run_dir, "commit")
    if version and commit:
        return f"written by spare_megatron {version}, commit {commit}"
    return "origin.json does not say by which version it was written"
