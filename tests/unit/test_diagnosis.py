"""What is reported about nodes, from what was found on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import ValidationCorpus
from spare_megatron.config.supported_versions import version_problem
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.formats.store_space import STEP_BYTES, StoreSpace
from spare_megatron.machine.gpus import Gpu
from spare_megatron.tools.doctor.diagnosis import (
    ClockOffset,
    NodeFacts,
    NodeFinding,
    NodeMeasurements,
    Rate,
    diagnose,
    nodes_per_group,
    own_etcd_ports,
)

H100 = Path(__file__).parents[2] / "configs/run/gpt_7b_h100.toml"
GIB = 2**30
NUM_NODES = 17
"""One to spare."""


def configured(*overrides: str) -> RunConfig:
    return load_run_config(H100, overrides).config


CONFIG = configured()
CHECKPOINT = run_sizes(CONFIG).checkpoint_bytes
RANK = run_sizes(CONFIG).memory.total_bytes
GPU = Gpu(uuid="GPU-a", name="H100", memory_bytes=80 * GIB, free_bytes=79 * GIB)
FACTS = NodeFacts(
    host="machine",
    versions={"torch": "2.13.0", "CUDA": "13.0", "NCCL": "2.29", "spare_megatron": "0.1.0 (abc)"},
    torch_failure="",
    gpus=(GPU,) * 8,
    gpu_driver="570.1",
    open_files=65536,
    open_files_most=65536,
    locked_memory_bytes=None,
    has_infiniband=True,
    busy_ports=(),
    store_failures={},
    store_refusal="",
    store_space=None,
    corpus_bytes=(1000, 100),
    sees_folder=True,
    folder_free_bytes=5 * CHECKPOINT,
)
LINK = Rate(bytes_per_s=1e9)


def nodes(**changed: NodeMeasurements) -> list[NodeMeasurements]:
    """Healthy ones, apart from those that are named."""
    healthy = NodeMeasurements(
        name="",
        facts=FACTS,
        clock=ClockOffset(ahead_s=0.0, error_s=0.001),
        write=Rate(bytes_per_s=1e9),
        link_to="next",
        link=LINK,
    )
    names = [f"n{index}" for index in range(NUM_NODES)]
    return [changed.get(name, replace(healthy, name=name)) for name in names]


def test_files_of_validation_sets_are_looked_at_too() -> None:
    sets = (ValidationCorpus(name="wiki", corpus="data/wiki"),)
    config = replace(CONFIG, data=replace(CONFIG.data, validation=sets))
    found = diagnose(
        config, "/ck", [replace(node, facts=replace(FACTS, corpus_bytes=(1, 1, 1, None))) for node in nodes()]
    )
    texts = [finding.text for finding in found if finding.check == "corpus"]
    assert len(texts) == NUM_NODES
    assert all("data/wiki.idx cannot be read" in text for text in texts)


def findings(config: RunConfig = CONFIG, /, **change: Any) -> list[NodeFinding]:
    """With one node, n3, whose facts or report are changed so."""
    node = nodes()[3]
    of_report = {key: value for key, value in change.items() if key in ("clock", "write", "link", "facts", "failure")}
    of_facts = {key: value for key, value in change.items() if key not in of_report}
    if of_facts:
        node = replace(node, facts=replace(FACTS, **of_facts))
    return diagnose(config, "/ck", nodes(n3=replace(node, **of_report)))


def test_of_healthy_nodes_nothing_is_reported() -> None:
    assert diagnose(CONFIG, "/ck", nodes()) == []


@pytest.mark.parametrize(
    ("change", "check", "is_problem", "expected"),
    [
        ({"facts": None, "failure": "no answer"}, "node", True, "no answer"),
        ({"gpus": (GPU,) * 7}, "gpus", True, "7 GPUs are visible, and its 8 ranks need 8;"),
        (
            {"gpus": (replace(GPU, memory_bytes=RANK - 1, free_bytes=RANK - 1), *(GPU,) * 7)},
            "gpus",
            True,
            "GPU 0 (GPU-a) has",
        ),
        ({"gpus": (*(GPU,) * 7, replace(GPU, free_bytes=RANK - 1))}, "gpus", True, "others use it"),
        ({"gpus": (replace(GPU, name="A100"), *(GPU,) * 7)}, "gpus", False, "1 x A100, 7 x H100, and elsewhere 8 x"),
        ({"gpu_driver": "535.2"}, "gpus", False, "driver is 535.2, and 570.1 elsewhere"),
        ({"nccl_cumem": "0"}, "gpus", False, "NCCL_CUMEM_ENABLE=0 is set: GPUs of this node"),
        ({"versions": {**FACTS.versions, "NCCL": "2.27"}}, "versions", True, "NCCL is 2.27, and 2.29 on most nodes"),
        (
            {"versions": {key: value for key, value in FACTS.versions.items() if key != "spare_megatron"}},
            "versions",
            True,
            "spare_megatron is absent, and 0.1.0",
        ),
        ({"versions": {**FACTS.versions, "CUDA": ""}}, "versions", True, "torch 2.13.0 is built without CUDA or ROCm"),
        ({"torch_failure": "OSError: libcudart"}, "versions", True, "torch cannot be used: OSError: libcudart"),
        (
            {"clock": ClockOffset(ahead_s=2.1, error_s=0.01)},
            "clock",
            False,
            "2.1 s ahead of the driver's, more than 2 x",
        ),
        ({"clock": ClockOffset(ahead_s=-2.1, error_s=0.01)}, "clock", False, "2.1 s behind the driver's"),
        ({"open_files": 256}, "limits", True, "raise it by `ulimit -n 352`"),
        ({"open_files": 256, "open_files_most": 256}, "limits", True, "limits.conf, as root, and `ulimit -n 352`"),
        ({"temp_folder": f"/{'x' * 75}"}, "limits", True, "set TMPDIR to a shorter path"),
        ({"locked_memory_bytes": 65536}, "limits", False, "may lock 64 KiB of memory"),
        ({"corpus_bytes": (1000, None)}, "corpus", True, "data/corpus.idx cannot be read"),
        ({"corpus_bytes": (1000, 99)}, "corpus", True, "the corpora have (1000, 99) bytes (.bin, .idx), and"),
        ({"sees_folder": False, "folder_free_bytes": 0}, "storage", True, "/ck is not the folder that the driver's"),
        ({"write": Rate(failure="Permission denied")}, "storage", True, "/ck cannot be written: Permission denied"),
        ({"folder_free_bytes": CHECKPOINT - 1}, "storage", True, "and a checkpoint takes"),
        ({"folder_free_bytes": 4 * CHECKPOINT - 1}, "storage", False, "checkpoint.keep_last=2, one that has yet"),
        ({"write": Rate(bytes_per_s=CHECKPOINT / 1801)}, "storage", True, "and checkpoint.timeout_s=1800"),
        ({"write": Rate(bytes_per_s=0.0)}, "storage", True, "takes 0 B a second"),
        ({"link": Rate(failure="refused")}, "network", True, "next cannot be reached from here: refused"),
        ({"link": Rate(bytes_per_s=0.19e9)}, "network", False, "181 MiB a second to next over TCP, and 954 MiB"),
    ],
)
def test_a_node_that_is_unfit_is_named_with_value_limit_and_what_to_do(
    change: dict[str, Any], check: str, is_problem: bool, expected: str
) -> None:
    found = findings(**change)
    fitting = [finding for finding in found if finding.check == check and expected in finding.text]
    assert [finding.is_problem for finding in fitting] == [is_problem], found
    assert {finding.node for finding in found} == {"n3"}


@pytest.mark.parametrize(
    "change",
    [
        {"clock": ClockOffset(ahead_s=2.1, error_s=0.2)},  # a slow answer proves nothing
        {"clock": ClockOffset(ahead_s=-1.9, error_s=0.0)},
        {"open_files": 352},
        {"temp_folder": f"/{'x' * 74}"},
        {"address_space_bytes": 1},  # of no use to a GPU
        {"has_infiniband": False, "locked_memory_bytes": 65536},
        {"folder_free_bytes": 4 * CHECKPOINT},
        {"write": Rate(bytes_per_s=CHECKPOINT / 1799)},
        {"link": Rate(bytes_per_s=0.21e9)},
        {"gpus": (*(GPU,) * 8,), "busy_ports": (2379,)},  # n3 is no member of etcd
    ],
)
def test_within_the_limits_nothing_is_reported(change: dict[str, Any]) -> None:
    assert findings(**change) == []


def test_audits_need_room_for_the_newest_audited_checkpoint() -> None:
    config = configured("reduce.mode=reproducible", "audit.every_steps=7")
    assert findings(config, folder_free_bytes=5 * CHECKPOINT) == []
    [found] = findings(config, folder_free_bytes=5 * CHECKPOINT - 1)
    assert "one that has yet to be confirmed, the newest audited one and one that is being written" in found.text


def test_members_of_the_jobs_etcd_need_their_two_ports_and_no_others() -> None:
    assert [own_etcd_ports(CONFIG, node, NUM_NODES) for node in range(4)] == [
        (2379, 2380),
        (2381, 2382),
        (2383, 2384),
        (),
    ]
    assert [own_etcd_ports(CONFIG, node, 2) for node in range(2)] == [(2379, 2380), ()]
    there = configured('control.endpoints=["https://e:2379"]')
    assert own_etcd_ports(there, 0, NUM_NODES) == ()
    node = replace(nodes()[1], facts=replace(FACTS, busy_ports=(2379, 2382)))
    (found,) = diagnose(CONFIG, "/ck", nodes(n1=node))
    assert (found.node, found.check, found.is_problem) == ("n1", "ports", True)
    assert "port 2382 is taken" in found.text
    assert "slurm.etcd_port=2379" in found.text


def test_one_silent_member_of_etcd_is_a_warning_and_all_silent_are_a_problem() -> None:
    there = configured('control.endpoints=["https://a:1","https://b:1"]')
    assert [found.is_problem for found in findings(there, store_failures={"https://a:1": "refused"})] == [False]
    both = {"https://a:1": "refused", "https://b:1": "refused"}
    assert [found.is_problem for found in findings(there, store_failures=both)] == [True, True]


def space(used_bytes: int, limit_bytes: int | None = 2 * GIB, *, is_full: bool = False) -> StoreSpace:
    return StoreSpace(used_bytes=used_bytes, limit_bytes=limit_bytes, is_full=is_full)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (space(GIB), []),
        (space(2 * GIB), ["etcd holds 2 GiB of the 2 GiB of its --quota-backend-bytes"]),
        (space(1 << 40, None), []),
        (space(GIB, is_full=True), ["etcd is full and refuses all writes, at 1 GiB of the 2 GiB of its"]),
        (space(GIB, None, is_full=True), ["etcd is full and refuses all writes, at 1 GiB; remove"]),
    ],
)
def test_an_etcd_that_is_all_but_full_is_named_once_for_all_nodes(space: StoreSpace, expected: list[str]) -> None:
    there = configured('control.endpoints=["https://a:1"]')
    reported = [replace(node, facts=replace(FACTS, store_space=space)) for node in nodes()]
    found = diagnose(there, "/ck", reported)
    assert [(one.node, one.check, one.is_problem) for one in found] == [("n0", "store", space.is_full)] * len(expected)
    assert all(text in one.text and "alarm disarm" in one.text for text, one in zip(expected, found, strict=True))


def test_the_log_of_all_steps_has_to_find_room_in_etcd() -> None:
    most = (8 * GIB // 10 - GIB // 2) // STEP_BYTES
    for num_steps, num_found in ((most, 0), (most + 1, 1)):
        there = configured('control.endpoints=["https://a:1"]', f"train.steps={num_steps}")
        reported = [replace(node, facts=replace(FACTS, store_space=space(GIB // 2, GIB))) for node in nodes()]
        assert len(diagnose(there, "/ck", reported)) == num_found


def test_an_etcd_that_can_be_connected_to_and_refuses_is_a_problem_of_the_node() -> None:
    (found,) = findings(store_refusal="etcd refuses user alice: authentication failed")
    assert found.is_problem
    assert "can be connected to, but etcd refuses user alice" in found.text


def test_on_cpus_gpus_and_locked_memory_do_not_matter_and_tcp_carries_the_reduction() -> None:
    cpu = configured("cluster.device=cpu", "reduce.timeout_s=60")
    assert findings(cpu, gpus=(), gpu_driver="", locked_memory_bytes=1) != []
    same = [replace(node, facts=replace(FACTS, gpus=(), gpu_driver="", locked_memory_bytes=1)) for node in nodes()]
    assert diagnose(cpu, "/ck", same) == []
    # 8 ranks send and receive a bucket of 32 MiB each.
    (found,) = findings(cpu, link=Rate(bytes_per_s=512 * 2**20 / 61))
    assert "would take 61 s, and reduce.timeout_s=60" in found.text
    assert found.is_problem


def test_a_checkpoint_that_takes_longer_than_its_interval_is_a_warning() -> None:
    often = configured("checkpoint.cadence=fixed", "checkpoint.interval_s=100")
    (found,) = findings(often, write=Rate(bytes_per_s=CHECKPOINT / 101))
    assert "101 s for this node's part of a checkpoint, and checkpoint.interval_s=100" in found.text
    assert not found.is_problem


def test_without_checkpoints_their_room_does_not_matter() -> None:
    none = configured("checkpoint.cadence=fixed", "slurm.max_requeues=0")
    assert findings(none, folder_free_bytes=0, write=Rate(bytes_per_s=1.0)) == []


def test_a_group_on_several_nodes_writes_a_checkpoint_together() -> None:
    wide = configured("layout.num_groups=8", "layout.pipeline_parallel=2", "spare.redundancy=2")
    assert (nodes_per_group(CONFIG), nodes_per_group(wide)) == (1, 2)
    size = run_sizes(wide).checkpoint_bytes
    assert findings(wide, folder_free_bytes=9 * size, write=Rate(bytes_per_s=size / 2 / 1799)) == []


def test_of_equally_many_versions_that_of_the_first_node_counts() -> None:
    other = replace(FACTS, versions={**FACTS.versions, "torch": "2.12"})
    two = [nodes()[0], replace(nodes()[1], facts=other)]
    (found,) = diagnose(CONFIG, "/ck", two)
    assert (found.node, found.text) == ("n1", "torch is 2.12, and 2.13.0 on most nodes; install the same on all")


def test_versions_that_are_not_supported_are_named_with_what_to_do() -> None:
    te = ">=2.9,<2.12"
    versions = {"Python": "3.14.1", "torch": "2.16.0", "megatron-core": "0.16.1", "transformer-engine": "2.12.0"}
    found = findings(CONFIG, versions=FACTS.versions | versions | {"NCCL": "2.28.7"})
    texts = [finding.text for finding in found if "most nodes" not in finding.text]
    assert texts == [
        "Python 3.14.1 is installed, spare_megatron needs >=3.11,<3.14: make the environment with another python",
        "torch 2.16.0 is installed, spare_megatron needs >=2.11,<2.16: pip install 'torch>=2.11,<2.16'",
        f"transformer-engine 2.12.0 is installed, spare_megatron needs {te}: pip install 'transformer-engine{te}'",
        version_problem("NCCL", "2.28.7"),
    ]
    later = versions | {"Python": "3.13.0", "torch": "2.15.0", "megatron-core": "0.19.2"}
    assert all("most nodes" in one.text for one in findings(CONFIG, versions=FACTS.versions | later))


def test_two_links_have_no_usual_speed() -> None:
    two = [nodes()[0], replace(nodes()[1], link=Rate(bytes_per_s=1e6))]
    assert diagnose(CONFIG, "/ck", two) == []


def test_findings_come_in_the_order_of_the_nodes() -> None:
    gone = NodeMeasurements(name="n9", failure="no answer")
    few = replace(nodes()[4], facts=replace(FACTS, gpus=(GPU,)), link=Rate(failure="refused"))
    found = diagnose(CONFIG, "/ck", nodes(n9=gone, n4=few))
    assert [finding.node for finding in found] == ["n4", "n4", "n4", "n9"]
