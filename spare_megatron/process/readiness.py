"""The start of a run: a barrier that opens when every group is ready to train, or lost."""

from spare_megatron.stacking.layout import GroupId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore, StoreTimeout

GRACE_S = 30.0
"""Time for the driver to leave out nodes that are late, before those who wait for them give up."""


class GroupsMissing(ValueError):
    """The run cannot begin because some groups do not come up."""


def note_ready(store: ControlStore, group: GroupId, reporter: str, num_groups: int) -> None:
    """Records that the group is ready, or lost; the last record opens the barrier. Several may report a group, and one
    may die halfway: the count only says when to check every group.
    """
    store.put(keys.ready(group), "yes")
    count = store.put_counted(keys.ready_report(group, reporter), "yes", keys.NUM_READY_REPORTS)
    if count >= num_groups and not _awaited(store, num_groups):
        store.put(keys.ALL_GROUPS_READY, "yes")


def wait_until_ready(store: ControlStore, num_groups: int, startup_timeout_s: float) -> None:
    """Blocks until every group is ready or lost; raises GroupsMissing after startup_timeout_s + GRACE_S seconds."""
    try:
        store.wait(keys.ALL_GROUPS_READY, startup_timeout_s + GRACE_S)
    except StoreTimeout as late:
        awaited = _awaited(store, num_groups)
        raise GroupsMissing(
            f"groups {awaited} did not start within control.startup_timeout_s={startup_timeout_s:g} of the others; "
            f"the logs of their ranks show how far they are; raise it if they are only slow"
        ) from late


def _awaited(store: ControlStore, num_groups: int) -> list[int]:
    ready = store.get([keys.ready(GroupId(group)) for group in range(num_groups)])
    return [group for group, text in enumerate(ready) if text is None]
