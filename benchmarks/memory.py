"""Memory of a rank: plain Megatron DDP and its DistributedOptimizer (ZeRO-1) beside ours, replicated and stacked.

With `--lanes D` instead: groups of D lanes beside the DistributedOptimizer over D ranks, which keeps as much state.

Bytes of tensors are counted after some steps, on every rank: those of the model's parameters, of Megatron's gradient
buffers, of what the optimizer holds, and all staging buffers that were ever made, for buckets and gathered parameters.
Beside them stands what the process has grown by since it was forked, activations, allocators and libraries included.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.driver.run import start_run
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.process.processes import end_child, fork_server, start_child, start_embedded_store
from spare_megatron.process.specs import RankSpec
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec
from spare_megatron.tools.bench.plain_megatron import TIMEOUT, join_world, train_steps

MODEL = ["model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8", "layout.pipeline_parallel=1"]
"""About 13 million parameters in one rank."""

COLUMNS = ("parameters", "gradients", "main_parameters", "moments", "staging", "total", "grown", "peak_grown")
_TIMEOUT_S = 300.0


def plain_rank(config: RunConfig, is_sharded: bool, rank: int, spec: StoreSpec, answer: Connection) -> None:
    """Trains as one rank of plain Megatron and sends its memory."""
    before = _process_bytes("VmRSS")
    device = torch.device("cpu")
    join_world(config, rank, open_store(spec).rendezvous("plain", rank, TIMEOUT.total_seconds()), device)
    steps = train_steps(config, device, is_sharded=is_sharded)
    for _ in range(config.train.steps):  # not to its end, where it would let go of its optimizer
        chunk = next(steps)
    answer.send(_memory([chunk], staging=0, before=before))
    dist.barrier()


def own_rank(folder: Path, spec: RankSpec, reports: Connection) -> None:
    """Trains as one rank of ours and writes down its memory."""
    from spare_megatron.comm import bucket_exchange
    from spare_megatron.mcore import trainer
    from spare_megatron.rank import assembly, rank
    from spare_megatron.rank.train_step import train

    before = _process_bytes("VmRSS")
    trainers: list[trainer.GroupTrainer] = []
    stagings: list[Tensor] = []

    class Trainer(trainer.GroupTrainer):
        def __init__(self, *parts: Any, **settings: Any) -> None:
            super().__init__(*parts, **settings)
            trainers.append(self)

    class Staging(bucket_exchange.Staging):
        def __init__(self, make: Callable[[], Tensor]) -> None:
            super().__init__(lambda: kept(make()))

    def kept(made: Tensor) -> Tensor:
        stagings.append(made)
        return made

    def train_and_measure(*parts: Any) -> Any:
        ended = train(*parts)
        num_bytes = sum(tensor.nbytes for tensor in stagings)
        memory = _memory(trainers[0].chunks, staging=num_bytes, before=before)
        (folder / f"{spec.name}.json").write_text(json.dumps(memory))
        return ended

    vars(assembly).update(GroupTrainer=Trainer, Staging=Staging)
    vars(rank).update(train=train_and_measure)
    rank.run_rank(spec, reports)


def _memory(chunks: Sequence[Chunk], *, staging: int, before: int) -> dict[str, int]:
    """Bytes of each kind; what the process holds more than `before` now, and the most that it ever did."""
    gc.collect()
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    # By its type, for some objects of other packages warn when they are asked for their class.
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
    updated = [values for optimizer in optimizers for group in optimizer.param_groups for values in group["params"]]
    main = [values for values in updated if values.untyped_storage().data_ptr() not in own]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = [tensor for state in states for tensor in state.values() if torch.is_tensor(tensor) and tensor.ndim]
    bytes_of = {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes(parameter.main_grad for parameter in parameters),
        "main_parameters": sum(tensor.nbytes for tensor in main),
        "moments": sum(tensor.nbytes for tensor in moments),
        "staging": staging,
    }
    # What is seen by the tensor is all that the optimizer keeps.
    assert bytes_of["main_parameters"] + bytes_of["moments"] == _storage_bytes([*main, *moments])
    bytes_of["total"] = sum(bytes_of.values())
    bytes_of["grown"] = _process_bytes("VmRSS") - before
    bytes_of["peak_grown"] = _process_bytes("VmHWM") - before
    return bytes_of


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind the tensors, each storage once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _process_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(key)]
    return int(line.split()[1]) * 1024


def measure_plain(config: RunConfig, *, is_sharded: bool) -> list[dict[str, int]]:
    """The memory of each rank of plain Megatron."""
    context = fork_server()
    preflight(config)
    store, spec = start_embedded_store(context, config.control.listen_address)
    ranks = [
        start_child(context, f"plain-{rank}", plain_rank, config, is_sharded, rank, spec)
        for rank in range(config.parallel.num_ranks)
    ]
    try:
        if not all(child.reports.poll(_TIMEOUT_S) for child in ranks):
            raise TimeoutError(f"not all ranks have answered within {_TIMEOUT_S} s")
        memories = [child.reports.recv() for child in ranks]
        for child in ranks:
            child.process.join(60)
        return memories
    finally:
        for child in [*ranks, store]:
            end_child(child)


def measure_own(config: RunConfig) -> list[dict[str, int]]:
    """The memory of each rank of ours."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "memory"
        folder.mkdir()
        summary = start_run(config, Path(scratch) / "run", lambda _: None, partial(own_rank, folder))
        assert summary.verdict == "valid", summary.reasons
        return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def measure_lanes(config_file: Path, overrides: list[str], num_lanes: int) -> dict[str, Any]:
    """Groups of several lanes, and one group of as many ranks of plain Megatron; the fullest rank of each."""
    ours = load_run_config(
        config_file, [*MODEL, "faults.trace=[]", *overrides, f"layout.data_parallel={num_lanes}"]
    ).config
    alone = replace(ours, layout=replace(ours.layout, num_groups=1), spare=replace(ours.spare, redundancy=1))
    names = f"Megatron ZeRO-1, {num_lanes} ranks", f"ours, {num_lanes} lanes"
    memories = measure_plain(alone, is_sharded=True), measure_own(ours)
    rows = dict(zip(names, map(_fullest, memories), strict=True))
    theirs, own = rows.values()
    return {**_result(ours, rows), "ratio": own["total"] / (theirs["total"] + own["staging"])}


