"""The first part: what the machine has, whether all of it is supported, and whether its GPUs compute."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu_check.scene import Scene, mib, python_version
from benchmarks.origin import origin
from spare_megatron.comm import nccl
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.supported_versions import check_version, installed_version
from spare_megatron.driver.run import look_at_machine
from spare_megatron.rank import rank  # noqa: F401  (it imports all that a rank needs, which checks versions)
from spare_megatron.tools.text.corpus_writer import write_corpus

_CORPUS_BYTES = 4 * 2**20
_OPTIONAL = "transformer-engine"
_SIZE = 256


def examine(scene: Scene) -> None:
    """Raises ImportError for an unsupported version, ValueError without a GPU. Writes the corpus of all parts."""
    versions = {"Python": python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda or "none"}
    if torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.distributed.ProcessGroupNCCL.get_runtime_nccl_version()))
    for package in ("megatron-core", _OPTIONAL, "numpy", "triton"):
        versions[package] = installed_version(package) or "none"
    found = origin()
    scene.report(versions=versions, machine=found["machine"], commit=found["commit"], devices=[])
    if (installed := installed_version(_OPTIONAL)) is not None:
        check_version(_OPTIONAL, installed)
    if not scene.is_dry:
        scene.report(devices=list(_devices()))
        nccl.check_nccl()
    write_corpus(_documents(), scene.corpus)


def _devices() -> Iterator[str]:
    """Names and memory, of GPUs that have multiplied two matrices. ValueError: there is none that a run would find."""
    num_gpus = look_at_machine(RunConfig()).num_gpus
    if num_gpus < 1 or not torch.cuda.is_available():
        raise ValueError(
            f"no GPU: the driver lists {num_gpus}, torch {torch.__version__} sees {torch.cuda.device_count()}"
        )
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(_SIZE, _SIZE, device=f"cuda:{index}", dtype=torch.bfloat16)
        if not bool(((ones @ ones) == _SIZE).all()):
            raise ValueError(f"GPU {index} multiplies wrong: {(ones @ ones).unique().tolist()} instead of {_SIZE}")
        free, memory = torch.cuda.mem_get_info(index)
        yield f"{torch.cuda.get_device_name(index)}, {mib(memory)}, {mib(free)} free"


def _documents() -> Iterator[bytes]:
    """Sources of Python's own library."""
    num_bytes = 0
    for file in sorted(Path(os.__file__).parent.glob("**/*.py")):
        num_bytes += file.stat().st_size
        if num_bytes > _CORPUS_BYTES:
            return
        yield file.read_bytes()
