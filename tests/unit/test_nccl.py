"""What is decided around NCCL: whether to connect, what counts after an abort, and who is aborted when.

A backend stands in for torch's, which needs a GPU; tests/gpu has what it does there.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import communicators, nccl, sum_watch, transfers
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.nccl import Call, warm_up
from spare_megatron.comm.sum_watch import SumWatch
from spare_megatron.comm.transfers import Exchange, Transfer
from spare_megatron.config.training.run_sizes import MOST_CHANNELS
from spare_megatron.devices import gpu
from spare_megatron.process.reports import ExitCode
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.interface import StoreLost
from spare_megatron.supervisor.rank_exits import Consequence, cause_of_end, consequence_of
from tests.unit.nccl_stand_in import GPU, PATIENCE, Backend, Work, new_communicator, post


@pytest.fixture
def torch_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(gpu, "set_device", lambda _device: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1")


# ------------------------------------------------------------------------------------------------------- connecting


def connect(store: dist.Store, is_wanted: Callable[[], bool], timeout: timedelta = PATIENCE) -> Backend:
    backend = nccl.connect(store, 0, 2, device=GPU, timeout=timeout, is_wanted=is_wanted)
    assert isinstance(backend, Backend)
    return backend


@pytest.mark.usefixtures("torch_with_nccl")
def test_a_rank_that_has_met_the_others_connects() -> None:
    store = dist.HashStore()
    other = threading.Thread(target=nccl.meet, args=(store, 2, PATIENCE))
    other.start()
    backend = connect(store, lambda: True)
    other.join()
    _, rank, size, options = backend.arguments
    assert (rank, size, options._timeout, options.config.blocking) == (0, 2, PATIENCE, 1)
    assert options.config.max_ctas == MOST_CHANNELS, "the memory of more is not counted"
    assert options.is_high_priority_stream, "a stream of a pool that Megatron does not use"
    assert backend.connected == [GPU]
    for name in ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "WAIT_TIMEOUT_DUMP_MILSEC"):
        assert os.environ[f"TORCH_NCCL_{name}"] == "0"


@pytest.mark.usefixtures("torch_with_nccl")
def test_no_rank_starts_to_connect_that_could_not_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", None)
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):  # the other never comes
        connect(dist.HashStore(), lambda: True, timedelta(milliseconds=20))
    store = dist.HashStore()
    store.add("here", 1)
    with pytest.raises(nccl.NoLongerWanted):  # it has come, and the log has moved on
        connect(store, lambda: False)


# ---------------------------------------------------------------------------------------------- what counts, and ends


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> CrossGroupCommunicator:
    monkeypatch.setattr(nccl, "connect", lambda *_arguments, **_options: Backend())
    return new_communicator(monkeypatch)


def test_sums_that_were_ended_do_not_count_though_they_look_complete(communicator: CrossGroupCommunicator) -> None:
    backend = post(communicator, 0)
    backend.works[0].has_come = True
    assert communicator.poll() == 1
    first = communicator.first_in_flight()
    assert first is not None
    communicator.abort_sum(first)
    assert backend.is_aborted.wait(PATIENCE.total_seconds())
    assert backend.works[1].is_completed()
    assert communicator.poll() == 0
    assert communicator.first_in_flight() is None
    assert communicator.evidence == "connection: aborted: the log has moved on"
    assert not communicator.post(torch.zeros(1))


def test_sums_that_are_ended_while_they_are_looked_at_do_not_count(communicator: CrossGroupCommunicator) -> None:
    backend = post(communicator, 0)
    first = communicator.first_in_flight()
    assert first is not None

    def is_completed() -> bool:
        communicator.abort_sum(first)
        return backend.is_aborted.wait(PATIENCE.total_seconds())

    backend.works[0].is_completed = is_completed  # type: ignore[method-assign]
    assert communicator.poll() == 0
    assert communicator.evidence == "connection: aborted: the log has moved on"


def test_a_sum_that_failed_is_given_up_without_a_wait_that_would_abort_here(
    communicator: CrossGroupCommunicator,
) -> None:
    backend = post(communicator, 0)
    for work in backend.works:
        work.has_come, work.result = True, 2
    assert communicator.poll() == 0
    assert communicator.evidence == "connection: a sum of NCCL failed (WorkResult 2); torch has logged the error"
    assert backend.is_aborted.wait(PATIENCE.total_seconds())


STICKY = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported")


@pytest.mark.parametrize("failing", ["is_completed", "post", "build"])
def test_an_error_that_ends_the_use_of_the_device_ends_the_rank(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The rank took it for a broken connection, and built one communicator after the other."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise STICKY

    if failing == "build":
        monkeypatch.setattr(nccl, "connect", fail)
        monkeypatch.setattr(gpu, "empty_cache", lambda: None)
        communicator.start_build(0, [GroupId(0), GroupId(1)])
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            communicator.connect(lambda: False)
        return
    backend = post(communicator, 0)
    if failing == "post":
        monkeypatch.setattr(backend, "allreduce", fail)
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            communicator.post(torch.zeros(1))
        return
    monkeypatch.setattr(backend.works[0], "is_completed", fail)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        communicator.poll()


def test_a_communicator_whose_watchdog_has_ended_is_broken(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums complete, as the work itself asks the device, and no result of them is ever noted."""
    now_s = 100.0
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: now_s))
    backend = post(communicator, 0)
    late = SimpleNamespace(done=lambda: False)
    noted = SimpleNamespace(done=lambda: True, value=lambda: 0)
    for work, result in zip(backend.works, (noted, late), strict=True):
        work.has_come = True
        monkeypatch.setattr(work, "get_future_result", lambda result=result: result)
    assert communicator.poll() == 2
    for pause_s, num_complete in ((29.0, 1), (2.0, 0)):
        now_s += pause_s
        assert communicator.post(torch.zeros(1))
        backend.works[-1].has_come = True
        assert communicator.poll() == num_complete
    assert communicator.evidence == "connection: torch's watchdog has noted no end of a sum for 30 s"
    assert backend.is_aborted.wait(PATIENCE.total_seconds())


