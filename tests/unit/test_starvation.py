"""The clock that leaves out waits for a processor."""

from spare_megatron.machine.machine_signs import UnstarvedClock, unstarved_clock

MS = 1_000_000


def test_a_wait_between_its_two_readings_does_not_turn_the_clock_back() -> None:
    """A pass that ended in such a wait lasted a negative time, and the group was lost over it."""
    waited_ns = iter([0, 0, 0, 80 * MS, 80 * MS])
    now_s = iter([10.0, 10.02, 10.1])
    clock = UnstarvedClock(lambda: next(waited_ns), lambda: next(now_s))
    assert clock() == 10.0
    assert abs(clock() - 10.02) < 1e-9  # 10.1 less the wait of 0.08


def test_it_never_falls_though_the_kernels_clocks_differ() -> None:
    waited_ns = iter([0, 0, 21 * MS, 21 * MS])
    now_s = iter([10.0, 10.02])
    clock = UnstarvedClock(lambda: next(waited_ns), lambda: next(now_s))
    assert [clock(), clock()] == [10.0, 10.0]


def test_this_kernel_counts_waits() -> None:
    clock = unstarved_clock()
    assert isinstance(clock, UnstarvedClock)
    assert clock() <= clock()
