"""Which of the faults that a run was to inject had to strike, by its log."""

from collections.abc import Mapping
from typing import Any

from spare_megatron.journal.fold import Fold


def is_due(fault: Mapping[str, Any], fold: Fold) -> bool:
    """Whether the run came to the moment of a fault with the group that it was to hit.

    A step that nobody committed does not count, nor does a recovery that there was no need for: `rebuild` is reached
    when another group is fenced in the step, `patch` when that cost the sum.

    Args:
        fault: Of the run record: its step, group and phase.
        fold: The log.
    """
    commits = {commit.step: commit for commit in fold.kept}
    commit = commits.get(fault["step"])
    if commit is None or fault["group"] not in commit.began_with:
        return False
    if fault["phase"] not in ("patch", "rebuild"):
        return True
    before = commits.get(fault["step"] - 1)
    first = 0 if before is None else before.index + 1
    lost_at = [index for index in sorted(fold.fenced) if first <= index < commit.index]
    if not lost_at or fold.fenced[lost_at[0]][0] == fault["group"]:
        return False
    if fault["phase"] == "rebuild":
        return True
    return any(
        fold.entries[index]["entry"] == "retry" for index in range(lost_at[0], commit.index) if index in fold.entries
    )
