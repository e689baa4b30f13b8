"""Suspect microbatches before the commit: another host computes them, and the digests of their losses are compared.

The group that has counted a suspect microbatch votes with the digest of its loss. The entry Retry asks it and another
host to compute the microbatch, too. If all agree, it is the data, and the sum is committed as it is; else
`audits.judge` decides over these statements (docs/protocol_wrong_numbers.md, Suspect microbatches).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from spare_megatron.core.audits.audits import MAX_ROUNDS, AuditWord, Dispute, Statement, Verdict
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Microbatch

MOST_AT_ONCE = 4
"""Suspects that one attempt has computed again, beside those of the attempt before."""
MOST_NAMED = 16
"""Suspects that a group names in a vote."""
STEPS_PER_QUESTION = 32
"""Committed steps that allow one further attempt with suspects."""
MOST_QUESTIONS = 4
"""Attempts with suspects that may follow each other."""


class QuestionBudget:
    """Attempts that suspects may still cost, so that noisy losses hold no run up: at most
    `MOST_QUESTIONS` + n / `STEPS_PER_QUESTION` in n committed steps. Equal after the same entries.
    """

    def __init__(self) -> None:
        self._credit = MOST_QUESTIONS * STEPS_PER_QUESTION

    @property
    def is_left(self) -> bool:
        return self._credit >= STEPS_PER_QUESTION

    def on_commit(self) -> None:
        self._credit = min(self._credit + 1, MOST_QUESTIONS * STEPS_PER_QUESTION)

    def on_question(self) -> None:
        self._credit -= STEPS_PER_QUESTION


Named = tuple[GroupId, Microbatch]
"""A group says what the loss of a microbatch is."""


def named_in(disputes: Iterable[Dispute]) -> frozenset[Named]:
    """What groups have said in questions about suspects, or were asked."""
    return frozenset(
        (group, dispute.microbatch)
        for dispute in disputes
        if dispute.is_suspicion
        for group in (*(statement.group for statement in dispute.statements), *dispute.asked)
    )


def suspicions(losses: Mapping[GroupId, Sequence[AuditWord]], known: Collection[Named]) -> tuple[Dispute, ...]:
    """The suspects that groups name and were in no question about, from all groups in turn; no group is asked yet.

    >>> words = [AuditWord(0, 0, 5), AuditWord(0, 1, 6)]
    >>> [one.microbatch.index for one in suspicions({GroupId(0): words}, {(GroupId(0), Microbatch(0, 0))})]
    [1]
    """
    by_microbatch: dict[Microbatch, list[Statement]] = {}
    order: dict[Microbatch, tuple[int, GroupId]] = {}
    for group in sorted(losses):
        for place, word in enumerate(losses[group]):
            if (group, word.microbatch) in known:
                continue
            by_microbatch.setdefault(word.microbatch, []).append(Statement(group, word.digest))
            order[word.microbatch] = min((place, group), order.get(word.microbatch, (place, group)))
    return tuple(
        Dispute(microbatch=one, statements=tuple(by_microbatch[one]), asked=(), num_rounds=0, is_suspicion=True)
        for one in sorted(by_microbatch, key=lambda one: (order[one], one))
    )


def first_questions(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts without those questions about suspects that have to wait for the next attempt."""
    kept: list[Verdict] = []
    num_new = 0
    for verdict in verdicts:
        is_new = isinstance(verdict, Dispute) and verdict.is_suspicion and verdict.num_rounds == 1
        num_new += is_new
        kept.append(None if is_new and num_new > MOST_AT_ONCE else verdict)
    return kept


def confirmation(dispute: Dispute, able: Iterable[GroupId]) -> Dispute | None:
    """The question to a host that has said nothing of a suspect yet; None if one has, or if none is left to ask.

    The groups that have said something compute it again, too: one may contradict itself, and their digests along the
    stages show where the computations part.
    """
    spoken = {statement.group for statement in dispute.statements}
    able = list(able)
    further = [group for group in able if group not in spoken]
    if len(spoken) > 1 or not further or dispute.num_rounds >= MAX_ROUNDS:
        return None
    asked = (further[0], *sorted(spoken & set(able)))
    plain = tuple(statement._replace(boundaries=()) for statement in dispute.statements)
    return replace(dispute, statements=plain, asked=asked, num_rounds=dispute.num_rounds + 1)