def test_a_result_that_is_noted_late_breaks_nothing() -> None:
    check = nccl.WatchdogCheck()
    is_noted = [False]
    work = SimpleNamespace(get_future_result=lambda: SimpleNamespace(done=lambda: is_noted[0]))
    check.on_end(work, 0.0)
    check.on_end(work, 30.0)
    is_noted[0] = True
    check.on_end(work, 40.0)  # of this one the time begins here
    is_noted[0] = False
    check.on_end(work, 70.0)
    with pytest.raises(RuntimeError, match="watchdog"):
        check.on_end(work, 70.1)


@pytest.mark.parametrize("returns", [True, False])
def test_an_abort_that_does_not_return_ends_the_process(returns: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """The survivors waited for the rank whose abort held its device, for as long as it lived."""
    if (pid := os.fork()) == 0:
        gpu.synchronize = lambda _device: None
        backend = Backend()
        if not returns:
            backend.may_abort.clear()
        nccl.Abort(backend, threading.Lock(), GPU, limit_s=0.2).thread.join(2.0)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    text = capfd.readouterr().err
    assert os.waitstatus_to_exitcode(status) == (0 if returns else ExitCode.ABORT_HUNG)
    assert text == ("" if returns else "an abort of NCCL has not returned within reduce.timeout_s=0.2\n")
    cause, error = cause_of_end(ExitCode.ABORT_HUNG)
    assert (cause, error) == ("an abort of NCCL did not return within reduce.timeout_s", "")
    ending = consequence_of(ExitCode.ABORT_HUNG, is_group_lost=False, is_store_given_up=False)
    assert ending is Consequence.GROUP_LOST


def test_an_abort_waits_for_the_thread_that_posts(communicator: CrossGroupCommunicator) -> None:
    backend = post(communicator, 0)
    first = communicator.first_in_flight()
    assert first is not None
    backend.may_return.clear()
    poster = threading.Thread(target=communicator.post, args=(torch.zeros(1),))
    poster.start()
    assert backend.is_inside.wait(PATIENCE.total_seconds())
    communicator.abort_sum(first)
    assert not backend.is_aborted.wait(0.1)
    backend.may_return.set()
    assert backend.is_aborted.wait(PATIENCE.total_seconds())
    poster.join()
    num_posted = len(backend.works)
    assert not communicator.post(torch.zeros(1))
    assert len(backend.works) == num_posted


def test_an_abort_does_not_wait_for_a_post_that_only_an_abort_ends(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_LONGEST_CALL_S", 0.05)
    backend = post(communicator, 0)
    first = communicator.first_in_flight()
    assert first is not None
    backend.may_return = backend.is_aborted  # the launch queue is full, behind the kernel that hangs
    monkeypatch.setattr(backend.is_inside, "is_set", lambda: False)
    poster = threading.Thread(target=communicator.post, args=(torch.zeros(1),))
    poster.start()
    assert backend.is_inside.wait(PATIENCE.total_seconds())
    communicator.abort_sum(first)
    assert backend.is_aborted.wait(PATIENCE.total_seconds())
    poster.join()


def test_nothing_asks_the_works_of_a_backend_that_is_ending(communicator: CrossGroupCommunicator) -> None:
    backend = post(communicator, 0)
    backend.may_abort.clear()
    communicator.give_up()
    while not backend.is_aborting:
        time.sleep(0.001)
    communicator.start_attempt()
    assert communicator.first_waiting() is None
    assert communicator.may_break_device
    backend.may_abort.set()
    assert backend.is_aborted.wait(PATIENCE.total_seconds())
    while communicator.may_break_device:  # until the device has done what it was given
        time.sleep(0.001)
    communicator.start_attempt()


def test_each_backend_is_ended_once_and_the_next_is_sound(communicator: CrossGroupCommunicator) -> None:
    first = post(communicator, 0)
    communicator.give_up()
    assert first.is_aborted.wait(PATIENCE.total_seconds())
    second = post(communicator, 1)
    for work in second.works:
        work.has_come = True
    assert communicator.poll() == 2
    assert (first.num_aborts, second.num_aborts) == (1, 0)


def test_a_group_alone_has_nothing_to_end(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(nccl, "Abort", ended.append)
    communicator.start_build(0, [GroupId(0)])
    communicator.start_attempt()
    assert communicator.post(torch.zeros(1))
    alone = communicator.first_in_flight()
    assert alone is not None
    communicator.abort_sum(alone)
    assert communicator.poll() == 1
    assert ended == []


def test_a_group_of_transfers_that_breaks_stays_open_in_no_thread_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "current_stream", lambda _device: "mine")
    monkeypatch.setattr(gpu, "stream", lambda stream: nullcontext(assert_mine(stream)))
    opened_in: list[int] = []

    def assert_mine(stream: object) -> None:
        assert stream == "mine"

    def lose_connection() -> None:
        raise RuntimeError("connection lost")

    backend = SimpleNamespace(
        _start_coalescing=lambda: opened_in.append(threading.get_ident()), _end_coalescing=lambda: "the work"
    )
    assert nccl.coalesced(backend, GPU, lambda: None) == "the work"
    with pytest.raises(RuntimeError, match="connection lost"):
        nccl.coalesced(backend, GPU, lose_connection)
    assert len(opened_in) == 2
    assert threading.get_ident() not in opened_in


def test_the_sums_of_a_buffer_are_one_batch_and_its_copies_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "current_stream", lambda _device: "mine")
    monkeypatch.setattr(gpu, "stream", lambda _stream: nullcontext())
    calls: list[str] = []
    backend = SimpleNamespace(
        **{name: lambda *_, name=name: calls.append(name) for name in ("allreduce", "reduce", "send", "recv")},
        _start_coalescing=lambda: calls.append("("),
        _end_coalescing=lambda: calls.append(")") or len(calls),
    )
    transfer = Transfer(connection=None)
    shares = [(torch.zeros(2), recipients) for recipients in ((0, 1), (2, 1), (), (1, 0))]
    Exchange(backend, 0, is_polled=True).post(transfer, shares, torch.zeros(3), first_tag=0)
    assert calls == ["(", "reduce", "reduce", "allreduce", "reduce", "allreduce", ")", "(", "send", "recv", ")"]
    assert transfer.works == [7, 11], "the works of the batches alone report an end"
    assert transfer.follow is None


# ---------------------------------------------------------------------------------------------------------- waiting


@pytest.fixture
def end_of_sum(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Ends the sum behind which events are recorded."""
    ends = threading.Event()
    on_stream: list[Work] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "or it would take the processor"

        def record(self) -> None:
            self._work = on_stream[-1]

        def synchronize(self) -> None:
            assert ends.wait(PATIENCE.total_seconds())
            self._work.has_come = True

    monkeypatch.setattr(gpu, "Event", Event)
    monkeypatch.setattr(gpu, "Stream", lambda _device, priority: priority)
    monkeypatch.setattr(gpu, "stream", nullcontext)
    monkeypatch.setattr(gpu, "set_device", lambda _device: None)
    monkeypatch.setattr(Work, "block_current_stream", lambda work: on_stream.append(work))
    return ends


def test_a_waiting_rank_wakes_when_the_sum_ends_and_does_not_poll_for_it(
    monkeypatch: pytest.MonkeyPatch, end_of_sum: threading.Event
) -> None:
    monkeypatch.setattr(nccl, "connect", lambda *_arguments, **_options: Backend())
    monkeypatch.setattr(communicators, "_PAUSE_S", PATIENCE.total_seconds())
    communicator = new_communicator(monkeypatch, ask_interval_s=PATIENCE.total_seconds())
    work = post(communicator, 0).works[0]
    started_s = time.monotonic()
    threading.Timer(0.2, end_of_sum.set).start()
    assert communicator.wait(lambda: False)
    assert time.monotonic() - started_s < PATIENCE.total_seconds() / 2
    assert communicator.poll() == 1
    assert work.num_polls < 5


def num_threads() -> int:
    return sum(not thread.name.startswith("nccl-abort") for thread in threading.enumerate())


def test_a_rank_that_waits_for_a_sum_reads_the_log(
    communicator: CrossGroupCommunicator, end_of_sum: threading.Event
) -> None:
    backend, asked = post(communicator, 0), iter((False, False, True))
    threads = num_threads()
    assert not communicator.wait(lambda: next(asked))
    assert communicator.evidence == "the log has moved on"
    assert next(asked, "all were asked") == "all were asked"
    assert backend.is_aborted.wait(PATIENCE.total_seconds())
    assert num_threads() <= threads + 1, "one thread waits, however often the log was read"
    end_of_sum.set()


# -------------------------------------------------------------------------------------------------------- warming up


def test_a_warm_up_makes_the_calls_of_later_sums_up_to_the_largest() -> None:
    sizes: dict[str, list[int]] = defaultdict(list)
    backend = SimpleNamespace(
        allreduce=lambda tensors, _options: sizes["sums"].append(len(tensors[0])),
        reduce=lambda tensors, options: sizes["reduces"].append(len(tensors[0]) + options.rootRank),
        _allgather_base=lambda received, sent: sizes["gathers"].append(len(received) // len(sent)),
    )
    for call in warm_up(lambda: torch.empty(11), 2, is_stacked=True):
        call.start(backend)
    assert sizes == {"sums": [1, 2, 4, 8, 11], "reduces": [1], "gathers": [2, 2, 2]}
    for call in warm_up(lambda: torch.empty(1), 2, is_stacked=False):
        call.start(backend)
    assert sizes["sums"][-1:] == [1]
    assert len(list(warm_up(lambda: torch.empty(2), 2, is_stacked=True))) == 3  # too small to gather


class Warming:
    """A communicator whose first calls are two sums, the backend that they are made to, and its build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = Backend()
        monkeypatch.setattr(nccl, "connect", lambda *_arguments, **_options: self.backend)
        tensor = torch.zeros(1)
        call = Call([tensor], lambda backend: backend.allreduce([tensor], None))
        self.communicator = new_communicator(monkeypatch, lambda _size: [call, call])
        self.communicator.start_build(0, [GroupId(0), GroupId(1)])
        self.communicator.start_attempt()

    def wait_for(self, num_calls: int) -> None:
        while len(self.backend.works) < num_calls:
            time.sleep(0.001)


@pytest.fixture
def warming(monkeypatch: pytest.MonkeyPatch) -> Warming:
    return Warming(monkeypatch)


def test_a_communicator_is_there_once_it_is_warm_and_each_call_waits_for_the_one_before(warming: Warming) -> None:
    warming.wait_for(1)
    time.sleep(0.02)
    assert len(warming.backend.works) == 1  # a kernel that waits for a lost member blocks no other call
    assert not warming.communicator.is_ready()
    assert warming.communicator.first_waiting() is not None
    warming.backend.works[0].has_come = True
    warming.wait_for(2)
    warming.backend.works[1].has_come = True
    assert warming.communicator.connect(lambda: False)
    assert warming.communicator.first_in_flight() is None
    assert warming.backend.num_aborts == 0


def test_a_warm_up_ends_when_the_log_moves_on(warming: Warming) -> None:
    warming.wait_for(1)
    assert not warming.communicator.connect(lambda: True)
    warming.communicator.start_build(1, [GroupId(0)])
    assert warming.backend.is_aborted.wait(PATIENCE.total_seconds())


def test_the_watch_ends_a_warm_up_that_blocks_the_main_thread(warming: Warming) -> None:
    warming.wait_for(1)
    first = warming.communicator.first_in_flight()
    assert first is not None
    warming.communicator.abort_sum(first)
    assert warming.backend.is_aborted.wait(PATIENCE.total_seconds())
    assert not warming.communicator.connect(lambda: False)
    assert warming.communicator.evidence == "rebuild: aborted: the log has moved on"


def test_pairs_are_connected_once_before_the_sums_that_need_them(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(1)
    connected: list[tuple[Sequence[tuple[int, int]], int]] = []

    def connecting(pairs: Sequence[tuple[int, int]], rank: int, _device: torch.device) -> Call:
        connected.append((pairs, rank))
        return Call([tensor], lambda backend: backend.allreduce([tensor], None))

    monkeypatch.setattr(communicators, "connecting", connecting)
    backend = post(communicator, 0)
    backend.works[0].has_come = backend.works[1].has_come = True
    assert communicator.poll() == 2
    pairs = {(GroupId(1), GroupId(0)), (GroupId(0), GroupId(1)), (GroupId(0), GroupId(0))}
    communicator.connect_pairs(pairs)
    assert not communicator.is_ready()
    while len(backend.works) < 3:
        time.sleep(0.001)
    backend.works[2].has_come = True
    assert communicator.connect(lambda: False)
    communicator.connect_pairs(pairs)
    assert communicator.is_ready()
    assert connected == [([(0, 1), (1, 0)], 0)]
    communicator.start_build(1, [GroupId(0), GroupId(1)])
    communicator.connect_pairs(pairs)  # while it is built
    assert len(connected) == 2
    communicator.give_up()


def test_after_a_failed_build_the_memory_that_torch_keeps_is_freed_for_the_next(
    communicator: CrossGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(gpu, "empty_cache", lambda: freed.append(True))

    def connect(*_arguments: Any, **_options: Any) -> Backend:
        if not freed:
            raise RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'")
        return Backend()

    monkeypatch.setattr(nccl, "connect", connect)
    communicator.start_build(0, [GroupId(0), GroupId(1)])
    communicator.start_attempt()
    assert not communicator.connect(lambda: False)
    assert "out of memory" in communicator.evidence
    assert freed == [True]
    post(communicator, 1)


# -------------------------------------------------------------------------------------------------------- the watch


class Scene:
    """A watch, what it sees, and whom it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_flight: object | None = None
        self.head = 7
        self.num_written = 7
        self.ended: list[object] = []
        self.num_connections = self.num_broken = 0
        monkeypatch.setattr(sum_watch, "DecisionLog", lambda _store: SimpleNamespace(has=self._has))
        watched: Any = SimpleNamespace(
            first_in_flight=lambda: self.in_flight, abort_sum=lambda one, _reason="": self.ended.append(one)
        )
        self.watch = SumWatch(watched, self._connect, lambda: self.head)

    def _connect(self) -> Any:
        self.num_connections += 1

    def _has(self, index: int) -> bool:
        if self.num_broken >= self.num_connections:
            raise StoreLost("broken pipe")
        return index < self.num_written

    def look(self, times: int) -> None:
        for _ in range(times):
            self.watch.poll()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_sums_in_vain_are_ended_if_the_main_thread_leaves_them(scene: Scene) -> None:
    scene.in_flight = stuck = object()
    scene.look(5)
    assert scene.ended == []
    scene.num_written = 8
    scene.look(1)
    assert scene.ended == []  # the main thread may be about to
    scene.look(1)
    assert scene.ended == [stuck]


def test_a_main_thread_that_gets_on_is_left_alone(scene: Scene) -> None:
    scene.look(3)
    assert scene.num_connections == 0
    for _ in range(4):  # other sums each time
        scene.in_flight = object()
        scene.look(1)
    assert scene.num_connections == 0
    for _ in range(4):  # the same, and the log is read as it is written
        scene.num_written += 1
        scene.look(1)
        scene.head += 1
        scene.look(1)
    scene.in_flight, scene.num_written = None, scene.head + 1
    scene.look(3)
    assert scene.ended == []


def test_a_broken_connection_of_the_watch_is_replaced(scene: Scene) -> None:
    """One that a firewall had dropped while it was idle ended the watch."""
    scene.in_flight = stuck = object()
    scene.num_written, scene.num_broken = 8, 1
    scene.look(2)
    assert (scene.ended, scene.num_connections) == ([], 1)
    scene.look(2)
    assert (scene.ended, scene.num_connections) == ([stuck], 2)


def test_connections_that_break_one_after_the_other_end_no_sums(scene: Scene) -> None:
    scene.in_flight = object()
    for num_broken in (1, 2, 3):
        scene.num_broken = num_broken
        scene.look(3)  # it breaks, and the next one answers
    assert (scene.ended, scene.num_connections) == ([], 4)


def test_sums_in_flight_are_ended_if_the_store_is_lost(scene: Scene) -> None:
    """A main thread that a kernel blocks would not save its state before it is killed."""
    scene.in_flight = stuck = object()
    scene.num_broken = 9
    scene.look(2)
    assert scene.ended == []
    scene.look(1)
    assert scene.ended == [stuck]
