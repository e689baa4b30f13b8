"""On the leader of a group that waits after a wipe-out: what there is to start again from, until an entry says so.

It comes back to its caller every few seconds. The other ranks of the group wait for that, and for no longer, however
much there is to read.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from spare_megatron.core.controller import Controller
from spare_megatron.core.messages import AppendEntry
from spare_megatron.core.restart_messages import Offer, ReadFiles, Waiting, WaitingRead, WithdrawOffers
from spare_megatron.core.snapshots import Held, HeldSlice
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.runtime.rank.start_over import StartOver
from spare_megatron.runtime.vote.agreement import GroupAgreement

_TURN_S = 2.0
_POLL_S = 0.05
_POLL_S_PER_GROUP = 0.001
"""All groups ask the store for what all groups say."""
_SEARCH_AGAIN_S = 1.0
"""A folder of checkpoints that cannot be read may be back."""


class RestartSearch:
    """The leader's part.

    Args:
        controller: That of the group.
        agreement: The group's voice.
        start_over: What there is to start again from.
        groups: All groups of the run.
    """

    def __init__(
        self, controller: Controller, agreement: GroupAgreement, start_over: StartOver, groups: Sequence[GroupId]
    ) -> None:
        self._controller = controller
        self._agreement = agreement
        self._start_over = start_over
        self._groups = groups
        self._pause_s = max(_POLL_S, _POLL_S_PER_GROUP * len(groups))
        self._since_s = self._searched_at_s = 0.0
        self._own = Waiting(member=agreement.member, offers=())
        self._told: Waiting | None = None
        self._heard: dict[Member, tuple[Waiting, float]] = {}  # and since when it has said just that

    def begin(self) -> None:
        """Looks which checkpoints there are."""
        self._since_s = time.monotonic()
        self._own = Waiting(member=self._agreement.member, offers=())
        self._told = None
        self._heard = {}
        self._search()

    def tell(self, held: tuple[Held, ...], slices: tuple[HeldSlice, ...]) -> None:
        """Says what there is.

        Args:
            held: Snapshots of the group's rank positions.
            slices: The same of slices.
        """
        self._own = replace(self._own, held=held, slices=slices)
        self._tell()

    def seek(self, index: int) -> None:
        """For some seconds, does what helps to start again, and writes the entry at the index as soon as it may."""
        end_s = time.monotonic() + _TURN_S
        while time.monotonic() < end_s and not self._agreement.is_written(index):
            if self._own.failure and time.monotonic() - self._searched_at_s > _SEARCH_AGAIN_S:
                self._search()
            if self._decide():
                return
            self._tell()
            time.sleep(self._pause_s)

    def _decide(self) -> bool:
        """Whether an entry is written."""
        waited_s = time.monotonic() - self._since_s
        event = WaitingRead(group=self._agreement.member.group, waiting=self._listen(), waited_s=waited_s)
        for action in self._controller.handle(event, now_s=self._start_over.now_s()):
            match action:
                case AppendEntry(index=index, entry=entry):
                    self._agreement.append(index, entry)
                    return True
                case ReadFiles(offer=offer, numbers=numbers):
                    self._start_over.read(offer, numbers)
                case WithdrawOffers(reasons=reasons):
                    self._start_over.withdraw(reasons)
                    self._search()
                case _:
                    raise AssertionError(f"nothing asks who waits for {action}")
        return False

    def _listen(self) -> tuple[Waiting, ...]:
        """What all groups say, and for how long they have said just that."""
        now_s = time.monotonic()
        for item in self._agreement.waiting_to_restart(self._groups):
            if item.member not in self._heard or self._heard[item.member][0] != item:
                self._heard[item.member] = item, now_s
        latest = {item.member.group: (item, since_s) for item, since_s in self._heard.values()}
        return tuple(replace(item, silent_s=now_s - since_s) for item, since_s in latest.values())

    def _search(self) -> None:
        """Looks which checkpoints lack nothing at a glance."""
        offers: tuple[Offer, ...] = ()
        failure = ""
        try:
            offers = self._start_over.offers()
        except OSError as error:
            failure = str(error)
        self._own = replace(self._own, offers=offers, failure=failure)
        self._searched_at_s = time.monotonic()

    def _tell(self) -> None:
        """Says what has changed."""
        reader = self._start_over.reader
        own = replace(self._own, readings=reader.readings(), is_reading=reader.is_reading)
        if own != self._told:
            self._agreement.announce_restart(own)
            self._told = own
