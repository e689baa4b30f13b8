"""Which NCCL the ranks of a run use, which names of torch, and what its environment says before they start."""

import ast
import os
import re
import runpy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.config.schema import ClusterConfig, RunConfig
from spare_megatron.config.supported_versions import installed_version
from spare_megatron.devices import gpu
from spare_megatron.process.processes import set_gpu_environment
from spare_megatron.process.specs import NodeSpec, RankSpec, gpu_of
from spare_megatron.rank.bootstrap import choose_device
from spare_megatron.stacking.layout import Layout
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor.rank_processes import RankProcesses


@pytest.mark.parametrize(("found", "is_refused"), [((2, 26, 2), False), ((2, 30, 7, "rc1"), False), ((2, 25, 1), True)])
def test_processes_of_ranks_start_with_a_supported_nccl_alone(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int | str, ...], is_refused: bool
) -> None:
    backend = SimpleNamespace(get_runtime_nccl_version=lambda: found)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))  # that of torch's build, whatever is loaded
    with pytest.raises(ImportError, match=r"NCCL 2\.25\.1 is installed") if is_refused else nullcontext():
        nccl.check_nccl()


@pytest.mark.parametrize(
    "missing", ["Options._timeout", "NCCLConfig.blocking", "abort", "_start_coalescing", "get_runtime_nccl_version"]
)
def test_a_torch_without_a_name_that_is_used_is_refused_at_import(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    complete = MagicMock(Options=MagicMock(_timeout=None))
    owner, _, name = missing.rpartition(".")
    delattr(getattr(complete, owner) if owner else complete, name)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", complete, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    found = f"torch {installed_version('torch')} has no torch.distributed.ProcessGroupNCCL.{missing}, "
    with pytest.raises(ImportError, match=re.escape(found) + ".*pip install"):
        runpy.run_path(nccl.__file__)


def test_every_private_name_of_torch_is_looked_up_at_import() -> None:
    """In the modules that sum over the groups: private attributes of what is not their own."""
    trees = [ast.parse(path.read_text()) for path in Path(nccl.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and ast.unparse(node.value) != "self"
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_names"]
    names = [word.value for call in calls for word in call.args if isinstance(word, ast.Constant)]
    assert set() != used <= {str(name).rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    ("parallel", "before", "after"),
    [
        ({}, None, None),
        ({"pipeline_parallel": 2}, None, None),
        ({"tensor_parallel": 2}, None, "1"),
        ({"context_parallel": 2}, None, "1"),
        ({"tensor_parallel": 2}, "8", "8"),
    ],
)
def test_kernels_are_ordered_by_one_connection_only_where_megatron_needs_it(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int], before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if before is None else {"CUDA_DEVICE_MAX_CONNECTIONS": before})
    set_gpu_environment(Layout(num_groups=2, **parallel))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == after


@pytest.mark.parametrize(
    ("parallel", "is_on"),
    [
        ({"num_groups": 2}, False),
        ({"num_groups": 2, "num_nodes": 2}, True),
        ({"num_groups": 2, "tensor_parallel": 8, "num_nodes": 2}, True),
        ({"num_groups": 4, "tensor_parallel": 4, "num_nodes": 2}, False),
        ({"num_groups": 4, "tensor_parallel": 4, "pipeline_parallel": 2, "num_nodes": 4}, True),
        ({"num_groups": 4, "tensor_parallel": 4, "pipeline_parallel": 2, "num_nodes": 8}, True),
        ({"num_groups": 4, "data_parallel": 4, "num_nodes": 2}, False),
        ({"num_groups": 3, "tensor_parallel": 4, "num_nodes": 2}, False),  # group 1 has two ranks on each
        ({"num_groups": 2, "num_further": 1}, False),  # it may come at any time
    ],
)
@pytest.mark.parametrize("before", [None, "1"])
def test_no_multicast_group_of_nvlink_spans_groups(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int], is_on: bool, before: str | None
) -> None:
    """A killed member would leave those of the other groups undefined."""
    layout = Layout(**parallel)
    on_nodes = [Counter(rank for _, rank in layout.ranks_on(node)) for node in range(layout.num_nodes)]
    assert layout.most_peers_on_node == max(max(ranks.values()) for ranks in on_nodes)
    monkeypatch.setattr(os, "environ", {} if before is None else {"NCCL_NVLS_ENABLE": before})
    set_gpu_environment(layout)
    assert os.environ.get("NCCL_NVLS_ENABLE") == (before if is_on else "0")


def test_of_the_ranks_on_a_gpu_each_poses_as_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL refuses two ranks of one host on a device."""
    monkeypatch.setattr(nccl, "check_nccl", lambda: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    monkeypatch.setattr(gpu, "set_device", lambda _: None)
    monkeypatch.setenv("NCCL_HOSTID", "")
    config = RunConfig(cluster=ClusterConfig(device="gpu", ranks_per_gpu=2))
    common = {"config": config, "run_dir": tmp_path, "store": TcpStoreSpec(host="127.0.0.1", port=1), "faults": ()}
    RankProcesses(NodeSpec(node=0, rank_main=lambda *_: None, **common))
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"  # before any rank imports what uses a GPU
    placed = []
    for group in config.parallel.groups_on(0):
        spec = RankSpec(group=group, incarnation=0, rank=0, **common)
        choose_device(config, spec.device, spec.number)
        placed.append((gpu_of(config, group, 0), os.environ["NCCL_HOSTID"].rpartition("-")[2]))
    assert placed == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
