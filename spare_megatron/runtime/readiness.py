"""The start of a run: whom everybody waits for."""

from spare_megatron.control.store import ControlStore
from spare_megatron.core.topology import GroupId

ALL_GROUPS_READY = "all_groups_ready"
"""Key of the control store that is there when every group is ready to train, or lost."""


def note_ready(store: ControlStore, group: GroupId, teller: str, num_groups: int) -> None:
    """Nobody waits for the group any more: it is ready, or lost. Whoever says so of the last one lets all begin.

    Several may say so of one group, and one who dies in the middle has not. So the count only tells when it is worth
    asking for every group.

    Args:
        store: The control store.
        group: The group.
        teller: Who says so, once.
        num_groups: Of the run.
    """
    store.put(f"ready/{group}", "yes")
    count = store.put_counted(f"told/{group}/{teller}", "yes", "groups_told")
    if count >= num_groups and None not in store.get([f"ready/{other}" for other in range(num_groups)]):
        store.put(ALL_GROUPS_READY, "yes")
