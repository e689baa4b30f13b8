"""What an examination computes, keeps and moves on devices: right on this machine, and each planted fault is found."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spare_megatron.core.slow_machines.examination_rules import Load
from spare_megatron.devices import gpu
from spare_megatron.slow_machines import device_checks, examination
from spare_megatron.slow_machines.examination import ExaminationTask, ExaminationWanted
from spare_megatron.stacking.layout import MachineId
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.store.tcp_store import TcpControlStore, listen
from tests.unit.test_gpus import Nvml, Part

LOAD = Load(seed=3, leaves_waits_out=True)
TIMEOUT_S = 30.0


def test_products_are_the_same_each_time_and_differ_where_the_machine_drifts() -> None:
    (digest, seconds, *errors), again = (device_checks.multiply(LOAD, "cpu") for _ in range(2))
    assert again[0] == digest
    assert errors == [[], ""]
    assert seconds > 0.0
    assert device_checks.multiply(LOAD._replace(drifts=True), "cpu")[0] != digest


def test_values_of_the_chain_of_products_neither_die_out_nor_are_all_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are, an error of one product would not reach the last."""
    last: list[Tensor] = []
    compare = device_checks.compare

    def note(*given: Any) -> Iterator[str]:
        last.append(given[2])
        return compare(*given)

    monkeypatch.setattr(device_checks, "compare", note)
    device_checks.multiply(LOAD, "cpu")
    assert 0.3 < last[-1].abs().mean() < 0.9


def test_a_repetition_that_differs_in_one_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tanh, numbers = torch.tanh, iter(range(1000))
    struck = []

    def corrupted(values: Tensor) -> Tensor:
        product = tanh(values)
        if next(numbers) == 70:  # in the third of six repetitions
            struck.append(True)
            product[5, 9] += 1e-6
        return product

    monkeypatch.setattr(torch, "tanh", corrupted)
    (wrong,) = device_checks.multiply(LOAD, "cpu")[2]
    assert struck
    assert "of 65536 values of a repeated product on cpu are wrong" in wrong


# -------------------------------------------------------------------------------------------------- known results


FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


