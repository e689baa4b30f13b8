"""Who takes part in a run and what it has committed: the one fold of its decision log.

The controller decides by it; `spare check`, displays and reports read journals by it. Only the log determines it, so
it is equal in all processes after the same entries. docs/protocol.md says what proves it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from spare_megatron.core.log import entries
from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.state_partitions import PartitionSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTerms:
    """What the fold of a run's log depends on beside its entries."""

    placement: Placement
    num_steps: int
    first_step: int = 0
    """Committed steps of the checkpoint that the run begins with."""
    last_resort: bool = False
    """All groups can read all data, so any may compute any microbatch. Microbatch granularity only."""
    partitions: PartitionSetup | None = None
    """How the optimizer state is partitioned over the groups; None if each holds all of it."""
    evaluation: EvaluationPolicy | None = None
    num_stages: int = 1
    """Of a whole pipeline."""

    def stages_of(self, members: Sequence[Member], fewer: Mapping[GroupId, int]) -> tuple[int, ...]:
        """Those of the members, as entries have them, if these groups have fewer than the whole pipeline."""
        stages = tuple(fewer.get(member.group, self.num_stages) for member in members)
        return stages if min(stages, default=self.num_stages) < self.num_stages else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an entry has changed."""

    voters: tuple[Member, ...]
    """Those before the entry."""
    epoch: int
    """That before the entry."""
    lost: tuple[Member, ...] = ()
    """Voters that a fence or a restart has removed."""
    left: tuple[Member, ...] = ()
    """Voters that were drained."""
    admitted: tuple[Member, ...] = ()
    """New voters."""
    undone: range = range(0)
    """Committed steps that a restart or an undo has made void."""
    contradictions: tuple[str, ...] = ()
    """Why no correct run writes the entry here. It is folded all the same, as its own numbers say."""


class Membership:
    """State of a run between two entries of its log."""

    def __init__(self, terms: LogTerms) -> None:
        self.terms = terms
        self.head = 0  # entries folded, and the index of the next one
        self.step = terms.first_step  # committed steps, and the step under way
        self.attempt = 0  # under way, counted over the whole run
        self.epoch = 0  # number of changes of the members
        self.num_steps = terms.num_steps  # lowered by a commit that is the last
        self.num_restarts = 0  # undos included: how often the step has gone back
        self.members: tuple[GroupId, ...] = tuple(map(GroupId, range(terms.placement.num_groups)))
        self.voters: tuple[Member, ...] = tuple(map(Member, self.members))  # the same with their incarnations
        self.last_fenced: dict[GroupId, int] = {}  # highest incarnation that may not take part again
        self.drained: dict[GroupId, int] = {}  # incarnation in which it left, of groups that take no part
        self.stages: dict[GroupId, int] = {}  # of members that have fewer than the whole pipeline
        self.kept: tuple[int, ...] = ()  # leading buckets at each position that the attempt has from earlier ones
        self.is_discarded = False  # a group with wrong state or gradients contributed to the attempt
        self.is_evaluating = False  # after `step` committed steps, before the next one
        self.is_syncing = False  # with other sites, after `step` committed steps and before all else
        self.votes_on_end = False  # after the last step parameters are left to gather, or a save to compare
        self.is_over = False  # no attempt follows

    @property
    def is_trained(self) -> bool:
        """All steps are committed."""
        return self.step == self.num_steps

    @property
    def num_missing_stages(self) -> int:
        """Those that the members together lack."""
        return sum(self.terms.num_stages - number for number in self.stages.values())

    @property
    def uncovered(self) -> tuple[ShardId, ...]:
        """Shards that no member hosts, ascending; none if all groups can read all data."""
        return () if self.terms.last_resort else self.terms.placement.uncovered(frozenset(self.members))

    def apply(self, entry: entries.Entry) -> Change:
        """Folds the next entry. Never raises."""
        voters, epoch, step = self.voters, self.epoch, self.step
        self.head += 1
        contradictions = tuple(self._on_entry(entry))
        gone: tuple[Member, ...] = ()
        admitted: tuple[Member, ...] = ()
        if self.voters is not voters:
            now, before = frozenset(self.voters), frozenset(voters)
            gone = tuple(voter for voter in voters if voter not in now)
            admitted = tuple(voter for voter in self.voters if voter not in before)
        has_drained = isinstance(entry, entries.Commit)
        return Change(
            voters=voters,
            epoch=epoch,
            lost=() if has_drained else gone,
            left=gone if has_drained else (),
            admitted=admitted,
            undone=range(self.step, step if isinstance(entry, entries.Restart | entries.Undo) else self.step),
            contradictions=contradictions,
        )

    def not_fenced(self, members: Iterable[Member]) -> list[Member]:
        """Those that may take part, ascending; of each group the highest incarnation."""
        able = sorted(member for member in members if member.incarnation > self.last_fenced.get(member.group, -1))
        return [Member(group, incarnation) for group, incarnation in dict(able).items()]

    # ------------------------------------------------------------- each changes the state, and yields contradictions

    def _on_entry(self, entry: entries.Entry) -> Iterator[str]:
        match entry:
            case entries.Fence():
                self._on_fence(entry)
            case entries.Commit():
                yield from self._on_commit(entry)
            case entries.Retry():
                yield from self._on_retry(entry)
            case entries.Evaluated():
                yield from self._on_evaluated(entry)
            case entries.Synced():
                yield from self._on_synced(entry)
            case entries.Resume():
                yield from self._on_resume(entry)
            case entries.Restart():
                yield from self._on_restart(entry)
            case entries.Undo():
                yield from self._on_undo(entry)
            case entries.Finish():
                yield from self._misplaced(entry, "ends the run")
                self.is_over = True
            case entries.GiveUp() | entries.Halt():
                self.is_over = True

    def _misplaced(self, entry: entries.Decision, what: str) -> Iterator[str]:
        if (entry.step, entry.attempt) != (self.step, self.attempt):
            where = f"in attempt {self.attempt} of step {self.step}"
            yield f"attempt {entry.attempt} of step {entry.step} {what} {where}"

    def _on_fence(self, fence: entries.Fence) -> None:
        group = fence.group
        self.last_fenced[group] = max(fence.incarnation, self.last_fenced.get(group, -1))
        self.is_discarded |= fence.discard
        # Compare ids first: with thousands of groups a call for each would dominate.
        left = tuple(voter for voter in self.voters if voter.group != group or not fence.hits(voter))
        if len(left) < len(self.voters):
            self._set_voters(left)

    def _on_commit(self, commit: entries.Commit) -> Iterator[str]:
        step = commit.step
        for text in self._misplaced(commit, "is committed"):
            yield f"steps are not committed one after another, each exactly once: {text}"
        if step >= self.num_steps:
            yield f"step {step} is committed after the last"
        if self.is_evaluating or self.is_syncing:
            due = "round with other sites" if self.is_syncing else "evaluation"
            yield f"step {step} is committed before the {due} that was due"
        if self.is_discarded:
            yield f"step {step}: attempt {commit.attempt} was discarded, and is committed"
        self.step = step + 1
        if commit.is_last:
            self.num_steps = self.step
        self.votes_on_end = commit.save or self.terms.partitions is not None
        self.is_evaluating, self.is_syncing = self._is_evaluation_due(), commit.sync
        if not self.is_trained:  # the last commit changes no members
            for member in commit.drain:
                if member not in self.voters:
                    yield f"step {step}: group {member.group} is drained, and takes no part"
            self._change(commit.admit, commit.drain)
            yield from self._set_stages(commit.admit, commit.stages)
        self._open(commit.attempt + 1)

    def _on_retry(self, retry: entries.Retry) -> Iterator[str]:
        yield from self._misplaced(retry, "is retried")
        what = f"step {retry.step}: attempt {retry.attempt} was"
        if self.is_discarded and not retry.recompute and not retry.disputes:
            yield f"{what} discarded, and not all of it is computed again"
        if self.terms.partitions is not None and retry.recompute and not retry.gather:
            yield f"{what} void, and its parameters are not gathered anew"
        before = () if retry.recompute else self.kept
        if any(now < earlier for now, earlier in zip_longest(retry.kept, before, fillvalue=0)):
            yield f"step {retry.step}: after attempt {retry.attempt} fewer buckets are kept than before"
        self._open(retry.attempt + 1, retry.kept)
        self.is_discarded = any(one.differs for one in retry.disputes)  # its sums hold a gradient that is wrong

    def _on_evaluated(self, entry: entries.Evaluated) -> Iterator[str]:
        yield from self._misplaced(entry, "is evaluated")
        if not self.is_evaluating or self.is_syncing:
            yield f"attempt {entry.attempt} evaluates after {entry.step} steps, which was not due"
        if self.is_discarded:
            yield f"the evaluation after {entry.step} steps was discarded, and is decided"
        self.is_evaluating = False
        self._open(entry.attempt + 1)

    def _on_synced(self, entry: entries.Synced) -> Iterator[str]:
        yield from self._misplaced(entry, "ends a round with other sites")
        if not self.is_syncing:
            yield f"attempt {entry.attempt} ends a round with other sites after {entry.step} steps, and none was due"
        if self.is_discarded:
            yield f"the round with other sites after {entry.step} steps was discarded, and is decided"
        self.is_syncing = False
        self._open(entry.attempt + 1)

    def _on_resume(self, resume: entries.Resume) -> Iterator[str]:
        yield from self._misplaced(resume, "resumes")
        if not self.uncovered:
            yield f"step {resume.step} resumes after a pause, and every shard had a host"
        self._change(resume.admit)
        yield from self._set_stages(resume.admit, resume.stages)
        if uncovered := self.uncovered:
            yield f"step {resume.step} resumes, and no group hosts shards {[int(shard) for shard in uncovered]}"
        self._open(resume.attempt + 1)

    def _on_restart(self, restart: entries.Restart) -> Iterator[str]:
        for voter in set(self.voters) - set(restart.members):
            self.last_fenced[voter.group] = max(voter.incarnation, self.last_fenced.get(voter.group, -1))
        self._set_voters(self.not_fenced(restart.members))
        self.stages.clear()
        yield from self._set_stages(restart.members, restart.stages)
        self.step = restart.step
        self.num_restarts += 1
        self.votes_on_end = True  # the state saved after the last step has yet to be compared
        self.is_evaluating, self.is_syncing = self._is_evaluation_due(), False
        self._open(self.attempt + 1)

    def _on_undo(self, undo: entries.Undo) -> Iterator[str]:
        if undo.attempt != self.attempt or not self.terms.first_step < undo.step < self.step:
            where = f"in attempt {self.attempt} of step {self.step}"
            yield f"attempt {undo.attempt} goes back to the state after {undo.step} steps {where}"
        self.step = undo.step
        self.num_restarts += 1
        self.is_evaluating = self.is_syncing = self.votes_on_end = False  # what was due after so many steps is done
        self._open(self.attempt + 1)

    def _change(self, asked: Iterable[Member], drained: Iterable[Member] = ()) -> None:
        """Admits those that may take part of the ones that ask, and removes those that are drained."""
        # An entry may name two incarnations of a group, one fenced meanwhile, or one whose group still takes part.
        admitted = [member for member in self.not_fenced(asked) if member.group not in self.members]
        left = {member for member in drained if member in self.voters}
        if admitted or left:
            self.drained |= dict(left)
            self.last_fenced |= dict(left)  # only a later incarnation may come back
            self._set_voters((*(voter for voter in self.voters if voter not in left), *admitted))

    def _set_voters(self, voters: Iterable[Member]) -> None:
        self.voters = tuple(sorted(voters))
        self.members = tuple(voter.group for voter in self.voters)
        self.epoch += 1
        present = set(self.members)
        for group in self.drained.keys() & present:
            del self.drained[group]
        for group in self.stages.keys() - present:
            del self.stages[group]

    def _set_stages(self, named: Sequence[Member], stages: Sequence[int]) -> Iterator[str]:
        """Of those members that an entry names and that take part."""
        most = self.terms.num_stages
        if stages and (len(stages) != len(named) or not 0 < min(stages) <= max(stages) <= most):
            yield f"step {self.step}: {len(named)} members have {stages} stages, each at most {most}"
        fewer = {member: number for member, number in zip(named, stages, strict=False) if number < most}
        self.stages |= {voter.group: fewer[voter] for voter in self.voters if voter in fewer}

    def _open(self, attempt: int, kept: tuple[int, ...] = ()) -> None:
        """Begins an attempt, unless none follows."""
        self.attempt, self.kept = attempt, kept
        self.is_discarded = False
        if self.is_evaluating and self.is_trained and self.voters and self.uncovered:
            self.is_evaluating = False  # left out: no restart for the last evaluation
        self.is_over = self.is_trained and not (self.is_syncing or self.is_evaluating or self.votes_on_end)

    def _is_evaluation_due(self) -> bool:
        policy = self.terms.evaluation  # a run evaluates nothing before its first step
        return (
            policy is not None
            and self.step > self.terms.first_step
            and policy.is_due(self.step, is_last=self.is_trained)
        )
