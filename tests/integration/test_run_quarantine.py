"""Whole runs in which a machine is put into quarantine, and comes back once an examination of it has passed."""

from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.schema import AuditConfig, ClusterConfig, FaultConfig, FaultsConfig, LayoutConfig
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.journal.follow import read_run_state
from spare_megatron.journal.records import ExaminationRecord, FaultRecord, PlacesRecord
from spare_megatron.process.reports import MachineExamined, MachineQuarantined
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import complete_run, fenced_groups, losses_of, params_of, tiny_config

pytestmark = pytest.mark.timeout(300)

STEPS, AUDITED, BACK_FROM = 7, 2, 5


def test_an_outvoted_machine_stays_out_until_its_examination_passes_and_no_bit_changes(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Its layer drifts for some seconds, in which its matrix products do, too."""
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=AUDITED, group=2, kind="drift", seconds=6.0)
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=STEPS,
        faults=[fault],
        mode="reproducible",
        rejoins=1,
        cluster=ClusterConfig(device="cpu", num_nodes=4),
        heartbeat_s=1.0,
    )
    config = replace(config, audit=AuditConfig(every_steps=AUDITED + 1))
    watch = Watch(awaited=frozenset({(BACK_FROM - 1, Member(GroupId(2), 1))}))
    run = complete_run(config, tmp_path / "run", watch)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["drift"]
    assert fenced_groups(run.journal) == {2}
    begun, ended = {record.index: record for record in run.journal.of(PlacesRecord)}.values()
    assert [(machine, cause) for machine, cause, _ in begun.quarantined] == [(2, "outvoted")]
    assert "agree on other values" in str(begun.quarantined[0][2])
    assert ended.released == [2]
    *failed, passed = run.journal.of(ExaminationRecord)
    assert failed, "the first examination comes while the machine computes wrongly"
    assert all("its matrix products differ from those of machine" in one.reason for one in failed)
    assert (passed.machine, passed.reason) == (2, "")
    assert set(passed.likes) == {"0", "1", "3"}
    assert [event.machine for event in run.events if isinstance(event, MachineQuarantined)] == [2]
    assert len([event for event in run.events if isinstance(event, MachineExamined)]) == len(failed) + 1
    run_state = read_run_state(run.run_dir)
    assert run_state.quarantined == {}
    texts = " ".join(event.text for event in run_state.events(100))
    assert "machine 2 stays in quarantine: its matrix products differ" in texts
    assert "machine 2 has passed its examination" in texts

    calm = complete_run(replace(config, faults=FaultsConfig()), tmp_path / "calm")
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert params_of(run)[STEPS] == params_of(calm)[STEPS]
