"""How the ranks of plain Megatron are started, beside which ours are measured."""

import multiprocessing
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, RunConfig
from spare_megatron.tools.bench import bench_plain


class Refused(Exception):
    pass


@pytest.mark.parametrize(("device", "expected"), [("gpu", SpawnContext), ("cpu", ForkServerContext)])
def test_on_gpus_plain_ranks_are_no_forks_of_a_server_that_may_have_used_one(
    monkeypatch: pytest.MonkeyPatch, device: Any, expected: type[BaseContext]
) -> None:
    """With transformer-engine, which the server imports, they ended: CUDA cannot be used in a fork."""
    contexts: list[BaseContext] = []

    def start_child(context: BaseContext, *_arguments: Any) -> None:
        contexts.append(context)
        raise Refused

    monkeypatch.setattr(bench_plain, "preflight", lambda _config: None)
    monkeypatch.setattr(bench_plain.processes, "fork_server", lambda: multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(bench_plain.processes, "start_embedded_store", lambda *_arguments, **_options: (None, None))
    monkeypatch.setattr(bench_plain.processes, "start_child", start_child)
    with pytest.raises(Refused):
        bench_plain.run_plain(RunConfig(cluster=ClusterConfig(device=device)))
    assert [type(context) for context in contexts] == [expected]
