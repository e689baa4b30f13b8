"""Audits: a group computes a microbatch of another group a second time, and the votes compare digests of both.

All hosts of a microbatch compute it to the same bits, so a mismatch is never noise. It is settled before the commit:
the entry Retry names hosts that compute the microbatch, too, and a group is fenced once two others agree against it, or
once it contradicts itself. One report against one decides nothing (docs/protocol_wrong_numbers.md, Audits).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil
from random import Random
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.paces import ONE_BY_ONE, Rounds
from spare_megatron.stacking.plans import NO_OWNER, Audit, Microbatch, Owners, Work

LARGEST_PRICE = 0.01
"""Of a step, that audits may cost on average if `audit.every_steps` is left open."""

AUDITOR_SLACK = 2
"""Microbatches by which a group has to be below the makespan to audit at no cost: a digest takes at most the time of
one (docs/audits.md)."""
OWNER_SLACK = 1
"""The same for a group that takes a digest of its own microbatch."""

MAX_ROUNDS = 16
"""Times that hosts are asked about one microbatch; after that the run halts."""


def default_every_steps(microbatches_per_shard: int, at_once: int = 1) -> int:
    """Least interval at which audits cost at most `LARGEST_PRICE`: an audit takes the time of `at_once` of the m
    microbatches, those of all lanes in the rounds to which an interleaved schedule pads.

    >>> [default_every_steps(m) for m in (4, 16, 64)], default_every_steps(16, 4)
    ([25, 7, 2], 25)
    """
    return ceil(1 / (LARGEST_PRICE * max(microbatches_per_shard // at_once, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPolicy:
    """In every `every_steps`-th step and the last, each group, or each of its lanes, audits a microbatch of another."""

    every_steps: int
    seed: int
    rounds: Rounds = ONE_BY_ONE
    """What the pipeline schedule makes of a group's microbatches, from which its slack follows."""

    def is_due(self, step: int) -> bool:
        """Whether all groups audit in this step, be it the last or not.

        >>> [step for step in range(8) if AuditPolicy(every_steps=3, seed=0).is_due(step)]
        [2, 5]
        """
        return step % self.every_steps == self.every_steps - 1


def is_checked(share: float, seed: int, step: int, number: int) -> bool:
    """Whether the passes of a microbatch, by its number in the batch of a step, are among those that are checked as
    they are computed (`audit.products`): drawn, the same on all ranks of all groups.

    >>> sum(is_checked(0.25, 1, step, number) for step in range(50) for number in range(20))
    274
    """
    drawn = blake2b(f"products|{seed}|{step}|{number}".encode(), digest_size=7).digest()
    return int.from_bytes(drawn, "little") < share * 2**56


class Boundary(NamedTuple):
    """Digest of what one rank has of an audited microbatch at one place, as groups of any shape name it."""

    kind: Literal["forward", "backward", "gradients"]
    """What the stage outputs, the gradient of that, as it receives it, or those of its parameters."""
    stage: int
    """Or slab, if pipelines have several lengths."""
    position: int
    """The rank that has it if each slab is a stage, in the first of the lanes that could have computed it."""
    digest: int
    offset: int = 0
    """By which the position that has computed it is further."""


class MicrobatchDigest(NamedTuple):
    """Digest of a microbatch, over all ranks of a group; in a dispute with the boundaries that it covers."""

    shard: ShardId
    index: int  # type: ignore[assignment]  # hides tuple.index
    digest: int
    boundaries: tuple[Boundary, ...] = ()

    @property
    def microbatch(self) -> Microbatch:
        return Microbatch(self.shard, self.index)


class Statement(NamedTuple):
    """A digest that a group has voted with."""

    group: GroupId
    digest: int
    boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """A microbatch that groups have computed to different digests, or whose loss is suspect."""

    microbatch: Microbatch
    statements: tuple[Statement, ...]
    """All so far, in the order of votes; a group may have made several."""
    asked: tuple[GroupId, ...]
    """The groups that compute it in the attempt that this opens."""
    num_rounds: int = 1
    is_suspicion: bool = False
    """Opened by a loss (`core.audits.suspects`): statements are digests of the loss, and may all agree."""

    @property
    def differs(self) -> bool:
        """Whether a gradient in the sum may be wrong: statements differ."""
        return len({statement.digest for statement in self.statements}) > 1


