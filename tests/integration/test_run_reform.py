"""Machines that are lost for good: groups are re-formed from others, or go on with fewer stages."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import (
    AuditConfig,
    ClusterConfig,
    FaultConfig,
    FaultsConfig,
    LayoutConfig,
    OptimizerConfig,
    RunConfig,
)
from spare_megatron.config.schema_sections import EvalConfig, SnapshotConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import EndRecord, PlacesRecord, RestartRecord, StartRecord, UpdateRecord
from spare_megatron.process.processes import fork_server
from spare_megatron.process.reports import GroupRejoined, RunEvent
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.supervisor.node_process import look_after_node
from spare_megatron.supervisor.places.group_reforming import AssignmentList
from spare_megatron.supervisor.remote_supervisor import ByHand
from spare_megatron.supervisor.supervisor import Supervisor
from tests.integration.etcd_cluster import EtcdCluster
from tests.integration.forked_supervisors import START_S, Forked, Forks, LateForks
from tests.integration.watched_rank import Watch, watched_rank
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    entries_of,
    evaluations_of,
    kill,
    losses_of,
    read_run,
    tiny_config,
)
from tests.matrix.cells import PHASES_OF_EVERY_STEP

pytestmark = pytest.mark.timeout(300)

STEPS = 12
RE_FORMED = (6, Member(GroupId(0), 1))
"""The step at whose end the re-formed group is admitted."""
COME_BACK = (9, Member(GroupId(1), 1))
"""Likewise the group that machines come back for."""


def kill_machine(step: int, group: int, rank: int) -> FaultConfig:
    return FaultConfig(phase=FaultPoint.FORWARD, step=step, group=group, rank=rank, kind="kill_supervisor")


@pytest.fixture(scope="module")
def config(text_corpus: Path) -> RunConfig:
    return tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4, pipeline_parallel=2),
        steps=STEPS,
        faults=[kill_machine(2, 0, 0), kill_machine(4, 1, 1)],
        redundancy=3,
        rejoins=1,
        mode="reproducible",
        optimizer=OptimizerConfig(sharding="stacked", redundancy=3),
        cluster=ClusterConfig(device="cpu", num_nodes=8),
    )


@pytest.fixture(scope="module")
def plain(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same without losses."""
    one = replace(config, faults=FaultsConfig(), cluster=replace(config.cluster, num_nodes=1))
    return complete_run(one, tmp_path_factory.mktemp("plain") / "run")


def rejoined(run: Run) -> list[tuple[Member, int]]:
    return [(event.member, event.step) for event in run.events if isinstance(event, GroupRejoined)]


def holdings(run: Run) -> Mapping[int, list[list[int]]]:
    return {record.index: record.holdings for record in run.journal.of(PlacesRecord)}


def groups_at_the_end(run: Run) -> set[int]:
    return {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1}


def test_two_broken_groups_of_lanes_make_a_whole_one_that_changes_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    """A machine has both lanes of a stage, with their parts of the optimizer state. One group computes the same."""
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=3, data_parallel=2, pipeline_parallel=2),
        steps=STEPS,
        faults=[kill_machine(2, 0, rank=0), kill_machine(4, 1, rank=2)],
        rejoins=1,
        mode="reproducible",
        cluster=ClusterConfig(device="cpu", num_nodes=6),
    )
    run = complete_run(config, tmp_path / "run", Watch(awaited=frozenset({RE_FORMED})))
    assert_masked(run)
    assert rejoined(run) == [(RE_FORMED[1], RE_FORMED[0] + 1)]
    assert holdings(run) == {0: [[2, 0, 1]]}, "machine 2, of group 1, takes the place of machine 0"
    assert groups_at_the_end(run) == {0, 2}
    alone = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=1, pipeline_parallel=2),
        steps=STEPS,
        num_microbatches=3 * config.spare.microbatches_per_shard,
        mode="reproducible",
    )
    assert losses_of(run.journal) == losses_of(complete_run(alone, tmp_path / "alone").journal)


