"""Memory errors of a device while communicators end: of this group alone, and no bug that all groups share."""

from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.process.reports import ExitCode
from spare_megatron.rank.rank import _Rank

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
UNHANDLED = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)")
OTHER = RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")


def _parts(may_break_device: bool) -> Any:
    return SimpleNamespace(ctx=SimpleNamespace(communicators=[SimpleNamespace(may_break_device=may_break_device)]))


class TroubledRank(_Rank):
    """A rank whose start raises while a communicator is, or is not, being aborted."""

    def __init__(self, error: RuntimeError, *, may_break_device: bool = False, num_written: int = 7) -> None:
        self._error, self._assembly = error, _parts(may_break_device)
        self._controller: Any = SimpleNamespace(head=7)
        self._log: Any = SimpleNamespace(has=lambda index: index < num_written)
        control = SimpleNamespace(heartbeat_interval_s=1.0)
        self._spec: Any = SimpleNamespace(incarnation=0, config=SimpleNamespace(control=control))
        self._store: Any = SimpleNamespace(break_off=None)
        self._heartbeat: Any = SimpleNamespace(start_beating=lambda _interval_s, on_cut_off: None)
        self._parts = None

    def _write_code(self) -> None:
        pass

    def _assemble(self) -> Any:
        return self._assembly

    def _start(self, _parts: Any) -> Any:
        raise self._error

    def _broken(self, _error: Exception) -> ExitCode:
        return ExitCode.GROUP_BROKEN


@pytest.mark.parametrize("error", [ILLEGAL, UNHANDLED])
def test_a_memory_error_while_a_communicator_ends_breaks_the_group_alone(error: RuntimeError) -> None:
    assert TroubledRank(error, may_break_device=True).run() is ExitCode.GROUP_BROKEN
    assert TroubledRank(error, num_written=8).run() is ExitCode.GROUP_BROKEN  # a peer has read it, and aborted
    with pytest.raises(RuntimeError, match=r"(?i)cuda"):
        TroubledRank(error).run()


def test_any_other_error_meanwhile_may_be_met_by_all_groups() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        TroubledRank(OTHER, may_break_device=True, num_written=8).run()
