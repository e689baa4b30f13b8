"""Whole runs as sites: one alone is the plain run bit by bit, and two train together, whatever happens to either."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.records import RoundRecord
from tests.integration.whole_run import assert_masked, complete_run, entries_of, kill, losses_of, params_of, tiny_config

if TYPE_CHECKING:
    from tests.integration.fault_free import FaultFreeRuns

pytestmark = pytest.mark.timeout(120)


def free_port() -> int:
    """As known before the store is served there: all sites name it in their settings."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def site_config(
    corpus: Path, sites: SitesConfig, *, steps: int, faults: Sequence[FaultConfig] = (), rejoins: int = 0
) -> RunConfig:
    plain = tiny_config(
        corpus, LayoutConfig(num_groups=2), steps=steps, mode="reproducible", faults=faults, rejoins=rejoins
    )
    config = replace(plain, sites=sites)
    assert problems(config, look_at_machine(config)) == []
    return config


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (kill("round_exchanged", 2, 0), kill("round_voted", 4, 1)),
    ],
    ids=["quiet", "with losses"],
)
def test_one_site_that_takes_its_own_mean_is_the_plain_run_bit_by_bit(
    faults: Sequence[FaultConfig], random_corpus: Path, fault_free: "FaultFreeRuns", tmp_path: Path
) -> None:
    """Also if the group that speaks for it is lost in a round, or one that has voted."""
    sites = SitesConfig(
        endpoints=(f"tcp://127.0.0.1:{free_port()}",),
        num_sites=1,
        every_steps=2,
        learning_rate=1.0,
        momentum=0.0,
        bits=32,
        wait_s=10.0,
    )
    config = site_config(random_corpus, sites, steps=6, faults=faults, rejoins=2)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    plain = fault_free(replace(config, sites=SitesConfig()))
    assert losses_of(run.journal) == losses_of(plain.journal)
    assert params_of(run)[6] == params_of(plain)[6]
    rounds = [entry for entry in entries_of(run.journal) if entry["entry"] == "synced"]
    assert [(one["step"], one["round"], one["sites"]) for one in rounds] == [(2, 1, [0]), (4, 2, [0]), (6, 3, [0])]
    assert [record.reason for record in run.journal.of(RoundRecord)] == [""] * 3
