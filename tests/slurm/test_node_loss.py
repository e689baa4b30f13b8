"""A job of a real Slurm that loses a node in the middle of a step, and then its first node."""

from collections.abc import Callable

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, SlurmConfig
from spare_megatron.core.phases import Phase
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import FaultRecord
from tests.integration.whole_run import entries_of, patched_in
from tests.slurm.jobs import Cluster, Job, num_records, spare, text_of

LOST_IN = 5
LOST = 1
"""The group on the second node of the first rack, which has no member of etcd."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_commits_the_step_it_lost_a_node_in_takes_a_spare_one_and_outlives_its_first(
    start_cluster: Callable[..., Cluster], submit: Callable[..., Job]
) -> None:
    """The first node has the batch script, the driver, a supervisor and a member of etcd. One of three racks has two of
    the four groups.
    """
    cluster = start_cluster(5, 3)
    # It hangs in the backward pass, and long before that is found its node is lost.
    hang = FaultConfig(phase=Phase.BACKWARD, step=LOST_IN, group=LOST, rank=0, kind="hang")
    job = submit(LayoutConfig(num_groups=4), SlurmConfig(num_spare_nodes=1, max_requeues=0), faults=[hang])
    run_dir = job.run()
    job.wait_until(lambda: num_records(run_dir, LOST, "fault") > 0)
    warning = "warning: rack rack1 has 2 groups (0, 1), and with spare.groups_per_domain=1 some of them may be all"
    assert warning in job.log
    for node, name in enumerate(("n1", "n4", "n2", "n3")):
        assert f"started on {name}" in text_of(run_dir / f"logs/node-{node}.log")
    cluster.power_off("n4")
    job.wait_until(lambda: f"group {LOST} rejoined" in job.log)
    assert "started on n5" in text_of(run_dir / f"logs/node-{LOST}.log")
    cluster.mark_down("n4")
    cluster.power_off("n1")
    cluster.mark_down("n1")
    job.wait_until(lambda: "the driver is gone" in text_of(run_dir / "logs/supervisor-2.log"))
    before = num_records(run_dir, 2, "update")
    job.wait_until(lambda: num_records(run_dir, 2, "update") > before + 3)
    job.signal_end()
    job.wait_until(lambda: job.is_over)
    assert job.state == "CANCELLED", "by the nodes that were left"
    job.wait_until(lambda: cluster.processes() == [])

    assert spare("check", str(run_dir)).startswith("valid")
    summary = job.summary()
    assert (summary["outcome"], summary["groups_lost"], summary["groups_rejoined"]) == ("finished", 2, 1)
    journal = read_journal(run_dir)
    assert [(fault.group, fault.step) for fault in journal.of(FaultRecord)] == [(LOST, LOST_IN)]
    log = [entry for entry in entries_of(journal) if entry["entry"] in ("fence", "commit")]
    fence = next(index for index, entry in enumerate(log) if entry.get("group") == LOST)
    assert [entry["step"] for entry in (log[fence - 1], log[fence + 1])] == [LOST_IN - 1, LOST_IN]
    assert patched_in(journal)[LOST_IN] > 0
