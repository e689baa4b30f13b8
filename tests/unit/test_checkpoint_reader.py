"""Reading checkpoints beside all else, and what is seen of them at a glance."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spare_megatron.core.log.actions import Reading
from spare_megatron.state.checkpoint import checkpoint_reader
from spare_megatron.state.checkpoint.checkpoint_reader import CheckpointReader
from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, candidate_of, glance
from tests.unit.test_checkpoints import cut_short, flip_a_bit, save

TIMEOUT_S = 30.0


def read_all(reader: CheckpointReader, path: Path, *numbers: int) -> Reading:
    """What there is to say of the checkpoint when all of it is read that was asked for."""
    checkpoint = glance(path)
    offer = candidate_of(checkpoint.manifest)
    reader.read(offer, checkpoint, numbers)
    done = threading.Event()
    while reader.is_reading:
        assert not done.wait(0.001)
    return next(reading for reading in reader.readings() if reading.candidate == offer)


def test_files_are_read_once_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    reader, path = CheckpointReader(), save(tmp_path, 10)
    flip_a_bit(path / "1.distcp")
    assert read_all(reader, path, 0)[1:] == ((0,), (), "", 2000)
    reason = "step-00000010: 1.distcp does not fit its SHA-256: its content has changed"
    assert read_all(reader, path, 0, 1)[1:] == ((0,), (1,), reason, 4000)


@pytest.mark.parametrize("harm", [cut_short, Path.unlink])
def test_the_quick_check_finds_missing_data_but_no_flipped_bit(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = save(tmp_path, 10)
    flip_a_bit(path / "0.distcp")
    glance(path)
    harm(path / "1.distcp")
    with pytest.raises(DamagedCheckpoint, match=r"step-00000010: 1\.distcp"):
        glance(path)


def test_other_files_under_the_same_step_are_another_checkpoint(tmp_path: Path) -> None:
    first, second = (glance(save(tmp_path / name, step)) for name, step in (("a", 10), ("b", 10)))
    assert candidate_of(first.manifest) == candidate_of(second.manifest), "all of it is the same"
    assert candidate_of(first.manifest) != candidate_of(glance(save(tmp_path, 11)).manifest)


def test_reading_does_not_block_and_stops_when_it_is_no_longer_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a checkpoint that takes longer to read than a group may take to start."""
    is_under_way, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(folder: Path, name: str, stored: object, on_read: Callable[[int], None]) -> None:
        on_read(7)
        is_under_way.set()
        assert may_go_on.wait(TIMEOUT_S)
        try:
            on_read(8)
        finally:
            ended.set()

    monkeypatch.setattr(checkpoint_reader, "verify_file", slow)
    reader, checkpoint = CheckpointReader(), glance(save(tmp_path, 10))
    reader.read(candidate_of(checkpoint.manifest), checkpoint, [0])
    assert is_under_way.wait(TIMEOUT_S)
    assert reader.is_reading
    [reading] = reader.readings()
    assert reading[1:] == ((), (), "", 7), "others see that it gets on"
    reader.stop()
    assert (reader.readings(), reader.is_reading) == ((), False)
    may_go_on.set()
    assert ended.wait(TIMEOUT_S)
    assert reader.readings() == ()
