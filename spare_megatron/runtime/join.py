"""A group that comes back: it catches up with the log, waits to be admitted, and takes the state over from a donor."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from spare_megatron.core.controller import Controller
from spare_megatron.core.liveness import Operation
from spare_megatron.core.messages import Action, AdmitGroups, EntryRead, Fence, RunStarted
from spare_megatron.core.topology import Member
from spare_megatron.mcore.state import DamagedState
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.agreement import Fenced, GroupAgreement
from spare_megatron.runtime.communicators import CrossGroupCommunicator
from spare_megatron.runtime.fold import Stop
from spare_megatron.runtime.probe import RankProbe

_POLL_S = 0.005


class JoinFailed(Exception):
    """The group was admitted and could not take the state over. It has nothing to go on with."""


def catch_up(controller: Controller, agreement: GroupAgreement, announced: Callable[[], None]) -> deque[Action] | Stop:
    """Folds the log from its first entry until an entry admits this group, and carries nothing out.

    Collective over: all ranks of the group.

    Args:
        controller: A new one.
        agreement: The group's voice.
        announced: Called when the group has asked to be admitted.

    Returns:
        What there is to do from its admission on, that first; or how the run ends before.

    Raises:
        Fenced: The group was found lost while it waited.
    """
    controller.handle(RunStarted(), now_s=0.0)
    has_announced = False
    while True:
        if not has_announced and agreement.is_at_end(controller.head):
            agreement.announce()
            announced()
            has_announced = True
        index = controller.head
        entry = agreement.read_entry(index)
        if isinstance(entry, Fence) and entry.hits(agreement.member):
            raise Fenced(f"{agreement.member} is fenced by log entry {index} before it was admitted: {entry.reason}")
        actions = controller.handle(EntryRead(index=index, entry=entry), now_s=0.0)
        for number, action in enumerate(actions):
            if isinstance(action, Stop):
                return action
            if isinstance(action, AdmitGroups) and agreement.member in action.members:
                return deque(actions[number:])


class StateTransfer:
    """One rank's part in admitting groups: rank j of a donor gives, rank j of the newcomer takes.

    Args:
        trainer: The rank's part of the model.
        agreement: The group's voice.
        channel: For the transfers, between two groups at a time.
        device: Where the channel's tensors are.
        probe: Told before a transfer begins.
    """

    def __init__(
        self,
        *,
        trainer: GroupTrainer,
        agreement: GroupAgreement,
        channel: CrossGroupCommunicator,
        device: torch.device,
        probe: RankProbe,
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._channel = channel
        self._device = device
        self._probe = probe

    def run(self, action: AdmitGroups, head: int) -> None:
        """Gives the state to those this group is the donor of, or takes it.

        A donor that loses its newcomer goes on: it is lost, and everybody will find it so.

        Args:
            action: Who is admitted, and who gives to whom.
            head: Entries of the log folded so far.

        Raises:
            JoinFailed: The state has not come, or came damaged.
        """
        donors = zip(action.members, action.donors, strict=True)
        for newcomer, donor in donors:
            if self._agreement.member not in (newcomer, donor):
                continue
            self._probe.begin_join(action.step)
            is_newcomer = self._agreement.member == newcomer
            self._channel.begin_build(f"{head - 1}/{newcomer.group}", sorted((newcomer.group, donor.group)))
            with self._probe.during(Operation.CHECK):
                mine = b"" if is_newcomer else self._trainer.dump_state()
            data = self._exchange(mine, donor if is_newcomer else newcomer, head)
            if not is_newcomer:
                continue
            if data is None:
                raise JoinFailed(f"group {donor.group} did not give its state: {self._channel.evidence}")
            try:
                self._trainer.load_state(data.numpy().tobytes())
            except DamagedState as error:
                raise JoinFailed(f"the state that group {donor.group} gave is damaged: {error}") from error

    def _exchange(self, mine: bytes, other: Member, head: int) -> torch.Tensor | None:
        """The bytes of whichever of the two has some; None if the other is lost. The sum of two, of which one is 0."""
        size = self._sum(torch.tensor([len(mine)], dtype=torch.int64), other, head)
        if size is None:
            return None
        with self._probe.during(Operation.CHECK):
            data = torch.zeros(int(size), dtype=torch.uint8)
            if mine:
                data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return self._sum(data, other, head)

    def _sum(self, tensor: torch.Tensor, other: Member, head: int) -> torch.Tensor | None:
        buffer = tensor.to(self._device)
        is_complete = self._channel.reduce(buffer, lambda: self._agreement.is_lost(other, head))
        return buffer.cpu() if is_complete else None


def confirm(
    digest: str, action: AdmitGroups, head: int, agreement: GroupAgreement, timeout_s: float, probe: RankProbe
) -> None:
    """Makes sure that more than half of those who took part before hold the parameters that were taken over.

    Otherwise the copy of a wrong state could outvote the right ones in the next comparison. Whoever has been lost
    since the admission has no say: it may never tell.

    Args:
        digest: Of the parameters taken over.
        action: The admission.
        head: Entries of the log folded so far, that of the admission the last.
        agreement: The group's voice.
        timeout_s: Longest wait for the others.
        probe: Told that the rank is there while it waits.

    Raises:
        JoinFailed: They do not, or have not said so in time.
    """
    end_s = time.monotonic() + timeout_s
    while (verdict := majority_holds(digest, _told(action, head, agreement))) is None:
        if time.monotonic() > end_s:
            raise JoinFailed(f"too few groups have told their parameters within {timeout_s:g} s")
        time.sleep(_POLL_S)
        probe.progress()
    if not verdict:
        raise JoinFailed("the state that was taken over is not that of the other groups")


def _told(action: AdmitGroups, head: int, agreement: GroupAgreement) -> list[str | None]:
    """What those have told so far who took part before and still do."""
    left = [member.group for member in action.earlier if not agreement.is_lost(member, head)]
    return agreement.digests(head - 1, left)


def majority_holds(digest: str, others: Sequence[str | None]) -> bool | None:
    """Whether more than half of the others hold the same parameters; None while too few have said so.

    >>> [majority_holds("a", others) for others in (["a", None, "a"], ["a", None, "b"], ["b", "b", None])]
    [True, None, False]
    """
    same = sum(other == digest for other in others)
    different = sum(other is not None and other != digest for other in others)
    if 2 * same > len(others):
        return True
    return False if 2 * different >= len(others) else None
