"""Audits: a group computes a microbatch of another group a second time, and the votes compare digests of both.

All hosts of a microbatch compute it to the same bits, so a mismatch is never noise. It is settled before the commit:
the entry Retry names hosts that compute the microbatch, too, and a group is fenced once two others agree against it, or
once it contradicts itself. One word against one decides nothing (docs/protocol.md, Audits).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil
from random import Random
from typing import Literal, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.plans import NO_OWNER, Audit, Microbatch, Work

LARGEST_PRICE = 0.01
"""Of a step, that audits may cost on average if `audit.every_steps` is left open."""

MAX_ROUNDS = 16
"""Times that hosts are asked about one microbatch; after that the run halts."""


def default_every_steps(microbatches_per_shard: int) -> int:
    """Least interval at which audits cost at most `LARGEST_PRICE`: an audit is one microbatch of m.

    >>> [default_every_steps(m) for m in (4, 16, 64)]
    [25, 7, 2]
    """
    return ceil(1 / (LARGEST_PRICE * microbatches_per_shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPolicy:
    """Every group audits one microbatch of another group in every `every_steps`-th step; `seed` draws the pairs."""

    every_steps: int
    seed: int

    def is_due(self, step: int) -> bool:
        """Whether all groups audit in this step.

        >>> [step for step in range(8) if AuditPolicy(every_steps=3, seed=0).is_due(step)]
        [2, 5]
        """
        return step % self.every_steps == self.every_steps - 1


class Boundary(NamedTuple):
    """Digest of what one rank has of an audited microbatch at one place.

    `forward`: what the stage puts out. `backward`: the gradient of that, as it receives it. `gradients`: those of its
    parameters.
    """

    kind: Literal["forward", "backward", "gradients"]
    stage: int
    rank: int
    digest: int


class AuditWord(NamedTuple):
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
    """A microbatch that groups have computed to different digests.

    Attributes:
        statements: All so far, in the order of votes; a group may have made several.
        asked: The groups that compute it in the attempt that this opens.
    """

    microbatch: Microbatch
    statements: tuple[Statement, ...]
    asked: tuple[GroupId, ...]
    num_rounds: int = 1


# ------------------------------------------------------------------------------------------------------ who audits whom


def draw_audits(
    policy: AuditPolicy, step: int, work: Work, hosts: Sequence[Sequence[GroupId]] | None, auditors: Collection[GroupId]
) -> tuple[Audit, ...]:
    """One audit for each of the `auditors` that compute anything, as far as they host work of another group.

    `hosts` of each shard; None if every group can read all data. As many groups as possible are audited once. Drawn
    from seed and step, equal in every process. Cost: O(N r m) beside one matching.
    """
    busy = [GroupId(group) for group in np.unique(work.owners).tolist() if group != NO_OWNER]
    asked = sorted(set(auditors) & set(busy))
    random = Random(f"{policy.seed}|{step}")
    random.shuffle(busy)
    random.shuffle(asked)
    shards = {} if hosts is None else _shards_of(hosts, asked)
    audits = []
    for group, owner in _pairs(work, None if hosts is None else shards, asked, busy, random):
        readable = shards.get(group, range(work.num_shards))
        places, indices = np.nonzero((work.owners if hosts is None else work.owners[readable]) == owner)
        number = random.randrange(len(indices))
        audits.append(Audit(group, owner, Microbatch(ShardId(readable[places[number]]), int(indices[number]))))
    return tuple(sorted(audits))


def _pairs(
    work: Work,
    shards: Mapping[GroupId, Sequence[int]] | None,
    asked: Sequence[GroupId],
    busy: Sequence[GroupId],
    random: Random,
) -> Iterator[tuple[GroupId, GroupId]]:
    """An owner for each of the groups that are asked, in their order, as far as there is one."""
    if shards is None:
        after = dict(zip(busy, [*busy[1:], busy[0]], strict=True)) if len(busy) > 1 else {}
        yield from ((group, after[group]) for group in asked if group in after)
        return
    at_column = {owner: column for column, owner in enumerate(busy)}
    able = [
        sorted(at_column[GroupId(o)] for o in set(work.owners[shards[group]].ravel().tolist()) - {group, NO_OWNER})
        for group in asked
    ]
    if not any(able):
        return
    starts = np.cumsum([0, *map(len, able)])
    edges = np.concatenate([np.array(of_row, dtype=np.int32) for of_row in able])
    graph = csr_array((np.ones(len(edges), dtype=np.int8), edges, starts), shape=(len(asked), len(busy)))
    chosen = maximum_bipartite_matching(graph, perm_type="column").tolist()
    for group, of_row, column in zip(asked, able, chosen, strict=True):
        if of_row:
            yield group, busy[random.choice(of_row) if column < 0 else column]


def _shards_of(hosts: Sequence[Sequence[GroupId]], groups: Sequence[GroupId]) -> Mapping[GroupId, Sequence[int]]:
    """The shards that each of the groups hosts, ascending."""
    found: dict[GroupId, list[int]] = {group: [] for group in groups}
    for shard, row in enumerate(hosts):
        for group in row:
            if group in found:
                found[group].append(shard)
    return found


# -------------------------------------------------------------------------------------------------------------- digests


def word_of(boundaries: Iterable[Boundary]) -> int:
    """The 64-bit digest of a microbatch from those of all ranks of a group, in any order."""
    return int.from_bytes(blake2b(repr(sorted(boundaries)).encode(), digest_size=8).digest(), "little")


class Difference(NamedTuple):
    """Where two computations of a microbatch part: a stage, what it did, and its ranks."""

    stage: int
    what: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"stage {self.stage}, {self.what}, {ranks}"


def first_difference(one: Iterable[Boundary], other: Iterable[Boundary]) -> Difference | None:
    """Where two computations of a microbatch part, along its way through the stages; None if it is not known.

    What a stage puts out is wrong though all before it is right: that stage is named. A gradient that a stage receives
    is what the next one has computed.

    >>> right = [Boundary("forward", 0, 0, 1), Boundary("forward", 1, 1, 2), Boundary("gradients", 0, 0, 3)]
    >>> print(first_difference(right, [right[0], Boundary("forward", 1, 1, 9), Boundary("gradients", 0, 0, 8)]))
    stage 1, forward pass, rank 1
    """
    theirs = {(b.kind, b.stage, b.rank): b.digest for b in other}
    different = [b for b in one if theirs.get((b.kind, b.stage, b.rank), b.digest) != b.digest]
    if not different:
        return None
    first = min(different, key=_along_the_way)
    beside = [b.rank for b in different if (b.kind, b.stage) == (first.kind, first.stage)]
    match first.kind:
        case "forward":
            return Difference(first.stage, "forward pass", _ascending(beside))
        case "backward":
            # Its own ranks have received it, those of the next stage have computed it.
            stage = first.stage + 1
            ranks = [b.rank for b in different if b.stage == stage] or beside
            return Difference(stage, "backward pass", _ascending(ranks))
        case "gradients":
            return Difference(first.stage, "gradients", _ascending(beside))


def _along_the_way(boundary: Boundary) -> tuple[int, int, int]:
    kind = ("forward", "backward", "gradients").index(boundary.kind)
    return (kind, boundary.stage if kind == 0 else -boundary.stage, boundary.rank)


def _ascending(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


# -------------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Outvoted:
    """A group whose computation of a microbatch is wrong, why that is known, and at which ranks first if that is."""

    group: GroupId
    reason: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Groups differ, and no further host can tell which is wrong."""

    dispute: Dispute
    reason: str


