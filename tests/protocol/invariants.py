"""What must hold in every history, checked by an observer who sees everything and shares no code with the controller.

1. Exactly once: the sums a group applies hold each microbatch of the batch once, in every bucket.
2. Agreement: a step is committed once, on one attempt; all that apply it get the same parameters.
3. A decision is written by a member, needs the vote of every member of that moment, and follows from their votes
   alone. So nothing that a fenced group does later can change one. A fenced group may still apply the commits that
   stand before its fence in the log, never one behind it. The same holds for a group that came back and its earlier
   incarnations. A fence ends the incarnation that it names and those before it, none after.
4. When the faults stop, all steps are committed, unless a shard has no host left, or there is no group.
5. Where members that voted on an attempt have compared parameters, or hosts of a partition its state, and differ, it is
   never committed; a group fenced for it does have wrong ones; the run halts only if there is no majority. With state
   partitions, hosts go that are right where not more than half of them are known to be, by copies compared before.
6. After a wipe-out training starts again only in incarnations that have not taken part, from what was saved, and with
   a host for every shard; or a group says why not.
   Where groups wait for hosts, that happens only once the last copy of some state is lost: till then a pause ends with
   a host for every shard, and all groups compute the step from zero sums.
7. No run ends with a checkpoint that is wrong, if it is the last, or by a group fenced for wrong state (`saved`). When
   one is refused, another is left, if there ever was one.
8. An evaluation is decided where it is due, and nowhere else. It counts each of its microbatches once; unless
   parameters are wrong, its value is that of the parameters after so many steps.
9. A group that is drained has asked for it, leaves a host for every shard and state partition, whose copies have been
   compared if they are new, takes no part from there on, and ends; its checkpoints have been compared before.
10. Where members have voted with other digests of one microbatch, nothing is committed. A group fenced for it has
    computed wrongly; the run halts for it only if fewer than two right members can compute the microbatch. A suspect is
    committed only if another host has computed it to the same loss, unless there is none or such questions have held
    the run up as often as they may.
11. A group that votes twice in a step that it lacks a resource is fenced, and no other one for that; if all members do,
    the run halts (`shortages`).
12. Steps are undone only after a group was found wrong, to a state that none of its wrong numbers is in; they are if a
    member has such a snapshot. What was saved of them is not used (`undoing`).
13. No log entry is written twice; no communicator's name is used twice (`communicators`).
14. All take a member to have the stages that it has in this incarnation.
15. A group whose own checks have found its numbers wrong is fenced with `discard`, once, and no sum stays of an attempt
    in which it has voted so. The run halts if two state it, in one attempt or in one step (`own_findings`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from spare_megatron.core.log.actions import (
    AttemptEvaluation,
    AttemptFinish,
    AttemptReduce,
    AttemptSync,
    AttemptUndo,
    FinishRun,
    StopHalted,
    StopWipeOut,
)
from spare_megatron.core.log.entries import (
    Commit,
    Entry,
    Evaluated,
    Fence,
    Finish,
    GiveUp,
    Halt,
    Restart,
    Resume,
    Retry,
    Synced,
    Undo,
    decode_entry,
)
from spare_megatron.core.log.loss_sums import EvaluationPolicy, SetSum
from spare_megatron.core.log.votes import WRONG_NUMBERS, Vote
from spare_megatron.stacking.layout import Member
from tests.protocol.audits import AuditDigests, AuditObserver
from tests.protocol.ballots import Ballots
from tests.protocol.communicators import Sums
from tests.protocol.incarnations import Incarnation, Opening, incarnation_of
from tests.protocol.known_params import KnownParams
from tests.protocol.own_findings import FindingObserver, is_own_finding
from tests.protocol.partitions import WRONG, PartitionObserver
from tests.protocol.round_rules import RoundObserver
from tests.protocol.saved import Saved
from tests.protocol.shortages import LACKING, ShortageObserver
from tests.protocol.suspects import SuspectObserver
from tests.protocol.undoing import UndoObserver
from tests.protocol.violation import Violation
from tests.protocol.work import Work

MAX_RESUMES = 4
"""One more without a commit, and the run may end for want of hosts."""


class Invariants:
    """Sees all entries, votes, reductions, updates and ends of one history."""

    def __init__(
        self,
        hosts: Sequence[Sequence[int]] | None,
        num_shards: int,
        sizes: Sequence[int],
        num_steps: int,
        partitions: PartitionObserver,
        evaluation: EvaluationPolicy | None = None,
        *,
        undos: UndoObserver,
        pauses: bool = False,
    ) -> None:
        self.undos = undos
        self._pauses = pauses
        self._num_resumes = 0  # of the step or evaluation
        self._was_state_lost = False  # so that only a restart helps, or the run has ended for want of hosts
        self.partitions = partitions
        # Without `hosts` every group can compute every shard.
        self._hosts = None if hosts is None else [set(map(int, row)) for row in hosts]
        self.audits, self.suspects = AuditObserver(self._hosts), SuspectObserver(self._hosts)
        self._work = Work(num_shards, sizes, num_steps, evaluation)
        self._is_evaluation_due = False
        self.entries: list[Entry] = []
        self.members: frozenset[Incarnation] = frozenset((group, 0) for group in range(num_shards))
        self._fenced: set[Incarnation] = set()
        self._admitted: set[Incarnation] = set(self.members)
        self.epoch = self.step = self.attempt = 0
        self._opened = {0: Opening(0, self.members, 0)}
        self._commits: dict[int, tuple[int, frozenset[Incarnation]]] = {}  # by attempt: step, members
        self._generation = 0  # restarts
        self._began_with = self.members  # the step, or the evaluation before it
        self.saves = Saved()
        self._was_wiped_out = self._is_given_up = False
        self.ballots = Ballots()
        self.stages_of: Callable[[Member], int | None] = lambda _member: None
        """Those of a member that has fewer than others."""
        self.params = KnownParams()
        self.rounds = RoundObserver()
        self._corrupted: set[str] = set()
        self._is_discarded = False  # the attempt under way
        self._is_anew = False  # it follows one of which nothing may stay
        self._found_wrong: frozenset[Incarnation] = frozenset()  # sums of the attempt before
        self._shortages, self._findings = ShortageObserver(), FindingObserver()
        self._is_halted = False
        self._is_finished = not partitions.exist  # the log has decided that the run can end
        self.counts: Counter[str] = Counter()

    # ---------------------------------------------------------------------------------------------------- the log

    def entry_written(self, index: int, text: str, writer: str) -> None:
        """An entry has been written for the first time."""
        entry = decode_entry(text)
        if index != len(self.entries):
            raise Violation(f"{writer} writes entry {index} while the log has {len(self.entries)}")
        self.entries.append(entry)
        self.counts[type(entry).__name__] += 1
        match entry:
            case Fence(group=group, incarnation=incarnation, discard=discard):
                if discard:
                    self.undos.found_wrong(group, self.step)
                if is_own_finding(entry):
                    stated = self.ballots.stated(self.attempt)
                    self._is_halted |= self._findings.fenced(entry, writer, stated, self.members)
                    self.counts["fence for own wrong numbers"] += 1
                if entry.is_outvoted:
                    self.audits.outvoted(f"{group}.{incarnation}", writer, self._corrupted)
                    self._is_discarded = True
                    self.counts["outvoted"] += 1
                elif discard:
                    self._discarded(f"{group}.{incarnation}", writer)
                elif LACKING in entry.reason:
                    self._shortages.fenced((group, incarnation), writer, self._votes_now())
                    self.counts["fence for lack of a resource"] += 1
                self._lost(group, incarnation)
            case Commit() | Retry() | Evaluated() | Synced() | Finish():
                self._decided(entry, writer)
            case Resume():
                self._resumed(entry, writer)
            case Restart():
                self._restarted(entry, writer)
            case Undo():
                self._undone(entry, writer)
            case GiveUp(reason=reason):
                self._given_up(reason, writer)
            case Halt(reason=reason):
                self._halted(reason, writer)
        self._was_wiped_out |= self._is_wiped_out()
        self._was_state_lost |= self._is_wiped_out() and not self.is_paused

    def _resumed(self, entry: Resume, writer: str) -> None:
        if (entry.step, entry.attempt) != (self.step, self.attempt) or not self.is_paused:
            raise Violation(f"{writer} writes {entry} in step {self.step}, attempt {self.attempt}, in no pause")
        if incarnation_of(writer) not in self.members:
            raise Violation(f"{writer} is fenced and writes {entry}")
        self._admit(tuple(entry.admit), {group for group, _ in self.members})
        if self._is_wiped_out():
            raise Violation(f"{writer} writes {entry}, which leaves shards without a host")
        self._num_resumes += 1
        self.counts["resume of an evaluation"] += self._is_evaluation_due
        self.counts["resume with state partitions"] += self.partitions.exist
        self._is_discarded = False
        self.suspects.begin()
        self._open_attempt()

    def _open_attempt(self) -> None:
        self.attempt += 1
        self._opened[self.attempt] = Opening(self.step, self.members, self.epoch)

    @property
    def is_paused(self) -> bool:
        """Whether shards have no host, and those who are left have all state and wait for one."""
        has_state = bool(self.members) and not self.partitions.is_wiped_out
        is_over = self._is_done or self._is_given_up or self._is_halted or self._num_resumes > MAX_RESUMES
        return self._pauses and has_state and not is_over and self._is_wiped_out()

    def _restarted(self, entry: Restart, writer: str) -> None:
        if not self._is_wiped_out() or self._is_given_up:
            raise Violation(f"{writer} writes {entry}, and every shard has a host")
        if self.is_paused:
            raise Violation(f"{writer} writes {entry}, and {set(self.members)} have all state")
        named = {tuple(member) for member in entry.members}
        if named & self._admitted:
            raise Violation(f"{writer} writes {entry}, with incarnations that took part before")
        if entry.step not in self.saves.params:
            raise Violation(f"{writer} writes {entry}, which no group has saved")
        if not self._has_hosts({group for group, _ in named}):
            raise Violation(f"{writer} writes {entry}, which leaves shards without a host")
        self._fenced |= self.members  # who is not named is over
        self.members = frozenset(named - self._fenced)
        self._admitted |= self.members
        self.epoch += 1
        self.step = entry.step
        self._shortages.begin()
        self._findings.begin()
        self._num_resumes = 0
        self._is_evaluation_due, self.rounds.is_due = self._work.has_evaluation(self.step), False
        self._is_discarded = False
        self.suspects.begin()
        self._generation += 1
        self._open_attempt()
        self.partitions.restarted(self.step, self.members)

    def _undone(self, entry: Undo, writer: str) -> None:
        silent = [incarnation for incarnation, vote in self._votes_now().items() if vote is None]
        if silent or incarnation_of(writer) not in self.members:
            raise Violation(f"{writer} writes {entry} without the votes of groups {silent}")
        if entry.attempt != self.attempt or entry.step >= self.step:
            raise Violation(f"{writer} writes {entry} in step {self.step}, attempt {self.attempt}")
        self.undos.undone(writer, entry, self.members)
        self.saves.undone(len(self.entries) - 1, entry.step)
        self._generation += 1
        self.params.undone(self._generation, entry.step)
        self.step, self._began_with = entry.step, self.members
        self._shortages.begin()
        self._num_resumes = 0
        self._is_evaluation_due = self._is_discarded = False
        self.suspects.begin()
        self._open_attempt()

    def _given_up(self, reason: str, writer: str) -> None:
        if not self._is_wiped_out():
            raise Violation(f"{writer} gives the run up though every shard has a host: {reason}")
        self._is_given_up = True

    def _discarded(self, process: str, writer: str) -> None:
        incarnation = incarnation_of(process)
        is_wrong = process in self._corrupted or self.ballots.is_unconfirmed(
            incarnation, self.members, self.attempt, self.partitions.redundancy
        )
        if not is_wrong and not self._receives_wrong_sums(incarnation):
            raise Violation(f"{writer} fences {process}, whose parameters are right")
        self._is_discarded = True
        self.counts["discard"] += 1

    def _receives_wrong_sums(self, incarnation: Incarnation) -> bool:
        """Whether it found sums wrong twice, and all others found them right the second time."""
        cast = self.ballots.on(self.attempt)
        votes = {member: cast[member] for member in self.members}
        is_alone = all(vote.is_complete != (member == incarnation) for member, vote in votes.items())
        is_found = self._found_wrong == {incarnation} and votes[incarnation].has_wrong_sum
        self.counts["fence for wrong sums"] += is_alone and is_found
        return is_alone and is_found

    def _halted(self, reason: str, writer: str) -> None:
        self._is_halted = True
        if LACKING in reason:
            self._shortages.halted(reason, writer, self._votes_now())
            self.counts["halt for lack of a resource"] += 1
        elif reason.startswith(WRONG_NUMBERS):
            self._findings.halted(reason, writer, self.ballots.stated(self.attempt, is_late=True))
            self.counts["halt for own wrong numbers"] += 1
        elif reason.startswith("audit of"):
            self.audits.halted(writer, self.entries, set(self.members))
            self.counts["halt over an audit"] += 1
        elif self.ballots.have_majority(self.members, self.attempt, has_partitions=self.partitions.exist):
            raise Violation(f"{writer} halts the run: {reason}")

    def _lost(self, group: int, incarnation: int) -> None:
        """An incarnation ends with its own fence, or with that of a later one."""
        ended = {(group, number) for number in range(incarnation + 1)}
        if ended & self.members:
            self.ballots.lost(ended, self.attempt)
        present = [number for of, number in self.members if of == group]
        what = "a member" if ended & self.members else "a fenced group"
        if present and present[0] > incarnation:
            what = "an earlier incarnation"
        elif (group, incarnation) not in self._fenced and not ended & self.members:
            what = "a waiting group"
        self.counts[f"fence of {what}"] += 1
        self.epoch += bool(ended & self.members)
        self.members -= ended
        self.partitions.lost(ended)
        self._fenced |= ended

    def _drain(self, entry: Commit, writer: str, votes: Mapping[Incarnation, Vote]) -> None:
        drained = frozenset(tuple(member) for member in entry.drain)
        if strange := [member for member in drained if member not in self.members or not votes[member].leaves]:
            raise Violation(f"{writer} drains {strange}, which have not asked for it")
        if drained and self.step == self._work.num_steps:
            raise Violation(f"{writer} drains {set(drained)} with the last step")
        self.members -= drained
        left = {group for group, _ in self.members}
        if drained and not self._has_hosts(left):
            raise Violation(f"{writer} drains {set(drained)}, which leaves shards without a host")
        self.partitions.drained(drained, len(self.members) + len(drained) - len(entry.leaving or drained))
        self.saves.drained(drained, self.step)
        self._fenced |= {(group, number) for group, incarnation in drained for number in range(incarnation + 1)}
        self.counts["drained"] += len(drained)
        self.epoch += bool(drained)

    def _admit(self, asked: tuple[Incarnation, ...], present: Collection[int]) -> None:
        able = {member for member in asked if member not in self._fenced and member[0] not in present}
        latest = {max(member for member in able if member[0] == group) for group, _ in able}
        self.counts["admission"] += len(latest)
        self.counts["admission of a further group"] += sum(group >= self._work.num_shards for group, _ in latest)
        self.counts["void admission"] += len(set(asked) - latest)
        if latest and present == {group for group, _ in self.members}:  # else the drain has counted this change
            self.epoch += 1
        self.members |= latest
        self._admitted |= latest

    def _votes_now(self) -> dict[Incarnation, Vote | None]:
        """Of the members, on this attempt."""
        return self.ballots.of(self.members, self.attempt)

    def _decided(self, entry: Commit | Retry | Evaluated | Synced | Finish, writer: str) -> None:
        if (entry.step, entry.attempt) != (self.step, self.attempt):
            raise Violation(f"{writer} writes {entry} in step {self.step}, attempt {self.attempt}")
        if incarnation_of(writer) not in self.members:
            raise Violation(f"{writer} is fenced and writes {entry}")
        votes = self._votes_now()
        silent = [incarnation for incarnation, vote in votes.items() if vote is None]
        if silent:
            raise Violation(f"{writer} writes {entry} without the votes of groups {silent}")
        found_wrong = frozenset(member for member, vote in votes.items() if vote is not None and vote.has_wrong_sum)
        stated = self.ballots.stated(self.attempt)
        self._findings.decided(entry, writer, stated, self.members)
        self.counts["sum of a group lost since it found itself wrong"] += bool(stated) and not self._is_discarded
        is_anew = self._compared(entry, writer) or bool(found_wrong) or bool(stated)
        is_anew |= self.attempt in self.undos.attempts
        if isinstance(entry, Retry) and entry.recompute:
            is_anew |= bool(self.ballots.stated(self.attempt, is_late=True))  # which may have been seen, or not
        if isinstance(entry, Commit | Evaluated | Synced) and self._is_discarded:
            raise Violation(f"{writer} writes {entry}, the sum of a fenced group, by its parameters")
        is_complete = all(vote.is_complete for vote in votes.values() if vote is not None)
        if self._is_evaluation_due and not self.rounds.is_due:  # what the lost have computed is lost
            is_complete &= self.members == self._opened[self.attempt].members
        disputes = entry.disputes if isinstance(entry, Retry) else ()
        if disputes:
            self.audits.asked(writer, entry, {group for group, _ in self.members})
            self.suspects.asked(writer, disputes)
            self.counts["dispute"] += any(one.differs for one in disputes)
            self.counts["question about suspects"] += any(one.is_suspicion for one in disputes)
            self.counts["dispute over a loss"] += any(one.is_suspicion and one.differs for one in disputes)
            is_anew = False
        elif isinstance(entry, Retry) == (is_complete and not is_anew):
            raise Violation(f"{writer} writes {entry} though the members voted {votes}")
        is_summed = is_complete and bool(disputes) and not any(one.differs for one in disputes)
        self._retried(entry, writer, votes, is_anew=is_anew, is_summed=is_summed)
        if isinstance(entry, Synced):
            self.counts["round after a loss"] += self.members != self._began_with
        if not isinstance(entry, Retry):
            self._expect(entry, writer)
            self._num_resumes = 0
            self._findings.begin()
        self._is_finished |= isinstance(entry, Finish)
        self._is_anew = isinstance(entry, Retry) and entry.recompute
        self._found_wrong = found_wrong if isinstance(entry, Retry) else frozenset()
        if isinstance(entry, Commit):
            self._committed(entry, writer, {incarnation: vote for incarnation, vote in votes.items() if vote})
        if isinstance(entry, Retry) and entry.recompute:
            self.suspects.begin()
        self._is_discarded = any(one.differs for one in disputes)
        self._open_attempt()

    def _retried(
        self,
        entry: Entry,
        writer: str,
        votes: Mapping[Incarnation, Vote | None],
        *,
        is_anew: bool,
        is_summed: bool,
    ) -> None:
        """`is_summed`: all have the sum, of which the last bucket is summed again once suspects are computed."""
        if not isinstance(entry, Retry):
            return
        self._shortages.retried(entry, writer, votes)
        held = [vote.num_complete for vote in votes.values() if vote is not None]
        of_positions = zip(*held, strict=False)
        least = () if is_anew or () in held else tuple(min(numbers) - is_summed for numbers in of_positions)
        if (entry.recompute, entry.kept) != (is_anew, least):
            raise Violation(f"{writer} writes {entry} though the members hold {held}")
        lacks_params = any(vote.lacks_params for vote in votes.values() if vote is not None)
        if entry.gather != (lacks_params or (is_anew and self.partitions.exist)):
            raise Violation(f"{writer} writes {entry} though the members voted {votes}")
        self.counts["retry that keeps buckets"] += any(entry.kept)

    def _committed(self, entry: Commit, writer: str, cast: Mapping[Incarnation, Vote]) -> None:
        self.audits.committed(writer, self.ballots.in_time(entry.attempt))
        self.undos.committed(writer, self.step, self.attempt, cast)
        self.counts["commit with agreed suspects"] += self.suspects.committed(writer, cast)
        self.counts["commit with audits"] += any(vote.audits for vote in cast.values())
        self.partitions.compared(cast)
        self.partitions.released(entry.released, cast)
        self.partitions.proven(entry.proven, cast)
        self.partitions.committed(self.attempt, entry.restored, self.members)
        self._commits[self.attempt] = (self.step, self.members)
        self.counts["save"] += entry.save
        if self.members != self._opened[self.attempt].members:
            self.counts["commit with the sum of a fenced group"] += 1
        self.rounds.committed(writer, entry, cast)
        self.step += 1
        self._shortages.begin()
        present = {group for group, _ in self.members}
        self._drain(entry, writer, cast)
        if self.step < self._work.num_steps:
            self._admit(entry.admit, present)
        self._is_evaluation_due = self._work.has_evaluation(self.step)
        self._began_with = self.members

    def _expect(self, entry: Commit | Evaluated | Synced | Finish, writer: str) -> None:
        """An attempt that is not retried leads to what is due."""
        if self.rounds.expects(writer, entry, self._votes_now()):
            return
        is_over = self.step == self._work.num_steps
        due = Evaluated if self._is_evaluation_due else Finish if is_over else Commit
        is_skipped = is_over and isinstance(entry, Finish) and self._was_wiped_out
        if not isinstance(entry, due) and not is_skipped:
            raise Violation(f"{writer} writes {entry} after {self.step} of {self._work.num_steps} steps, not {due}")
        self._is_evaluation_due = False
        self.counts["evaluation after a loss"] += isinstance(entry, Evaluated) and self.members != self._began_with

    def _compared(self, entry: Entry, writer: str) -> bool:
        """Whether no sum of the attempt may stay, by what all voters reported of their state."""
        votes = self.ballots.on(self.attempt)
        members = [vote for incarnation, vote in votes.items() if incarnation in self.members]
        if any(vote.lacks_params for vote in members) and not isinstance(entry, Commit | Evaluated | Synced | Finish):
            return self._is_discarded
        states = {(digest.partition, digest.value) for vote in members for digest in vote.partition_digests}
        is_different = len({vote.params_digest for vote in members} - {""}) > 1
        is_different |= len({vote.state_digest for vote in members} - {""}) > 1
        is_different |= len(states) > len({index for index, _ in states})
        if is_different and not (self.partitions.exist and isinstance(entry, Retry)):
            raise Violation(f"{writer} writes {entry} though the members have different parameters")
        all_right = {index for index, sha256 in states if not sha256.startswith(WRONG)}
        is_wrong = any(vote.params_digest.startswith(WRONG) for vote in members)
        if (
            isinstance(entry, Commit | Evaluated | Synced | Finish)
            and is_wrong
            and all_right
            and len(all_right) == self.partitions.num_partitions
        ):
            raise Violation(f"{writer} writes {entry} though parameters are wrong, and each partition has a right host")
        is_all_right = not any(one.value.startswith(WRONG) for vote in votes.values() for one in vote.partition_digests)
        for incarnation, vote in votes.items():
            is_strange = vote.params_digest.startswith(WRONG) and "{}.{}".format(*incarnation) not in self._corrupted
            if self._is_anew and is_strange and is_all_right:
                raise Violation(f"{incarnation} has not gathered anew what may come from a fenced group")
        if isinstance(entry, Retry) and entry.recompute and len({vote.params_digest for vote in votes.values()}) > 1:
            return self._is_discarded or self.partitions.exist  # a vote of a lost group may have been seen, or not
        return self._is_discarded or (self.partitions.exist and is_different)

    # -------------------------------------------------------------------------------------------------- the groups

    def attempted(
        self,
        process: str,
        action: AttemptReduce | AttemptEvaluation | AttemptSync | AttemptFinish | AttemptUndo,
        epoch: int,
        stages: Mapping[int, int],
    ) -> None:
        """A process starts an attempt, and takes these groups to have so many stages."""
        fewer = {voter.group: number for voter in action.voters if (number := self.stages_of(voter)) is not None}
        if fewer != stages:
            raise Violation(f"{process} takes the stages of groups to be {stages}, not {fewer}")
        self.counts["attempt with fewer stages"] += bool(fewer)
        if isinstance(action, AttemptUndo):
            self.undos.attempts.add(action.attempt)
        opening = self._opened.get(action.attempt)
        if opening != Opening(action.step, frozenset(action.voters), epoch):
            raise Violation(f"{process} starts {action}, but the log says {opening}")
        if incarnation_of(process) not in action.voters:
            raise Violation(f"{process} reduces among {action.voters}")

    def voted(self, process: str, attempt: int, vote: Vote, audits: AuditDigests) -> None:
        """A process sends its vote, with what it has computed to compare."""
        is_wrong = audits.is_wrong
        self.undos.voted(incarnation_of(process), attempt, is_lasting=audits.is_lasting)
        is_late = attempt != self.attempt
        params = None if process in self._corrupted or is_late else self.params.after(self._generation, self.step)
        self.audits.voted(process, self.step, params, vote, is_wrong=is_wrong)
        if not is_late:
            self.suspects.voted(process, self.step, params, vote, is_wrong=is_wrong)
        self.ballots.add(process, attempt, vote)
        if incarnation_of(process) not in self.members:
            self.counts["vote of a fenced group"] += 1

    def updated(self, process: str, step: int, attempt: int, buckets: Sequence[Sums] | None) -> str:
        """A process applies the sums of its buckets. Returns what they change."""
        committed, members = self._commits.get(attempt, (None, frozenset()))
        if step != committed:
            raise Violation(f"{process} applies attempt {attempt} to step {step}, and not to {committed}")
        if incarnation_of(process) not in members:
            raise Violation(f"{process} was fenced before the commit of step {step}, and applies it")
        if buckets is None:
            raise Violation(f"{process} has no sum of attempt {attempt}, which is committed")
        self._work.applied(process, step, buckets)
        self.counts["step with buckets of several attempts"] += any(sums != buckets[0] for sums in buckets)
        return repr((step, attempt, [sorted(sums.items()) for sums in buckets]))

    def evaluated(self, process: str, generation: int, step: int, sums: Sequence[SetSum]) -> None:
        """A process learns the value of an evaluation."""
        params = self.params.after(generation, step)
        self._work.evaluated(process, step, sums, params, may_be_wrong=bool(self._corrupted))

    def corrupted(self, process: str) -> None:
        """The parameters of a process have changed behind its back."""
        self._corrupted.add(process)

    def took_state(self, process: str, donor: Incarnation) -> None:
        """A process goes on with the parameters of another, be they right or wrong."""
        if "{}.{}".format(*donor) in self._corrupted:
            self._corrupted.add(process)

    def refused(self, process: str, step: int, member: Member) -> None:
        """What the member has saved after so many steps is not to be used."""
        self.counts["refused checkpoint"] += 1
        may_be_any_group = self.partitions.exist or self._is_halted or self._was_lost_uncompared(member, step)
        self.saves.refused(process, step, member, None if may_be_any_group else self._corrupted | self.audits.wrong)

    def _was_lost_uncompared(self, member: Member, step: int) -> bool:
        """Whether it was lost before a commit has compared what there is after so many steps."""
        times = (*self._commits.values(), (self.step, self.members))
        return any(tuple(member) not in members for of, members in times if of == step)

    # --------------------------------------------------------------------------------------------------------- ends

    def stopped(self, process: str, stop: object) -> None:
        """A process comes to the end of the run."""
        self.counts[type(stop).__name__] += 1
        if isinstance(stop, FinishRun) and self._is_done:
            return
        # Others may have gone on without one that is late to read of a wipe-out.
        if isinstance(stop, StopWipeOut) and (
            self.partitions.was_wiped_out if stop.partitions else self._was_state_lost
        ):
            self.counts["state wipe-out"] += bool(stop.partitions)
            return
        if isinstance(stop, StopHalted) and self._is_halted:
            return
        raise Violation(f"{process} ends with {stop} after {self.step} committed steps; members {set(self.members)}")

    @property
    def took_part(self) -> frozenset[Incarnation]:
        """All who were ever members."""
        return frozenset(self._admitted)

    @property
    def awaits_restart(self) -> bool:
        """Whether the log ends in a wipe-out that no group has decided on."""
        return self._is_wiped_out() and not (self._is_done or self._is_given_up or self._is_halted)

    @property
    def _is_done(self) -> bool:
        # An evaluation after the last step is no reason to go back if a shard has no host.
        is_evaluated = not self._is_evaluation_due or (self._is_wiped_out() and bool(self.members))
        return self.step == self._work.num_steps and self._is_finished and is_evaluated

    def ended(self, running: list[str], *, may_restart: bool) -> None:
        """Nothing moves any more. `running`: processes of groups that have neither ended nor died; `may_restart`: a
        wipe-out is no end by itself.
        """
        if may_restart and self.awaits_restart:
            raise Violation(f"{running} wait for ever for training to start again")
        stuck = [process for process in running if incarnation_of(process) in self._admitted]
        if stuck:
            raise Violation(f"no progress: {stuck} wait for ever; the log ends with {self.entries[-3:]}")
        if not self._is_done and not self._is_wiped_out() and not self._is_halted:
            raise Violation(f"only {self.step} steps are committed, and every shard has a host")
        if self._is_done:
            fences = (entry for entry in self.entries if isinstance(entry, Fence) and entry.discard)
            self.saves.ended(self._work.num_steps, {f"{fence.group}.{fence.incarnation}" for fence in fences})

    def _has_hosts(self, groups: Collection[int]) -> bool:
        """Whether every shard has a host among them."""
        return bool(groups) if self._hosts is None else all(row & set(groups) for row in self._hosts)

    def _is_wiped_out(self) -> bool:
        groups = {group for group, _ in self.members}
        return self.partitions.is_wiped_out or not self._has_hosts(groups)
