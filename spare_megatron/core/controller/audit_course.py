"""Where the audits of a run stand: groups that are due, disputes and questions of the step, how far steps are audited.

`core.audits.audits` draws audits and judges them, `core.audits.suspects` names suspects.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from spare_megatron.core.audits.audits import AuditPolicy, Dispute, draw_audits, saver_of
from spare_megatron.core.audits.clean_prefix import AuditedSteps
from spare_megatron.core.audits.suspects import Named, QuestionBudget, named_in
from spare_megatron.core.log.entries import Retry
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.paces import Paces, slack_of
from spare_megatron.stacking.plans import Audit, StepPlan, Work


class AuditCourse:
    """Equal after the same entries. `policy`: None without audits; `hosts` of each shard: None if data is shared."""

    def __init__(self, policy: AuditPolicy | None, hosts: Sequence[Sequence[GroupId]] | None, first_step: int) -> None:
        self._policy = policy
        self._hosts = hosts
        self.disputes: tuple[Dispute, ...] = ()
        """Of this attempt."""
        self.questioned: frozenset[Named] = frozenset()
        """What groups were asked about suspects of this step."""
        self._budget = QuestionBudget()
        self._due: frozenset[GroupId] = frozenset()  # in the next step: they are new, or of another pace than before
        self._audited = AuditedSteps(first_step)
        self._is_saved = False  # a dispute of this step

    @property
    def audited_steps(self) -> int | None:
        """As `AuditedSteps.num_steps`; None without audits."""
        return None if self._policy is None else self._audited.num_steps

    @property
    def is_spoiled(self) -> bool:
        """Whether what a group that was found wrong has computed is in committed steps."""
        return self._policy is not None and bool(self._audited.spoiled_by)

    @property
    def may_question(self) -> bool:
        """Whether an attempt may compute suspects again."""
        return self._policy is not None and self._budget.is_left

    def draw(
        self, step: int, work: Work, members: Collection[GroupId], paces: Paces, *, is_last: bool
    ) -> tuple[Audit, ...]:
        """The audits of a step: of all groups, or of those that are due and others by their slack at these paces."""
        if self._policy is None:
            return ()
        asked = members if is_last or self._policy.is_due(step) else self._due
        slack = slack_of(work, replace(paces, rounds=self._policy.rounds))
        return draw_audits(self._policy, step, work, self._hosts, asked, slack)

    def saver(self, voters: Sequence[Member], disputes: Iterable[Dispute] = ()) -> Member | None:
        """The member that is to save the parameters of this step; None if one has been asked to before."""
        if self._is_saved:
            return None
        self._is_saved = True
        return saver_of(voters, disputes)

    # ------------------------------------------------------------------------------------------------ the log's entries

    def on_admitted(self, members: Iterable[Member]) -> None:
        self._due |= {member.group for member in members}

    def on_wrong(self, group: GroupId) -> None:
        """The group is fenced, as what it has computed or the state that it holds is wrong."""
        self._audited.on_wrong(group)

    def on_retry(self, retry: Retry) -> None:
        """Counts suspects that are computed again; if everything is, they may be found anew."""
        self.disputes = retry.disputes
        if any(one.is_suspicion and one.num_rounds == 1 and not one.differs for one in retry.disputes):
            self._budget.on_question()
        self.questioned = frozenset() if retry.recompute else self.questioned | named_in(retry.disputes)

    def on_resume(self) -> None:
        """The step begins again after a pause."""
        self.disputes, self.questioned = (), frozenset()

    def on_commit(self, step: int, plans: Sequence[StepPlan], members: Collection[GroupId]) -> None:
        """The members commit the step, which these plans have dealt. Those that were due and not audited stay due."""
        computed = [(group, audit.microbatch) for audit in plans[0].audits for group in (audit.auditor, audit.owner)]
        self._audited.on_commit(step, computed, members)
        done = {group for plan in plans for audit in plan.audits for group in (audit.auditor, audit.owner)}
        self._due = (self._due - done) & frozenset(members)
        self._budget.on_commit()
        self._end_step()

    def on_paces(self, before: Mapping[GroupId, int], now: Mapping[GroupId, int], members: Collection[GroupId]) -> None:
        """Work is dealt by other paces from the next step on: groups whose pace changes are due."""
        changed = {group for group in {*before, *now} if before.get(group) != now.get(group)}
        self._due |= changed & frozenset(members)

    def on_restart(self, step: int, members: Collection[GroupId]) -> None:
        """Training goes on after so many committed steps; all groups are due."""
        self._due = frozenset(members)
        self._audited.on_restart(step)
        self._end_step()

    def _end_step(self) -> None:
        self.on_resume()
        self._is_saved = False
