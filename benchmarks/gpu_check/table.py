"""The results as lines of Markdown for benchmarks/RESULTS.md."""

from collections.abc import Iterator, Mapping
from typing import Any


def as_table(document: Mapping[str, Any]) -> str:
    """Where the figures come from, the verdict of each part, and its figures."""
    return "\n".join(_lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    if document["dry_run"]:
        yield "A dry run on the CPU, whose figures mean nothing."
    versions = document["versions"]
    if isinstance(versions, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"{document['machine']}; {versions}."
    yield ""
    yield "| what | figure | command | commit, date |"
    yield "| --- | --- | --- | --- |"
    came_from = f"{document['commit']}, {document['date']}"
    for part in document["parts"]:
        command = f"`launch/gpu-check --only {part['name']}`"
        verdict = part["verdict"] + (f": {part['reason']}" if part["reason"] else f", {part['seconds']:.0f} s")
        for what, figure in [(part["measures"], verdict), *part["rows"]]:
            yield f"| {_cell(what)} | {_cell(figure)} | {command} | {came_from} |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
