"""Whole runs as sites: one alone is the plain run bit by bit, and two train together, whatever happens to either."""

import json
import os
import signal
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import FaultConfig, FaultsConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.core.outer.entries import SiteId
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.records import RoundRecord
from spare_megatron.mcore.optimizer.outer_step import OuterRule
from tests.integration.relayed_site import FLIP_ROUND, Relay, Script, Site, all_ended, end_together, later_port, until
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
from tests.unit.test_outer_step import reference_received, reference_step

if TYPE_CHECKING:
    from tests.integration.fault_free import FaultFreeRuns

pytestmark = pytest.mark.timeout(120)

ONE_GROUP, TWO_GROUPS = LayoutConfig(num_groups=1), LayoutConfig(num_groups=2)


def site_config(
    corpus: Path,
    sites: SitesConfig,
    *,
    steps: int = 100_000,
    layout: LayoutConfig = ONE_GROUP,
    faults: Sequence[FaultConfig] = (),
    rejoins: int = 0,
    precision: str = "fp32",
) -> RunConfig:
    plain = tiny_config(corpus, layout, steps=steps, mode="reproducible", rejoins=rejoins, precision=precision)
    control = replace(plain.control, decision_timeout_s=max(plain.control.decision_timeout_s, 4 * sites.wait_s))
    config = replace(plain, sites=sites, control=control, faults=FaultsConfig(trace=tuple(faults)))
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
    """Also if the group that speaks for it is lost in a round, or one that has voted, before that is back."""
    sites = SitesConfig(
        endpoints=(f"tcp://127.0.0.1:{later_port()}",),
        num_sites=1,
        every_steps=2,
        learning_rate=1.0,
        momentum=0.0,
        bits=32,
        wait_s=10.0,
    )
    config = site_config(random_corpus, sites, steps=6, layout=LayoutConfig(num_groups=3), faults=faults, rejoins=2)
    config = replace(config, optimizer=optimizer)
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


def joint(site: Site) -> list[dict[str, Any]]:
    return [one for one in site.rounds() if one["sites"] == [0, 1]]


