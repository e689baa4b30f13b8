"""Checks of the processes that wait to take the place of a lost group's."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig


def spare_problems(config: RunConfig) -> Iterator[str]:
    """Why nobody would ever take the processes that wait."""
    spare, layout = config.spare, config.parallel
    if spare.spares <= 0 or layout.num_nodes < 1 or layout.num_ranks % layout.num_nodes:
        return
    groups_per_node = max(len(layout.groups_on(node)) for node in range(layout.num_nodes))
    if spare.spares > groups_per_node:
        yield (
            f"spare.spares={spare.spares} exceeds the {groups_per_node} groups of a node: no more can be lost at a "
            f"time; lower it"
        )
    if not (spare.rejoins or config.checkpoint.max_restarts):
        yield (
            f"spare.spares={spare.spares} is of no use where no group comes back: spare.rejoins={spare.rejoins}, "
            f"checkpoint.max_restarts=0; raise one of them, or set spare.spares to 0"
        )
