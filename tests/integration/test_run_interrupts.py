"""A signal in each phase of a start is one line, exit code 130, and the end of all processes."""

import signal
from pathlib import Path

import pytest

from tests.interrupts.trial import interrupt, write_preset

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@pytest.mark.parametrize(
    ("line", "after_s"),
    [
        ("begun", 0.2),
        ("starting: Megatron", 0.4),
        ("starting: control store", 0.0),
        ("starting: 2 ranks", 0.1),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_start_is_one_line(
    text_corpus: Path, tmp_path: Path, line: str, after_s: float, number: signal.Signals
) -> None:
    """As `python -m tests.interrupts` does at 200 moments."""
    write_preset(text_corpus, tmp_path / "preset.toml")
    assert interrupt(tmp_path / "preset.toml", tmp_path / "trial", after_s, line, number).problem == ""
