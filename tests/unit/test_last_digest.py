"""The digests that a group journals as it ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.core.log.actions import DrainGroups, FinishRun
from spare_megatron.rank import train_step
from spare_megatron.stacking.layout import GroupId, Member
from tests.rank_context import rank_context

ME = Member(GroupId(0))


@pytest.mark.parametrize(
    ("end", "is_syncing", "journaled"),
    [
        (DrainGroups(step=4, members=(ME,)), False, [4]),
        (DrainGroups(step=4, members=(ME,)), True, []),
        (FinishRun(step=4), False, [4]),
    ],
)
def test_a_group_that_leaves_before_a_round_has_no_digest_to_compare_with_those_after_it(
    end: FinishRun | DrainGroups, is_syncing: bool, journaled: list[int]
) -> None:
    found: list[int] = []
    nothing: Any = SimpleNamespace(
        clock=SimpleNamespace(on_stop=lambda: None),
        write_recoveries=lambda: None,
        finish=lambda: None,
        report_finished=lambda: None,
        end=lambda step, **_: found.append(step),
    )
    parts: Any = SimpleNamespace(sites=None, profile=None, reports=nothing, digests=nothing, saves=nothing)
    ctx = rank_context(ME, controller=SimpleNamespace(is_syncing=is_syncing, head=1))
    train_step._stop(ctx, parts, end)
    assert found == journaled
