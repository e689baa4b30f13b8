"""What the communicators between groups use of a CUDA build of torch, as far as it shows without a GPU."""

import ast
import mmap
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.config.schema import ControlConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.run_sizes import MOST_CHANNELS
from spare_megatron.devices import gpu
from spare_megatron.tools.doctor.node_survey import FactsWanted, examine_node

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(
        not dist.is_nccl_available() or not any(dist.ProcessGroupNCCL.get_runtime_nccl_version()),
        reason="needs a CUDA build of torch and its NCCL, not launch/cuda_stand_ins.py",
    ),
]

PATIENCE = timedelta(seconds=30)


def test_torch_takes_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.ProcessGroupNCCL.Options
    taken: list[Any] = []

    class Unconnected:
        """torch's own constructor needs a GPU."""

        Options = real

        def __init__(self, _store: dist.Store, _rank: int, _size: int, options: Any) -> None:
            taken.append(options)

        def eager_connect_single_device(self, _device: torch.device) -> None:
            """Needs one, too."""

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Unconnected)
    monkeypatch.setattr(gpu, "set_device", lambda _device: None)
    for name in ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "WAIT_TIMEOUT_DUMP_MILSEC"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "")  # so that it is put back
    device = torch.device("cuda", 0)
    nccl.connect(dist.HashStore(), 0, 1, device=device, timeout=PATIENCE, is_wanted=lambda: True)
    [options] = taken
    assert options._timeout == PATIENCE
    assert options.config.blocking != real().config.blocking, "it is undefined unless it is set"
    assert options.config.max_ctas == MOST_CHANNELS != real().config.max_ctas


def test_every_attribute_that_is_used_of_a_backend_is_there() -> None:
    used = {
        node.attr
        for path in Path(nccl.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("backend")
    }
    assert {"allreduce", "abort", "_allgather_base", "_start_coalescing"} <= used
    assert used <= set(dir(dist.ProcessGroupNCCL))


def test_torch_reads_the_variables_that_are_set() -> None:
    set_here = set(re.findall(r'"(TORCH_NCCL_\w+)"', Path(nccl.__file__).read_text()))
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        read_there = {name for name in set_here if content.find(name.encode() + b"\0") >= 0}
    assert read_there == set_here != set()


def test_the_nccl_that_is_loaded_is_supported_and_reported(tmp_path: Path) -> None:
    nccl.check_nccl()
    facts = examine_node(FactsWanted(data=DataConfig(), control=ControlConfig(), ports=(), folder=tmp_path, token="."))
    assert facts.versions["NCCL"] == ".".join(map(str, dist.ProcessGroupNCCL.get_runtime_nccl_version()))
