"""Groups that lose a machine for good go on with fewer stages, and become whole again when a machine comes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import PlacesRecord, RestartRecord, StartRecord
from spare_megatron.process.reports import GroupRejoined, RunEvent
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.forked_supervisors import Forked, Forks, LateForks
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, assert_masked, complete_run, entries_of, evaluations_of, kill, tiny_config
from tests.matrix.cells import PHASES_OF_EVERY_STEP

pytestmark = pytest.mark.timeout(300)

STEPS = 20
LOST_IN = 8
HEARTBEAT_S = 1.5
"""As in test_run_reform.py."""
COMES_BACK = (12, Member(GroupId(1), 1))
"""The step at whose end the smaller group is admitted."""
LEAVES = (14, 1)
"""The step at whose end it leaves, to become whole, and the group."""
IS_WHOLE = (17, Member(GroupId(1), 2))
"""As `COMES_BACK`, once it is whole."""


def kill_machine(group: int, rank: int) -> FaultConfig:
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
        steps=STEPS,
        rejoins=2,
        mode="reproducible",
        cluster=ClusterConfig(device="cpu", num_nodes=num_groups * stages),
        heartbeat_s=HEARTBEAT_S,
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
def plain(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two groups of three stages without a loss."""
    return complete_run(shaped(text_corpus, stages=3), tmp_path_factory.mktemp("plain") / "run")


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
    lost = with_faults(config, kill_machine(1, rank=lanes * (whole - 2)))
    run = complete_run(lost, tmp_path / "run", Watch(awaited=frozenset({COMES_BACK})))
    assert_masked(run)
    assert starts(run) == {(1, 1, whole - 1)}
    # The machine of the last place takes that of the lost one.
    (places,) = {record.index: record for record in run.journal.of(PlacesRecord)}.values()
    assert places.holdings == [[2 * whole - 1, 2 * whole - 2, 1]]
    assert places.stages == [[1, whole - 1]]
    plain = complete_run(config, tmp_path / "plain")
    assert params(run) == params(plain)


@pytest.mark.parametrize("phase", PHASES_OF_EVERY_STEP)
def test_a_machine_may_be_lost_at_any_moment_of_a_step(
    text_corpus: Path, tmp_path: Path, plain: Run, phase: FaultPoint
) -> None:
    """First of one group, then of the other: both have fewer stages in the end."""
    config = shaped(text_corpus, stages=3)
    lost = with_faults(
        config, replace(kill_machine(1, 1), phase=phase), replace(kill_machine(0, 1), phase=phase, step=14)
    )
    again = frozenset({(12, Member(GroupId(1), 1)), (18, Member(GroupId(0), 1))})
    run = complete_run(lost, tmp_path / "run", Watch(awaited=again))
    assert_masked(run)
    assert starts(run) == {(1, 1, 2), (0, 1, 2)}
    assert params(run) == params(plain)


def test_two_groups_that_lose_a_machine_each_go_on_side_by_side(text_corpus: Path, tmp_path: Path) -> None:
    """Of three groups two have two stages of three: unequal parts of the layers stand beside each other in all sums."""
    config = shaped(text_corpus, num_groups=3, stages=3)
    lost = with_faults(config, kill_machine(0, rank=2), kill_machine(1, rank=0))
    members = frozenset((COMES_BACK[0], Member(GroupId(group), 1)) for group in (0, 1))
    run = complete_run(lost, tmp_path / "run", Watch(awaited=members))
    assert_masked(run)
    assert starts(run) == {(0, 1, 2), (1, 1, 2)}
    assert params(run) == params(complete_run(config, tmp_path / "plain"))


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
        optimizer=OptimizerConfig(decay_steps=STEPS + 4),
        checkpoint=replace(config.checkpoint, interval_steps=10),
    )
    again = [(12, Member(GroupId(1), 1)), (15, Member(GroupId(0), 1)), (18, Member(GroupId(1), 2))]
    killed = kill(FaultPoint.BACKWARD, 13, 0, 2), kill(FaultPoint.AFTER_VOTE, 16, 1, 1)
    lost = with_faults(config, kill_machine(1, 1), *killed)
    run = complete_run(lost, tmp_path / "run", Watch(awaited=frozenset(again)))
    assert_masked(run)
    assert starts(run) == {(1, 1, 2), (0, 1, None), (1, 2, 2)}
    plain = complete_run(config, tmp_path / "plain")
    assert params(run) == params(plain)
    assert evaluations_of(run.journal) == evaluations_of(plain.journal) != []
    last = [
        complete_run(
            replace(
                config,
                train=replace(config.train, steps=STEPS + 4),
                checkpoint=replace(config.checkpoint, load=str(tmp_path / name)),
            ),
            tmp_path / f"{name}-continued",
        )
        for name in ("run", "plain")
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
        checkpoint=replace(config.checkpoint, interval_steps=5),
        snapshot=SnapshotConfig(every_steps=every_steps),
    )
    killed = [kill(FaultPoint.BACKWARD, 15, group, 0) for group in (0, 1)]
    lost = with_faults(config, kill_machine(1, lanes), *killed)
    run = complete_run(lost, tmp_path / "run", Watch(awaited=frozenset({COMES_BACK})))
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert run.summary.restarts == 1
    assert {record.loaded_from for record in run.journal.of(RestartRecord)} == {loaded_from}
    assert starts(run) == {(1, 1, 2), (0, 1, None), (1, 2, 2)}
    assert params(run) == params(complete_run(config, tmp_path / "plain"))


