"""Folders of Megatron-LM's `--save` in the two forms that they have, each written and read back by its own version.

`python -m tests.megatron_folders.folders` keeps one of the installed megatron-core: the model of `ARGS` on 2 x 2 ranks.
The saved arguments are those of Megatron-LM's own parser where the package has it (from 0.19 on).
"""

import hashlib
import importlib
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "expected.json"
LAYOUT = (2, 2)
"""Tensor and pipeline parallelism."""
ARGS: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "swiglu": True,
    "bias_gelu_fusion": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 32,
    "params_dtype": torch.float32,
}


def kept() -> dict[str, dict[str, str]]:
    """Version of megatron-core -> key of a tensor -> digest of what that version read of its own folder."""
    found: dict[str, dict[str, str]] = json.loads(EXPECTED.read_text())
    return found


def unpack(of_version: str, folder: Path) -> Path:
    """What `--save` named, below a folder."""
    with tarfile.open(FOLDER / f"{of_version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / of_version


def digest(values: Tensor) -> str:
    shape = ",".join(map(str, values.shape))
    return f"{values.dtype} ({shape}) {hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()}"


def read_by_megatron(folder: Path) -> dict[str, Tensor]:
    """All tensors, as the installed Megatron reads them in this process, which must be in no group of processes."""
    importlib.import_module("spare_megatron.mcore")  # first: megatron-core cannot be imported alone without triton
    from megatron.core import dist_checkpointing

    with tempfile.TemporaryDirectory() as store:
        _join(f"{store}/store", rank=0, num_ranks=1)
        try:
            found = dist_checkpointing.load_plain_tensors(str(folder))
        finally:
            dist.destroy_process_group()
    return {key: values for key, values in found.items() if isinstance(values, Tensor)}


def _join(store: str, *, rank: int, num_ranks: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )


def _save(rank: int, store: str, folder: Path, others: Mapping[str, Any]) -> None:
    from spare_megatron.config.schema import RunConfig
    from tests.integration import megatron_group

    torch.set_num_threads(1)
    _join(store, rank=rank, num_ranks=LAYOUT[0] * LAYOUT[1])
    megatron_group.save(RunConfig(), ARGS, LAYOUT, {folder: {"singleton_local_shards": False}}, others)


def _arguments_of_a_launch() -> dict[str, Any]:
    try:
        from megatron.training.arguments import parse_args
    except ModuleNotFoundError:
        return {}
    sys.argv = ["pretrain_gpt.py"]
    return vars(parse_args())


def keep(name: str) -> None:
    """Adds the folder of the installed version. ValueError if there is one: what is kept is never written again."""
    target = FOLDER / f"{name}.tar.xz"
    if target.exists():
        raise ValueError(f"{target} is kept already; delete it first if it is wrong")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        importlib.import_module("spare_megatron.mcore")
        importlib.import_module("tests.integration.megatron_group")
        arguments = (f"{temporary}/store", folder, _arguments_of_a_launch())
        multiprocessing.start_processes(_save, arguments, nprocs=LAYOUT[0] * LAYOUT[1], start_method="fork")
        found = read_by_megatron(folder / "iter_0000007")
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for file in sorted(file for file in folder.rglob("*") if file.is_file()):
                member = tarfile.TarInfo(f"{name}/{file.relative_to(folder)}")
                member.size = file.stat().st_size
                archive.addfile(member, io.BytesIO(file.read_bytes()))
    others = kept() if EXPECTED.exists() else {}
    answers = {**others, name: {key: digest(values) for key, values in found.items()}}
    EXPECTED.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    keep(version("megatron-core"))
