"""Which snapshot settings are refused, and which raise a warning."""

from dataclasses import replace

import pytest

from spare_megatron.config.checks.validate import problems, warnings
from spare_megatron.config.schema import AuditConfig, ClusterConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig, SnapshotConfig
from tests.unit.configured import CPU, configured

GOOD = replace(configured(), snapshot=SnapshotConfig(every_steps=10, redundancy=1), cluster=ClusterConfig(num_nodes=2))

REFUSED = {
    "negative redundancy": (replace(GOOD, snapshot=SnapshotConfig(redundancy=-1)), "snapshot.redundancy=-1"),
    "every step": (replace(GOOD, snapshot=SnapshotConfig(every_steps=1)), "snapshot.every_steps=1"),
    "negative steps": (replace(GOOD, snapshot=SnapshotConfig(every_steps=-5)), "snapshot.every_steps=-5"),
    "nothing to go back for": (
        replace(GOOD, checkpoint=CheckpointConfig(max_restarts=0), audit=AuditConfig(every_steps=0)),
        "checkpoint.max_restarts=0",
    ),
}


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_setting_to_change(config: RunConfig, named: str) -> None:
    (text,) = problems(config, CPU)
    assert named in text


def test_good_settings_and_none_raise_neither_errors_nor_warnings() -> None:
    for config in (GOOD, configured(), replace(GOOD, snapshot=SnapshotConfig(every_steps=2, redundancy=0))):
        assert [*problems(config, CPU), *warnings(config, CPU)] == []


def test_more_copies_than_nodes_raise_a_warning() -> None:
    (text,) = warnings(replace(GOOD, cluster=ClusterConfig(num_nodes=1)), CPU)
    assert "snapshot.redundancy=1 needs 2 copies" in text
    assert "cluster.num_nodes=1" in text


def test_more_copies_of_partitions_than_they_have_hosts_raise_a_warning() -> None:
    (text,) = warnings(replace(GOOD, optimizer=OptimizerConfig(sharding="stacked", redundancy=1)), CPU)
    assert "snapshot.redundancy=1 needs 2 copies" in text
    assert "each is kept on only 1" in text
    stacked = replace(GOOD, optimizer=OptimizerConfig(sharding="stacked", redundancy=2))
    assert [*problems(stacked, CPU), *warnings(stacked, CPU)] == []
