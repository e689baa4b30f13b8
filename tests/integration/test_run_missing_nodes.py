"""Nodes that are broken from the start: training begins without them, and admits them when they come."""

import sys
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig
from spare_megatron.journal.records import LossRecord, StartRecord, UpdateRecord
from spare_megatron.process.reports import GroupLost, GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.forked_supervisors import Forked, Forks
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, complete_run, entries_of, tiny_config

pytestmark = pytest.mark.timeout(200)

STEPS = 4
SHORT_S = 15.0
"""For nodes to come in; the machine may be busy."""


@dataclass(frozen=True)
class AllButOne(Forks):
    """The supervisor of one node is not started, or it ends at once; until the run has gone on without it, if ever."""

    missing: int = 0
    ends: bool = False
    comes_late: bool = False

    def start(self, run_dir: Path, node: int, incarnation: int) -> Forked | None:
        if node != self.missing or (incarnation and self.comes_late):
            return super().start(run_dir, node, incarnation)
        if not self.ends:
            return None
        process = get_context("fork").Process(target=sys.exit, args=(7,))
        process.start()
        return Forked(process)


def config_of(corpus: Path, layout: LayoutConfig, num_nodes: int, **settings: object) -> RunConfig:
    cluster = ClusterConfig(device="cpu", num_nodes=num_nodes)
    return tiny_config(corpus, layout, steps=STEPS, cluster=cluster, **settings)  # type: ignore[arg-type]


def impatient(config: RunConfig) -> RunConfig:
    return replace(config, control=replace(config.control, startup_timeout_s=SHORT_S))


def assert_begun_without(run: Run, group: int, cause: str) -> None:
    """Its group was lost before anything else happened, for this reason, and all steps are proven."""
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert run.summary.steps_committed == STEPS
    first, *rest = entries_of(run.journal)
    assert (first["entry"], first["group"], first["reason"]) == ("fence", group, cause)
    assert "fence" not in {entry["entry"] for entry in rest}
    assert {(loss.group, loss.incarnation) for loss in run.journal.of(LossRecord)} == {(group, 0)}
    assert (group, cause) in {(e.record.group, e.record.cause) for e in run.events if isinstance(e, GroupLost)}
    assert (run.summary.groups_lost, run.summary.steps_lost) == (1, 0)


def test_a_run_begins_without_a_node_whose_supervisor_never_comes(text_corpus: Path, tmp_path: Path) -> None:
    config = impatient(config_of(text_corpus, LayoutConfig(num_groups=3), num_nodes=3))
    run = complete_run(config, tmp_path / "run", launcher=AllButOne(missing=2))  # type: ignore[arg-type]
    cause = (
        f"node 2: its supervisor did not connect within control.startup_timeout_s={SHORT_S:g}; look at "
        f"logs/node-2.log, and at the machine"
    )
    assert_begun_without(run, 2, cause)
    assert (run.run_dir / "logs" / "node-2.log").is_file()
    assert {record.group for record in run.journal.of(UpdateRecord)} == {0, 1}


def test_a_node_of_a_divided_group_whose_supervisor_cannot_start_costs_that_group(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Its ranks on the other node wait for peers that never come."""
    config = config_of(text_corpus, LayoutConfig(num_groups=2, pipeline_parallel=2), num_nodes=4)
    run = complete_run(config, tmp_path / "run", launcher=AllButOne(missing=3, ends=True))  # type: ignore[arg-type]
    cause = (
        "node 3: its supervisor did not connect: the command that starts it ended with exit code 7; look at "
        "logs/node-3.log, and at the machine"
    )
    assert_begun_without(run, 1, cause)


def test_a_node_that_comes_after_it_was_left_out_is_admitted(text_corpus: Path, tmp_path: Path) -> None:
    config = config_of(text_corpus, LayoutConfig(num_groups=3), num_nodes=3, rejoins=1)
    late = Member(GroupId(2), 1)
    run = complete_run(
        config,
        tmp_path / "run",
        Watch(awaited=frozenset({(1, late)})),
        launcher=AllButOne(missing=2, ends=True, comes_late=True),  # type: ignore[arg-type]
    )
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    first = entries_of(run.journal)[0]
    assert (first["entry"], first["group"]) == ("fence", 2)
    assert "did not connect" in first["reason"]
    assert [event.member for event in run.events if isinstance(event, GroupRejoined)] == [late]
    [started] = run.journal.of(StartRecord)
    assert (started.group, started.incarnation) == (2, 1)
    assert {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1} == {0, 1, 2}


def test_a_run_that_cannot_do_without_a_node_ends_and_names_it(text_corpus: Path, tmp_path: Path) -> None:
    config = config_of(text_corpus, LayoutConfig(num_groups=2), num_nodes=2, redundancy=1, rejoins=1)
    run = complete_run(config, tmp_path / "run", launcher=AllButOne(missing=1, ends=True))  # type: ignore[arg-type]
    assert (run.summary.outcome, run.summary.steps_committed) == ("failed", 0)
    assert run.summary.outcome_reason.startswith(
        "groups [1] were lost before training began, and no other group hosts what they host; group 1: node 1: "
        "its supervisor did not connect"
    )
