"""A real run's own costs predict times for all it went through. How well is a matter of the machine: benchmarks/."""

import os
from pathlib import Path

import pytest

from spare_megatron.config.schema import LayoutConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.tools.simulate.measured import WARM_UP_STEPS
from spare_megatron.tools.simulate.run_replay import replay
from spare_megatron.tools.simulate.scenario import CostModel
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import alert_config, assert_masked, complete_run, kill

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

STEPS = 14


def test_every_state_of_a_run_and_every_recovery_is_predicted(text_corpus: Path, tmp_path: Path) -> None:
    faults = [kill(FaultPoint.BACKWARD, 6, 1), kill(FaultPoint.IN_REDUCE, 10, 2)]
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    run = complete_run(alert_config(text_corpus, layout, steps=STEPS, faults=faults), tmp_path / "run")
    assert_masked(run)
    found = calibrate(run.journal)
    assert found.full_speed_groups == len(os.sched_getaffinity(0)) / 2
    assert 0 <= found.pipeline_fill <= 1  # two stages
    assert found.num_steps == STEPS - WARM_UP_STEPS - len(faults)
    assert None not in (found.detect_s, found.agree_s, found.retry_s)
    predicted = replay(run.journal, CostModel(**found.costs))
    assert [(step.num_alive, step.num_steps) for step in predicted.steps] == [(4, 3), (3, 3), (2, 3)]
    assert [recovery.step for recovery in predicted.recoveries] == [6, 10]
    for time in [one.time for one in (*predicted.steps, *predicted.recoveries)]:
        assert time.predicted_s is not None
        assert 0 < time.predicted_s < 10 * time.measured_s


def test_a_run_whose_group_comes_back_measures_and_predicts_what_that_takes(text_corpus: Path, tmp_path: Path) -> None:
    lost_in, back_after = 4, 6
    faults = [kill(FaultPoint.FORWARD, lost_in, 1)]
    config = alert_config(text_corpus, LayoutConfig(num_groups=3), steps=STEPS, faults=faults, rejoins=1)
    watch = Watch(awaited=frozenset({(back_after, Member(GroupId(1), 1))}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    found = calibrate(run.journal)
    num_whole = STEPS - (back_after + 1) - WARM_UP_STEPS
    assert (found.num_recoveries, found.num_joins) == (1, 1)
    assert found.num_steps == 2 + 1 + num_whole  # step 3, those without the group, those after its return
    assert found.join_s is not None
    predicted = replay(run.journal, CostModel(**found.costs))
    assert [(step.num_alive, step.num_steps) for step in predicted.steps] == [(3, 1 + num_whole), (2, 2)]
    assert [recovery.step for recovery in predicted.recoveries] == [lost_in]
    assert [(join.step, join.groups) for join in predicted.joins] == [(back_after + 1, (1,))]
    assert predicted.joins[0].time.predicted_s == pytest.approx(found.join_s)