def of_both(a: Site, b: Site) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The records that both sites have of a joint round."""
    of_b = {one["round"]: one for one in joint(b)}
    return [(one, of_b[one["round"]]) for one in joint(a) if one["round"] in of_b]


def until_joint(number: int, *sites: Site) -> None:
    until(lambda: min(len(joint(site)) for site in sites) >= number, 120.0, f"{number} rounds of both")


def assert_ended(*sites: Site) -> list[int]:
    """Steps of each."""
    summaries = end_together(*sites)
    for summary in summaries:
        assert (summary["outcome"], summary["verdict"], summary["steps_lost"]) == ("stopped", "valid", 0)
    return [summary["steps_committed"] for summary in summaries]


def assert_waited_once(away: Iterable[dict[str, Any]], before: Iterable[dict[str, Any]]) -> None:
    """In rounds of a site while one of them was away; `before`: those of both."""
    waited, exchange_s = [one["spent_s"] for one in away], statistics.median(one["spent_s"] for one in before)
    # None, if a lease ended before the next round.
    assert sum(spent_s > WAIT_S / 2 + exchange_s for spent_s in waited) <= 1
    assert max(waited) < 2 * WAIT_S + exchange_s


@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", ["", "exchange", "vote"], ids=["between rounds", "in an exchange", "after its vote"])
def test_two_sites_train_together_a_cut_costs_the_other_one_wait_and_the_cut_one_comes_back(
    moment: Script, random_corpus: Path, tmp_path: Path
) -> None:
    """Site 1 reaches the outer store and site 0 through a relay alone, which is stopped and goes on. Before a cut
    between rounds, the group that speaks for site 0 is lost in a round.
    """
    relay, port = Relay(0.01), later_port()
    sites = SitesConfig(endpoints=(f"tcp://127.0.0.1:{port}",), every_steps=EVERY_STEPS, bits=8, wait_s=WAIT_S)
    behind = replace(sites, site=1, endpoints=(f"tcp://127.0.0.1:{relay.port(port)}",))
    if moment:
        first, second = (site_config(random_corpus, one) for one in (sites, behind))
    else:
        faults = [kill("round_exchanged", EVERY_STEPS, 0)]
        first = site_config(random_corpus, sites, layout=TWO_GROUPS, faults=faults, rejoins=2)
        second = site_config(random_corpus, behind, layout=TWO_GROUPS)
    a, b = Site(first, tmp_path), Site(second, tmp_path, relay, moment)
    with all_ended(a, b, relay):
        if not moment:
            until_joint(3, a, b)
            relay.cut()
        until(relay.is_cut, 120.0, "the cut")
        last = max(one["round"] for one in b.rounds())

        def alone() -> list[dict[str, Any]]:
            return [one for one in a.rounds() if one["round"] > last]

        until(lambda: sum(one["sites"] == [0] for one in alone()) >= 3, 60.0, "rounds of site 0 alone")
        until(lambda: not b.rounds()[-1]["round"], 60.0, "a round that site 1 goes on without")
        away, missed = alone(), [one for one in b.rounds() if not one["round"]]
        restored_at_s, num_before = time.time(), len(joint(b))
        relay.restore()
        until(lambda: len(of_both(a, b)) >= num_before + 2, 120.0, "two more rounds of both")
        assert_ended(a, b)
    for fault in a.records("fault"):
        assert next(one["group"] for one in a.rounds() if one["at_s"] > fault["at_s"]) == 1
    assert len(a.records("fault")) == len(first.faults.trace)
    # All that took part in a round hold the digest of the others, and counted the same work.
    both = of_both(a, b)
    assert len(both) >= 4
    assert all((x["digest"], x["weights"]) == (y["digest"], y["weights"]) for x, y in both)
    assert all(x["weights"].keys() == {"0", "1"} for x, _ in both)
    # Nothing but differences is fetched in them: no site takes the result for a state that it lacks.
    before = [one for site in (a, b) for one in joint(site) if one["round"] <= last]
    assert len({one["num_bytes"] for one in before}) == 1
    # The vote of a site that was cut off after it counts.
    assert away[0]["sites"] == ([0, 1] if moment == "vote" else [0])
    # The site that was cut off has taken the newest state from the other one.
    taken = [one for one in b.rounds() if one["round"] and not one["sites"] and one["at_s"] > restored_at_s]
    assert {one["round"]: one["digest"] for one in a.rounds()}[taken[0]["round"]] == taken[0]["digest"]
    for of_site in (away, missed):
        assert_waited_once(of_site, before)
    left_out = left_out_of(a, b)
    assert left_out[0] == 0
    assert left_out[1] >= (1 if moment == "vote" else EVERY_STEPS)


@pytest.mark.timeout(240)
def test_sites_wait_once_for_an_outer_store_that_is_stopped_and_all_that_they_compute_counts(
    random_corpus: Path, tmp_path: Path
) -> None:
    port = later_port()
    sites = SitesConfig(endpoints=(f"tcp://127.0.0.1:{port}",), every_steps=EVERY_STEPS, bits=8, wait_s=WAIT_S)
    a, b = (Site(site_config(random_corpus, replace(sites, site=site)), tmp_path) for site in (0, 1))
    with all_ended(a, b):
        until_joint(2, a, b)
        [store] = {
            one.pid for one in psutil.net_connections("tcp4") if one.status == "LISTEN" and one.laddr.port == port
        }
        os.kill(store, signal.SIGSTOP)

        def missed(site: Site) -> list[dict[str, Any]]:
            return [one for one in site.rounds() if not one["round"]]

        until(lambda: min(len(missed(site)) for site in (a, b)) >= 3, 60.0, "rounds that both go on without")
        os.kill(store, signal.SIGCONT)
        num_before = len(joint(b))
        until_joint(num_before + 2, a, b)
        num_steps, _ = assert_ended(b, a)  # the store is that of site 0
    for site in (a, b):
        assert {one["reason"] for one in missed(site)} == {f"the outer store has not answered for {WAIT_S:g} s"}
        assert_waited_once(missed(site), joint(site))
    # Where site 0 ends a round after it, what site 1 began for that is left out.
    begun = num_steps - joint(b)[-1]["step"] if a.rounds()[-1]["sites"] == [0] else 0
    assert left_out_of(a, b) == [0, begun]


def left_out_of(a: Site, b: Site) -> list[int]:
    """Steps of each site that are not in the parameters, by `spare check` of both runs, which says that all is well."""
    result = CliRunner().invoke(app, ["check", str(a.run_dir), str(b.run_dir), "--json"])
    assert result.exit_code == 0, result.output
    joined = json.loads(result.stdout.splitlines()[-1])
    assert joined["rounds"] == list(range(1, joined["newest"][0] + 1))
    assert (joined["findings"], joined["absent"]) == ([], [])
    steps = [span[:2] for span in joined["samples"]["1"]]
    assert [steps, sorted(steps)] == [joined["sites"][1]["joined"]] * 2
    assert all(sample % 2 == 1 for span in joined["samples"]["1"] for sample in span[2:])
    return [sum(end - begin for begin, end in one["left_out"]) for one in joined["sites"]]


# ------------------------------------------------------------------------------------------------ the same bits again

OWN_STEPS = (2, 3)
"""Between rounds, of each site."""


def trained_alike(
    corpus: Path, folder: Path, script: Script, bits: Literal[32, 8], num_rounds: int, num_stages: int = 1
) -> tuple[Site, Site]:
    """Sites that have ended so many rounds together, each of which counts `OWN_STEPS`; site 1 has the script. With
    several stages they train in bf16.
    """
    folder.mkdir()
    layout = LayoutConfig(num_groups=1, pipeline_parallel=num_stages)
    sites = SitesConfig(endpoints=(f"tcp://127.0.0.1:{later_port()}",), bits=bits, wait_s=60.0)
    a, b = (
        Site(
            site_config(
                corpus,
                replace(sites, site=site, every_steps=OWN_STEPS[site]),
                layout=layout,
                precision="fp32" if num_stages == 1 else "bf16",
            ),
            folder,
            script=script if site else "alike",
        )
        for site in (0, 1)
    )
    with all_ended(a, b):
        until_joint(num_rounds, a, b)
        assert_ended(b, a)
    return a, b


def assert_as_computed_by_numpy(
    rounds: Sequence[dict[str, Any]], sites: Sequence[Site], bits: int, rank: int = 0
) -> None:
    """Each round continues the one before and applies what the reference makes of the values of its sites."""
    rule = OuterRule(learning_rate=SitesConfig().learning_rate, momentum=SitesConfig().momentum)
    first = sites[0].applied(0, rank)

    def split(flat: np.ndarray) -> list[np.ndarray]:
        """By parameter."""
        return np.split(flat, np.cumsum(first["sizes"])[:-1])

    start, momentum = first["start"], np.zeros_like(first["start"])
    for one in rounds:
        applied = {SiteId(site): sites[site].applied(one["base_round"], rank) for site in one["sites"]}
        weights = {SiteId(int(site)): weight for site, weight in one["weights"].items()}
        for held in applied.values():
            assert (held["start"].tobytes(), held["momentum"].tobytes()) == (start.tobytes(), momentum.tobytes())
        values = {site: split(held["values"]) for site, held in applied.items()}
        results = []
        for number, (before, velocity) in enumerate(zip(split(start), split(momentum), strict=True)):
            received = {site: reference_received(before, of_site[number], bits) for site, of_site in values.items()}
            results.append(reference_step(before, velocity, received, weights, rule))
        start, momentum = (np.concatenate(parts) for parts in zip(*results, strict=True))
        for held in applied.values():
            assert held["result"].tobytes() == start.tobytes() + momentum.tobytes()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_stages", [1, 2], ids=["one rank", "two stages in bf16"])
def test_the_same_sites_with_the_same_weights_in_each_round_give_the_same_bits_which_are_those_of_numpy(
    num_stages: int, random_corpus: Path, tmp_path: Path
) -> None:
    num_rounds, found = 4, []
    for name in ("once", "again"):
        a, b = trained_alike(random_corpus, tmp_path / name, "alike", 8, num_rounds, num_stages)
        rounds = joint(a)[:num_rounds]
        assert [one["round"] for one in rounds] == list(range(1, num_rounds + 1))
        assert [one["weights"] for one in rounds] == [{"0": 2 * OWN_STEPS[0], "1": 2 * OWN_STEPS[1]}] * num_rounds
        assert [one["digest"] for one in joint(b)[:num_rounds]] == [one["digest"] for one in rounds]
        params = [
            [one["digest"] for one in site.records("params") if one["step"] <= num_rounds * steps]
            for site, steps in zip((a, b), OWN_STEPS, strict=True)
        ]
        found.append(([one["digest"] for one in rounds], params))
    assert found[0] == found[1]
    for rank in range(num_stages):
        assert_as_computed_by_numpy(rounds, (a, b), 8, rank)


@pytest.mark.timeout(240)
def test_a_site_whose_momentum_has_changed_is_left_out_of_a_round_and_takes_the_state_of_the_others(
    random_corpus: Path, tmp_path: Path
) -> None:
    a, b = trained_alike(random_corpus, tmp_path / "run", "flip", 32, FLIP_ROUND + 2)
    rounds = [one for one in a.rounds() if one["round"]]
    assert [one["sites"] for one in rounds[: FLIP_ROUND + 1]] == [[0, 1]] * FLIP_ROUND + [[0]]
    digests = {one["round"]: one["digest"] for one in rounds}
    taken = [one for one in b.rounds() if one["round"] and not one["sites"]]
    assert taken[0]["round"] > FLIP_ROUND
    assert [one["digest"] for one in taken] == [digests[one["round"]] for one in taken]
    assert_as_computed_by_numpy([one for one in rounds if one["round"] <= joint(b)[-1]["round"]], (a, b), 32)
    left_out = left_out_of(a, b)
    assert left_out[0] == 0
    assert left_out[1] >= OWN_STEPS[1]