def test_a_smaller_group_becomes_whole_when_a_machine_comes(text_corpus: Path, tmp_path: Path) -> None:
    """It leaves at a commit, and loses nothing: what it has computed counts."""
    config = shaped(text_corpus)
    launcher = LateForks(may_come=tmp_path / "may_come")

    def on_event(event: RunEvent) -> None:
        if isinstance(event, GroupRejoined):
            launcher.may_come.touch()

    watch = Watch(awaited=frozenset({COMES_BACK, IS_WHOLE}), leaving=frozenset({LEAVES}))
    lost = with_faults(config, kill_machine(1, rank=3))
    run = complete_run(lost, tmp_path / "run", watch, on_event, launcher=launcher)  # type: ignore[arg-type]
    assert_masked(run)
    assert starts(run) == {(1, 1, 3), (1, 2, None)}
    found = {record.index: record.stages for record in run.journal.of(PlacesRecord)}
    assert [stages for _, stages in sorted(found.items())] == [[[1, 3]], [[1, 4]]]
    assert run.summary.groups_lost == 1
    assert params(run) == params(complete_run(config, tmp_path / "plain"))


def test_a_smaller_group_leaves_when_it_is_drained(text_corpus: Path, tmp_path: Path, plain: Run) -> None:
    run_dir = tmp_path / "run"

    def on_event(event: RunEvent) -> None:
        if isinstance(event, GroupRejoined):
            result = CliRunner().invoke(app, ["drain", str(run_dir), str(event.member.group)])
            assert result.exit_code == 0, result.output

    watch = Watch(awaited=frozenset({COMES_BACK}), leaving=frozenset({LEAVES}))
    lost = with_faults(shaped(text_corpus, stages=3), kill_machine(1, rank=1))
    run = complete_run(lost, run_dir, watch, on_event)
    assert_masked(run)
    assert starts(run) == {(1, 1, 2)}
    (left,) = [entry for entry in entries_of(run.journal) if entry.get("drain")]
    assert (left["step"], left["drain"]) == (LEAVES[0], [[1, 1]])
    assert params(run) == params(plain)


@dataclass(frozen=True)
class FewForks(Forks):
    """Has machines for the first nodes alone."""

    num_machines: int = 0

    def lacks(self, node: int) -> bool:
        return node >= self.num_machines

    def start(self, run_dir: Path, node: int, incarnation: int) -> Forked | None:
        return None if self.lacks(node) else super().start(run_dir, node, incarnation)


def test_a_run_begins_with_fewer_machines_than_its_groups_have(text_corpus: Path, tmp_path: Path, plain: Run) -> None:
    """Without the group that lacks one, which comes in with fewer stages."""
    launcher = FewForks(num_machines=5)
    watch = Watch(awaited=frozenset({(LOST_IN, Member(GroupId(1), 1))}))
    run = complete_run(shaped(text_corpus, stages=3), tmp_path / "run", watch, launcher=launcher)  # type: ignore[arg-type]
    assert run.summary.outcome == "finished", run.summary.outcome_reason
    assert run.summary.verdict == "valid", run.summary.reasons
    assert starts(run) == {(1, 1, 2)}
    assert params(run) == params(plain)