# ------------------------------------------------------------------------------------------------------ who audits whom


def draw_audits(
    policy: AuditPolicy,
    step: int,
    work: Work,
    hosts: Sequence[Sequence[GroupId]] | None,
    asked: Collection[GroupId],
    slack: Mapping[GroupId, int],
) -> tuple[Audit, ...]:
    """Audits in which each of the groups that are `asked` and compute anything takes part, as far as possible.

    `hosts` of each shard; None if every group can read all data. Groups with slack audit first, which costs no time. If
    they do not reach all, each of the groups that are asked audits another one, and as many as possible are audited
    once; else those that have slack left audit each other. Drawn from seed and step, equal in every process. Cost:
    O(N r m) beside two matchings.
    """
    busy = [GroupId(group) for group in np.unique(work.owners).tolist() if group != NO_OWNER]
    wanted = sorted(set(asked) & set(busy))
    able = sorted(group for group in busy if slack.get(group, 0) >= AUDITOR_SLACK)
    random = Random(f"{policy.seed}|{step}")
    random.shuffle(busy)
    random.shuffle(wanted)
    draw = _Draw(work, hosts, policy.rounds.lanes, random)
    no_auditors = {group for group in busy if group not in able or slack[group] >= AUDITOR_SLACK + OWNER_SLACK}
    audits = draw.audits(able, [group for group in wanted if group in no_auditors], is_once=True)
    if set(wanted) - {group for audit in audits for group in (audit.auditor, audit.owner)}:
        return tuple(sorted(draw.audits(wanted, busy)))
    left = sorted(set(able) - {audit.auditor for audit in audits})
    owners = {group for group in no_auditors if slack.get(group, 0) >= OWNER_SLACK} - {audit.owner for audit in audits}
    return tuple(sorted([*audits, *draw.audits(left, sorted(owners), is_once=True)]))


