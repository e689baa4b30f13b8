"""Buckets in flight: what a rank has written over its local sums, all groups hold, in every order of events."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import pytest

from spare_megatron.config.model.model_shape import model_shape
from spare_megatron.config.schema import ClusterConfig, ModelConfig, ReduceConfig, RunConfig
from spare_megatron.config.training.run_sizes import rank_memory
from spare_megatron.core.log.bucket_window import MAX_STAGED, WINDOW, BucketWindow, cut


def test_buckets_are_the_whole_space_in_order_and_equal_but_for_the_last() -> None:
    for num_elements in range(1, 40):
        for size in range(1, 12):
            buckets = cut(num_elements, size)
            assert [element for bucket in buckets for element in bucket] == list(range(num_elements))
            assert {len(bucket) for bucket in buckets[:-1]} <= {size}
            assert 1 <= len(buckets[-1]) <= size


@pytest.mark.parametrize(("mode", "number_bytes"), [("fast", 4), ("fast_bf16", 2), ("reproducible", 8)])
def test_the_memory_of_a_reduction_is_that_of_all_gradients_or_of_the_staged_buckets(
    mode: Literal["fast", "fast_bf16", "reproducible"], number_bytes: int
) -> None:
    for bucket_mib in (1 / 64, 32.0):
        config = RunConfig(reduce=ReduceConfig(mode=mode, bucket_mib=bucket_mib))
        staged = rank_memory(config).reduction_bytes
        assert staged == min(MAX_STAGED * bucket_mib * 2**20, number_bytes * sum(model_shape(config).of_stages(1)))


@pytest.mark.parametrize(("device", "bucket_mib"), [("cpu", 32), ("gpu", 128)])
def test_buckets_are_larger_on_gpus(device: Literal["cpu", "gpu"], bucket_mib: int) -> None:
    model = ModelConfig(hidden_size=4096, num_layers=8)
    config = RunConfig(model=model, cluster=ClusterConfig(device=device))
    assert rank_memory(config).reduction_bytes == MAX_STAGED * bucket_mib * 2**20
    with_own = replace(config, reduce=ReduceConfig(bucket_mib=1.0))
    assert rank_memory(with_own).reduction_bytes == MAX_STAGED * 2**20


def test_more_buckets_cannot_be_kept_than_there_are() -> None:
    with pytest.raises(ValueError, match="4 buckets should be kept, the rank has 3"):
        BucketWindow(3, 4)


MayPost = Callable[[int, int], bool]
"""Whether a rank that has posted and completed so many buckets may post the next."""


@dataclass(frozen=True, slots=True)
class State:
    """Of every rank, how many buckets it has posted, and how many are complete there.

    Bucket i completes, in order, on a rank once every rank has posted i, dead ones included, if they did before they
    died.
    """

    posted: tuple[int, ...]
    complete: tuple[int, ...]
    dead: frozenset[int] = frozenset()

    def moves(self, num_buckets: int, may_post: MayPost) -> Iterator["State"]:
        for rank in range(len(self.posted)):
            if rank in self.dead:
                continue
            posted, complete = self.posted[rank], self.complete[rank]
            if posted < num_buckets and may_post(posted, complete):
                yield replace(self, posted=_with(self.posted, rank, posted + 1))
            if complete < min(self.posted):
                yield replace(self, complete=_with(self.complete, rank, complete + 1))
            if not self.dead:
                yield replace(self, dead=frozenset({rank}))


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def reachable(num_ranks: int, num_buckets: int, kept: int, may_post: MayPost | None = None) -> set[State]:
    """All states, with a loss of any rank at any moment."""

    def window_may_post(posted: int, complete: int) -> bool:
        return window_at(num_buckets, kept, posted, complete).may_post(num_buckets)

    first = State((kept,) * num_ranks, (kept,) * num_ranks)
    seen, new = {first}, [first]
    while new:
        state = new.pop()
        for after in state.moves(num_buckets, may_post or window_may_post):
            if after not in seen:
                seen.add(after)
                new.append(after)
    return seen


def window_at(num_buckets: int, kept: int, posted: int, complete: int) -> BucketWindow:
    """The window of a rank that has come that far; the order in which it did makes no difference."""
    window = BucketWindow(num_buckets, kept)
    written: list[int] = []
    while (window.num_posted, window.num_complete) != (posted, complete):
        if window.may_post(num_buckets) and window.num_posted < posted:
            assert window.post() == window.num_posted - 1
        else:
            written += window.complete()
    assert written == list(range(kept, window.num_everywhere)), "each bucket is written once, in order"
    return window


@pytest.mark.parametrize(("num_ranks", "num_buckets", "kept"), [(2, 7, 0), (3, 5, 0), (3, 6, 2), (4, 4, 1), (3, 1, 0)])
def test_whatever_happens_survivors_can_go_on_from_what_all_of_them_hold(
    num_ranks: int, num_buckets: int, kept: int
) -> None:
    states = reachable(num_ranks, num_buckets, kept)
    num_kept, is_uneven, most_staged, most_in_flight = 0, False, 0, 0
    for state in states:
        windows = [
            window_at(num_buckets, kept, posted, complete)
            for posted, complete in zip(state.posted, state.complete, strict=True)
        ]
        survivors = [rank for rank in range(num_ranks) if rank not in state.dead]
        agreed = min(state.complete[rank] for rank in survivors)
        for rank in survivors:
            # A sum over a local sum that has to be reduced again would be counted twice.
            assert windows[rank].num_everywhere <= agreed
            # And whatever is kept, all groups hold, be it staged or in its place.
            assert windows[rank].num_complete >= agreed
            most_staged = max(most_staged, windows[rank].num_posted - windows[rank].num_everywhere)
            most_in_flight = max(most_in_flight, windows[rank].num_posted - windows[rank].num_complete)
        num_kept += agreed > kept
        is_uneven |= len({window.num_everywhere for window in windows}) > 1
    assert most_staged == min(MAX_STAGED, num_buckets - kept)
    assert most_in_flight == min(WINDOW, num_buckets - kept)
    assert num_kept, "some losses leave something"
    assert is_uneven or num_buckets - kept <= WINDOW, "some ranks have written what others still hold staged"


@pytest.mark.parametrize(("num_ranks", "num_buckets", "kept"), [(2, 12, 0), (3, 9, 2)])
def test_a_rank_counts_on_as_many_buckets_everywhere_as_are_certain_and_no_fewer(
    num_ranks: int, num_buckets: int, kept: int
) -> None:
    states = [state for state in reachable(num_ranks, num_buckets, kept) if not state.dead]
    for complete in range(kept, num_buckets + 1):
        certain = min(min(state.complete) for state in states if state.complete[0] == complete)
        assert window_at(num_buckets, kept, complete, complete).num_everywhere == certain


@pytest.mark.parametrize(
    "may_post",
    [lambda posted, complete: posted - complete < WINDOW, lambda posted, complete: posted - complete < WINDOW + 1],
    ids=["any number is staged", "one more is in flight"],
)
def test_ranks_that_post_more_than_the_window_lets_them_are_found_to_write_too_early(may_post: MayPost) -> None:
    too_early = 0
    for state in reachable(2, 6, 0, may_post):
        survivors = [rank for rank in range(2) if rank not in state.dead]
        for rank in survivors:
            window = BucketWindow(6, 0)
            window.num_complete = state.complete[rank]
            too_early += window.num_everywhere > min(state.complete[other] for other in survivors)
    assert too_early


def test_a_whole_attempt_reduces_every_bucket_once_in_random_orders() -> None:
    random = Random(4)
    for _ in range(200):
        num_buckets = random.randint(1, 9)
        kept = random.randint(0, num_buckets)
        windows = [BucketWindow(num_buckets, kept) for _ in range(3)]
        posted: list[list[int]] = [[], [], []]
        while not all(window.is_complete for window in windows):
            rank = random.randrange(3)
            window = windows[rank]
            if random.random() < 0.5 and window.may_post(random.randint(0, num_buckets)):
                posted[rank].append(window.post())
            elif window.num_complete < min(other.num_posted for other in windows):
                window.complete()
        assert posted == [list(range(kept, num_buckets))] * 3
