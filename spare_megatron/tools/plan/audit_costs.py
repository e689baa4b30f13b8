"""What audits cost and find: closed forms over the steps between them.

An audit is one microbatch of the m that a group computes in a step, for each group in every E-th step. The next one
finds a lasting fault of a group. A fault in a single microbatch is found if that one is audited: one of m, in one of E
steps, so that the share found equals the price, but for an interleaved schedule, which pads an audit to a round of k.
"""

from dataclasses import dataclass

from spare_megatron.core.audits.audits import default_every_steps
from spare_megatron.tools.plan.facts import ClusterFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPrice:
    every_steps: int
    """Steps between audits, within which a lasting fault is found."""
    price: float
    """Share of a step's compute that they add, less where groups have slack; divided by k also the share of faults in a
    single microbatch that they find, more where groups have slack."""


def audit_price(num_microbatches: int, multiple: int = 1, every_steps: int | None = None) -> AuditPrice:
    """For m = `num_microbatches` per shard and k = `multiple`; by default as often as `audit.every_steps` is.

    >>> audit_price(16), audit_price(16, 4)
    (AuditPrice(every_steps=7, price=0.008928571428571428), AuditPrice(every_steps=25, price=0.01))
    """
    every_steps = every_steps or default_every_steps(num_microbatches, multiple)
    return AuditPrice(every_steps=every_steps, price=multiple / (num_microbatches * every_steps))


def num_judges(facts: ClusterFacts, redundancy: int) -> int:
    """Groups that can compute a microbatch, up to the three that settle which of two is wrong: its hosts, or any group
    where all read the same data. With one there are no audits; with two a mismatch may halt the run.
    """
    return min(facts.num_groups if facts.last_resort else redundancy, 3)


def audit_curve(num_microbatches: int, multiple: int = 1) -> tuple[AuditPrice, ...]:
    """Half, one, two, four times the default price and so on, up to audits in every step."""
    default = default_every_steps(num_microbatches, multiple)
    intervals = {2 * default, *(max(1, round(default / 2**power)) for power in range(default.bit_length() + 1))}
    return tuple(audit_price(num_microbatches, multiple, every) for every in sorted(intervals, reverse=True))
