"""Which checkpoints are kept, as they come and are confirmed."""

from collections.abc import Sequence

import pytest

from spare_megatron.core.saves.checkpoint_policy import superseded

STEPS = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("keep_last", "keep_every_steps", "kept"),
    [(1, None, [50]), (3, None, [30, 40, 50]), (1, 20, [10, 20, 40, 50]), (9, None, STEPS)],
)
def test_the_newest_and_one_of_each_stretch_are_kept(
    keep_last: int, keep_every_steps: int | None, kept: Sequence[int]
) -> None:
    assert set(STEPS) - superseded(STEPS, [], keep_last, keep_every_steps) == set(kept)


@pytest.mark.parametrize(
    ("unverified", "keep_last", "kept"),
    [
        ([50], 1, [40, 50]),
        ([50], 2, [30, 40, 50]),
        ([40, 50], 1, [30, 40, 50]),
        ([20, 50], 1, [40, 50]),  # undone, and of no use any more
        (STEPS, 1, STEPS),
        ([60], 1, [50]),
    ],
)
def test_what_may_turn_out_to_be_wrong_supersedes_nothing(
    unverified: Sequence[int], keep_last: int, kept: Sequence[int]
) -> None:
    """With keep_last=1 the one that was refused was the only one."""
    assert set(STEPS) - superseded(STEPS, unverified, keep_last, None) == set(kept)


def test_one_verified_checkpoint_of_each_interval_is_kept_permanently() -> None:
    assert set(STEPS) - superseded(STEPS, [20, 50], 1, 20) == {10, 30, 40, 50}


def test_what_was_kept_permanently_stays_so_as_checkpoints_come_and_go() -> None:
    present: set[int] = set()
    for step in range(3, 100, 3):
        present.add(step)
        present -= superseded(present, [step], 2, 25)
    assert sorted(present) == [3, 27, 51, 75, 93, 96, 99]


@pytest.mark.parametrize(
    ("audited_steps", "unverified", "kept"),
    [
        (None, [], [50]),
        (9, [], [50]),
        (10, [], [10, 50]),
        (39, [], [30, 50]),
        (39, [30], [20, 50]),
        (60, [], [50]),
        (60, [50], [40, 50]),
    ],
)
def test_the_newest_that_is_audited_is_kept(
    audited_steps: int | None, unverified: Sequence[int], kept: Sequence[int]
) -> None:
    assert set(STEPS) - superseded(STEPS, unverified, 1, None, audited_steps) == set(kept)


def test_there_is_always_a_checkpoint_that_is_audited_once_one_was() -> None:
    present: set[int] = set()
    for step in range(3, 100, 3):
        audited_steps = step - step % 20
        present.add(step)
        present -= superseded(present, [step], 2, None, audited_steps)
        assert (step < 20) or any(audited_steps - 3 < one <= audited_steps for one in present)
