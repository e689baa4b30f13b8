"""Whole runs as sites: one alone is the plain run bit by bit, and two train together, whatever happens to either."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import FaultConfig, FaultsConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.records import RoundRecord
from tests.integration.relayed_site import Relay, Site, all_ended, until
from tests.integration.whole_run import (
    MUON,
    REPLICATED,
    assert_masked,
    complete_run,
    entries_of,
    kill,
    losses_of,
    needs_muon,
    params_of,
    tiny_config,
)

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
    plain = tiny_config(corpus, LayoutConfig(num_groups=2), steps=steps, mode="reproducible", rejoins=rejoins)
    config = replace(plain, sites=sites, faults=FaultsConfig(trace=tuple(faults)))
    assert problems(config, look_at_machine(config)) == []
    return config


LOSSES = kill("round_exchanged", 2, 0), kill("round_voted", 4, 1)


@pytest.mark.parametrize(
    ("faults", "optimizer"),
    [((), REPLICATED), (LOSSES, REPLICATED), pytest.param(LOSSES, MUON, marks=needs_muon)],
    ids=["quiet", "with losses", "with losses, Muon"],
)
def test_one_site_that_takes_its_own_mean_is_the_plain_run_bit_by_bit(
    faults: Sequence[FaultConfig],
    optimizer: OptimizerConfig,
    random_corpus: Path,
    fault_free: "FaultFreeRuns",
    tmp_path: Path,
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
    config = replace(site_config(random_corpus, sites, steps=6, faults=faults, rejoins=2), optimizer=optimizer)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    plain = fault_free(replace(config, sites=SitesConfig()))
    assert losses_of(run.journal) == losses_of(plain.journal)
    assert params_of(run)[6] == params_of(plain)[6]
    rounds = [entry for entry in entries_of(run.journal) if entry["entry"] == "synced"]
    assert [(one["step"], one["round"], one["sites"]) for one in rounds] == [(2, 1, [0]), (4, 2, [0]), (6, 3, [0])]
    assert [record.reason for record in run.journal.of(RoundRecord)] == [""] * 3


WAIT_S = 3.0
EVERY_STEPS = 20


def joint(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in rounds if one["sites"] == [0, 1]]


@pytest.mark.timeout(240)
def test_two_sites_train_together_a_cut_costs_the_other_one_wait_and_the_cut_one_comes_back(
    random_corpus: Path, tmp_path: Path
) -> None:
    """Site 1 reaches the outer store and site 0 through a relay alone, which is stopped and goes on. Before that, the
    group that speaks for site 0 is lost in a round.
    """
    relay, port = Relay(0.01), free_port()
    sites = SitesConfig(endpoints=(f"tcp://127.0.0.1:{port}",), every_steps=EVERY_STEPS, bits=8, wait_s=WAIT_S)
    faults = (kill("round_exchanged", EVERY_STEPS, 0),)
    first = site_config(random_corpus, sites, steps=100_000, faults=faults, rejoins=2)
    behind = replace(sites, site=1, endpoints=(f"tcp://127.0.0.1:{relay.port(port)}",))
    second = site_config(random_corpus, behind, steps=100_000)
    a, b = Site(first, tmp_path), Site(second, tmp_path, relay)
    with all_ended(a, b, relay):
        until(lambda: min(len(joint(a.rounds())), len(joint(b.rounds()))) >= 3, 120.0, "three rounds of both")
        relay.cut()
        cut_at_s = time.time()
        until(
            lambda: sum(one["at_s"] > cut_at_s and one["sites"] == [0] for one in a.rounds()) >= 3,
            60.0,
            "rounds of site 0 alone",
        )
        until(lambda: any(not one["round"] for one in b.rounds()), 60.0, "a round that site 1 goes on without")
        relay.restore()
        restored_at_s = time.time()
        num_before = len(joint(b.rounds()))
        until(lambda: len(joint(b.rounds())) >= num_before + 2, 60.0, "further rounds of both")
        summaries = [site.end() for site in (a, b)]
    for summary in summaries:
        assert (summary["outcome"], summary["verdict"], summary["steps_lost"]) == ("stopped", "valid", 0)
    [fault] = a.records("fault")
    spoken = next(one for one in a.rounds() if one["at_s"] > fault["at_s"])
    assert spoken["group"] == 1
    assert spoken["round"] > 0
    # All that took part in a round hold the digest of the others, and counted the same work.
    of_b = {one["round"]: one for one in joint(b.rounds())}
    both = [(one, of_b[one["round"]]) for one in joint(a.rounds()) if one["round"] in of_b]
    assert len(both) >= 5
    assert all((x["digest"], x["weights"]) == (y["digest"], y["weights"]) for x, y in both)
    assert all(x["weights"].keys() == {"0", "1"} for x, _ in both)
    # Nothing but differences is fetched in them: no site takes the result for a state that it lacks.
    assert len({one["num_bytes"] for one in (*joint(a.rounds()), *joint(b.rounds())) if one["at_s"] < cut_at_s}) == 1
    # The site that was cut off has taken the newest state from the other one.
    taken = [one for one in b.rounds() if one["round"] and not one["sites"] and one["at_s"] > restored_at_s]
    assert [one["round"] for one in taken]
    assert {one["round"]: one["digest"] for one in a.rounds()}[taken[0]["round"]] == taken[0]["digest"]
    # The other one has waited once.
    waited = [one["spent_s"] for one in a.rounds() if one["at_s"] > cut_at_s and one["at_s"] < restored_at_s]
    assert sum(spent_s > WAIT_S / 2 for spent_s in waited) <= 1  # none, if its lease ended before the next round
    assert max(waited) < 2 * WAIT_S + 2.0
    _assert_joined(a, b)


def _assert_joined(a: Site, b: Site) -> None:
    """`spare check` of both runs names what is in the parameters; the steps of site 1 while it was cut off are not."""
    result = CliRunner().invoke(app, ["check", str(a.run_dir), str(b.run_dir), "--json"])
    assert result.exit_code == 0, result.output
    joined = json.loads(result.stdout.splitlines()[-1])
    assert joined["rounds"] == list(range(1, joined["newest"][0] + 1))
    assert (joined["findings"], joined["absent"]) == ([], [])
    first, second = joined["sites"]
    assert first["left_out"] == []
    assert sum(end - begin for begin, end in second["left_out"]) >= EVERY_STEPS
    steps = [span[:2] for span in joined["samples"]["1"]]
    assert [steps, sorted(steps)] == [second["joined"]] * 2
    assert all(sample % 2 == 1 for span in joined["samples"]["1"] for sample in span[2:])
