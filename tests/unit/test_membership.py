"""The fold of the decision log: against definitions that look through the whole log, and by small cases."""

from collections.abc import Sequence
from functools import cache
from random import Random

import pytest

from spare_megatron.core.audits.audits import Dispute, Statement
from spare_megatron.core.log.entries import (
    Commit,
    Entry,
    Evaluated,
    Fence,
    Finish,
    Restart,
    Resume,
    Retry,
    decode_entry,
    encode_entry,
)
from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.core.log.membership import LogTerms, Membership
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import PartitionSetup

NUM_GROUPS, NUM_STEPS, NUM_STAGES = 5, 9, 4
TERMS = LogTerms(placement=make_placement("golomb", NUM_GROUPS, 2), num_steps=NUM_STEPS, num_stages=NUM_STAGES)
PARTITIONED = LogTerms(
    placement=TERMS.placement,
    num_steps=NUM_STEPS,
    partitions=PartitionSetup(num_groups=NUM_GROUPS, redundancy=2, groups_per_domain=1),
)
EVALUATING = LogTerms(
    placement=TERMS.placement,
    num_steps=NUM_STEPS,
    evaluation=EvaluationPolicy(every_steps=2, microbatches_per_shard=1),
)


def of(*groups: int, incarnation: int = 0) -> tuple[Member, ...]:
    return tuple(Member(GroupId(group), incarnation) for group in groups)


def lost(*groups: int, discard: bool = False) -> list[Entry]:
    return [Fence(group=GroupId(group), discard=discard) for group in groups]


def dispute(*digests: int) -> Dispute:
    statements = tuple(Statement(GroupId(group), digest) for group, digest in enumerate(digests))
    return Dispute(microbatch=Microbatch(ShardId(0), 0), statements=statements, asked=())


class ByDefinition:
    """Who takes part, by looking through the log for each question."""

    def __init__(self, log: Sequence[Entry]) -> None:
        self.log = log
        named = [getattr(entry, "admit", ()) + getattr(entry, "members", ()) for entry in log]
        self.named = sorted({*of(*range(NUM_GROUPS)), *(member for members in named for member in members)})
        self.takes_part = cache(self._takes_part)
        self.is_over = cache(self._is_over)

    def _takes_part(self, member: Member, head: int) -> bool:
        let_in = [at for at in range(-1, head) if self._lets_in(at, member)]
        return any(not any(self._removes(at, member) for at in range(first + 1, head)) for first in let_in)

    def _is_over(self, member: Member, head: int) -> bool:
        """Whether it may not take part again, by the entries before `head`."""
        later = [one for one in self.named if one.group == member.group and one.incarnation >= member.incarnation]
        return any(
            entry.hits(member)
            if isinstance(entry, Fence)
            else any(self.takes_part(one, at) and self._leaves(entry, one) for one in later)
            for at, entry in enumerate(self.log[:head])
        )

    def _leaves(self, entry: Entry, member: Member) -> bool:
        if isinstance(entry, Restart):
            return member not in entry.members
        return isinstance(entry, Commit) and member in entry.drain and entry.step + 1 < NUM_STEPS

    def _removes(self, at: int, member: Member) -> bool:
        entry = self.log[at]
        if isinstance(entry, Restart):
            return True  # it lets in those that stay
        return entry.hits(member) if isinstance(entry, Fence) else self._leaves(entry, member)

    def _lets_in(self, at: int, member: Member) -> bool:
        if at < 0:
            return member.incarnation == 0
        match self.log[at]:
            case Restart(members=asked):
                able = [one for one in asked if not self.is_over(one, at + 1)]
            case Resume(admit=asked):
                able = self._able(asked, at)
            case Commit(admit=asked, step=step) if step + 1 < NUM_STEPS:
                able = self._able(asked, at)
            case _:
                return False
        return member in able and member == max(one for one in able if one.group == member.group)

    def _able(self, asked: Sequence[Member], at: int) -> list[Member]:
        present = {one.group for one in self.named if self.takes_part(one, at)}
        return [one for one in asked if one.group not in present and not self.is_over(one, at)]


