"""Runs a program alone in a fresh process for `spare check-program`, and prints what it observed as JSON.

A trial computes some microbatches twice, the second time in another order, with the gradients of each from zero.
"""

import hashlib
import json
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import spare_megatron.mcore  # noqa: F401 before megatron-core, which may need an adaptation to be imported

# isort: split
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.batches import BadSample, UnreadMask
from spare_megatron.mcore.model.program import Batch, Program, StepContext, Terms, program_of
from spare_megatron.mcore.model.training_samples import Dataset, prepare_index
from spare_megatron.mcore.program_check import check_program
from spare_megatron.mcore.trainer import GroupTrainer, OnSlabReady
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch

_CPU = torch.device("cpu")
_ACROSS_GROUPS = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp")
"""Process groups in which Megatron's own trainer meets other data-parallel ranks."""


def work_of(config: RunConfig) -> list[tuple[int, Microbatch]]:
    """The microbatches of a trial: the first and last of some shards, in two steps if there are as many."""
    shards = sorted({0, config.layout.num_groups - 1})
    return [
        (step, Microbatch(ShardId(shard), index))
        for step in range(min(2, config.train.steps))
        for shard in shards
        for index in sorted({0, config.spare.ramp.at(step) - 1})
    ]


class _Observer:
    """Collects what the roles do that they must not, each kind of it once per place."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, str, str]] = []
        """Rule, place and detail."""
        self.batches: list[bytes] = []
        """Digests of the samples read for the microbatch under way."""
        self.terms: list[str] = []
        self.allowed: set[str] = set()
        """Names of process groups inside the data-parallel group."""

    def add(self, rule: str, place: str, detail: str) -> None:
        if (rule, place, detail) not in self.faults:
            self.faults.append((rule, place, detail))

    @contextmanager
    def watching_randomness(self, place: str, *, allows_torch: bool) -> Iterator[None]:
        before = _random_states()
        yield
        names = [name for name, state in _random_states().items() if state != before[name]]
        for name in names:
            if not (allows_torch and name == "torch"):
                self.add("random", place, f"it draws from the global generator of {name}")


def _random_states() -> dict[str, str]:
    return {
        "Python": _digest([repr(random.getstate()).encode()]),
        "numpy": _digest([repr(np.random.get_state(legacy=False)["state"]).encode()]),
        "torch": _digest([torch.default_generator.get_state().numpy().tobytes()]),
    }


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    return _digest(
        part
        for name, tensor in tensors
        for part in (name.encode(), tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    )


class _WatchedDataset:
    def __init__(self, dataset: Dataset, observer: _Observer) -> None:
        self._dataset, self._observer = dataset, observer

    def __getitem__(self, number: int) -> Mapping[str, Tensor]:
        with self._observer.watching_randomness("datasets_provider", allows_torch=False):
            sample = self._dataset[number]
        self._observer.batches.append(_digest_of(sorted(sample.items())).encode())
        return sample


class _Collectives(TorchDispatchMode):
    """Reports collectives over process groups that are not inside the data-parallel group."""

    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            *_, group = [name for one in args if (name := _group_name(one)) is not None]
            if group not in self._observer.allowed:
                self._observer.add("collective", "forward_step", f"it calls {func.overloadpacket.__name__.strip('_')}")
        return func(*args, **(kwargs or {}))


def _group_name(argument: object) -> str | None:
    """Name of the process group that an argument of an operator stands for."""
    if isinstance(argument, str):
        return argument  # as functional collectives name it, after the reduction
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return str(dist.ProcessGroup.unbox(argument).group_name)
    except RuntimeError:  # another kind of object, as the operation of a reduction
        return None


def _watched(program: Program, observer: _Observer) -> Program:
    def model_provider(context: Any) -> Any:
        with observer.watching_randomness("model_provider", allows_torch=True):
            return program.model_provider(context)

    def forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[Tensor, Terms]:
        parameters, buffers = _digest_of(model.named_parameters()), _digest_of(model.named_buffers())
        with observer.watching_randomness("forward_step", allows_torch=True):
            output, terms = program.forward_step(batch, model, context)
        if _digest_of(model.named_parameters()) != parameters:
            observer.add("state", "forward_step", "it changes parameters")
        if _digest_of(model.named_buffers()) != buffers:
            observer.add("state", "forward_step", "it changes buffers of the model")
        observer.terms = [f"{name}: {float(total.detach())!r} {count}" for name, (total, count) in terms.items()]
        return output, terms

    def datasets_provider(config: RunConfig) -> Dataset:
        with observer.watching_randomness("datasets_provider", allows_torch=False):
            dataset = program.datasets_provider(config)
        return _WatchedDataset(dataset, observer)

    return replace(
        program, model_provider=model_provider, forward_step=forward_step, datasets_provider=datasets_provider
    )


def observe(config: RunConfig) -> dict[str, Any]:
    """What a program did: its faults, and per microbatch the digests of samples and gradients of each of two passes."""
    prepare_index(config)
    program = program_of(config)
    observer = _Observer()
    trainer = GroupTrainer(config, _CPU, program=_watched(program, observer))
    groups = trainer.process_groups
    observer.allowed = {groups.tp.group_name}  # with one rank all of them are one
    across = dist.new_group([0])
    for name in _ACROSS_GROUPS:
        setattr(groups, name, across)
    parallel_state._DATA_PARALLEL_GROUP = parallel_state._DATA_PARALLEL_GROUP_WITH_CP = across
    work = work_of(config)
    built = _digest_of((named.name, named.parameter) for named in trainer.parameters_named())
    on_ready = (lambda *_: None) if config.reduce.overlap else None  # else nothing counts the parts of gradients
    orders = (work, work[::-1])
    passes = [dict(_computed(trainer, observer, on_ready, step, one) for step, one in order) for order in orders]
    if config.eval.every_steps:
        trainer.evaluator.compute([Microbatch(ShardId(0), 0)])
    check_program(config, program)  # last: what the program keeps of it has no values
    return {"parameters": built, "passes": passes, "faults": observer.faults}


def _computed(
    trainer: GroupTrainer, observer: _Observer, on_ready: OnSlabReady | None, step: int, microbatch: Microbatch
) -> tuple[str, dict[str, Any]]:
    observer.batches, observer.terms = [], []
    trainer.begin_step(step)
    with _Collectives(observer):
        trainer.compute([microbatch], on_ready)
    gradients = _digest_of(("", sums) for slab in trainer.slabs for sums in slab.gradients.local_sums())
    address = f"step {step}, shard {microbatch.shard}, microbatch {microbatch.index}"
    return address, {"batch": _digest(observer.batches), "gradients": gradients, "terms": observer.terms}


def main() -> None:
    """Observes the program of each configuration on the command line; its first word names the process."""
    torch.set_num_threads(1)
    multiprocessing.current_process().name, *paths = sys.argv[1:]
    for path in paths:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            found = observe(load_run_config(Path(path)).config)
        except BadSample as error:
            found = {"refused": str(error)}
        except UnreadMask as error:
            found = {"faults": [("mask", error.role, str(error))], "parameters": "", "passes": [{}, {}]}
        except Exception:  # noqa: BLE001  (any error of the program is reported)
            found = {"error": traceback.format_exc()}
        finally:
            dist.destroy_process_group()
        print("observed", json.dumps(found), flush=True)
    os._exit(0)  # a program may have started threads


if __name__ == "__main__":
    main()
