"""Run directories of earlier versions are judged, summed up and shown as by the version that kept them."""

import difflib
import json
from pathlib import Path

import pytest

from tests.kept_runs.runs import CHECKPOINTS, CHECKPOINTS_OF_VERSIONS, FOLDER, answers_of, expected_answers, unpack

EXPECTED = expected_answers()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_kept_run_is_answered_for_as_when_it_was_kept(name: str, tmp_path: Path) -> None:
    expected, found = (
        json.dumps(answers, indent=1, sort_keys=True).splitlines()
        for answers in (EXPECTED[name], answers_of(unpack(name, tmp_path)))
    )
    difference = list(difflib.unified_diff(expected, found, "when it was kept", "now", n=2, lineterm=""))
    assert not difference, "\n".join(difference)


def test_each_archive_has_its_answers() -> None:
    archives = {file.name.removesuffix(".tar.xz") for file in FOLDER.glob("*.tar.xz")}
    assert archives == {*EXPECTED, CHECKPOINTS, CHECKPOINTS_OF_VERSIONS}