def stages_of(member: Member) -> int:
    return 1 + (member.group + 3 * member.incarnation) % NUM_STAGES if member.incarnation else NUM_STAGES


def listed(members: Sequence[Member]) -> tuple[int, ...]:
    stages = tuple(map(stages_of, members))
    return stages if min(stages) < NUM_STAGES else ()


def drawn(membership: Membership, random: Random) -> Entry:
    """An entry as a correct run may have it, with requests of any incarnation to take part."""
    step, attempt = membership.step, membership.attempt
    some = tuple(Member(GroupId(random.randrange(NUM_GROUPS)), random.randrange(6)) for _ in range(4))
    if random.random() < 0.35:
        return Fence(group=some[0].group, incarnation=some[0].incarnation, discard=random.random() < 0.3)
    if random.random() < 0.1 or not membership.voters:
        return Restart(step=random.randint(0, step), members=some, stages=listed(some))
    if membership.uncovered:
        back = of(*range(NUM_GROUPS), incarnation=6 + membership.head)
        return Resume(step=step, attempt=attempt, admit=back, stages=listed(back))
    if membership.is_discarded or membership.is_trained:
        return Retry(step=step, attempt=attempt, recompute=True)
    leaving = tuple(random.sample(membership.voters, random.choice((0, 0, 0, 1))))
    return Commit(step=step, attempt=attempt, admit=some, drain=leaving, stages=listed(some))


@pytest.mark.parametrize("seed", range(15))
def test_members_of_drawn_logs_are_those_by_definition(seed: int) -> None:
    random, membership, log = Random(seed), Membership(TERMS), list[Entry]()
    for _ in range(30):
        entry, step, before = drawn(membership, random), membership.step, membership.voters
        change = membership.apply(decode_entry(encode_entry(entry)))
        log.append(entry)
        found = ByDefinition(log)
        assert membership.voters == tuple(one for one in found.named if found.takes_part(one, len(log)))
        fewer = {one.group: stages_of(one) for one in membership.voters if stages_of(one) < NUM_STAGES}
        assert membership.stages == fewer
        assert (change.contradictions, change.voters) == ((), before)
        assert set(membership.voters) == {*before} - {*change.lost, *change.left} | {*change.admitted}
        assert len(change.undone) == (step - entry.step if isinstance(entry, Restart) else 0)
        decided = [at for at, each in enumerate(log) if not isinstance(each, Fence)]
        assert (membership.head, membership.attempt) == (len(log), len(decided))
        since = log[max(decided, default=-1) + 1 :]
        assert membership.is_discarded == any(isinstance(each, Fence) and each.discard for each in since)
    assert any(isinstance(each, Restart) for each in log) or membership.step > 1


def after(*entries: Entry, terms: LogTerms = TERMS) -> tuple[str, ...]:
    """Contradictions of the last of these entries."""
    membership = Membership(terms)
    *earlier, last = entries
    assert [found for entry in earlier for found in membership.apply(entry).contradictions] == []
    return membership.apply(last).contradictions


COMMIT = Commit(step=0, attempt=0)


