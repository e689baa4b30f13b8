"""Who gets the sums of which slice's gradients, where the optimizer state is cut into slices (`core.slices`).

Whoever updates a slice needs the sum of its gradients over the groups, and nobody else does: its hosts, and those who
are making a copy of it, for they update what they have of it. The owner receives the sum and sends it to the others, so
that all of them have the same bits.

A sum that is kept from one attempt of a step to the next is with those who were to get it then. A host of a later
attempt was one of an earlier, for only a commit makes anybody a host. Whoever is asked for a copy by a fence was not,
and so begins with the state after the step (`StartRepairs.first_step`).
"""

from spare_megatron.core.slices import Ownership
from spare_megatron.core.topology import GroupId


def recipients(ownership: Ownership) -> tuple[tuple[GroupId, ...], ...]:
    """For each slice, who gets the sums of its gradients: its owner, then the others, ascending."""
    asked = [set(row) for row in ownership.hosts]
    for copy in (*ownership.repairs, *ownership.moves):
        asked[copy.slice].add(copy.receiver)
    return tuple(
        (owner.group, *sorted(member.group for member in row if member != owner))
        for owner, row in zip(ownership.owners, asked, strict=True)
    )
