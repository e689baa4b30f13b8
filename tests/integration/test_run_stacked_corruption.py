"""State partitions that go wrong on one of their hosts, in runs with stacked optimizer state."""

from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig
from spare_megatron.faults.points import FaultKind, FaultPoint
from spare_megatron.journal.records import FaultRecord
from tests.integration.whole_run import Run, complete_run, entries_of, losses_of, params_of, tiny_config

pytestmark = pytest.mark.timeout(180)

GROUPS = LayoutConfig(num_groups=5)
STEPS = 4


def run_with(corpus: Path, run_dir: Path, redundancy: int, *faults: FaultConfig) -> Run:
    config = tiny_config(
        corpus,
        GROUPS,
        steps=STEPS,
        faults=faults,
        mode="reproducible",
        optimizer=OptimizerConfig(sharding="stacked", redundancy=redundancy),
    )
    run = complete_run(config, run_dir)
    assert len(run.journal.of(FaultRecord)) == len(faults)
    return run


def flip(group: int, kind: FaultKind = "param_flip") -> FaultConfig:
    """Before the update of step 1, in the first partition that the group hosts."""
    return FaultConfig(phase=FaultPoint.AFTER_COMMIT, step=1, group=group, rank=0, kind=kind, bit=10)


def entries(run: Run, kind: str) -> list[dict[str, object]]:
    return [entry for entry in entries_of(run.journal) if entry["entry"] == kind]


@pytest.mark.parametrize("kind", ["param_flip", "moment_flip"])
def test_wrong_state_of_an_owner_is_found_by_its_other_hosts_and_costs_its_group_alone(
    text_corpus: Path, tmp_path: Path, kind: FaultKind
) -> None:
    """Partition 0 is on groups 0, 3 and 4. Group 0 owns it, so that groups 1 and 2 get what it has."""
    expected = run_with(text_corpus, tmp_path / "none", 3)
    assert (expected.summary.outcome, expected.summary.verdict) == ("finished", "valid"), expected.summary
    run = run_with(text_corpus, tmp_path / "run", 3, flip(0, kind))
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    [fence] = entries(run, "fence")
    assert (fence["group"], fence["discard"]) == (0, True)
    assert fence["reason"] == "its state of partition 0 before step 2 differs from that of 2 other hosts"
    [retry] = entries(run, "retry")
    assert (retry["step"], retry["recompute"], retry["gather"]) == (2, True, True)
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert run.summary.params_sha256 == expected.summary.params_sha256
    assert params_of(run)[STEPS] == params_of(expected)[STEPS]


def test_two_hosts_of_a_state_partition_that_differ_end_the_run_which_names_them(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Partition 0 is on groups 0 and 4."""
    run = run_with(text_corpus, tmp_path, 2, flip(0))
    assert (run.summary.outcome, run.summary.verdict) == ("wipe_out", "valid"), run.summary
    assert [entry["group"] for entry in entries(run, "fence")] == [0, 4]
    assert run.summary.outcome_reason == (
        "no surviving group holds partitions [0] of the optimizer state: "
        "groups [0, 4] hold different state of partition 0 before step 2, and no majority is right"
    )
    assert run.summary.steps_committed == 2