def measure(config_file: Path, overrides: list[str]) -> dict[str, Any]:
    """Every arrangement in turn, the fullest rank of each."""

    def config_with(*settings: str) -> RunConfig:
        return load_run_config(config_file, [*MODEL, "faults.trace=[]", *overrides, *settings]).config

    whole = config_with("optimizer.sharding=replicated")
    stacked = {
        f"ours, stacked, r_o = {r}": config_with("optimizer.sharding=stacked", f"optimizer.redundancy={r}")
        for r in (2, 3)
    }
    measured = {
        "Megatron DDP": measure_plain(whole, is_sharded=False),
        "Megatron ZeRO-1": measure_plain(whole, is_sharded=True),
    }
    ours = {"ours, replicated": whole, **stacked}
    measured |= {name: measure_own(config) for name, config in ours.items()}
    rows = {name: _fullest(memories) for name, memories in measured.items()}
    ratio = rows["ours, stacked, r_o = 2"]["moments"] / rows["Megatron DDP"]["moments"]
    return {**_result(whole, rows), "ratio": ratio}


def _fullest(memories: Sequence[dict[str, int]]) -> dict[str, int]:
    return {column: max(memory[column] for memory in memories) for column in COLUMNS}


def _result(config: RunConfig, rows: dict[str, dict[str, int]]) -> dict[str, Any]:
    return {
        "rows": rows,
        "bucket_bytes": round(config.bucket_mib * 2**20),
        "num_groups": config.layout.num_groups,
        "precision": config.model.precision,
        **origin(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run")
    parser.add_argument("--lanes", type=int, default=1, help="of each group; more than 1 compares these alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    overrides = [f"train.steps={options.steps}", "optimizer.warmup_steps=0", "reduce.bucket_mib=4", *options.set]
    if options.lanes > 1:
        result = measure_lanes(options.config, overrides, options.lanes)
    else:
        result = measure(options.config, overrides)
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{result['num_groups']} groups, {result['precision']}, buckets of {result['bucket_bytes'] / 2**20:g} MiB; MiB"
    )
    print(f"{'':24}" + "".join(f"{column:>16}" for column in COLUMNS))
    for name, row in result["rows"].items():
        print(f"{name:24}" + "".join(f"{row[column] / 2**20:16.2f}" for column in COLUMNS))


if __name__ == "__main__":
    main()
