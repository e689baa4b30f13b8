"""How a simulated group reaches others: sums over its communicator, and its voice in the log."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from spare_megatron.core.controller import Controller
from spare_megatron.core.entries import Fence, decode_entry
from spare_megatron.core.events import EntryRead, VotesRead
from spare_megatron.stacking.layout import Member
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement
from tests.protocol.communicators import Communicator, Reduction
from tests.protocol.store import conversation
from tests.protocol.surroundings import Steps, Surroundings, Until

NUM_ROUNDS = 2
"""Of a gathering: who gives up in the first is missed in the second."""


class Fenced(Exception):
    """The log says that this group is lost."""


class _LoneRank:
    """The process group of a group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Links:
    """One process's.

    Attributes:
        communicator: The one to use next; None where the last one broke.
        head: Entries of the log read so far.
    """

    def __init__(self, member: Member, name: str, controller: Controller, world: Surroundings) -> None:
        self._member, self._name = member, name
        self._controller = controller
        self._world = world
        self.communicator: Communicator | None = None
        self._is_alone = False  # among the members of the last one
        self.head = 0

    def begin(self, communicator: Communicator) -> None:
        """Takes this one in place of the last."""
        self.release()
        self.communicator, self._is_alone = communicator, len(communicator.members) == 1

    def gather(self, name: str, brought: Any) -> Steps:
        """What all members brought, or None as soon as it cannot be had or no one needs it.

        The others cannot see that a living member has given up: it reports that, unless another one has.
        """
        gathered = yield from self._gather(name, brought)
        if gathered is None and not (yield from self.is_over(is_gathering=True)):
            yield from self.speak(lambda voice: voice.report_broken(self.head))
        return gathered

    def _gather(self, name: str, brought: Any) -> Steps:
        if not (yield from self.connect(is_gathering=True)):
            return None
        gathered = None
        for number in range(NUM_ROUNDS):
            reduction = self.post(f"{name}, round {number}", brought)
            yield None
            gathered = yield from self.await_sums(reduction, is_gathering=True)
            if gathered is None:
                return None
        return gathered

    def connect(self, *, is_gathering: bool = False) -> Steps:
        """Whether there is a communicator to post on, as soon as there is."""
        if self._is_alone:
            return True
        if self.communicator is None or (yield from self.is_over(is_gathering=is_gathering)):
            return False
        communicator = self.communicator
        while not communicator.is_built:
            yield Until(lambda: communicator.is_built or self._has_news(is_gathering=is_gathering))
            if not communicator.is_built and (yield from self.is_over(is_gathering=is_gathering)):
                return False
        return True

    def post(self, name: str, brought: Any) -> Reduction:
        if self._is_alone:
            return Reduction(name, {self._name: brought})
        assert self.communicator is not None, "it has been connected"
        return self.communicator.post(self._name, name, brought)

    def await_sums(self, reduction: Reduction, *, is_gathering: bool = False) -> Steps:
        """What all members brought, or None as soon as it cannot be had or no one needs it."""
        if self._is_alone:
            return dict(reduction.posted)
        communicator = self.communicator
        assert communicator is not None, "it was posted on"

        def possible() -> list[str]:
            is_broken = communicator.has_dead if is_gathering else communicator.is_broken
            found = ["completes"] if communicator.may_complete(reduction) else []
            found += ["breaks"] if is_broken else []
            return found + (["looks at the store"] if self._has_news(is_gathering=is_gathering) else [])

        while True:
            yield Until(lambda: bool(possible()))
            outcome = self._world.choose(*possible())
            if outcome == "completes":
                return dict(reduction.posted)
            if outcome == "breaks" or (yield from self.is_over(is_gathering=is_gathering)):
                self.release()
                return None

    def build(self, communicator: Communicator) -> Steps:
        yield None
        communicator.join(self._member.group, self._name)

    def release(self) -> None:
        if self.communicator is not None:
            self.communicator.leave(self._name)
        self.communicator = None

    # ------------------------------------------------------------------------------------------------- coming back

    def announce(self) -> Steps:
        """Says that this incarnation waits to be taken in."""
        member = self._member
        yield from conversation(lambda store: store.put(keys.waiting(member.group), str(member.incarnation)))
        self._world.num_announced += 1

    def with_waiting(self, event: VotesRead) -> Steps:
        """The votes, with those who wait to be taken in."""
        return replace(event, waiting=(yield from self.waiting(self._controller.voters)))

    def waiting(self, voters: Collection[Member]) -> Steps:
        """Those who wait to be taken in beside these."""
        present = {voter.group for voter in voters}
        groups = [group for group in self._world.groups if group not in present]
        if not groups:
            return ()
        found = yield from conversation(lambda store: store.get([keys.waiting(group) for group in groups]))
        return tuple(Member(group, int(text)) for group, text in zip(groups, found, strict=True) if text is not None)

    # ------------------------------------------------------------------------------------------------------ the log

    def speak(self, call: Callable[[GroupAgreement], Any]) -> Steps:
        """A call of the group's voice, with a log of the world's kind."""
        log_type = self._world.log_type
        return (yield from conversation(lambda store: call(self._voice(log_type(store)))))

    def is_over(self, *, is_gathering: bool) -> Steps:
        """Whether the store says that what is under way is abandoned."""
        head = self.head
        if (yield from self.speak(lambda voice: voice.is_written(head))):
            return True
        return is_gathering and (yield from self.speak(lambda voice: voice.is_broken(head)))

    def _has_news(self, *, is_gathering: bool) -> bool:
        """Whether it will be."""
        return self._world.is_written(self.head) or (is_gathering and self._world.is_reported_broken(self.head))

    def read_entry(self, index: int) -> Steps:
        return self.take_entry(index, (yield from self.await_entry(index)))

    def await_entry(self, index: int) -> Steps:
        return (yield from self.speak(lambda voice: voice.await_entry(index)))

    def take_entry(self, index: int, text: str) -> list[EntryRead]:
        """Goes on after this entry.

        Raises:
            Fenced: It ends this incarnation.
        """
        entry = decode_entry(text)
        self.head = index + 1
        if isinstance(entry, Fence) and entry.hits(self._member):
            raise Fenced
        return [EntryRead(index=index, entry=entry)]

    def _voice(self, log: DecisionLog) -> GroupAgreement:
        return self._world.voice_type(self._member, _LoneRank(), log, 1.0, fan_in=self._world.fan_in)
