"""The order in which the ranks of a group post sums over the groups and collectives of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm.bucket_exchange import BucketExchange, BucketSums, Staging
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.mcore_group import CPU, run_group, work_of
from tests.integration.test_run_buckets import bucketed, run_of
from tests.integration.test_run_corruption import wrong
from tests.integration.whole_run import kill, losses_of, tiny_config

pytestmark = pytest.mark.timeout(180)

MEMBERS = (GroupId(0), GroupId(1))
WORK = work_of((0, 0), (1, 1))
COLLECTIVE = "collective of the group"


class LateCommunicator:
    """Records posts. A sum is complete at the next poll or, if `is_late`, only once the rank waits for it. The wait
    after the first `num_sums` sums ends without success."""

    evidence = ""

    def __init__(self, order: list[str], num_sums: int, *, is_late: bool) -> None:
        self._order, self._num_left, self._is_late = order, num_sums, is_late
        self._in_flight = self._num_complete = 0

    def start_attempt(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True

    def connect(self, _is_decided: Callable[[], bool]) -> bool:
        return True

    def post(self, _tensor: torch.Tensor) -> bool:
        self._order.append("sum over the groups")
        self._in_flight += 1
        return True

    def wait(self, _is_decided: Callable[[], bool]) -> bool:
        if not self._num_left:
            return False
        self._num_left -= 1
        self._in_flight -= 1
        self._num_complete += 1
        return True

    def poll(self) -> int:
        if not self._is_late:
            self._num_complete, self._in_flight = self._num_complete + self._in_flight, 0
        num_complete, self._num_complete = self._num_complete, 0
        return num_complete


def order_of_posts(config: RunConfig, late_sums: int, *, is_alone: bool) -> list[str]:
    """What this rank posted in a backward pass, in order. Sums complete late on the last rank, `late_sums` in all."""
    order: list[str] = []
    is_late = dist.get_rank() == dist.get_world_size() - 1
    communicator: Any = LateCommunicator(order, late_sums, is_late=is_late)
    trainer = GroupTrainer(config, CPU)
    exchange = BucketExchange(
        position=dist.get_rank(),
        lanes=config.parallel.beside(dist.get_rank()),
        is_alone=is_alone,
        sums=trainer.slabs[0].gradients,
        communicator=communicator,
        bucket_sums=BucketSums(trainer.slabs[0].gradients, communicator),
        staging=Staging(trainer.slabs[0].gradients.new_staging),
        outlier_factor=0.0,
        probe=SilentProbe(),
    )
    all_reduce = dist.all_reduce

    def recorded(*arguments: Any, **options: Any) -> Any:
        order.append(COLLECTIVE)
        return all_reduce(*arguments, **options)

    voters = tuple(Member(group) for group in MEMBERS)
    attempt = AttemptReduce(step=0, attempt=0, epoch=0, members=MEMBERS, voters=voters, plan_digest="", kept=())
    trainer.begin_step(0)
    exchange.start_attempt(attempt)
    dist.all_reduce = recorded
    exchange.begin_early(len(WORK))
    trainer.compute(WORK, lambda _, num_ready: exchange.send_ready(num_ready, lambda: False))
    return order


def tensor_parallel(corpus: Path) -> RunConfig:
    config = tiny_config(corpus, LayoutConfig(num_groups=2, tensor_parallel=2))
    config = replace(config, reduce=replace(config.reduce, bucket_mib=0.005))
    prepare_index(config)
    return config


def test_tensor_parallel_ranks_post_sums_at_the_same_points_though_one_sees_them_complete_late(
    text_corpus: Path,
) -> None:
    """A sum's kernel may hold up what is posted after it. In another order two ranks would wait for each other."""
    config = tensor_parallel(text_corpus)
    prompt, late = run_group(order_when_waiting, config)
    assert prompt == late
    sums = [at for at, what in enumerate(late) if what != COLLECTIVE]
    collectives = [at for at, what in enumerate(late) if what == COLLECTIVE]
    assert sum(at > sums[2] for at in collectives) > 2, "sums are posted in the middle of the backward pass"
    prompt, late = run_group(order_when_polling, config)
    assert prompt != late, "what a rank sees complete would decide"


def order_when_waiting(config: RunConfig) -> list[str]:
    return order_of_posts(config, 1000, is_alone=False)


def order_when_polling(config: RunConfig) -> list[str]:
    return order_of_posts(config, 1000, is_alone=True)


def test_a_rank_that_has_given_up_takes_part_in_all_collectives_of_its_group(text_corpus: Path) -> None:
    whole, cut = run_group(order_when_given_up, tensor_parallel(text_corpus))
    num_sums = len(cut) - cut.count(COLLECTIVE)
    assert 2 < num_sums < len(whole) - whole.count(COLLECTIVE)
    assert whole.count(COLLECTIVE) == cut.count(COLLECTIVE)
    last = max(at for at, what in enumerate(cut) if what != COLLECTIVE)
    assert whole[: last + 1] == cut[: last + 1]
    assert set(cut[last + 1 :]) == {COLLECTIVE}


def order_when_given_up(config: RunConfig) -> list[str]:
    return order_of_posts(config, 2, is_alone=False)


def test_a_run_of_tensor_parallel_groups_masks_losses_and_unsound_gradients_of_one_rank(
    text_corpus: Path, tmp_path: Path
) -> None:
    layout = LayoutConfig(num_groups=4, tensor_parallel=2)
    expected = run_of(bucketed(text_corpus, layout=layout), tmp_path / "none")
    faults = [wrong("nan", FaultPoint.BACKWARD, 1, 2, 1), kill(FaultPoint.IN_REDUCE, 3, 1, 1)]
    run = run_of(bucketed(text_corpus, faults, layout=layout, overlap=True), tmp_path / "faults")
    assert run.summary.outcome == "finished"
    assert losses_of(run.journal) == losses_of(expected.journal)
    assert run.summary.params_sha256 == expected.summary.params_sha256
