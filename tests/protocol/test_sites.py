"""Sites in random histories: crashes, cuts, stores that are away or lost, wrong results; and planted bugs."""

import pytest

from tests.protocol.mutations_of_sites import MUTATIONS_OF_SITES
from tests.protocol.outer_sites import run_outer_histories
from tests.protocol.violation import Violation

NUM_HISTORIES = 50
MOST_SEEDS = 60

FOUND_AS = {
    "counts a stale revision": "counts .* and continues",
    "closes a round without votes": "without equal votes",
    "commits a result that differs": "without equal votes",
    "applies a round twice": "with another weight, or twice",
    "takes a result before its commit": "which no round has made",
    "votes with the result of an earlier attempt": "another state than the sum",
    "commits for a site that has gone on": "no progress",
    "waits for a site without progress": "no progress",
    "gives up a state of a site that is away": "no progress|is given up",
    "takes over a stale state": "no progress",
}
FIRST_SEEDS = {
    "commits for a site that has gone on": 55,
    "waits for a site without progress": 64,
    "gives up a state of a site that is away": 17,
    "takes over a stale state": 64,
}
"""Seeds before these find nothing."""


def test_no_history_of_sites_violates_an_invariant_and_together_they_reach_everything() -> None:
    counts, violations = run_outer_histories(range(NUM_HISTORIES))
    assert violations == {}
    least = {
        "OpenRound": 300,
        "CommitRound": 300,
        "WithoutSite": 10,
        "crash": 15,
        "cut": 10,
        "link": 5,
        "outage": 5,
        "loss": 5,
        "wrong result": 3,
        "went on": 2,
        "took over": 20,
        "given up": 1,
    }
    assert {name: counts[name] for name, number in least.items() if counts[name] < number} == {}


@pytest.mark.parametrize("mutation", MUTATIONS_OF_SITES)
def test_the_simulation_of_sites_finds_a_protocol_that(mutation: str) -> None:
    first = FIRST_SEEDS.get(mutation, 0)
    [violation] = run_outer_histories(range(first, first + MOST_SEEDS), MUTATIONS_OF_SITES[mutation])[1].values()
    with pytest.raises(Violation, match=FOUND_AS[mutation]):
        raise Violation(violation)
