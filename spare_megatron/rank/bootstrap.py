"""Starts a rank: picks its device, joins its group and waits until all groups are ready to train."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.config.schema import ControlConfig, RunConfig
from spare_megatron.devices import gpu
from spare_megatron.machine.gpus import maker, visible_gpus
from spare_megatron.machine.machine_signs import processor, unstarved_clock
from spare_megatron.mcore.model.model import choose_deterministic_kernels
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.process.readiness import GRACE_S, note_ready, wait_until_ready
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.process.specs import RankSpec, gpu_of
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore

_MARGIN_S = 30.0
"""Ranks wait this much longer for their leader than the leader waits for the store."""


def refuse_lost_gpu(spec: RankSpec) -> None:
    """RuntimeError: the driver does not list the rank's GPU, the only one that this process sees."""
    if spec.device == "cpu" or visible_gpus():
        return
    number = gpu_of(spec.config, spec.group, spec.rank)
    if not spec.gpu:
        raise RuntimeError(f"GPU {number} of this machine is not there: no CUDA-capable device is left for the rank")
    raise RuntimeError(
        f"GPU {number} of this machine, {spec.gpu}, is lost: no CUDA-capable device has this UUID now (see "
        f"`{maker().LIST_COMMAND}` and `dmesg`); the rank gets no other one until the machine is replaced"
    )


def choose_device(config: RunConfig, name: str, number: int) -> torch.device:
    """Makes the GPU of this name, if it is one, current. ImportError: its NCCL version is not supported."""
    device = torch.device(name)
    if device.type != "cpu":
        nccl.check_nccl()
        if (sharing := config.cluster.ranks_per_gpu) > 1:
            nccl.share_gpu(number % sharing)
        choose_deterministic_kernels(config)
        gpu.set_device(device)
    return device


def pass_times_on(spec: RankSpec) -> PassTimes:
    """The timer of passes on the rank's device: the clock, without waits for processors that groups take from each
    other, or events among the kernels of a GPU.
    """
    if spec.device != "cpu":
        return PassTimes(_record_event, _between_events_s)
    layout = spec.config.parallel
    is_shared = (
        spec.config.cluster.launcher == "local" or len(layout.groups_on(layout.node_of(spec.group, spec.rank))) > 1
    )
    clock = unstarved_clock() if is_shared else time.monotonic
    return PassTimes(clock, lambda began_s, ended_s: ended_s - began_s)


def _record_event() -> gpu.Event:
    event = gpu.Event(enable_timing=True)
    event.record()
    return event


def _between_events_s(began: gpu.Event, ended: gpu.Event) -> float:
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def join_group(spec: RankSpec, store: ControlStore, device: torch.device) -> dist.ProcessGroup:
    """Makes the group's ranks a torch.distributed world, which checkpoint loads and Megatron's schedule use. Returns a
    group for CPU tensors, whose timeout exceeds the leader's longest wait. Collective over: all ranks of the group.
    """
    control = spec.config.control
    timeout_s = control.startup_timeout_s
    dist.init_process_group(
        "nccl" if device.type != "cpu" else "gloo",
        store=store.rendezvous(keys.world(spec.member), spec.rank, timeout_s),
        rank=spec.rank,
        world_size=spec.num_ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=longest_wait_s(control)))


def longest_wait_s(control: ControlConfig) -> float:
    """How long ranks wait for their leader, which may wait for other groups to start or for a decision."""
    return max(control.decision_timeout_s, control.startup_timeout_s + GRACE_S) + _MARGIN_S


def wait_for_all_groups(spec: RankSpec, store: ControlStore, ranks: dist.ProcessGroup) -> None:
    """Waits until every group has built its model or is lost. Raises `GroupsMissing` if one is late. Collective over:
    all ranks of the group.
    """
    dist.barrier(group=ranks)
    if spec.rank == 0:
        note_ready(store, spec.group, "itself", spec.config.layout.num_groups)
        wait_until_ready(store, spec.config.layout.num_groups, spec.config.control.startup_timeout_s)
    dist.barrier(group=ranks)


def check_same_device(device: torch.device, group: GroupId, store: ControlStore) -> None:
    """Raises ValueError if the first group has another model of device: audits would take its results for wrong."""
    name = gpu.name_of_device(device) if device.type != "cpu" else processor()
    first = store.put_if_absent(keys.AUDITED_DEVICE, name)
    if first != name:
        raise ValueError(
            f"audits compare groups bit by bit, which needs the same devices: group {group} has {name}, the first "
            f"group {first}; use one model of device, or set audit.every_steps=0"
        )


def check_shared_data(corpus: Corpus, group: GroupId, store: ControlStore) -> None:
    """Compares samples with the first group that read them. Raises ValueError if one cannot be read or differs."""
    try:
        digest = corpus.digest()
    except ValueError as error:
        text = f"data.access=shared needs every group to read all data, and in group {group} {error}; set it to stacked"
        raise ValueError(text) from error
    if store.put_if_absent(keys.DATA_DIGEST, digest) != digest:
        raise ValueError(
            f"data.access=shared needs every group to read the same data, and group {group} reads other samples than "
            f"the first group that read them; have data.corpus name the same files everywhere, or set "
            f"data.access=stacked"
        )