def test_machines_that_come_back_to_taken_places_take_those_that_were_left(
    config: RunConfig, plain: Run, tmp_path: Path
) -> None:
    """Supervisors as on other machines. Those of the lost ones come once the re-formed group has been admitted."""
    launcher = LateForks(may_come=tmp_path / "may_come")

    def on_event(event: RunEvent) -> None:
        if isinstance(event, GroupRejoined):
            launcher.may_come.touch()

    watch = Watch(awaited=frozenset({RE_FORMED, COME_BACK}))
    run = complete_run(config, tmp_path / "run", watch, on_event, launcher=launcher)  # type: ignore[arg-type]
    assert_masked(run)
    assert rejoined(run) == [(member, step + 1) for step, member in (RE_FORMED, COME_BACK)]
    re_formed, *came = [holding for _, found in sorted(holdings(run).items()) for holding in found]
    assert re_formed == [2, 0, 1]
    # Machine 8 replaces machine 0, whose place machine 2 has; machine 11 replaces machine 3 in its own.
    assert sorted(came) == [[8, 2, 1], [11, 3, 1]]
    assert groups_at_the_end(run) == {0, 1, 2, 3}
    assert run.summary.params_sha256 == plain.summary.params_sha256


# ------------------------------------------------------------------------------------- by hand, and without a driver

END_S = 100.0


