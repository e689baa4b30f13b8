"""The leader's search for the state to restart from: announces what its group has, lets the controller decide."""

import time
from dataclasses import replace

from spare_megatron.core.log.actions import AppendEntry, CheckpointCandidate, ReadFiles, WithdrawCandidates
from spare_megatron.core.log.events import HeldPartition, RestartState, WaitingRead
from spare_megatron.core.log.votes import Held
from spare_megatron.formats.output import real_paths
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.stacking.layout import Member
from spare_megatron.state.rank_context import RankContext
from spare_megatron.store.decision_log import poll_interval_s
from spare_megatron.voting.agreement import TURN_S

_SEARCH_AGAIN_S = 1.0
"""A checkpoint folder that cannot be read may be back after this time."""


class RestartSearch:
    """The leader's part in finding the state to restart from: announces, reads, and lets the controller decide."""

    def __init__(self, ctx: RankContext, loader: RestartLoader) -> None:
        self._ctx = ctx
        self._loader = loader
        self._pause_s = poll_interval_s(len(ctx.groups))
        self._since_s = self._searched_at_s = 0.0
        self._own = RestartState(member=ctx.member, candidates=())
        self._announced: RestartState | None = None
        self._announcements: dict[Member, tuple[RestartState, float]] = {}  # and since when it is unchanged

    def start(self) -> None:
        """Forgets what was announced before and searches for checkpoints."""
        self._since_s = time.monotonic()
        self._own = RestartState(member=self._ctx.member, candidates=())
        self._announced = None
        self._announcements = {}
        self._search()

    def announce_snapshots(self, held: tuple[Held, ...], partitions: tuple[HeldPartition, ...]) -> None:
        """Announces the snapshots that the group holds: of its rank positions, and of state partitions."""
        self._own = replace(self._own, held=held, partitions=partitions)
        self._announce()

    def seek(self, index: int) -> None:
        """Works on the restart for some seconds, until the entry at the index is written."""
        end_s = time.monotonic() + TURN_S
        while time.monotonic() < end_s and not self._ctx.agreement.is_written(index):
            if self._own.failure and time.monotonic() - self._searched_at_s > _SEARCH_AGAIN_S:
                self._search()
            if self._decide():
                return
            self._announce()
            time.sleep(self._pause_s)

    def _decide(self) -> bool:
        """Lets the controller decide. Returns whether an entry is written."""
        waited_s = time.monotonic() - self._since_s
        event = WaitingRead(group=self._ctx.member.group, waiting=self._listen(), waited_s=waited_s)
        for action in self._ctx.controller.handle(event, now_s=self._loader.now_s()):
            match action:
                case AppendEntry(index=index, entry=entry):
                    self._ctx.agreement.append(index, entry)
                    return True
                case ReadFiles(candidate=candidate, numbers=numbers):
                    self._loader.read(candidate, numbers)
                case WithdrawCandidates(reasons=reasons):
                    self._loader.withdraw(reasons)
                    self._search()
                case _:
                    raise AssertionError(f"a waiting leader does not execute {action}")
        return False

    def _listen(self) -> tuple[RestartState, ...]:
        """The last announcement of every group, and for how long it has not changed."""
        now_s = time.monotonic()
        for item in self._ctx.agreement.waiting_to_restart(self._ctx.groups):
            if item.member not in self._announcements or self._announcements[item.member][0] != item:
                self._announcements[item.member] = item, now_s
        latest = {item.member.group: (item, since_s) for item, since_s in self._announcements.values()}
        return tuple(replace(item, silent_s=now_s - since_s) for item, since_s in latest.values())

    def _search(self) -> None:
        candidates: tuple[CheckpointCandidate, ...] = ()
        failure = ""
        try:
            candidates = self._loader.candidates()
        except OSError as error:
            failure = real_paths(str(error))  # which the groups may read in the log, one after another
        self._own = replace(self._own, candidates=candidates, failure=failure)
        self._searched_at_s = time.monotonic()

    def _announce(self) -> None:
        reader = self._loader.reader
        own = replace(self._own, readings=reader.readings(), is_reading=reader.is_reading)
        if own != self._announced:
            self._ctx.agreement.announce_restart(own)
            self._announced = own
