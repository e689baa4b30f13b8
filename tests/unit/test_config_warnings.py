"""Every warning of validation."""

import dataclasses

from spare_megatron.config.checks.validate import warnings
from tests.unit.configured import CPU, GOLOMB, configured


def test_a_comfortable_run_raises_no_warning() -> None:
    assert warnings(configured(*GOLOMB), CPU) == []


def test_lanes_that_wait_for_others_raise_a_warning() -> None:
    overrides = ("layout.data_parallel=3", "layout.num_groups=2", "spare.redundancy=2")
    (warning,) = warnings(configured(*overrides), CPU)
    assert "spare.microbatches_per_shard=4 is no multiple of layout.data_parallel=3" in warning
    assert "2 lanes of each group wait" in warning
    assert warnings(configured(*overrides, "spare.microbatches_per_shard=6"), CPU) == []


def test_tensor_ranks_on_several_machines_raise_a_warning() -> None:
    by_hand = ("cluster.launcher=hand", "cluster.num_nodes=4", "layout.tensor_parallel=2", "layout.data_parallel=2")
    several = ("layout.num_groups=3", "layout.tensor_parallel=4", "cluster.num_nodes=4", "cluster.launcher=hand")
    texts = [[one for one in warnings(configured(*run), CPU) if "tensor" in one] for run in (by_hand, several)]
    assert texts[0] == []
    assert "layout.tensor_parallel=4 does not divide the 3 ranks of a node" in texts[1][0]


def test_more_threads_than_cores_raise_a_warning() -> None:
    config, few = configured(*GOLOMB, "cluster.threads_per_rank=3"), dataclasses.replace(CPU, num_cores=2)
    (text,) = warnings(config, few)
    assert "7 ranks with cluster.threads_per_rank=3 share 2 cores" in text
    assert warnings(config, dataclasses.replace(CPU, num_cores=3)) == [], "as ranks of the demo share cores"


def test_smaller_groups_that_get_as_much_work_as_others_raise_a_warning() -> None:
    groups = ("layout.num_groups=3", "layout.pipeline_parallel=4", "cluster.num_nodes=12", "spare.redundancy=2")
    config = configured(*groups, "layout.least_pipeline_parallel=3", "spare.deal_by_pace=false")
    (text,) = warnings(config, CPU)
    assert "layout.least_pipeline_parallel=3 with spare.deal_by_pace=false" in text


def test_redundancy_of_one_masks_nothing() -> None:
    (text,) = warnings(configured("spare.redundancy=1"), CPU)
    assert "masks nothing" in text


def test_hosts_that_share_a_domain_raise_a_warning() -> None:
    crowded = configured("layout.num_groups=12", "spare.redundancy=3", "spare.groups_per_domain=6")
    [text, *_] = [text for text in warnings(crowded, CPU) if "domain" in text]
    assert "2 of the spare.redundancy=3 hosts of some shard stand in one domain" in text
    apart = configured("layout.num_groups=12", "spare.redundancy=3", "spare.groups_per_domain=4")
    assert not any("domain" in text for text in warnings(apart, CPU))


def test_groups_that_all_host_every_shard_cannot_do_better() -> None:
    assert warnings(configured("layout.num_groups=5", "spare.redundancy=5"), CPU) == []
    assert warnings(configured("layout.num_groups=5", "spare.redundancy=4"), CPU) == []
    in_twos = configured("layout.num_groups=6", "spare.redundancy=6", "spare.groups_per_domain=2")
    assert warnings(in_twos, CPU) == []


def test_a_store_that_others_can_reach_without_a_secret_raises_a_warning() -> None:
    (text,) = warnings(configured(*GOLOMB, "control.listen_address=10.0.0.5"), CPU)
    assert "control.listen_address=10.0.0.5: the embedded store has no authentication" in text
    etcd = (*GOLOMB, "control.store=etcd")
    (text,) = warnings(configured(*etcd, 'control.endpoints=["http://etcd-0:2379"]'), CPU)
    assert "passwords and decisions travel unencrypted" in text
    assert warnings(configured(*etcd, 'control.endpoints=["http://127.0.0.1:2379"]'), CPU) == []
    assert warnings(configured(*etcd, 'control.endpoints=["https://etcd-0:2379"]'), CPU) == []
