"""A whole run with a slow group, which gets less work; its loss and return change no bit either."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, FaultsConfig, LayoutConfig
from spare_megatron.driver.planned_faults import resolve_trace
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, FaultRecord, PacesRecord
from spare_megatron.journal.state.follow import read_run_state
from tests.integration.whole_run import (
    complete_run,
    entries_of,
    fenced_groups,
    kill,
    losses_of,
    params_of,
    tiny_config,
)

pytestmark = pytest.mark.timeout(300)

STEPS, SLOW_FROM, LOST_IN = 24, 3, 16
MICROBATCHES = 6
SLOW = FaultConfig(phase=FaultPoint.FORWARD, kind="slow", step=SLOW_FROM, group=1, rank=0, factor=4.0)


def test_a_slow_group_gets_less_work_and_nothing_else_changes(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=STEPS,
        faults=[SLOW, kill("forward", LOST_IN, 1)],
        num_microbatches=MICROBATCHES,
        mode="reproducible",
        rejoins=1,
        deal_by_pace=True,
    )
    run = complete_run(config, tmp_path / "slow")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert {(fault.kind, fault.group) for fault in run.journal.of(FaultRecord)} == {("slow", 1), ("kill", 1)}
    assert fenced_groups(run.journal) == {1}

    changes = run.journal.of(PacesRecord)
    by_step = defaultdict(list)
    for change in changes:
        by_step[change.step].append(change.permille)
    assert all(permille == of_step[0] for of_step in by_step.values() for permille in of_step), "all folds agree"
    known_in = min(step for step, (permille, *_) in by_step.items() if int(permille.get("1", 0)) > 2000)
    assert SLOW_FROM + 3 <= known_in < LOST_IN
    loads = {
        (record.step, record.group): sum(map(len, record.microbatches.values()))
        for record in run.journal.of(ContributionRecord)
    }
    assert loads[SLOW_FROM, 1] == MICROBATCHES
    [_, lost] = resolve_trace(config)
    assert loads[LOST_IN - 1, 1] < lost.ordinal, "it struck although the group did not come so far"
    assert loads.get((known_in, 1), 0) < MICROBATCHES < max(loads[known_in, group] for group in (0, 2, 3))
    assert any(entry.get("paces") for entry in entries_of(run.journal))
    texts = [event.text for event in read_run_state(run.run_dir).events()]
    assert any(f"from step {known_in} on work is dealt by pace" in text for text in texts)

    calm = complete_run(
        replace(config, faults=FaultsConfig(), spare=replace(config.spare, deal_by_pace=False)), tmp_path / "calm"
    )
    assert calm.journal.of(PacesRecord) == []
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert params_of(run)[STEPS] == params_of(calm)[STEPS]
