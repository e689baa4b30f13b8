"""A rank's part in rounds with other sites.

The leader of the lowest group speaks for its site (`rank.outer_link`). In an attempt the ranks of its group go in
turns: each turn the leader says what to fetch, and all say how far they are. Rank j fetches from rank j of the other
sites and computes the result; once the outer log has committed it, it goes to the other groups by sums of its bits, in
which they have zeros. It is applied when the site's own log says so.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spare_megatron.comm.communicators import report_incomplete
from spare_megatron.core.log.actions import ApplySync, AttemptSync
from spare_megatron.core.log.events import Event
from spare_megatron.core.log.votes import Digests, RoundResult
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.outer.entries import Revision, SiteId
from spare_megatron.core.outer.rounds import RoundPhase
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.codec import encode
from spare_megatron.journal.records import RoundRecord
from spare_megatron.machine.network import address_towards, hosts_of
from spare_megatron.mcore.optimizer.outer_step import OuterRule, OuterState, SiteValues, exchanged_bytes
from spare_megatron.rank.outer_exchange import Fetch, OuterSource, SiteContent
from spare_megatron.rank.outer_link import Arriving, OuterLink, View
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.store import keys
from spare_megatron.store.interface import read_values, write_value
from spare_megatron.store.open_store import open_store, outer_spec
from spare_megatron.voting.voting import plain_vote

_TURN_S = 0.02
_DIFFERENCES, _STATE = "differences", "state"


class Target(NamedTuple):
    """What the ranks of the speaking group are to have: contents of other sites, and the result of a closed round or,
    without weights, the outer state of another site.
    """

    round: int
    attempt: int
    wanted: Mapping[SiteId, SiteContent]
    weights: Mapping[SiteId, int]

    @property
    def fetches(self) -> list[tuple[SiteId, str, int]]:
        return [(site, wanted.kind, wanted.number) for site, wanted in self.wanted.items()]

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.round, self.attempt, bool(self.weights)


class TurnOrder(NamedTuple):
    """What the leader says in a turn. `end`: how the round has ended; `is_left`: the attempt is over without that."""

    target: Target | None = None
    end: RoundResult | None = None
    is_left: bool = False


class Status(NamedTuple):
    """How far a rank is: sites that it has yet to fetch from, what it has fetched and computed, digests of the result
    for a key, by position, and why a fetch last failed.
    """

    lacks: frozenset[SiteId] = frozenset()
    progress: int = 0
    key: tuple[int, int, bool] | None = None
    digests: Mapping[int, str] = {}
    failure: str = ""


@dataclass(slots=True)
class _Round:
    """What a rank has of the round with which it ends a step; kept over attempts."""

    key: tuple[int, int]
    """Restarts and committed steps."""
    began_s: float
    moved_s: float
    """When the round last made progress, as far as the leader knows."""
    moved: tuple[int, ...] = ()
    failure: str = ""
    """Of the last fetch that failed."""
    offered: dict[int, Tensor] = field(default_factory=dict)
    """What the rank contributes, by index of the slab."""
    fetches: dict[tuple[SiteId, str, int], Fetch] = field(default_factory=dict)
    """By site, kind and number of what is wanted."""
    result_of: tuple[int, int, bool] | None = None
    result: dict[int, Tensor] = field(default_factory=dict)
    """By index of the slab."""
    digests: dict[int, str] = field(default_factory=dict)
    num_computed: int = 0
    end: RoundResult | None = None
    reason: str = ""
    weights: Mapping[SiteId, int] = field(default_factory=dict)


def combined(digests: Mapping[int, str]) -> str:
    """One digest of those of all positions."""
    text = "\n".join(f"{position} {digest}" for position, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


class Sites:
    """One rank's part. All ranks of the group call what is not named otherwise."""

    def __init__(self, ctx: RankContext, outer: OuterState) -> None:
        self._ctx, self._outer = ctx, outer
        self._settings = ctx.config.sites
        self._site = SiteId(self._settings.site)
        self._rule = OuterRule(learning_rate=self._settings.learning_rate, momentum=self._settings.momentum)
        self._link: OuterLink | None = None
        self._start = ""
        self._round: _Round | None = None
        self._gave_up_on: Revision | None = None  # it could not be taken
        self._offered: Revision | None = None
        self._source = OuterSource()
        host = address_towards(hosts_of(self._settings.endpoints))
        self._server = PieceServer(host, self._source, self._settings.wait_s)
        self._server.start()

    # --------------------------------------------------------------------------------------------- between rounds

    def begin(self) -> None:
        """Names the present outer state, if it has no name, and offers it."""
        if not self._outer.revision.digest:
            gathered = self._ctx.agreement.gathered(self._digests({}))
            digests = {position: digest for of_rank in gathered for position, digest in of_rank.items()}
            self._outer.revision = Revision(self._outer.revision.round, combined(digests))
        if self._offered != self._outer.revision:
            self._offer_state()

    def is_due(self) -> bool:
        """Whether a round is to follow the step under way; on other ranks than the leader by its own count alone."""
        self._follow()
        is_counted = self._outer.num_steps + 1 >= self._settings.every_steps
        view = None if self._link is None else self._link.view
        is_asked = view is not None and (
            view.is_wanted or (view.donor is not None and view.revision != self._gave_up_on)
        )
        return is_counted or is_asked

    def end(self, *, is_final: bool) -> None:
        if self._link is not None:
            self._link.end(is_final=is_final)
            self._link.join(2.0)
            self._link = None

    @property
    def _speaks(self) -> bool:
        return self._ctx.controller.voters[:1] == (self._ctx.member,)

    def _follow(self) -> None:
        """Leader: follows the outer log as long as the group speaks for its site."""
        number = self._ctx.controller.num_restarts
        start = f"{number}" if self._speaks and self._ctx.agreement.is_leader else ""
        if start == self._start and (self._link is None) is (not start):
            return
        self.end(is_final=False)
        self._start = start
        if start:
            ctx, held = self._ctx, self._outer.revision
            name = ctx.store.put_if_absent(keys.site_start(number), secrets.token_hex(8))
            self._link = OuterLink(lambda: open_store(outer_spec(ctx.config, os.environ)), self._settings, name, held)
            self._link.start()

    def _digests(self, results: Mapping[int, Tensor]) -> dict[int, str]:
        """Of results by index of the slab, else of what is held; by position."""
        with self._ctx.probe.during(Operation.CHECK):
            slabs = self._ctx.trainer.slabs
            found = [self._outer.digest(slab.chunks, results.get(index)) for index, slab in enumerate(slabs)]
            return {slab.position: one.hexdigest() for slab, one in zip(slabs, found, strict=True)}

    def _offer_state(self) -> None:
        for slab in self._ctx.trainer.slabs:
            content = self._outer.content(slab.chunks)
            self._source.offer(f"{_STATE} {slab.position}", self._outer.revision.round, content)
        self._offered = self._outer.revision

    # ------------------------------------------------------------------------------------------------- an attempt

    def attempt(self, action: AttemptSync) -> Sequence[Event]:
        """Takes part in the round, puts its result aside and votes. Returns as `Voting.cast`; collective likewise."""
        ctx = self._ctx
        now_s = time.monotonic()
        key = ctx.controller.num_restarts, action.step
        if self._round is None or self._round.key != key:
            self._round = _Round(key=key, began_s=now_s, moved_s=now_s)
        self._follow()
        end = self._take_part(action) if self._speaks else self._await_speaker(action)
        digests: dict[int, str] = {}
        if end is not None and end.round:
            end = end if self._spread(action) else None
            if end is not None:
                digests = self._round.digests if self._speaks else self._digests(self._round.result)
        gathered = ctx.agreement.gathered((end is not None, digests))
        is_complete = all(is_there for is_there, _ in gathered)
        if end is not None and is_complete and end.round:
            found = combined({position: one for _, of_rank in gathered for position, one in of_rank.items()})
            vote = plain_vote(action, Digests(params=found), lacks_params=False)
        else:
            vote = plain_vote(action, Digests(), lacks_params=False)
        vote = replace(vote, is_complete=is_complete, synced=end if is_complete else None)
        votes = ctx.voting.cast(action, vote)
        ctx.probe.between_steps(action.step, FaultPoint.ROUND_VOTED)
        return votes

    def _await_speaker(self, action: AttemptSync) -> RoundResult | None:
        """How the round has ended, as the speaker says; None once a new entry makes that void."""
        ctx, key = self._ctx, keys.round_result(action.attempt)
        while True:
            order = TurnOrder()
            if ctx.agreement.is_leader:
                [end] = read_values(ctx.store, [key], RoundResult)
                order = TurnOrder(end=end, is_left=end is None and ctx.agreement.is_over(ctx.controller.head))
            order, _ = self._turn(order)
            if order.end is not None or order.is_left:
                return order.end

    def _take_part(self, action: AttemptSync) -> RoundResult | None:
        """The same on the group that speaks for the site."""
        ctx, now = self._ctx, self._now
        addresses = self._offer_differences()
        if self._link is not None and now.end is None:
            self._link.is_due = self._outer.num_steps >= self._settings.every_steps
            self._link.arriving = Arriving(self._outer.weight, action.step, addresses)
            self._link.hurry()
        statuses: list[Status] = []
        while True:
            order = self._order(statuses) if self._link is not None else TurnOrder()
            order, statuses = self._turn(order)
            if order.end is not None:
                now.end = order.end
                if ctx.agreement.is_leader:
                    write_value(ctx.store, keys.round_result(action.attempt), order.end)
            if order.end is not None or order.is_left:
                self._leave_fetches(())
                return order.end
            if order.target is not None:
                self._work(order.target)

    @property
    def _now(self) -> _Round:
        assert self._round is not None, "an attempt has begun"
        return self._round

    def _turn(self, order: TurnOrder) -> tuple[TurnOrder, list[Status]]:
        """The leader's order, and how far all ranks are."""
        ctx = self._ctx
        with ctx.probe.during(Operation.SETTLE):
            time.sleep(_TURN_S)
            gathered = ctx.agreement.gathered((order, self._status()))
        ctx.probe.progress()
        return gathered[0][0], [status for _, status in gathered]

    def _status(self) -> Status:
        now = self._now
        fetched = sum(one.num_fetched for one in now.fetches.values())
        lacks = frozenset(site for (site, *_), one in now.fetches.items() if not one.is_complete and not one.is_left)
        return Status(lacks, fetched + now.num_computed, now.result_of, now.digests, now.failure)

    def _offer_differences(self) -> str:
        """Offers what this rank contributes. Returns the addresses of all ranks by position, as JSON."""
        now = self._now
        if not now.offered:
            with self._ctx.probe.during(Operation.CHECK):
                for index, slab in enumerate(self._ctx.trainer.slabs):
                    now.offered[index] = self._outer.message(slab.chunks, self._settings.bits)
                    self._source.offer(f"{_DIFFERENCES} {slab.position}", now.key[1], [now.offered[index]])
        own = {slab.position: str(self._server.address) for slab in self._ctx.trainer.slabs}
        with self._ctx.probe.during(Operation.SETTLE):
            gathered = self._ctx.agreement.gathered(own)
        return encode({str(position): one for of_rank in gathered for position, one in of_rank.items()})

    # -------------------------------------------------------------------------------------- the leader that speaks

    def _order(self, statuses: Sequence[Status]) -> TurnOrder:
        """What the ranks of the group are to do, by the outer log and how far they are."""
        ctx, now, link = self._ctx, self._now, self._link
        assert link is not None, "the leader speaks"
        if now.end is not None:
            return TurnOrder(end=now.end)
        if ctx.agreement.is_over(ctx.controller.head):
            return TurnOrder(is_left=True)
        view, now_s = link.view, time.monotonic()
        link.progress = sum(status.progress for status in statuses)
        link.lacks = frozenset(site for status in statuses for site in status.lacks)
        moved = (view.head, link.progress, view.progress)  # one that has its result waits while others fetch theirs
        if moved != now.moved:
            now.moved, now.moved_s = moved, now_s
        target = self._target(view)
        digest = self._common_digest(target, statuses)
        if link.done is not None and view.revision == Revision(link.done[0], link.done[2]):
            return TurnOrder(end=RoundResult(link.done[0], tuple(now.weights), link.done[2]))
        if target is not None and digest and target.weights:
            now.weights = target.weights
            link.done = (target.round, target.attempt, digest)
        elif target is not None and digest and view.revision is not None and digest == view.revision.digest:
            return TurnOrder(end=RoundResult(target.round, (), digest))
        reason = self._why_over(view, now_s - now.moved_s, is_old=link.seen_at_s < now.began_s)
        if reason:
            failures = [status.failure for status in statuses if status.failure]
            now.reason = "; ".join([reason, *failures[:1]])
            self._gave_up_on = view.revision
            return TurnOrder(end=RoundResult())
        return TurnOrder(target=target)

    def _target(self, view: View) -> Target | None:
        if view.phase is RoundPhase.CLOSED and self._site in view.sites:
            others = {site: one for site, one in view.sites.items() if site != self._site}
            wanted = {
                site: SiteContent(_DIFFERENCES, one.step, view.addresses.get(site, {})) for site, one in others.items()
            }
            weights = {site: one.weight for site, one in view.sites.items()}
            own = view.sites[self._site]
            is_own = (own.incarnation, own.step) == (view.incarnation, self._now.key[1])  # else it has gone on since
            return Target(view.round, view.attempt, wanted, weights) if is_own else None
        if view.donor is not None and view.revision is not None:
            wanted = {view.donor: SiteContent(_STATE, view.revision.round, view.addresses.get(view.donor, {}))}
            return Target(view.revision.round, 0, wanted, {})
        return None

    def _common_digest(self, target: Target | None, statuses: Sequence[Status]) -> str:
        """The digest of the target's result, once all ranks have it."""
        if target is None or not statuses or any(status.key != target.key for status in statuses):
            return ""
        return combined({position: one for status in statuses for position, one in status.digests.items()})

    def _why_over(self, view: View, quiet_s: float, *, is_old: bool) -> str:
        """Why the site goes on without a result; empty while it waits. `is_old`: the view is from before the round."""
        wait_s = self._settings.wait_s
        assert self._link is not None, "the leader speaks"
        if self._link.failure:
            return self._link.failure
        if time.monotonic() - self._link.answered_at_s >= wait_s:
            return self._link.refusal or f"the outer store has not answered for {wait_s:g} s"
        if quiet_s >= 2 * wait_s:
            return self._link.refusal or f"no progress for {2 * wait_s:g} s"
        if is_old:
            return ""
        if view.phase is RoundPhase.CLOSED and self._site not in view.sites and view.donor is None:
            return "the round is closed without this site"
        if view.phase is RoundPhase.IDLE and view.donor is None and quiet_s >= wait_s:
            return f"no round was opened within {wait_s:g} s"
        return ""

    # ------------------------------------------------------------------------------------------- what a rank does

    def _work(self, target: Target) -> None:
        """Fetches what the target needs; computes its result once all is here."""
        now, slabs = self._now, self._ctx.trainer.slabs
        self._leave_fetches(target.fetches)
        for key, wanted in zip(target.fetches, target.wanted.values(), strict=True):
            failed = now.fetches.get(key)
            if failed is None or failed.failure:
                now.failure = f"site {key[0]}: {failed.failure}" if failed else now.failure
                now.fetches[key] = Fetch(wanted, self._num_bytes(wanted.kind), self._settings.wait_s, failed)
                now.fetches[key].start()
        if now.result_of == target.key or not all(now.fetches[key].is_complete for key in target.fetches):
            return
        self._ctx.probe.between_steps(now.key[1], FaultPoint.ROUND_EXCHANGED)
        contents = {key[0]: now.fetches[key].contents for key in target.fetches}
        for index, slab in enumerate(slabs):
            of_slab = {site: one[slab.position] for site, one in contents.items()}
            with self._ctx.probe.during(Operation.UPDATE):
                now.result[index] = self._compute(index, of_slab, target.weights)
        now.digests, now.result_of = self._digests(now.result), target.key
        now.num_computed += 1

    def _compute(self, index: int, contents: Mapping[SiteId, Tensor], weights: Mapping[SiteId, int]) -> Tensor:
        chunks, bits = self._ctx.trainer.slabs[index].chunks, self._settings.bits
        if not weights:
            [state] = contents.values()
            return state.view(torch.float32)
        sizes, own = self._outer.sizes(chunks), {self._site: self._now.offered[index]}
        messages = {site: SiteValues(one, sizes, bits) for site, one in {**contents, **own}.items()}
        return self._outer.result(chunks, messages, weights, self._rule)

    def _num_bytes(self, kind: str) -> dict[int, int]:
        found = {}
        for slab in self._ctx.trainer.slabs:
            sizes = self._outer.sizes(slab.chunks)
            found[slab.position] = 8 * sum(sizes) if kind == _STATE else exchanged_bytes(sizes, self._settings.bits)
        return found

    def _leave_fetches(self, wanted: Sequence[tuple[SiteId, str, int]]) -> None:
        """Ends the fetches that are not for these."""
        for key, fetch in self._now.fetches.items():
            if key not in wanted and not fetch.is_complete:
                fetch.is_left = True

    def _spread(self, action: AttemptSync) -> bool:
        """The result of the speaking group to all groups of the site. Collective over: all members."""
        ctx, now = self._ctx, self._now
        is_decided = partial(ctx.agreement.is_over, ctx.controller.head)
        bucket = int(ctx.config.bucket_mib * 2**20) // 4
        with ctx.probe.during(Operation.REDUCE):
            for index, (slab, communicator) in enumerate(zip(ctx.trainer.slabs, ctx.communicators, strict=True)):
                if len(action.voters) > 1 and not self._speaks:
                    now.result[index] = torch.empty(2 * sum(self._outer.sizes(slab.chunks)))
                for bits in now.result[index].view(torch.int32).split(bucket) if len(action.voters) > 1 else ():
                    buffer = bits.clone() if self._speaks else torch.zeros_like(bits)
                    buffer = buffer.to(next(slab.chunks[0].module.parameters()).device)
                    if not communicator.reduce(buffer, is_decided):
                        report_incomplete(communicator, ctx.agreement, ctx.controller.head)
                        return False
                    bits.copy_(buffer)
        return True

    # ------------------------------------------------------------------------------------------------- its end

    def apply(self, action: ApplySync) -> None:
        """Goes on with what the round has come to."""
        entry, now = action.entry, self._round
        assert now is not None, "the group has voted on it"
        self._write(action)
        if entry.round:
            with self._ctx.probe.during(Operation.UPDATE), self._source.changing():
                for index, slab in enumerate(self._ctx.trainer.slabs):
                    self._outer.apply(slab.chunks, now.result[index])
            self._outer.revision, self._outer.weight = Revision(entry.round, entry.digest), 0
            self._offer_state()
        self._outer.num_steps = 0
        self._round = None
        self._ctx.probe.heartbeat.take_split()  # not the next step's
        if self._link is not None:
            self._link.hold(self._outer.revision)

    def _write(self, action: ApplySync) -> None:
        entry, now, ctx = action.entry, self._now, self._ctx
        if not self._speaks:
            return
        fetched = sum(one.num_fetched for one in now.fetches.values())
        num_bytes = sum(ctx.agreement.gathered(fetched))
        record = RoundRecord(
            group=ctx.member.group,
            step=entry.step,
            attempt=entry.attempt,
            round=entry.round,
            base_round=self._outer.revision.round,
            sites=list(entry.sites),
            weights={str(site): weight for site, weight in now.weights.items()} if entry.sites else {},
            num_bytes=num_bytes,
            spent_s=round(time.monotonic() - now.began_s, 6),
            digest=entry.digest,
            reason=now.reason,
        )
        ctx.write_if_leader(record)
