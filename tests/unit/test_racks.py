"""Nodes by rack: how Slurm reports racks, the order in which a run takes nodes, and the warning about full racks."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.schema import SpareConfig
from spare_megatron.driver.slurm.allocation import find_racks, nodes_per_domain, order_by_rack, shared_racks, spread
from spare_megatron.stacking.layout import Layout
from spare_megatron.stacking.placement import make_placement

TREE = """
SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=n1,n4
SwitchName=rack2 Level=0 LinkSpeed=1 Nodes=n2,n5
SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-2,4-5] Switches=rack[1-2]
"""
BLOCKS = """
BlockName=rack1 BlockIndex=0 Nodes=n1,n4 BlockSize=2
BlockName=rack2 BlockIndex=1 Nodes=n2,n5 BlockSize=2
"""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (TREE, {"n1": "rack1", "n4": "rack1", "n2": "rack2", "n5": "rack2"}),
        (BLOCKS, {"n1": "rack1", "n4": "rack1", "n2": "rack2", "n5": "rack2"}),
        ("No topology information available", {}),
        ("'; exit 1; echo '", {}),
    ],
)
def test_racks_are_the_lowest_switches_or_the_blocks(
    answer: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = f"case \"$*\" in 'show topology') echo '{answer}';; *hostnames*) echo \"$3\" | tr , '\\n';; esac"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answers}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_racks() == expected


def test_a_domain_stands_in_a_rack_of_its_own_wherever_racks_allow_it() -> None:
    """Against all ways to give racks domains, on random clusters."""
    draw, num_shared = np.random.default_rng(5), 0
    for _ in range(300):
        domain_nodes, sizes = int(draw.integers(1, 4)), draw.integers(1, 6, size=draw.integers(1, 5)).tolist()
        names = [f"{rack}-{number}" for rack, size in enumerate(sizes) for number in range(size)]
        racks = {name: name.partition("-")[0] for name in names}
        rooms = [size // domain_nodes for size in sizes]
        num_domains = int(draw.integers(0, sum(rooms) + 1))
        order = order_by_rack(list(draw.permutation(names)), racks, num_domains * domain_nodes, domain_nodes)
        assert sorted(order) == sorted(names)
        run = [racks[name] for name in order[: num_domains * domain_nodes]]
        stand = [set(run[first : first + domain_nodes]) for first in range(0, len(run), domain_nodes)]
        assert all(len(found) == 1 for found in stand)
        ways = itertools.product(*(range(room + 1) for room in rooms))
        most = max(sum(taken > 0 for taken in way) for way in ways if sum(way) == num_domains)
        assert len(set(run)) == most
        assert [rack for rack, _ in itertools.groupby(run)] == list(dict.fromkeys(run)), "neighbours"
        num_shared += most < num_domains
    assert 50 < num_shared < 250


def test_what_fits_into_no_rack_as_a_whole_takes_what_is_left() -> None:
    racks = {"a1": "a", "a2": "a", "a3": "a", "b1": "b"}
    assert order_by_rack(["a1", "b1", "a2", "a3", "c1"], racks, 5, 2) == ("a1", "a2", "a3", "b1", "c1")
    assert order_by_rack(["n2", "n1", "n3"], {}, 2, 1) == ("n2", "n1", "n3")
    assert order_by_rack(["n2", "n1", "n3"], {}, 2, 2) == ("n2", "n1", "n3")


def sections(
    num_groups: int, num_nodes: int, *, groups_per_domain: int, redundancy: int = 2
) -> tuple[SpareConfig, Layout]:
    spare = SpareConfig(redundancy=redundancy, groups_per_domain=groups_per_domain)
    return spare, Layout(num_groups=num_groups, pipeline_parallel=2, num_nodes=num_nodes)


@pytest.mark.parametrize(("num_nodes", "groups_per_domain", "expected"), [(8, 1, 1), (16, 2, 4), (4, 2, 1), (4, 3, 2)])
def test_a_domain_is_as_many_nodes_as_its_groups_take(num_nodes: int, groups_per_domain: int, expected: int) -> None:
    assert nodes_per_domain(*sections(8, num_nodes, groups_per_domain=groups_per_domain)) == expected


def test_racks_that_hold_more_than_a_domain_are_reported_with_what_separates_the_hosts_of_a_shard() -> None:
    racks = {f"n{node}": f"rack{node // 4}" for node in range(16)}
    nodes = order_by_rack(sorted(racks), racks, 16, 2)
    warning = shared_racks(*sections(8, 16, groups_per_domain=1), nodes, racks)
    assert warning.endswith("(as in 4 of 4 racks); spare.groups_per_domain=2 keeps hosts apart")
    assert shared_racks(*sections(8, 16, groups_per_domain=1, redundancy=1), nodes, racks) == ""
    apart = sections(8, 16, groups_per_domain=2)
    nodes = order_by_rack(sorted(racks, reverse=True), racks, 16, nodes_per_domain(*apart))
    assert shared_racks(*apart, nodes, racks) == ""
    for hosts in make_placement("golomb", 8, 2, 2).hosts:
        stand = {racks[nodes[2 * group + part]] for group in hosts for part in range(2)}
        assert len(stand) == len(hosts), "no rack has two hosts of a shard"


def test_the_first_nodes_stand_apart() -> None:
    racks = {"a1": "a", "a2": "a", "b1": "b"}
    assert spread(["a1", "a2", "c1", "b1"], racks) == ("a1", "c1", "b1", "a2")
    assert spread(["a1", "a2"], {}) == ("a1", "a2")
