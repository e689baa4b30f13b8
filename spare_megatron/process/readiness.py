"""The start of a run: whom everybody waits for."""

from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.interface import ControlStore, StoreTimeout

ALL_GROUPS_READY = "all_groups_ready"
"""Key of the control store that is there when every group is ready to train, or lost."""


GRACE_S = 30.0
"""The driver has this long to leave out nodes that have not come in time, before those who wait for them give up."""


class GroupsMissing(ValueError):
    """The run cannot begin, for some groups do not come."""


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
    store.put(_ready_key(group), "yes")
    count = store.put_counted(f"told/{group}/{teller}", "yes", "groups_told")
    if count >= num_groups and not _awaited(store, num_groups):
        store.put(ALL_GROUPS_READY, "yes")


def wait_until_ready(store: ControlStore, num_groups: int, startup_timeout_s: float) -> None:
    """Returns when nobody waits for any group.

    Args:
        store: The control store.
        num_groups: Of the run.
        startup_timeout_s: `control.startup_timeout_s`.

    Raises:
        GroupsMissing: Some group was neither ready nor lost in time.
    """
    try:
        store.wait(ALL_GROUPS_READY, startup_timeout_s + GRACE_S)
    except StoreTimeout as late:
        awaited = _awaited(store, num_groups)
        raise GroupsMissing(
            f"groups {awaited} have not come up within control.startup_timeout_s={startup_timeout_s:g} of the others; "
            f"the logs of their ranks say how far they are, and whoever is only slow needs a longer one"
        ) from late


def _awaited(store: ControlStore, num_groups: int) -> list[int]:
    """The groups that are neither ready nor lost."""
    ready = store.get([_ready_key(group) for group in range(num_groups)])
    return [group for group, text in enumerate(ready) if text is None]


def _ready_key(group: int) -> str:
    return f"ready/{group}"