class _Draw:
    """Draws microbatches of owners for auditors that can compute them; lanes of a group compute units side by side."""

    def __init__(self, work: Work, hosts: Sequence[Sequence[GroupId]] | None, num_lanes: int, random: Random) -> None:
        self._work, self._hosts, self._random = work, hosts, random
        self._num_lanes = num_lanes
        self._lanes = _lanes_of(work, num_lanes)

    def audits(self, auditors: Sequence[GroupId], owners: Sequence[GroupId], *, is_once: bool = False) -> list[Audit]:
        """Those of one owner for each auditor, as far as it can compute anything of another group among the owners.

        As many owners as possible are audited; `is_once`: each at most once, and only if all of its lanes are.
        """
        if not auditors or not owners:
            return []
        if self._hosts is None:
            shards: Mapping[GroupId, Sequence[int]] = dict.fromkeys(auditors, range(self._work.num_shards))
            pairs = self._any_pairs(auditors, owners, is_once=is_once)
        else:
            shards = _shards_of(self._hosts, auditors)
            pairs = self._hosted_pairs(shards, auditors, owners, is_once=is_once)
        drawn = [(*pair, self._of_each_lane(*pair, shards[pair[0]])) for pair in pairs]
        if is_once:
            return [audit for _, _, found in drawn if len(found) == self._num_lanes for audit in found]
        audits = [audit for _, _, found in drawn for audit in found]
        reached = np.zeros((int(self._work.owners.max(initial=0)) + 1, self._num_lanes), dtype=np.bool_)
        for audit in audits:
            reached[audit.owner, self._lanes[audit.microbatch.shard, audit.microbatch.index]] = True
        for auditor, owner, found in drawn:
            audits += self._others(auditor, owner, shards[auditor], self._num_lanes - len(found), reached)
        return audits

    def _of_each_lane(self, auditor: GroupId, owner: GroupId, readable: Sequence[int]) -> list[Audit]:
        """One of each of the owner's lanes of which the auditor can compute any, by as many of its own lanes."""
        owners, lanes = self._work.owners[readable], self._lanes[readable]
        return [
            audit
            for lane in range(self._num_lanes)
            for audit in self._drawn(auditor, (owners == owner) & (lanes == lane), owners, readable)
        ]

    def _others(
        self, auditor: GroupId, owner: GroupId, readable: Sequence[int], number: int, reached: npt.NDArray[np.bool_]
    ) -> Iterator[Audit]:
        """So many of other owners, for lanes that would compute none; first of lanes that no audit has `reached`."""
        owners, lanes = self._work.owners[readable], self._lanes[readable]
        are_able = (owners != owner) & (owners != auditor) & (owners != NO_OWNER)
        for _ in range(number):
            are_new = are_able & ~reached[owners, lanes]
            for audit in self._drawn(auditor, are_new if are_new.any() else are_able, owners, readable):
                shard, index = audit.microbatch
                are_able[readable.index(shard), index] = False
                reached[audit.owner, self._lanes[shard, index]] = True
                yield audit

    def _drawn(
        self, auditor: GroupId, are_able: npt.NDArray[np.bool_], owners: Owners, readable: Sequence[int]
    ) -> Iterator[Audit]:
        """One of these units, if there is any."""
        places, indices = np.nonzero(are_able)
        if len(indices):
            number = self._random.randrange(len(indices))
            place, index = int(places[number]), int(indices[number])
            yield Audit(auditor, GroupId(int(owners[place, index])), Microbatch(ShardId(readable[place]), index))

    def _any_pairs(
        self, auditors: Sequence[GroupId], owners: Sequence[GroupId], *, is_once: bool
    ) -> Iterator[tuple[GroupId, GroupId]]:
        """Pairs where every group can compute everything: an owner takes its successor, others what is left."""
        after = dict(zip(owners, [*owners[1:], owners[0]], strict=True)) if len(owners) > 1 else {}
        taken = {after[auditor] for auditor in auditors if auditor in after}
        left = [owner for owner in owners if owner not in taken]
        for auditor in auditors:
            if auditor in after:
                yield auditor, after[auditor]
            elif left and left[0] != auditor:
                yield auditor, left.pop(0)
            elif not is_once and (others := [owner for owner in owners if owner != auditor]):
                yield auditor, self._random.choice(others)

    def _hosted_pairs(
        self,
        shards: Mapping[GroupId, Sequence[int]],
        auditors: Sequence[GroupId],
        owners: Sequence[GroupId],
        *,
        is_once: bool,
    ) -> Iterator[tuple[GroupId, GroupId]]:
        """Pairs by a maximum matching over the owners of shards that the auditors host; others take any owner."""
        at_column = {owner: column for column, owner in enumerate(owners)}
        able = [
            sorted(
                at_column[GroupId(o)]
                for o in set(self._work.owners[shards[group]].ravel().tolist()) - {group}
                if o in at_column
            )
            for group in auditors
        ]
        if not any(able):
            return
        starts = np.cumsum([0, *map(len, able)])
        edges = np.concatenate([np.array(of_row, dtype=np.int32) for of_row in able])
        graph = csr_array((np.ones(len(edges), dtype=np.int8), edges, starts), shape=(len(auditors), len(owners)))
        chosen = maximum_bipartite_matching(graph, perm_type="column").tolist()
        for group, of_row, column in zip(auditors, able, chosen, strict=True):
            if column >= 0:
                yield group, owners[column]
            elif of_row and not is_once:
                yield group, owners[self._random.choice(of_row)]


def _lanes_of(work: Work, num_lanes: int) -> Owners:
    """The lane that computes each unit of work: those of a group take turns, in the order of computation."""
    flat = work.owners.ravel()
    order = np.argsort(flat, kind="stable")
    grouped = flat[order]
    lanes = np.empty(flat.size, dtype=np.int32)
    lanes[order] = (np.arange(flat.size) - np.searchsorted(grouped, grouped)) % num_lanes
    return lanes.reshape(work.owners.shape)


def _shards_of(hosts: Sequence[Sequence[GroupId]], groups: Sequence[GroupId]) -> Mapping[GroupId, Sequence[int]]:
    """The shards that each of the groups hosts, ascending."""
    found: dict[GroupId, list[int]] = {group: [] for group in groups}
    for shard, row in enumerate(hosts):
        for group in row:
            if group in found:
                found[group].append(shard)
    return found


# -------------------------------------------------------------------------------------------------------------- digests


def combined_digest(boundaries: Iterable[Boundary]) -> int:
    """The 64-bit digest of a microbatch from those of all ranks of a group, in any order, whichever lanes they are."""
    places = sorted(tuple(boundary._replace(offset=0)) for boundary in boundaries)
    return int.from_bytes(blake2b(repr(places).encode(), digest_size=8).digest(), "little")


