"""A job of a real Slurm that loses a node in the middle of a step, a supervisor, its first node, and another one, grows
then, and shrinks.
"""

from collections.abc import Callable

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, SlurmConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import FaultRecord, PlacesRecord
from tests.integration.whole_run import entries_of, patched_in
from tests.slurm.jobs import Cluster, Job, num_records, spare, text_of

LOST_IN = 5
LOST = 1
"""The group on the second rack."""


RE_FORMED = 0
"""The group on the first rack, which is whole again in the end, with a machine of the lost one."""
FURTHER = 3
"""The group that joins at last."""


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_masks_a_lost_node_takes_a_spare_one_outlives_its_first_re_forms_a_group_grows_and_shrinks(
    start_cluster: Callable[..., Cluster], submit: Callable[..., Job]
) -> None:
    """Each of three groups and of a further one has the two nodes of a rack, and the node to spare one of its own. The
    first node has the batch script, the driver, a supervisor and a member of etcd; the others that are lost have no
    member.
    """
    cluster = start_cluster(9, 5)
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    # It hangs in the backward pass, and long before that is found its node is lost.
    hang = FaultConfig(phase=FaultPoint.BACKWARD, step=LOST_IN, group=LOST, rank=1, kind="hang")
    job = submit(layout, SlurmConfig(num_spare_nodes=1, max_requeues=0), faults=[hang], num_further=1)
    run_dir = job.run()
    job.wait_until(lambda: num_records(run_dir, LOST, "fault", rank=1) > 0)
    for node, name in enumerate(("n1", "n6", "n2", "n7", "n3", "n8", "n4", "n9")):
        assert f"started on {name}" in text_of(run_dir / f"logs/node-{node}.log")
    cluster.power_off("n7")
    wait_until_back(job, 1)
    assert "started on n5" in text_of(run_dir / "logs/node-3.log")
    cluster.mark_down("n7")

    job.cancel_step("node-3")  # its node is still in the job, and has room for another
    wait_until_back(job, 2)
    cluster.power_off("n1")
    cluster.mark_down("n1")
    job.wait_until(lambda: "the driver is gone" in text_of(run_dir / "logs/supervisor-2.log"))
    wait_for_updates(job, LOST, 3)

    cluster.power_off("n5")
    cluster.mark_down("n5")
    wait_for_updates(job, RE_FORMED, 1)
    spare("grow", str(run_dir), str(FURTHER))
    wait_for_updates(job, FURTHER, 1)
    spare("drain", str(run_dir), str(FURTHER))
    job.wait_until(lambda: any(entry.get("drain") for entry in entries_of(read_journal(run_dir))))
    job.signal_end()
    job.wait_until(lambda: job.is_over)
    assert job.state == "CANCELLED", "by the nodes that were left"
    job.wait_until(lambda: cluster.processes() == [])

    assert spare("check", str(run_dir)).startswith("valid")
    summary = job.summary()
    assert (summary["outcome"], summary["groups_lost"], summary["groups_rejoined"]) == ("stopped", 4, 4)
    assert summary["steps_lost"] == 0
    journal = read_journal(run_dir)
    assert [group for entry in entries_of(journal) for group, _ in entry.get("drain", ())] == [FURTHER]
    assert [fault.step for fault in journal.of(FaultRecord) if fault.group == LOST] == [LOST_IN]
    log = [entry for entry in entries_of(journal) if entry["entry"] in ("fence", "commit")]
    fence = next(index for index, entry in enumerate(log) if entry.get("group") == LOST)
    assert [entry["step"] for entry in (log[fence - 1], log[fence + 1])] == [LOST_IN - 1, LOST_IN]
    assert patched_in(journal)[LOST_IN] > 0
    *came, re_formed = [
        record for _, record in sorted({record.index: record for record in journal.of(PlacesRecord)}.items())
    ]
    assert [record.holdings for record in came] == [[[11, 3, 1]], [[19, 3, 2]]], "the nodes in the place of n7"
    assert re_formed.holdings == [[2, 0, 1]], "the other node of the group that has lost two"


def wait_until_back(job: Job, time: int) -> None:
    """Until the lost group takes part in steps again, for the first time, the second ..."""
    job.wait_until(lambda: job.log.count(f"group {LOST} rejoined") == time)
    wait_for_updates(job, LOST, 1)


def wait_for_updates(job: Job, group: int, num_updates: int) -> None:
    before = num_records(job.run(), group, "update")
    job.wait_until(lambda: num_records(job.run(), group, "update") >= before + num_updates)