Verdict = Outvoted | Undecided | Dispute | None


def mismatches(words: Mapping[GroupId, Iterable[AuditWord]]) -> tuple[Dispute, ...]:
    """The microbatches that groups have voted on with different digests; no group is asked yet."""
    by_microbatch: dict[Microbatch, list[Statement]] = {}
    for group in sorted(words):
        for word in words[group]:
            found = by_microbatch.setdefault(word.microbatch, [])
            found.append(Statement(group, word.digest, word.boundaries))
    return tuple(
        Dispute(microbatch=microbatch, statements=tuple(found), asked=(), num_rounds=0)
        for microbatch, found in sorted(by_microbatch.items())
        if len({statement.digest for statement in found}) > 1
    )


def heard(dispute: Dispute, words: Mapping[GroupId, Iterable[AuditWord]]) -> Dispute:
    """The dispute with what the groups that it asked have voted, and with the boundaries of earlier statements."""
    statements = list(dispute.statements)
    for group in sorted(words):
        for word in words[group]:
            if word.microbatch != dispute.microbatch:
                continue
            said = Statement(group, word.digest, word.boundaries)
            if group in dispute.asked:
                statements.append(said)
            else:
                statements = [said if (s.group, s.digest) == (group, word.digest) else s for s in statements]
    return Dispute(
        microbatch=dispute.microbatch, statements=tuple(statements), asked=dispute.asked, num_rounds=dispute.num_rounds
    )