@pytest.mark.parametrize(
    ("entries", "terms", "found"),
    [
        (
            [Commit(step=1, attempt=0)],
            TERMS,
            "each exactly once: attempt 0 of step 1 is committed in attempt 0 of step 0",
        ),
        ([COMMIT, Retry(step=1, attempt=0)], TERMS, "attempt 0 of step 1 is retried in attempt 1 of step 1"),
        ([Finish(step=9, attempt=0)], TERMS, "attempt 0 of step 9 ends the run in attempt 0 of step 0"),
        ([Commit(step=0, attempt=0, is_last=True), Commit(step=1, attempt=1)], TERMS, "is committed after the last"),
        ([Commit(step=0, attempt=0, drain=of(1, incarnation=1))], TERMS, "group 1 is drained, and takes no part"),
        ([*lost(1, discard=True), COMMIT], TERMS, "attempt 0 was discarded, and is committed"),
        ([*lost(1, discard=True), *lost(3), COMMIT], TERMS, "attempt 0 was discarded, and is committed"),
        ([Retry(step=0, attempt=0, disputes=(dispute(1, 2),)), Commit(step=0, attempt=1)], TERMS, "was discarded"),
        ([*lost(1, discard=True), Retry(step=0, attempt=0)], TERMS, "and not all of it is computed again"),
        ([Retry(step=0, attempt=0, recompute=True)], PARTITIONED, "its parameters are not gathered anew"),
        ([Retry(step=0, attempt=0, kept=(2, 3)), Retry(step=0, attempt=1, kept=(3, 2))], TERMS, "fewer buckets"),
        ([COMMIT, Commit(step=1, attempt=1), Commit(step=2, attempt=2)], EVALUATING, "the evaluation that was due"),
        ([COMMIT, Evaluated(step=1, attempt=1)], EVALUATING, "evaluates after 1 steps, which was not due"),
        ([Resume(step=0, attempt=0)], TERMS, "resumes after a pause, and every shard had a host"),
        (
            [*lost(0, 1, 2, 3), Resume(step=0, attempt=0, admit=of(0, incarnation=1))],
            TERMS,
            "and no group hosts shards",
        ),
        ([Commit(step=0, attempt=0, admit=of(1, 2), stages=(3,))], TERMS, "2 members have (3,) stages"),
        ([Restart(step=0, members=of(1, incarnation=1), stages=(5,))], TERMS, "each at most 4"),
        ([*lost(1), Commit(step=0, attempt=0, admit=of(1, incarnation=1), stages=(0,))], TERMS, "have (0,) stages"),
    ],
)
def test_what_no_correct_run_writes_is_a_contradiction(entries: list[Entry], terms: LogTerms, found: str) -> None:
    [contradiction] = after(*entries, terms=terms)
    assert found in contradiction


def test_after_an_entry_that_contradicts_the_fold_goes_on_from_its_numbers() -> None:
    membership = Membership(TERMS)
    assert membership.apply(Commit(step=3, attempt=7)).contradictions
    assert (membership.step, membership.attempt, membership.head) == (4, 8, 1)
    assert membership.apply(Commit(step=4, attempt=8)).contradictions == ()


def test_the_last_commit_changes_no_members_and_ends_the_run_unless_votes_are_left() -> None:
    for terms, save, is_over in ((TERMS, False, True), (TERMS, True, False), (PARTITIONED, False, False)):
        membership = Membership(terms)
        membership.apply(Commit(step=0, attempt=0, is_last=True, save=save, drain=of(0)))
        assert (len(membership.voters), membership.is_trained, membership.is_over) == (NUM_GROUPS, True, is_over)
        membership.apply(Finish(step=1, attempt=1))
        assert membership.is_over


def test_a_drained_group_is_named_until_it_takes_part_again() -> None:
    membership = Membership(TERMS)
    assert membership.apply(Commit(step=0, attempt=0, drain=of(2))).left == of(2)
    assert membership.drained == {2: 0}
    assert membership.apply(Commit(step=1, attempt=1, admit=of(2))).admitted == ()
    assert membership.apply(Commit(step=2, attempt=2, admit=of(2, incarnation=1))).admitted == of(2, incarnation=1)
    assert membership.drained == {}


def test_the_last_evaluation_is_left_out_without_hosts() -> None:
    membership = Membership(EVALUATING)
    for entry in (Commit(step=0, attempt=0, is_last=True), *lost(0, 1, 2)):
        membership.apply(entry)
        assert membership.is_evaluating
    membership.apply(Retry(step=1, attempt=1))
    assert (membership.is_evaluating, membership.is_over) == (False, True)
