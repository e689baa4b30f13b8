"""Up to which step all that is committed is audited: by small cases, and in histories of machines that break."""

from dataclasses import dataclass, field
from random import Random

from spare_megatron.core.audits.clean_prefix import AuditedSteps
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.plans import Microbatch

ALL = [GroupId(group) for group in range(4)]


def shared(*groups: int) -> list[tuple[GroupId, Microbatch]]:
    """These groups have computed one microbatch."""
    return [(GroupId(group), Microbatch(ShardId(0), min(groups))) for group in groups]


def test_the_group_that_was_audited_longest_ago_decides() -> None:
    audited = AuditedSteps(2)
    assert audited.num_steps == 2, "what a run begins with"
    audited.on_commit(2, shared(0, 1), ALL)
    assert audited.num_steps == 2
    audited.on_commit(5, shared(2, 3), ALL)
    assert audited.num_steps == 3
    audited.on_commit(6, [*shared(0, 1)], ALL)
    assert audited.num_steps == 6
    audited.on_commit(7, [*shared(0, 1), *shared(2, 3)], ALL)
    assert audited.num_steps == 8


def test_a_group_that_no_other_compares_is_not_audited() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(
        0, [*shared(0, 1), (ALL[2], Microbatch(ShardId(1), 0)), *shared(2, 3)], [GroupId(g) for g in (0, 2)]
    )
    assert audited.num_steps == 0, "both partners have been lost before the commit"


def test_what_a_wrong_group_has_computed_since_its_last_audit_spoils_all_later_states() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(0, [*shared(0, 1), *shared(2, 3)], ALL)
    audited.on_commit(1, [*shared(0, 1)], ALL)
    audited.on_wrong(GroupId(3))
    assert audited.spoiled_by == [3]
    left = ALL[:3]
    audited.on_commit(2, shared(0, 1, 2), left)
    assert audited.num_steps == 1
    audited.on_restart(2)
    audited.on_commit(2, shared(0, 1, 2, 3), ALL)
    assert audited.num_steps == 1, "that state has it, too"
    audited.on_restart(1)
    assert (audited.num_steps, audited.spoiled_by) == (1, [])
    audited.on_commit(1, shared(0, 1, 2, 3), ALL)
    assert audited.num_steps == 2


def test_a_group_that_was_audited_in_the_last_step_has_spoiled_nothing() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(0, shared(0, 1, 2, 3), ALL)
    audited.on_wrong(GroupId(3))
    assert audited.spoiled_by == []
    audited.on_commit(1, shared(0, 1, 2), ALL[:3])
    assert audited.num_steps == 2


def test_a_group_that_is_away_holds_nothing_up_until_it_is_back() -> None:
    audited = AuditedSteps(0)
    audited.on_commit(0, shared(0, 1, 2, 3), ALL)
    audited.on_commit(5, shared(0, 1, 2), ALL[:3])
    assert audited.num_steps == 6
    audited.on_wrong(GroupId(3))
    assert audited.num_steps == 1, "it was wrong when it came back, perhaps since its audit in step 0"


@dataclass
class History:
    """Machines that break for good, of which only audits show it; the restarts choose states at random."""

    random: Random
    audited: AuditedSteps = field(default_factory=lambda: AuditedSteps(0))
    members: set[GroupId] = field(default_factory=lambda: set(ALL))
    away: set[GroupId] = field(default_factory=set)
    broken: set[GroupId] = field(default_factory=set)
    new: set[GroupId] = field(default_factory=set)
    wrong_in: list[set[GroupId]] = field(default_factory=list)
    """Of each committed step, the broken groups that have computed in it."""
    found: set[GroupId] = field(default_factory=set)
    known: set[tuple[int, GroupId]] = field(default_factory=set)
    """Committed steps with wrong numbers of a group that has been found since."""

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.03:
            self.broken.add(self.random.choice(ALL))
        elif draw < 0.15 and len(self.members) > 2:
            self._leave(self.random.choice(sorted(self.members)))
        elif draw < 0.3 and self.away:
            group = self.random.choice(sorted(self.away))
            self.away.remove(group)
            self.members.add(group)
            self.new.add(group)
        elif draw < 0.36:
            self._restart(self.random.choice([self.audited.num_steps, self.random.randint(0, len(self.wrong_in))]))
        self._commit(is_due=self.random.random() < 0.4)

    def _leave(self, group: GroupId) -> None:
        self.members.remove(group)
        self.new.discard(group)
        self.away.add(group)

    def _restart(self, step: int) -> None:
        self.audited.on_restart(step)
        del self.wrong_in[step:]
        self.known = {(index, group) for index, group in self.known if index < step}
        self.broken -= self.found  # mended
        self.members, self.away, self.new = set(ALL), set(), set(ALL)

    def _commit(self, *, is_due: bool) -> None:
        """All members audit if it is due, else the new ones; a wrong one is lost, and the step begins again."""
        while len(self.members) > 1:
            seen = self.members if is_due else self.new | set(sorted(self.members)[: 1 if self.new else 0])
            if wrong := sorted(seen & self.broken):
                self.found.add(wrong[0])
                self.known |= {(index, wrong[0]) for index, groups in enumerate(self.wrong_in) if wrong[0] in groups}
                self.audited.on_wrong(wrong[0])
                self._leave(wrong[0])
                continue
            computed = shared(*seen) if len(seen) > 1 else []
            self.audited.on_commit(len(self.wrong_in), computed, frozenset(self.members))
            self.wrong_in.append(self.members & self.broken)
            self.new.clear()
            return
        self._restart(0)

    def known_to_be_spoiled(self) -> set[GroupId]:
        return {group for _, group in self.known}

    def spoiled(self) -> set[GroupId]:
        """Groups with wrong numbers in states that count as audited, those left out that are lost unseen."""
        wrong = set().union(*self.wrong_in[: self.audited.num_steps])
        return wrong - self.away


def test_no_state_that_counts_as_audited_has_numbers_of_a_group_that_takes_part_and_is_broken() -> None:
    num_found, reached = 0, []
    for seed in range(100):
        history = History(Random(seed))
        for _ in range(150):
            history.step()
            assert history.spoiled() == set(), seed
            assert history.known_to_be_spoiled() <= set(history.audited.spoiled_by), seed
            assert history.audited.num_steps <= len(history.wrong_in)
        num_found += len(history.found)
        reached.append(history.audited.num_steps)
    assert num_found > 100
    assert sum(steps > 10 for steps in reached) > 50
