"""How a simulated group reaches others: sums over its communicator, and its voice in the log."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.entries import Fence, decode_entry
from spare_megatron.core.log.events import EntryRead, VotesRead
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement
from tests.protocol.communicators import Communicator, Reduction
from tests.protocol.shortages import LACKING
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
        failure: Why this process itself cannot take part in sums over groups; empty if it can.
    """

    def __init__(self, member: Member, name: str, controller: Controller, world: Surroundings) -> None:
        self._member, self._name = member, name
        self._controller = controller
        self._world = world
        self.communicator: Communicator | None = None
        self._is_alone = False  # among the members of the last one
        self.head = 0
        self.failure = ""
        self._num_failures = 0

    def lack(self, num_failures: int) -> None:
        """Its next builds, or the collectives on what it has built, fail at once."""
        self._num_failures = num_failures

    def begin(self, communicator: Communicator) -> None:
        """Takes this one in place of the last, and starts to build it unless that fails at once."""
        self.release()
        self.communicator, self._is_alone = communicator, len(communicator.members) == 1
        self.failure = ""
        if not self._fails():
            self._world.start_in_background(f"{self._name} builds {communicator.key}", self._build(communicator))

    def _fails(self) -> bool:
        """Whether this operation fails for lack of a resource; if so, the communicator is gone and `failure` set."""
        if self._num_failures and not self._is_alone:
            self._num_failures -= 1
            self.failure = LACKING
            self.release()
        return bool(self.failure)

    def report(self) -> Steps:
        """Reports that this process posts no more before the next entry: the others cannot see that by themselves."""
        yield from self.speak(lambda voice: voice.report_broken(self.head, self.failure or "it has given up"))

    def gather(self, name: str, brought: Any) -> Steps:
        """What all members brought, or None as soon as it cannot be had or no one needs it."""
        gathered = yield from self._gather(name, brought)
        if gathered is None:
            yield from self.report()
        return gathered

    def _gather(self, name: str, brought: Any) -> Steps:
        if not (yield from self.connect()):
            return None
        gathered = None
        for number in range(NUM_ROUNDS):
            reduction = self.post(f"{name}, round {number}", brought)
            yield None
            gathered = reduction and (yield from self.await_sums(reduction))
            if gathered is None:
                return None
        return gathered

    def connect(self) -> Steps:
        """Whether there is a communicator to post on, as soon as there is."""
        if self._is_alone:
            return True
        if self.communicator is None or (yield from self.is_over()):
            return False
        communicator = self.communicator
        while not communicator.is_built:
            yield Until(lambda: communicator.is_built or self._has_news())
            if not communicator.is_built and (yield from self.is_over()):
                return False
        return True

    def post(self, name: str, brought: Any, position: int = 0) -> Reduction | None:
        """None if that fails at once, or if another rank has given up."""
        if self._is_alone:
            return Reduction(name, {self._name: brought})
        if self.communicator is None or self._fails():
            return None
        return self.communicator.post(self._name, name, brought, position)

    def await_sums(self, reduction: Reduction) -> Steps:
        """What all members brought, or None as soon as it cannot be had or no one needs it."""
        if self._is_alone:
            return dict(reduction.posted)
        communicator = self.communicator
        if communicator is None:
            return None

        def possible() -> list[str]:
            found = ["completes"] if communicator.may_complete(reduction) else []
            found += ["breaks"] if communicator.has_dead else []
            return found + (["looks at the store"] if self._has_news() else [])

        while True:
            yield Until(lambda: bool(possible()))
            outcome = self._world.choose(*possible())
            if outcome == "completes":
                return dict(reduction.posted)
            if outcome == "breaks" or (yield from self.is_over()):
                self.release()
                return None

    def _build(self, communicator: Communicator) -> Steps:
        yield None
        communicator.join(self._member.group, self._name)

    def release(self) -> None:
        self.communicator = None

    # ------------------------------------------------------------------------------------------------- coming back

    def announce(self) -> Steps:
        """Says that this incarnation waits to be admitted."""
        yield from self.speak(lambda voice: voice.announce())
        self._world.num_announced += 1

    def with_waiting(self, event: VotesRead) -> Steps:
        """The votes, with those who wait to be admitted."""
        waiting, stages = yield from self.waiting(self._controller.voters)
        return replace(event, waiting=waiting, stages=stages)

    def waiting(self, voters: Sequence[Member]) -> Steps:
        """Those who wait to be admitted beside these, and the stages of those that have fewer than others."""
        log_type, groups = self._world.log_type, self._world.groups
        return (yield from conversation(lambda store: self._voice(log_type(store), groups).waiting(voters)))

    # ------------------------------------------------------------------------------------------------------ the log

    def speak(self, call: Callable[[GroupAgreement], Any]) -> Steps:
        """A call of the group's voice, with a log of the world's kind."""
        log_type = self._world.log_type
        return (yield from conversation(lambda store: call(self._voice(log_type(store)))))

    def is_over(self) -> Steps:
        """Whether the store says that what is under way is abandoned."""
        head = self.head
        return (yield from self.speak(lambda voice: voice.is_over(head)))

    def _has_news(self) -> bool:
        """Whether it will be."""
        return self._world.is_written(self.head) or self._world.is_reported_broken(self.head)

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

    def _voice(self, log: DecisionLog, may_come_back: Sequence[GroupId] = ()) -> GroupAgreement:
        world = self._world
        stages = world.stages_of(self._member)
        return world.voice_type(
            self._member, _LoneRank(), log, 1.0, may_come_back, world.fan_in, num_positions=1, stages=stages
        )
