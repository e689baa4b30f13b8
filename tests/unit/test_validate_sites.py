"""The settings of sites: what is refused, what raises a warning, and what a run without sites sees of them."""

from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.config.checks.validate import problems, warnings
from spare_megatron.config.loader import settings
from spare_megatron.config.schema import ClusterConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig, SnapshotConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.config.training.terms import changes_of, differences, terms_of
from tests.unit.configured import CPU, configured

EMBEDDED, ETCD = ("tcp://127.0.0.1:4000",), ("https://etcd-0:2379", "https://etcd-1:2379")
GOOD = replace(configured(), sites=SitesConfig(endpoints=EMBEDDED))


def with_sites(**values: object) -> RunConfig:
    return replace(GOOD, sites=replace(GOOD.sites, **values))


BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

REFUSED = {
    "settings without sites": (with_sites(endpoints=(), every_steps=50), "sites.every_steps=50 has no effect"),
    "a number beyond the last": (with_sites(site=2), "sites.site=2 must be below sites.num_sites=2"),
    "no addresses": (with_sites(endpoints=("tcp://127.0.0.1",)), "are neither client URLs"),
    "two embedded stores": (with_sites(endpoints=("tcp://a:1", "tcp://b:1")), "are neither client URLs"),
    "two kinds": (with_sites(endpoints=(*EMBEDDED, *ETCD)), "are neither client URLs"),
    "partitioned state": (replace(GOOD, optimizer=OptimizerConfig(sharding="stacked")), "optimizer.sharding=stacked"),
    "lanes": (replace(GOOD, layout=replace(GOOD.layout, data_parallel=2)), "layout.data_parallel=2"),
    "expert biases": (
        replace(GOOD, model=replace(GOOD.model, num_experts=4), megatron=BIASED),
        "set it to false, or remove sites.endpoints",
    ),
    "undone steps": (replace(GOOD, snapshot=SnapshotConfig(every_steps=10)), "snapshot.every_steps=10"),
    "phases": (replace(GOOD, data=replace(GOOD.data, phases=("32:64",))), "data.phases"),
    "waits": (with_sites(wait_s=200.0), "4 x sites.wait_s=200.0 exceeds control.decision_timeout_s=600.0"),
    "no wait": (with_sites(wait_s=0.0), "sites.wait_s=0.0 must be above 0"),
    "certificates that a job replaces": (
        replace(
            with_sites(endpoints=ETCD),
            cluster=ClusterConfig(launcher="srun", device="cpu"),
            control=replace(GOOD.control, store="etcd"),
        ),
        "name an etcd in control.endpoints, or use http over a tunnel",
    ),
    "certificates without etcd": (
        replace(GOOD, control=replace(GOOD.control, ca_file="ca.pem")),
        "control.ca_file has no effect on control.store=embedded",
    ),
}


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_what_sites_cannot_be_is_refused_with_the_setting_to_change(config: RunConfig, named: str) -> None:
    (text,) = problems(config, CPU)
    assert named in text


def test_isolated_nodes_do_not_reach_other_sites() -> None:
    machine = replace(CPU, can_isolate=True)
    (text,) = problems(replace(GOOD, cluster=ClusterConfig(num_nodes=2, isolate_nodes=True)), machine)
    assert "cluster.isolate_nodes=true" in text


@pytest.mark.parametrize("endpoints", [EMBEDDED, ETCD, ("http://localhost:2379",)])
def test_an_etcd_and_an_embedded_store_raise_neither_errors_nor_warnings(endpoints: tuple[str, ...]) -> None:
    config = with_sites(endpoints=endpoints, site=1)
    assert [*problems(config, CPU), *warnings(config, CPU)] == []


@pytest.mark.parametrize("inner", [{}, {"store": "etcd", "endpoints": ("http://localhost:2379",)}])
def test_certificates_may_be_those_of_the_outer_store_alone(inner: dict[str, Any]) -> None:
    config = with_sites(endpoints=ETCD)
    assert problems(replace(config, control=replace(config.control, ca_file="ca.pem", **inner)), CPU) == []


@pytest.mark.parametrize("endpoints", [("tcp://10.0.0.1:4000",), ("http://etcd-0:2379",)])
def test_an_unencrypted_store_between_machines_raises_a_warning(endpoints: tuple[str, ...]) -> None:
    (text,) = warnings(with_sites(endpoints=endpoints), CPU)
    assert "travel unencrypted between sites" in text


def test_a_run_without_sites_has_no_terms_of_them() -> None:
    plain = configured()
    assert [name for name in terms_of(plain) if "site" in name] == []
    assert dict(settings(plain))["sites.endpoints"] == []
    assert changes_of(terms_of(plain), plain) == {}


def test_a_training_keeps_its_number_of_sites_and_its_site() -> None:
    theirs = terms_of(with_sites(num_sites=3, site=1))
    assert differences(theirs, with_sites(num_sites=3, site=1)) == []
    (number,) = differences(theirs, with_sites(num_sites=2, site=1))
    assert number == "sites.num_sites = 2, and the checkpoint was trained with 3; set it to that"
    (site,) = differences(theirs, other := with_sites(num_sites=3, site=2))
    assert 'set checkpoint.allow_changes=["sites.site"]' in site
    allowed = replace(other, checkpoint=CheckpointConfig(allow_changes=("sites.site",)))
    assert differences(theirs, allowed) == []
    assert len(differences(theirs, configured())) == len(differences(terms_of(configured()), other)) == 2


@pytest.mark.parametrize("num_sites", [1, 2, 5])
def test_sites_together_read_the_order_and_each_sample_once(num_sites: int) -> None:
    sites = [SitesConfig(endpoints=EMBEDDED, num_sites=num_sites, site=site) for site in range(num_sites)]
    read = [[one.read_of_order(number) - 1 for number in range(1, 8)] for one in sites]
    assert sorted(place for places in read for place in places) == list(range(7 * num_sites))
    assert all(place % num_sites == site for site, places in enumerate(read) for place in places)
    assert [one.read_of_order(0) for one in sites] == [0] * num_sites