@dataclass(frozen=True)
class Struck:
    """What is killed when a supervisor is about to assign places (`assign`), has done so (`assigned`), leaves a place
    (`leave`) or has started ranks again (`start`): the driver, and a supervisor itself. Each strikes once.
    """

    driver_at: str
    supervisor_at: str
    folder: Path

    def __call__(self, moment: str) -> None:
        if moment == self.driver_at and self._is_first("driver"):
            driver = psutil.Process(int((self.folder / "driver.pid").read_text()))
            driver.kill()
            psutil.wait_procs([driver], timeout=END_S)
        if moment == self.supervisor_at and self._is_first("supervisor"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, what: str) -> bool:
        try:
            os.close(os.open(self.folder / f"{what}-struck", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def supervise(strike: Struck, run_dir: Path, machine: int) -> None:
    """A supervisor's process, as `spare supervise` has it."""
    _around(AssignmentList, "append", lambda: strike("assign"), lambda: strike("assigned"))
    _around(Supervisor, "leave", lambda: strike("leave"), lambda: None)
    _around(Supervisor, "_start_again", lambda: None, lambda: strike("start"))
    look_after_node(run_dir, machine, START_S)
    os._exit(0)  # a thread may be waiting for the store


def _around(owner: type, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(self: Any, *words: Any, **settings: Any) -> Any:
        before()
        result = method(self, *words, **settings)
        after()
        return result

    setattr(owner, name, wrapped)


def drive(config: RunConfig, run_dir: Path, watch: Watch, address: str) -> None:
    """The driver's process. It starts others from the fork server of the tests, which has imported Megatron."""
    (run_dir.parent / "driver.pid").write_text(str(os.getpid()))
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009
    server._forkserver_address, server._forkserver_pid = address, os.getppid()
    server.ensure_running = forkserver.ensure_running = lambda: None
    start_run(config, run_dir, lambda event: None, partial(watched_rank, watch), ByHand())


@contextmanager
def started(config: RunConfig, run_dir: Path, watch: Watch, strike: Struck) -> Iterator[list[BaseProcess]]:
    """Supervisors and a driver, none of which outlives the block."""
    context = fork_server()
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    processes: list[BaseProcess] = [context.Process(target=drive, args=(config, run_dir, watch, address))]
    processes += [
        context.Process(target=supervise, args=(strike, run_dir, node)) for node in range(config.cluster.num_nodes)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture
def by_hand(config: RunConfig, etcd_cluster: EtcdCluster) -> RunConfig:
    """Three groups lose a machine in one step, so that the others of theirs make one whole."""
    return replace(
        config,
        spare=replace(config.spare, redundancy=4, rejoins=3),
        optimizer=replace(config.optimizer, redundancy=4),
        control=replace(config.control, store="etcd", endpoints=etcd_cluster.endpoints),
        faults=FaultsConfig(trace=tuple(kill_machine(2, group, rank) for group, rank in ((0, 0), (1, 1), (2, 1)))),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_lost", "driver_at", "supervisor_at", "re_formed"),
    [
        (3, "assign", "leave", {0}),
        # Group 0, where the losses of the other two groups are found first: machine 2 is the lowest then.
        (3, "assigned", "assign", {0, 1}),
        # Of three that break, the two that are found first make a whole one: any of them.
        (2, "start", "", {0}),
    ],
    ids=["the driver before, who moves", "the driver after, who assigns", "the driver while a group joins"],
)
def test_machines_are_re_formed_alone_whatever_is_lost_meanwhile(
    by_hand: RunConfig,
    plain: Run,
    tmp_path: Path,
    num_lost: int,
    driver_at: str,
    supervisor_at: str,
    re_formed: set[int],
) -> None:
    by_hand = replace(by_hand, faults=FaultsConfig(trace=by_hand.faults.trace[:num_lost]))
    watch = Watch(awaited_first=frozenset((RE_FORMED[0], Member(GroupId(group), 1)) for group in re_formed))
    run_dir = tmp_path / "run"
    with started(by_hand, run_dir, watch, Struck(driver_at, supervisor_at, tmp_path)) as processes:
        end_s = time.monotonic() + END_S
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    struck = ["driver", "supervisor"] if supervisor_at else ["driver"]
    assert sorted(file.name for file in tmp_path.glob("*-struck")) == [f"{what}-struck" for what in struck]
    assert codes[0] == -signal.SIGKILL
    assert codes.count(-signal.SIGKILL) == len(struck) + len(by_hand.faults.trace)
    assert codes.count(0) == len(codes) - codes.count(-signal.SIGKILL), "the others have ended by themselves"
    run = read_run(by_hand, run_dir, ())
    assert_masked(run)
    assert {end.outcome for end in run.journal.of(EndRecord)} == {"finished"}
    assert run.summary.groups_rejoined == 1
    assert len(groups_at_the_end(run)) == 5 - num_lost
    assert re_formed & {place // 2 for found in holdings(run).values() for _, place, _ in found}
    assert run.summary.params_sha256 == plain.summary.params_sha256


SHAPE_STEPS = 20
LOST_IN = 8
"""As in test_run_reform.py."""
COMES_BACK = (12, Member(GroupId(1), 1))
"""The step at whose end the smaller group is admitted."""
LEAVES = (14, 1)
"""The step at whose end it leaves, to become whole, and the group."""
IS_WHOLE = (17, Member(GroupId(1), 2))
"""As `COMES_BACK`, once it is whole."""


def lose_machine(group: int, rank: int) -> FaultConfig:
    return FaultConfig(phase=FaultPoint.FORWARD, step=LOST_IN, group=group, rank=rank, kind="kill_supervisor")


def shaped(corpus: Path, *, num_groups: int = 2, stages: int = 4, lanes: int = 1, **settings: Any) -> RunConfig:
    """A run of groups that have a machine for each stage and may have one stage fewer."""
    layout = LayoutConfig(
        num_groups=num_groups,
        data_parallel=lanes,
        pipeline_parallel=stages,
        least_pipeline_parallel=stages - 1,
    )
    return tiny_config(
        corpus,
        layout,
        steps=SHAPE_STEPS,
        rejoins=2,
        mode="reproducible",
        cluster=ClusterConfig(device="cpu", num_nodes=num_groups * stages),
        **{"num_layers": 2 * stages, "num_microbatches": 4, **settings},
    )


def with_faults(config: RunConfig, *faults: FaultConfig) -> RunConfig:
    return replace(config, faults=FaultsConfig(trace=faults))


def starts(run: Run) -> set[tuple[int, int, int | None]]:
    """Group, incarnation and stages of all starts after the first."""
    return {(record.group, record.incarnation, record.stages) for record in run.journal.of(StartRecord)}


def params(run: Run) -> str | None:
    return run.summary.params_sha256


@pytest.fixture(scope="module")
def plain_stages(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two groups of three stages without a loss."""
    return complete_run(shaped(text_corpus, stages=3), tmp_path_factory.mktemp("plain_stages") / "run")


VARIANTS = {
    "dense": {"deal_by_pace": True},
    "dropout and an output layer of its own": {
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "tie_embeddings": False,
    },
    "lanes": {"stages": 3, "lanes": 2},
    "experts over lanes, in bf16": {
        "stages": 3,
        "lanes": 2,
        "num_experts": 2,
        "linear_bias": False,
        "precision": "bf16",
    },
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_a_group_that_loses_a_machine_goes_on_with_fewer_stages_and_changes_no_bit(
    text_corpus: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = shaped(text_corpus, **settings)
    whole = config.layout.pipeline_parallel
    lanes = config.layout.data_parallel
    lost = with_faults(config, lose_machine(1, rank=lanes * (whole - 2)))
    run = complete_run(lost, tmp_path / "run", Watch(awaited=frozenset({COMES_BACK})))
    assert_masked(run)
    assert starts(run) == {(1, 1, whole - 1)}
    # The machine of the last place takes that of the lost one.
    (places,) = {record.index: record for record in run.journal.of(PlacesRecord)}.values()
    assert places.holdings == [[2 * whole - 1, 2 * whole - 2, 1]]
    assert places.stages == [[1, whole - 1]]
    plain_stages = complete_run(config, tmp_path / "plain_stages")
    assert params(run) == params(plain_stages)


@pytest.mark.parametrize("phase", PHASES_OF_EVERY_STEP)
def test_a_machine_may_be_lost_at_any_moment_of_a_step(
    text_corpus: Path, tmp_path: Path, plain_stages: Run, phase: FaultPoint
) -> None:
    """First of one group, then of the other: both have fewer stages in the end."""
    config = shaped(text_corpus, stages=3)
    lost = with_faults(
        config, replace(lose_machine(1, 1), phase=phase), replace(lose_machine(0, 1), phase=phase, step=14)
    )
    again = frozenset({(12, Member(GroupId(1), 1)), (18, Member(GroupId(0), 1))})
    run = complete_run(lost, tmp_path / "run", Watch(awaited=again))
    assert_masked(run)
    assert starts(run) == {(1, 1, 2), (0, 1, 2)}
    assert params(run) == params(plain_stages)


def test_two_groups_that_lose_a_machine_each_go_on_side_by_side(text_corpus: Path, tmp_path: Path) -> None:
    """Of three groups two have two stages of three: unequal parts of the layers stand beside each other in all sums."""
    config = shaped(text_corpus, num_groups=3, stages=3)
    lost = with_faults(config, lose_machine(0, rank=2), lose_machine(1, rank=0))
    members = frozenset((COMES_BACK[0], Member(GroupId(group), 1)) for group in (0, 1))
    run = complete_run(lost, tmp_path / "run", Watch(awaited=members))
    assert_masked(run)
    assert starts(run) == {(0, 1, 2), (1, 1, 2)}
    assert params(run) == params(complete_run(config, tmp_path / "plain_stages"))


def test_all_that_runs_beside_training_goes_on_and_a_smaller_group_gives_its_state_to_a_whole_one(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Evaluations, audits of every step and checkpoints. A process of each group is killed, too: the smaller one comes
    back as small, the other takes all of its state from it. The training is then continued from the last checkpoint.
    """
    config = shaped(text_corpus, stages=3)
    config = replace(
        config,
        data=replace(config.data, split="9,1"),
        eval=EvalConfig(every_steps=4, sequences=8),
        audit=AuditConfig(every_steps=1),
        optimizer=OptimizerConfig(decay_steps=SHAPE_STEPS + 4),
        checkpoint=replace(config.checkpoint, interval_steps=10),
    )
    again = [(12, Member(GroupId(1), 1)), (15, Member(GroupId(0), 1)), (18, Member(GroupId(1), 2))]
    killed = kill(FaultPoint.BACKWARD, 13, 0, 2), kill(FaultPoint.AFTER_VOTE, 16, 1, 1)
    lost = with_faults(config, lose_machine(1, 1), *killed)
    run = complete_run(lost, tmp_path / "run", Watch(awaited=frozenset(again)))
    assert_masked(run)
    assert starts(run) == {(1, 1, 2), (0, 1, None), (1, 2, 2)}
    plain_stages = complete_run(config, tmp_path / "plain_stages")
    assert params(run) == params(plain_stages)
    assert evaluations_of(run.journal) == evaluations_of(plain_stages.journal) != []
    last = [
        complete_run(
            replace(
                config,
                train=replace(config.train, steps=SHAPE_STEPS + 4),
                checkpoint=replace(config.checkpoint, load=str(tmp_path / name)),
            ),
            tmp_path / f"{name}-continued",
        )
        for name in ("run", "plain_stages")
    ]
    assert params(last[0]) == params(last[1])


@pytest.mark.parametrize(
    ("every_steps", "lanes", "loaded_from"), [(0, 1, "storage"), (2, 1, "memory"), (2, 2, "memory")]
)
def test_a_wipe_out_brings_back_all_groups_with_the_stages_that_they_have_machines_for(
    text_corpus: Path, tmp_path: Path, every_steps: int, lanes: int, loaded_from: str
) -> None:
    """From a checkpoint together; a snapshot is of the whole group, from which the smaller one takes its state."""
    config = shaped(text_corpus, stages=3, lanes=lanes, max_restarts=1)
    config = replace(
        config,
        # No save begins shortly before the wipe-out: it may end, or be lost.
        checkpoint=replace(config.checkpoint, interval_steps=9),
        snapshot=SnapshotConfig(every_steps=every_steps),
    )
    killed = [kill(FaultPoint.BACKWARD, 15, group, 0) for group in (0, 1)]
    lost = with_faults(config, lose_machine(1, lanes), *killed)
    run = complete_run(lost, tmp_path / "run", Watch(awaited=frozenset({COMES_BACK})))
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert run.summary.restarts == 1
    assert {record.loaded_from for record in run.journal.of(RestartRecord)} == {loaded_from}
    assert starts(run) == {(1, 1, 2), (0, 1, None), (1, 2, 2)}
    assert params(run) == params(complete_run(config, tmp_path / "plain_stages"))


def test_a_smaller_group_becomes_whole_when_a_machine_comes(text_corpus: Path, tmp_path: Path) -> None:
    """It leaves at a commit, and loses nothing: what it has computed counts."""
    config = shaped(text_corpus)
    launcher = LateForks(may_come=tmp_path / "may_come")

    def on_event(event: RunEvent) -> None:
        if isinstance(event, GroupRejoined):
            launcher.may_come.touch()

    watch = Watch(awaited=frozenset({COMES_BACK, IS_WHOLE}), leaving=frozenset({LEAVES}))
    lost = with_faults(config, lose_machine(1, rank=3))
    run = complete_run(lost, tmp_path / "run", watch, on_event, launcher=launcher)  # type: ignore[arg-type]
    assert_masked(run)
    assert starts(run) == {(1, 1, 3), (1, 2, None)}
    found = {record.index: record.stages for record in run.journal.of(PlacesRecord)}
    assert [stages for _, stages in sorted(found.items())] == [[[1, 3]], [[1, 4]]]
    assert run.summary.groups_lost == 1
    assert params(run) == params(complete_run(config, tmp_path / "plain_stages"))


def test_a_smaller_group_leaves_when_it_is_drained(text_corpus: Path, tmp_path: Path, plain_stages: Run) -> None:
    run_dir = tmp_path / "run"

    def on_event(event: RunEvent) -> None:
        if isinstance(event, GroupRejoined):
            result = CliRunner().invoke(app, ["drain", str(run_dir), str(event.member.group)])
            assert result.exit_code == 0, result.output

    watch = Watch(awaited=frozenset({COMES_BACK}), leaving=frozenset({LEAVES}))
    lost = with_faults(shaped(text_corpus, stages=3), lose_machine(1, rank=1))
    run = complete_run(lost, run_dir, watch, on_event)
    assert_masked(run)
    assert starts(run) == {(1, 1, 2)}
    (left,) = [entry for entry in entries_of(run.journal) if entry.get("drain")]
    assert (left["step"], left["drain"]) == (LEAVES[0], [[1, 1]])
    assert params(run) == params(plain_stages)


@dataclass(frozen=True)
class FewForks(Forks):
    """Has machines for the first nodes alone."""

    num_machines: int = 0

    def lacks(self, node: int) -> bool:
        return node >= self.num_machines

    def start(self, run_dir: Path, node: int, incarnation: int) -> Forked | None:
        return None if self.lacks(node) else super().start(run_dir, node, incarnation)


def test_a_run_begins_with_fewer_machines_than_its_groups_have(
    text_corpus: Path, tmp_path: Path, plain_stages: Run
) -> None:
    """Without the group that lacks one, which comes in with fewer stages."""
    launcher = FewForks(num_machines=5)
    watch = Watch(awaited=frozenset({(LOST_IN, Member(GroupId(1), 1))}))
    run = complete_run(shaped(text_corpus, stages=3), tmp_path / "run", watch, launcher=launcher)  # type: ignore[arg-type]
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert starts(run) == {(1, 1, 2)}
    assert params(run) == params(plain_stages)
