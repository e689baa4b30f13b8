"""How the ranks of plain Megatron are started, beside which ours are measured."""

import multiprocessing
import os
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, RunConfig
from spare_megatron.machine.gpus import Gpu
from spare_megatron.tools.bench import plain_megatron


class Refused(Exception):
    pass


@pytest.mark.parametrize(("device", "expected"), [("gpu", SpawnContext), ("cpu", ForkServerContext)])
def test_on_gpus_plain_ranks_are_no_forks_of_a_server_that_may_have_used_one(
    monkeypatch: pytest.MonkeyPatch, device: Any, expected: type[BaseContext]
) -> None:
    """With transformer-engine, which the server imports, they ended: CUDA cannot be used in a fork."""
    contexts: list[BaseContext] = []
    shown: list[str | None] = []

    def start_child(context: BaseContext, *_arguments: Any) -> None:
        contexts.append(context)
        shown.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if len(contexts) == 2:
            raise Refused

    gpus = tuple(Gpu(uuid=f"GPU-{letter}", name="H100", memory_bytes=1, free_bytes=1) for letter in "ba")
    monkeypatch.setattr(plain_megatron, "visible_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(plain_megatron, "preflight", lambda _config: None)
    monkeypatch.setattr(plain_megatron.processes, "fork_server", lambda: multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(plain_megatron.processes, "start_embedded_store", lambda *_arguments, **_options: (None, None))
    monkeypatch.setattr(plain_megatron.processes, "start_child", start_child)
    with pytest.raises(Refused):
        plain_megatron.run_plain(RunConfig(cluster=ClusterConfig(device=device)))
    assert [type(context) for context in contexts] == [expected] * 2
    assert shown == (["GPU-b", "GPU-a"] if device == "gpu" else ["1,0"] * 2), "each sees its own alone"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