class Difference(NamedTuple):
    """Where two computations of a microbatch part: a stage, what it did, and its positions."""

    stage: int
    what: str
    positions: tuple[int, ...]

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.positions) > 1 else ''} {', '.join(map(str, self.positions))}"
        return f"stage {self.stage}, {self.what}, {ranks}"


def first_difference(one: Iterable[Boundary], other: Iterable[Boundary]) -> Difference | None:
    """Where two computations of a microbatch part, along its way through the stages; None if it is not known.

    What a stage outputs is wrong though all before it is right: that stage is named. A gradient that a stage receives
    is what the next one has computed.

    >>> right = [Boundary("forward", 0, 0, 1), Boundary("forward", 1, 1, 2), Boundary("gradients", 0, 0, 3)]
    >>> print(first_difference(right, [right[0], Boundary("forward", 1, 1, 9), Boundary("gradients", 0, 0, 8)]))
    stage 1, forward pass, rank 1
    """
    theirs = {(b.kind, b.stage, b.position): b.digest for b in other}
    different = [b for b in one if theirs.get((b.kind, b.stage, b.position), b.digest) != b.digest]
    if not different:
        return None
    first = min(different, key=_along_the_way)
    beside = [b.position + b.offset for b in different if (b.kind, b.stage) == (first.kind, first.stage)]
    match first.kind:
        case "forward":
            return Difference(first.stage, "forward pass", _ascending(beside))
        case "backward":
            # Its own ranks have received it, those of the next stage have computed it.
            stage = first.stage + 1
            after = [b.position + b.offset for b in different if b.stage == stage]
            return Difference(stage, "backward pass", _ascending(after or beside))
        case "gradients":
            return Difference(first.stage, "gradients", _ascending(beside))


def _along_the_way(boundary: Boundary) -> tuple[int, int, int]:
    kind = ("forward", "backward", "gradients").index(boundary.kind)
    return (kind, boundary.stage if kind == 0 else -boundary.stage, boundary.position)


def _ascending(positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(positions)))