def judge(dispute: Dispute, members: Collection[GroupId], able: Sequence[GroupId]) -> Verdict:
    """What follows: a culprit among the members, the next question, or that it cannot be told. None: no members differ.

    `able`: the members that can compute the microbatch, in the order in which to ask them.
    """
    by_group: dict[GroupId, list[Statement]] = {}
    for statement in dispute.statements:
        by_group.setdefault(statement.group, []).append(statement)
    fickle = {group for group, said in by_group.items() if len({s.digest for s in said}) > 1}
    steady = {group: said[-1] for group, said in by_group.items() if group not in fickle}
    right = _majority(list(steady.values()))
    for group in sorted(by_group.keys() & set(members)):
        if group in fickle:
            return _outvoted(dispute, by_group[group], "it contradicts itself", right)
        if right is not None and steady[group].digest != right.digest:
            agree = sorted(other for other, said in steady.items() if said.digest == right.digest)
            why = f"groups {', '.join(map(str, agree))} agree on other values"
            return _outvoted(dispute, by_group[group], why, right)
    left = {group: said for group, said in steady.items() if group in members}
    if right is not None or len({said.digest for said in left.values()}) < 2:
        return None
    further = [group for group in able if group not in by_group]
    asked = tuple(further[:1]) or tuple(group for group in sorted(left) if len(by_group[group]) == 1 and group in able)
    if not asked or dispute.num_rounds >= MAX_ROUNDS:
        return Undecided(dispute=dispute, reason=_undecided(dispute, left))
    plain = tuple(statement._replace(boundaries=()) for statement in dispute.statements)
    return Dispute(microbatch=dispute.microbatch, statements=plain, asked=asked, num_rounds=dispute.num_rounds + 1)


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


def _majority(steady: Sequence[Statement]) -> Statement | None:
    """A statement that more groups make than any other one, and at least two; with boundaries if one has them."""
    ranked = Counter(statement.digest for statement in steady).most_common(2)
    if not ranked or ranked[0][1] < 2 or (len(ranked) > 1 and ranked[1][1] == ranked[0][1]):
        return None
    return max((s for s in steady if s.digest == ranked[0][0]), key=lambda s: len(s.boundaries))


def _outvoted(dispute: Dispute, said: Sequence[Statement], why: str, right: Statement | None) -> Outvoted:
    others = [right] if right is not None else dispute.statements
    places = [place for s in said for other in others if (place := first_difference(s.boundaries, other.boundaries))]
    reason = f"{_named(dispute)}: {why}{f'; first wrong at {places[0]}' if places else ''}"
    return Outvoted(group=said[0].group, reason=reason, ranks=places[0].ranks if places else ())


def _undecided(dispute: Dispute, left: Mapping[GroupId, Statement]) -> str:
    one, other, *_ = left.values()
    place = first_difference(one.boundaries, other.boundaries)
    return (
        f"{_named(dispute)}: groups {' and '.join(map(str, left))} compute different gradients, each the same "
        f"again, and no other group can compute it{f'; they differ first at {place}' if place else ''}"
    )


def _named(dispute: Dispute) -> str:
    return f"audit of microbatch {dispute.microbatch.index} of shard {dispute.microbatch.shard}"


def able_to_compute(
    shard: ShardId, members: Collection[GroupId], hosts: Sequence[Sequence[GroupId]] | None, disputes: Iterable[Dispute]
) -> list[GroupId]:
    """Members that can compute a shard; first those that no dispute names."""
    named = {statement.group for dispute in disputes for statement in dispute.statements}
    able = members if hosts is None else [group for group in hosts[shard] if group in members]
    return sorted(able, key=lambda group: (group in named, group))
