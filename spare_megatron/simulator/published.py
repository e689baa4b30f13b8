"""What the simulation of SPARe's paper (arXiv 2603.00357) found, to stand beside ours."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPoint:
    """The best of a policy for one number of groups.

    Attributes:
        policy: "replication" or "spare", at stack granularity.
        num_groups: N.
        redundancy: r at which it was found.
        time_to_train_ratio: Time to train over that without failures.
        availability: As a share of 1.
    """

    policy: str
    num_groups: int
    redundancy: int
    time_to_train_ratio: float
    availability: float


PUBLISHED = tuple(
    PublishedPoint(policy=policy, num_groups=n, redundancy=r, time_to_train_ratio=ratio, availability=up)
    for policy, n, r, ratio, up in (
        ("replication", 200, 3, 6.07, 0.6174),
        ("replication", 600, 3, 4.27, 0.7989),
        ("replication", 1000, 3, 3.88, 0.8441),
        ("spare", 200, 9, 2.92, 0.8700),
        ("spare", 600, 8, 2.49, 0.9390),
        ("spare", 1000, 9, 2.34, 0.9654),
    )
)
"""600,000 H100, a loss every 5 min, shards of 64 s, saves of 60 s, restarts of 60 min, 10,000 steps."""


def published(scenario_name: str) -> tuple[PublishedPoint, ...]:
    """The paper's points for one of its scenarios; none for other scenarios.

    >>> [point.time_to_train_ratio for point in published("paper_n600")]
    [4.27, 2.49]
    """
    return tuple(point for point in PUBLISHED if scenario_name == f"paper_n{point.num_groups}")
