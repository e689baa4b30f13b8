"""A run whose groups vote by way of relays, and loses two of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import LossRecord
from spare_megatron.process.reports import RunEvent
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank
from spare_megatron.stacking.layout import Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore
from tests.integration.whole_run import assert_masked, kill, read_run, tiny_config

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

STEPS = 6
HEARTBEAT_S = 2.0
"""Relays have a fraction of it for their part, also on a slow machine."""


class _RecordingLog(DecisionLog):
    """Writes down on which attempt it casts how many votes."""

    def __init__(self, file: Path, store: ControlStore) -> None:
        super().__init__(store)
        self._file = file

    def cast(self, attempt: int, writer: Member, votes: Mapping[Member, str], forget: Sequence[int] = ()) -> int:
        with self._file.open("a") as file:
            file.write(f"{attempt}:{len(votes)}\n")
        return super().cast(attempt, writer, votes, forget)


def recording_rank(spec: RankSpec, reports: Connection) -> None:
    rank.DecisionLog = partial(_RecordingLog, spec.run_dir / f"casts-{spec.group}")
    rank.run_rank(spec, reports)


def test_a_relay_that_is_killed_and_one_that_is_stopped_cost_their_own_groups_alone(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Blocks are 0 and 1, 2 and 3. Both relays are hit when their own group is about to vote."""
    faults = [
        kill(FaultPoint.AFTER_REDUCE, 1, group=2),
        FaultConfig(phase=FaultPoint.AFTER_REDUCE, kind="stop", step=3, group=0, rank=0),
    ]
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), steps=STEPS, faults=faults)
    control = replace(config.control, vote_fan_in=2, heartbeat_interval_s=HEARTBEAT_S)
    config = replace(config, control=control)
    run_dir, events = tmp_path / "run", list[RunEvent]()
    start_run(config, run_dir, events.append, rank_main=recording_rank)
    run = read_run(config, run_dir, events)
    assert_masked(run)
    assert {loss.group for loss in run.journal.of(LossRecord)} == {0, 2}
    casts = {group: (run_dir / f"casts-{group}").read_text().split() for group in range(4)}
    assert any(cast.endswith(":2") for cast in casts[0] + casts[2])
    assert all(cast.endswith(":1") for cast in casts[1] + casts[3])
    # No relay casts for these once their relays are gone.
    assert len(casts[1]) >= STEPS - 3
    assert len(casts[3]) >= STEPS - 1