def use(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """This type alone, in a size for CPUs, on which fp8 takes seconds."""
    monkeypatch.setattr(device_checks, "_types", lambda _: (dtype,))
    monkeypatch.setitem(device_checks.SIZES, "cpu", device_checks.SIZES["cpu"]._replace(product=64))


@pytest.mark.parametrize("dtype", [FP32, FP8])
def test_exact_products_are_those_of_integers_on_this_machine(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU fp8 runs through the same call as on a GPU."""
    use(monkeypatch, dtype)
    assert list(device_checks.check_products(LOAD, "cpu")) == []


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 2**22), (FP8, 2**13)])
def test_sums_of_exact_products_stay_in_what_tensor_cores_add_exactly(dtype: torch.dtype, limit: int) -> None:
    """At the size of GPUs, in any order: the sum of magnitudes is below the limit. Operands are numbers of the type."""
    size, generator = device_checks.SIZES["cuda"].product, torch.Generator().manual_seed(7)
    rows, columns = (device_checks.integers(dtype, size // 32, size, generator) for _ in range(2))
    assert (rows.abs() @ columns.abs().t()).max() < limit
    assert torch.equal(rows.to(dtype).float(), rows)
    assert rows.abs().max() == {BF16: 255.0, FP8: 7.0}[dtype]


@pytest.mark.parametrize("dtype", [FP32, FP8])
def test_one_corrupted_element_of_a_product_is_found_and_named(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, numbers, before = device_checks.exact_product, iter(range(100)), []

    def corrupted(left: Tensor, right: Tensor) -> Tensor:
        product = exact(left, right)
        if next(numbers) == 4:
            before.append(product[50, 31].item())
            product[50, 31] += 1
        return product

    use(monkeypatch, dtype)
    monkeypatch.setattr(device_checks, "exact_product", corrupted)
    name = {FP32: "float32", FP8: "float8_e4m3fn"}[dtype]
    (wrong,) = device_checks.check_products(LOAD, "cpu")
    values = f"{before[0] + 1} instead of {before[0]}"
    assert wrong == f"1 of 4096 values of a product in {name} on cpu are wrong, the first is {values}"


def test_a_drifting_machine_has_wrong_products() -> None:
    wrong = list(device_checks.check_products(LOAD._replace(drifts=True), "cpu"))
    assert len(wrong) == 6
    assert all(int(text.split()[0]) > 256 * 256 / 2 for text in wrong)


def test_a_gpu_multiplies_in_bf16_and_in_fp8_where_it_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, types in (((8, 0), (BF16,)), ((8, 9), (BF16, FP8)), ((9, 0), (BF16, FP8))):
        monkeypatch.setattr(gpu, "capability", lambda _, found=capability: found)
        assert device_checks._types("cuda:1") == types


def test_a_gpu_of_amd_multiplies_in_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 counts as 9.4 and has another fp8, in which the product would end the examination."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 4))
    assert device_checks._types("cuda:1") == (BF16,)


# --------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("is_own", [True, False])
def test_memory_keeps_its_patterns_here(is_own: bool) -> None:
    assert list(device_checks.check_memory("cpu", is_own=is_own)) == []


def test_an_examined_machine_fills_more_than_one_that_trains() -> None:
    own, beside = (list(device_checks._pieces("cpu", is_own=is_own)) for is_own in (True, False))
    assert sum(piece.nbytes for piece in beside) < device_checks.SIZES["cpu"].beside_bytes
    assert len(own) > 4 * len(beside)


def test_on_a_gpu_most_free_memory_is_filled_but_beside_training_at_most_1_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda words, **_: torch.empty_strided((words,), (0,), device="meta"))
    for used, free, is_own, least, most in (
        (2, 100, True, 88, 90),
        (1, 100, False, 0.6, 1.0),
        (41, 100, True, 0.6, 1.0),
        (41, 0.6, False, 0.2, 0.6),
    ):
        found = (int(free * 2**30), int((used + free) * 2**30))
        monkeypatch.setattr(gpu, "memory_left", lambda _, found=found: found)
        pieces = list(device_checks._pieces("cuda:0", is_own=is_own))
        assert least <= len(pieces) * device_checks.SIZES["cuda"].piece_bytes / 2**30 <= most


def test_memory_that_another_process_takes_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([torch.zeros(8)] * 3)

    def empty(*_: object, **__: object) -> Tensor:
        piece = next(found, None)
        if piece is None:
            raise torch.OutOfMemoryError
        return piece

    monkeypatch.setattr(torch, "empty", empty)
    assert len(list(device_checks._pieces("cpu", is_own=True))) == 3


class Corrupted(list[Tensor]):
    """Pieces of memory that are changed by `corrupt` once all of them are written: when they are listed again."""

    def __init__(self, pieces: Sequence[Tensor], corrupt: Callable[[Sequence[Tensor], bool], None]) -> None:
        super().__init__(pieces)
        self._corrupt, self.num_listed = corrupt, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.num_listed += 1
        if self.num_listed % 2 == 0:
            self._corrupt([*super().__iter__()], self.num_listed == 4)
        return super().__iter__()


def errors_of(monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[Sequence[Tensor], bool], None]) -> list[str]:
    pieces = Corrupted(list(device_checks._pieces("cpu", is_own=True))[:3], corrupt)
    monkeypatch.setattr(device_checks, "list", lambda _: pieces, raising=False)
    found = [*device_checks.check_memory("cpu", is_own=True)]
    assert pieces.num_listed == 4, "two patterns, written and read"
    return found


@pytest.mark.parametrize("in_complement", [False, True])
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_a_bit_that_flips_in_memory_is_found_and_named(
    bit: int, in_complement: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[int] = []

    def flip(pieces: Sequence[Tensor], is_complement: bool) -> None:
        if is_complement == in_complement:
            struck.append(pieces[1][77].item())  # type: ignore[arg-type]
            pieces[1][77] ^= 1 << bit if bit < 63 else -(1 << 63)
            struck.append(pieces[1][77].item())  # type: ignore[arg-type]

    found = errors_of(monkeypatch, flip)
    values = f"{struck[1]} instead of {struck[0]}"
    assert found == [f"1 of 524288 values of a pattern in memory on cpu are wrong, the first is {values}"]


def test_words_of_two_addresses_that_are_the_same_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been written to the second address last is what the first one reads."""

    def alias(pieces: Sequence[Tensor], _: bool) -> None:
        pieces[0][:24] = pieces[2][-24:]

    assert [text.split()[0] for text in errors_of(monkeypatch, alias)] == ["24", "24"]


@pytest.mark.parametrize("stuck_at", [0, 1])
def test_a_stuck_bit_is_found_whichever_value_it_has(stuck_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word is written with both values of each bit."""

    def stick(pieces: Sequence[Tensor], _: bool) -> None:
        pieces[0][5] = pieces[0][5] | 4 if stuck_at else pieces[0][5] & ~4

    assert [text.split()[0] for text in errors_of(monkeypatch, stick)] == ["1"]


# ------------------------------------------------------------------------------------------------------ transfers


def test_a_transfer_between_two_devices_that_changes_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have one device: devices here are names, and what the second one receives of the third is wrong."""
    pattern, moved = device_checks.pattern, []

    class Content(Tensor):
        def to(self, receiver: str) -> Tensor:  # type: ignore[override]
            moved.append(receiver)
            values = self.as_subclass(Tensor).clone()  # type: ignore[arg-type]
            values[100] ^= len(moved) == 6
            return values

    monkeypatch.setattr(device_checks, "pattern", lambda _: pattern("cpu").as_subclass(Content))
    (wrong,) = device_checks.check_links(["cuda:0", "cuda:1", "cuda:2"])
    assert moved == [f"cuda:{number}" for number in (1, 2, 0, 2, 0, 1)]
    assert "1 of 524288 values of a transfer from cuda:2 on cuda:1 are wrong" in wrong
    assert list(device_checks.check_links(["cpu"])) == []


@pytest.fixture
def server() -> Any:
    return listen("127.0.0.1", timedelta(seconds=TIMEOUT_S))


def task_of(machine: int, helpers: Sequence[int] = (), timeout_s: float = TIMEOUT_S) -> ExaminationTask:
    return ExaminationTask(
        wanted=ExaminationWanted(
            examined=MachineId(1), number=3, helpers=tuple(map(MachineId, helpers)), is_own=machine == 1
        ),
        machine=MachineId(machine),
        devices=("cpu", "cpu"),
        store=TcpStoreSpec(host="127.0.0.1", port=1),
        after=(),
        page=None,
        step_limit_s=TIMEOUT_S,
        transfer_timeout_s=timeout_s,
        limit_s=TIMEOUT_S,
        load=LOAD,
    )


def transfers_of(server: Any, tasks: Sequence[ExaminationTask]) -> dict[int, Any]:
    found: dict[int, Any] = {}

    def run(task: ExaminationTask) -> None:
        found[task.machine] = examination._transfers(task, TcpControlStore("127.0.0.1", server.port))

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return found


def test_machines_exchange_known_content_from_each_device(server: Any) -> None:
    found = transfers_of(server, [task_of(1, (0, 2)), task_of(0), task_of(2)])
    linked, wrong = found[1]
    assert (set(linked), wrong) == ({0, 2}, [])
    assert (found[0], found[2]) == (((0,), []), ((2,), []))


def test_a_machine_that_does_not_come_is_not_waited_for_longer_than_the_limit(server: Any) -> None:
    began_s = time.monotonic()
    found = transfers_of(server, [task_of(1, (0, 2), timeout_s=5.0), task_of(2, timeout_s=5.0)])
    assert time.monotonic() - began_s < TIMEOUT_S
    assert found[1] == ((2,), [])


@pytest.mark.parametrize("at_examined", [True, False])
def test_what_a_link_changes_is_found_by_the_machine_that_receives_it(
    server: Any, at_examined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for gloo changes one word of what arrives."""
    gloo = torch.distributed.ProcessGroupGloo

    class Corrupting:
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            self._group, self._rank = gloo(store, rank, size, timeout), rank

        def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
            self._group.broadcast(tensors, options).wait()
            if options.rootRank != self._rank and at_examined == (self._rank == 0):
                tensors[0][11] ^= 1
            return SimpleNamespace(wait=lambda _: None)

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", Corrupting)
    found = transfers_of(server, [task_of(1, (0,)), task_of(0)])
    wrong = found[1 if at_examined else 0][1]
    assert len(wrong) == 2, "of each device"
    assert all("1 of 524288 values of a transfer between machines 1 and 0 on cpu are wrong" in text for text in wrong)
    assert found[0 if at_examined else 1][1] == []


def test_an_examination_on_a_device_that_hangs_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would keep memory of a machine that trains until the next one, which may never come."""
    codes, has_ended = list[int](), threading.Event()
    monkeypatch.setattr(examination, "leave", lambda code: (codes.append(code), has_ended.set()))
    monkeypatch.setattr(examination, "_answer", lambda _: has_ended.wait(TIMEOUT_S))
    examination._examine(replace(task_of(0), limit_s=0.05), None)  # type: ignore[arg-type]
    assert codes == [1, 0], "here it goes on"
    assert capsys.readouterr().err == "an examination has not ended within 0.05 s\n"


class Nccl:
    """A communicator whose other member is gone when the content is sent; `wait` is that of torch with a timeout."""

    Options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731

    def __init__(self, *_: object) -> None:
        self.used: list[Any] = []
        COMMUNICATORS.append(self)

    def broadcast(self, _tensors: list[Tensor], _options: Any) -> Any:
        def wait(timeout: timedelta) -> None:
            assert timeout
            raise RuntimeError("timed out in blocking wait")

        self.used.append(STREAMS[-1])
        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.used.append("abort")


COMMUNICATORS: list[Nccl] = []
STREAMS: list[str] = ["default"]


def test_a_machine_that_goes_while_nccl_sends_holds_up_neither_the_device_nor_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the stream of everything else its kernel would hold up the rest of the examination, for ever."""
    expected = device_checks.pattern("cpu")
    monkeypatch.setattr(device_checks, "pattern", lambda *_, **__: expected)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(gpu, "set_device", lambda _: None)
    monkeypatch.setattr(gpu, "Stream", lambda device: f"own of {device}")
    monkeypatch.setattr(gpu, "stream", current)
    monkeypatch.setattr(gpu, "empty_cache", lambda: COMMUNICATORS[0].used.append("memory freed"))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "as before")
    meeting = torch.distributed.HashStore()
    meeting.set("here/1", "")
    with pytest.raises(RuntimeError, match="timed out"):
        list(device_checks.transfer(meeting, 0, "cuda:1", "transfer", timedelta(seconds=1)))
    (nccl,) = COMMUNICATORS
    assert nccl.used == ["own of cuda:1", "abort", "memory freed"]
    assert os.environ["NCCL_HOSTID"].endswith("-0"), "two machines that are emulated on a computer share a GPU"


@contextmanager
def current(stream: str) -> Iterator[None]:
    STREAMS.append(stream)
    yield
    STREAMS.pop()


# --------------------------------------------------------------------------------------------- times and clocks


def test_a_slow_machine_takes_longer_by_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = iter([0.0, 2.0]), []
    monkeypatch.setattr(device_checks, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=slept.append))
    monkeypatch.setattr(device_checks, "starved_s", lambda _: 0.0)
    with device_checks._timed(LOAD._replace(factor=3.0), "cpu") as spent_s:
        pass
    assert spent_s() == 6.0
    assert slept == [4.0]


def test_a_reduced_clock_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml([Part("GPU-a", "H100"), Part("GPU-b", "H100", throttled=0x40), Part("GPU-c", "H100")])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libnvidia-ml.so.1": nvml}[name])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-b")
    assert device_checks._reduced_clock("cuda:0") == ""
    assert device_checks._reduced_clock("cuda:1") == "clock 1005 of 1980 MHz: thermal slowdown by the hardware"
    assert device_checks._reduced_clock("cpu") == ""
