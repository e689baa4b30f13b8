"""`origin.json`, which names the code that started a run, beside its journal."""

import json
from pathlib import Path

ORIGIN = "origin.json"


def origin_field(run_dir: Path, name: str) -> str | None:
    """One field; empty if the file lacks it, None if there is no file that can be read, as beside a copied journal."""
    try:
        text = (run_dir / ORIGIN).read_bytes()
    except OSError:
        return None
    try:
        return str(json.loads(text)[name])
    except (ValueError, KeyError, TypeError):
        return ""
