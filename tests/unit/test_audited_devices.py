"""Which devices audits can compare, and how a supervisor asks for the clocks of GPUs."""

import threading
from dataclasses import replace

import pytest
import torch

from spare_megatron.config.schema import AuditConfig, ClusterConfig, LayoutConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.audits_and_evaluations import audit_policy
from spare_megatron.machine import gpus
from spare_megatron.machine.gpus import nvidia
from spare_megatron.rank import bootstrap
from spare_megatron.stacking.layout import GroupId
from tests.memory_store import MemoryStore

ON_GPUS = RunConfig(
    data=DataConfig(corpus="none"),
    layout=LayoutConfig(num_groups=3),
    spare=SpareConfig(redundancy=3),
    reduce=ReduceConfig(mode="reproducible"),
    cluster=ClusterConfig(device="gpu"),
)


def test_a_group_on_another_processor_than_the_first_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    store, device = MemoryStore({}), torch.device("cpu")
    monkeypatch.setattr(bootstrap, "_processor", lambda: "EPYC")
    for group in range(2):
        bootstrap.check_same_device(device, GroupId(group), store)
    monkeypatch.setattr(bootstrap, "_processor", lambda: "Xeon")
    with pytest.raises(ValueError, match=r"group 2 has Xeon, the first group EPYC; .*audit.every_steps=0"):
        bootstrap.check_same_device(device, GroupId(2), store)


def test_audits_are_off_by_default_where_sums_inside_groups_may_be_added_in_another_order() -> None:
    two, four = (replace(ON_GPUS, layout=replace(ON_GPUS.layout, tensor_parallel=number)) for number in (2, 4))
    assert audit_policy(two) is not None
    assert audit_policy(four) is None
    assert audit_policy(replace(four, audit=AuditConfig(every_steps=5))) is not None
    assert audit_policy(replace(four, cluster=ClusterConfig(device="cpu"))) is not None


def test_clocks_are_read_beside_the_caller_and_only_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def read(_shown: gpus.Shown) -> tuple[str, ...]:
        asked.release()
        may_answer.wait(30.0)
        return ("power cap",)

    monkeypatch.setattr(nvidia, "reduced_clocks", read)
    clocks = gpus.ClockReader()
    assert (clocks(), clocks()) == ((), ())
    assert asked.acquire(timeout=30.0)
    assert not asked.acquire(blocking=False), "the library has not answered yet"
    may_answer.set()
    assert clocks._thread is not None
    clocks._thread.join(30.0)
    assert clocks() == ("power cap",)