# -------------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Outvoted:
    """A group whose computation of a microbatch is wrong, why that is known, and at which positions first, if it is."""

    group: GroupId
    reason: str
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Groups differ, and no further host can decide which is wrong."""

    dispute: Dispute
    reason: str


Verdict = Outvoted | Undecided | Dispute | None


def mismatches(digests: Mapping[GroupId, Iterable[MicrobatchDigest]]) -> tuple[Dispute, ...]:
    """The microbatches that groups have voted on with different digests; no group is asked yet."""
    by_microbatch: dict[Microbatch, list[Statement]] = {}
    for group in sorted(digests):
        for item in digests[group]:
            found = by_microbatch.setdefault(item.microbatch, [])
            found.append(Statement(group, item.digest, item.boundaries))
    return tuple(
        Dispute(microbatch=microbatch, statements=tuple(found), asked=(), num_rounds=0)
        for microbatch, found in sorted(by_microbatch.items())
        if len({statement.digest for statement in found}) > 1
    )


def with_statements(dispute: Dispute, digests: Mapping[GroupId, Iterable[MicrobatchDigest]]) -> Dispute:
    """The dispute with what the groups that it asked have voted, and with the boundaries of earlier statements.

    About a suspect the statements of all groups count: one may have computed it since without being asked.
    """
    statements = list(dispute.statements)
    for group in sorted(digests):
        for item in digests[group]:
            if item.microbatch != dispute.microbatch:
                continue
            reported = Statement(group, item.digest, item.boundaries)
            is_new = (group, item.digest) not in {(s.group, s.digest) for s in statements}
            if group in dispute.asked or (dispute.is_suspicion and is_new):
                statements.append(reported)
            else:
                statements = [reported if (s.group, s.digest) == (group, item.digest) else s for s in statements]
    return replace(dispute, statements=tuple(statements))


def judge(dispute: Dispute, members: Collection[GroupId], able: Sequence[GroupId]) -> Verdict:
    """What follows: a wrong group among the members, the next question, or no decision. None: no members differ.

    `able`: the members that can compute the microbatch, in the order in which to ask them.
    """
    by_group: dict[GroupId, list[Statement]] = {}
    for statement in dispute.statements:
        by_group.setdefault(statement.group, []).append(statement)
    inconsistent = {group for group, reported in by_group.items() if len({s.digest for s in reported}) > 1}
    consistent = {group: reported[-1] for group, reported in by_group.items() if group not in inconsistent}
    right = _majority(list(consistent.values()))
    for group in sorted(by_group.keys() & set(members)):
        if group in inconsistent:
            return _outvoted(dispute, by_group[group], "it contradicts itself", right)
        if right is not None and consistent[group].digest != right.digest:
            agree = sorted(other for other, reported in consistent.items() if reported.digest == right.digest)
            why = f"groups {', '.join(map(str, agree))} agree on other values"
            return _outvoted(dispute, by_group[group], why, right)
    left = {group: reported for group, reported in consistent.items() if group in members}
    if right is not None or len({reported.digest for reported in left.values()}) < 2:
        return None
    further = [group for group in able if group not in by_group]
    asked = tuple(further[:1]) or tuple(group for group in sorted(left) if len(by_group[group]) == 1 and group in able)
    if not asked or dispute.num_rounds >= MAX_ROUNDS:
        return Undecided(dispute=dispute, reason=_undecided(dispute, left))
    return question(dispute, asked)


def saver_of(voters: Sequence[Member], disputes: Iterable[Dispute]) -> Member:
    """The voter that saves the parameters of a step with disputes: the first that has no part in them, if there is one.

    >>> found = Dispute(microbatch=Microbatch(0, 0), statements=(Statement(0, 5), Statement(1, 6)), asked=(2,))
    >>> saver_of([Member(0), Member(1), Member(2)], [found]).group
    2
    """
    named = {statement.group for dispute in disputes for statement in dispute.statements}
    return min(voters, key=lambda voter: (voter.group in named, voter))


def unasked(dispute: Dispute) -> Dispute:
    """The dispute as an entry of the log carries it if it asks no group: the sum of its attempt is not committed."""
    plain = tuple(statement._replace(boundaries=()) for statement in dispute.statements)
    return replace(dispute, statements=plain, asked=())


def question(dispute: Dispute, asked: tuple[GroupId, ...]) -> Dispute:
    """The dispute as an entry of the log carries it if it asks these groups, in one round more."""
    return replace(unasked(dispute), asked=asked, num_rounds=dispute.num_rounds + 1)


def _majority(consistent: Sequence[Statement]) -> Statement | None:
    """A statement that more groups make than any other one, and at least two; with boundaries if one has them."""
    ranked = Counter(statement.digest for statement in consistent).most_common(2)
    if not ranked or ranked[0][1] < 2 or (len(ranked) > 1 and ranked[1][1] == ranked[0][1]):
        return None
    return max((s for s in consistent if s.digest == ranked[0][0]), key=lambda s: len(s.boundaries))


def _outvoted(dispute: Dispute, reported: Sequence[Statement], why: str, right: Statement | None) -> Outvoted:
    others = [right] if right is not None else dispute.statements
    places = [
        place for s in reported for other in others if (place := first_difference(s.boundaries, other.boundaries))
    ]
    reason = f"{_named(dispute)}: {why}{f'; first wrong at {places[0]}' if places else ''}"
    return Outvoted(group=reported[0].group, reason=reason, positions=places[0].positions if places else ())


def _undecided(dispute: Dispute, left: Mapping[GroupId, Statement]) -> str:
    one, other, *_ = left.values()
    place = first_difference(one.boundaries, other.boundaries)
    groups = f"groups {' and '.join(map(str, left))}"
    what = "compute different gradients, each the same again, and no other group can compute it"
    if dispute.is_suspicion:
        what = "compute different losses, each the same again, and no other group can compute it"
    return f"{_named(dispute)}: {groups} {what}{f'; they differ first at {place}' if place else ''}"


def _named(dispute: Dispute) -> str:
    what = "audit of the loss of microbatch" if dispute.is_suspicion else "audit of microbatch"
    return f"{what} {dispute.microbatch.index} of shard {dispute.microbatch.shard}"


def able_to_compute(
    shard: ShardId, members: Collection[GroupId], hosts: Sequence[Sequence[GroupId]] | None, disputes: Iterable[Dispute]
) -> list[GroupId]:
    """Members that can compute a shard; first those that no dispute names."""
    named = {statement.group for dispute in disputes for statement in dispute.statements}
    able = members if hosts is None else [group for group in hosts[shard] if group in members]
    return sorted(able, key=lambda group: (group in named, group))
