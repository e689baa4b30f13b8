"""What a log says of a run in which no group is left to read it."""

from collections.abc import Sequence
from dataclasses import replace

from spare_megatron.config.schema import (
    ClusterConfig,
    LayoutConfig,
    ModelConfig,
    RunConfig,
    SpareConfig,
    TrainConfig,
)
from spare_megatron.core.log.actions import AwaitHosts, FinishRun, StopHalted, StopWipeOut
from spare_megatron.core.log.entries import Commit, Entry, Fence, Resume, Retry, encode_entry
from spare_megatron.stacking.layout import GroupId, Member, Slabs
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.supervisor.rank_exits import with_xid_events
from spare_megatron.voting.log_follower import LogFollower, Stop, controller_setup

CONFIG = RunConfig(layout=LayoutConfig(num_groups=3), spare=SpareConfig(redundancy=2), train=TrainConfig(steps=2))
NAN = "the gradient of step 0 is not finite"


class _Store:
    """Holds a log and nothing else."""

    def __init__(self, *entries: Entry) -> None:
        self._values = {keys.entry(index): encode_entry(entry) for index, entry in enumerate(entries)}

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return [self._values.get(key) for key in keys]


def stop_of(*entries: Entry) -> Stop | AwaitHosts | None:
    log = DecisionLog(_Store(*entries))  # type: ignore[arg-type]
    return LogFollower(log, controller_setup(CONFIG)).stop()


def fence(group: int, error: str = "") -> Fence:
    return Fence(group=GroupId(group), error=error)


def test_groups_that_all_raised_the_same_halt_the_run_though_none_of_them_could_say_so() -> None:
    stop = stop_of(fence(1, NAN), fence(0, NAN), fence(2, NAN))
    assert isinstance(stop, StopHalted)
    assert NAN in stop.reason


def test_groups_that_were_lost_for_reasons_of_their_own_do_not() -> None:
    assert stop_of() is None
    for last in (fence(1), fence(1, NAN)):
        stop = stop_of(last, fence(0, "another"), fence(2))
        assert isinstance(stop, StopWipeOut)
        assert stop.shards == (0, 1, 2)


def test_what_may_be_two_devices_halts_only_when_it_comes_again_after_a_retry() -> None:
    """Two machines of one rack may lose their GPUs in one step."""
    launch = "RuntimeError: CUDA error: unspecified launch failure"
    assert not isinstance(stop_of(fence(1, launch), fence(0, launch)), StopHalted)
    stop = stop_of(fence(1, launch), Retry(step=0, attempt=0), fence(0, launch))
    assert isinstance(stop, StopHalted)
    assert launch in stop.reason
    assert not isinstance(stop_of(fence(1, launch), Commit(step=0, attempt=0), fence(0, launch)), StopHalted)


def test_two_groups_whose_devices_have_failed_by_the_driver_never_halt_the_run() -> None:
    """As the supervisors of two machines fence them: by the exception alone, the second would show a bug."""
    launch = "RuntimeError: CUDA error: unspecified launch failure"
    lost = [with_xid_events(launch, launch, machine, [(f"GPU-{machine}", 79)]) for machine in (4, 7)]
    first, second = (
        Fence(group=GroupId(group), reason=cause, error=error) for group, (cause, error) in enumerate(lost)
    )
    assert [machine in fenced.reason for machine, fenced in (("machine 4", first), ("machine 7", second))] == [True] * 2
    assert not isinstance(stop_of(first, Retry(step=0, attempt=0), second), StopHalted)
    unnamed = Fence(group=GroupId(1), error=launch)
    assert not isinstance(stop_of(first, Retry(step=0, attempt=0), unnamed), StopHalted)


def test_the_same_in_different_steps_is_no_pattern() -> None:
    assert stop_of(fence(1, NAN), Commit(step=0, attempt=0), fence(0, NAN)) is None


def test_ends_that_a_log_reaches_are_reported() -> None:
    assert stop_of(Commit(step=0, attempt=0), Commit(step=1, attempt=1)) == FinishRun(step=2)
    stop = stop_of(fence(1), fence(0), Commit(step=0, attempt=0))
    assert isinstance(stop, AwaitHosts)
    back = (Member(GroupId(0), 1), Member(GroupId(1), 1))
    assert stop_of(fence(1), fence(0), Commit(step=0, attempt=0), Resume(step=1, attempt=1, admit=back)) is None


def test_who_follows_a_log_knows_the_stages_that_groups_may_have() -> None:
    layout = LayoutConfig(num_groups=3, pipeline_parallel=4, least_pipeline_parallel=3)
    config = replace(CONFIG, layout=layout, model=ModelConfig(num_layers=12), cluster=ClusterConfig(num_nodes=12))
    setup = controller_setup(config)
    assert setup.slabs == Slabs(12, (4, 3))
    assert (setup.num_stages, setup.rounds and setup.rounds.fill) == (4, 3)
    assert setup.stages_of([Member(GroupId(0), 1), Member(GroupId(2), 5)], {GroupId(2): 3}) == (4, 3)
    assert controller_setup(CONFIG).slabs is None
