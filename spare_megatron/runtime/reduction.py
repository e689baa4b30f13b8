"""One rank's part in the attempts to reduce a step: it judges what it adds, sums over the groups and votes."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from spare_megatron.core.guard import Finding, GradientGuard
from spare_megatron.core.liveness import Operation
from spare_megatron.core.messages import AttemptReduce, Event, Vote
from spare_megatron.core.phases import Phase
from spare_megatron.core.stepplan import Microbatch
from spare_megatron.core.topology import GroupId
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import ContributionRecord, VoteRecord, digest_of_work
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.agreement import GroupAgreement
from spare_megatron.runtime.communicators import CrossGroupCommunicator
from spare_megatron.runtime.probe import RankProbe


class Reduction:
    """The cross-group sums of one rank, attempt by attempt. It decides nothing.

    Args:
        trainer: The rank's part of the model.
        agreement: The group's voice.
        communicator: The rank's cross-group communicator.
        journal: The rank's journal; only leaders write here.
        probe: Told what the rank is about.
        guard: Judges this rank's gradients before they are summed with those of others.
    """

    def __init__(
        self,
        *,
        trainer: GroupTrainer,
        agreement: GroupAgreement,
        communicator: CrossGroupCommunicator,
        journal: JournalWriter,
        probe: RankProbe,
        guard: GradientGuard,
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._communicator = communicator
        self._journal = journal
        self._probe = probe
        self._guard = guard
        self._buffer: torch.Tensor | None = None
        self.loss_sum = float("nan")
        """The summed loss of the last attempt, known to every rank of the group; NaN unless it was complete."""

    @property
    def ready_at_s(self) -> float | None:
        """Monotonic time at which the last attempt had its communicator; None if it never had one."""
        return self._communicator.ready_at_s

    @property
    def sums(self) -> torch.Tensor:
        """The sums over all groups, once an attempt is committed."""
        assert self._buffer is not None, "a commit needs the group's own complete sum"
        return self._buffer

    def build_communicator(self, key: int, members: Sequence[GroupId]) -> None:
        """Begins to build the communicator of the next attempt."""
        self._communicator.begin_build(key, members)

    def attempt(
        self, action: AttemptReduce, computed: Sequence[Microbatch], *, params_digest: str, head: int
    ) -> list[Event]:
        """Sums over the groups out of place and casts the group's vote.

        Collective over: all ranks of the group.

        Args:
            action: What to reduce, with whom.
            computed: The microbatches in the rank's local sums.
            params_digest: What the vote says of the group's parameters.
            head: Entries of the log folded so far; the next one ends the attempt.

        Returns:
            On the leader whose vote was the last, all votes; else nothing.

        Raises:
            UnsoundGradient: What this group would add must not be added.
        """
        buffer = self._trainer.gradients.new_buffer() if self._buffer is None else self._buffer
        self._buffer = None
        self._probe(Phase.BEFORE_REDUCE)
        self._trainer.gradients.pack_into(buffer)
        self._judge(action.step, buffer, len(computed))
        self._write_contribution(action, computed)
        with self._probe.during(Operation.REDUCE):
            is_complete = self._communicator.reduce(buffer, lambda: self._agreement.is_written(head))
        if is_complete:
            self._buffer = buffer
            self._probe(Phase.AFTER_REDUCE)
        return self._vote(action, is_complete, digest_of_work(computed), params_digest)

    def _judge(self, step: int, buffer: torch.Tensor, num_computed: int) -> None:
        """Lets nothing into the sum that would spoil it for all groups.

        Collective over: all ranks of the group, so that all of them raise the same, whoever found it.

        Raises:
            UnsoundGradient: A rank of this group has gradients that are not finite, or far larger than usual.
        """
        norm = self._trainer.gradients.norm_of(buffer)
        finding = self._guard.judge(step, norm, num_computed)
        with self._probe.during(Operation.SETTLE):
            finding = Finding(self._agreement.highest(finding))
        if finding is not Finding.SOUND:
            raise self._guard.error(finding, step)

    def _vote(self, action: AttemptReduce, is_complete: bool, work_digest: str, params_digest: str) -> list[Event]:
        loss_sum = None if self._buffer is None else self._trainer.loss_of(self._buffer)
        with self._probe.during(Operation.SETTLE):
            opinion = self._agreement.settle(is_complete=is_complete, work_digest=work_digest, loss_sum=loss_sum)
        self.loss_sum = opinion.loss_sum
        last_votes = None
        if self._agreement.is_leader:
            record = VoteRecord(
                group=self._agreement.member.group,
                step=action.step,
                attempt=action.attempt,
                is_complete=opinion.is_complete,
                work_digest=work_digest,
                evidence=self._communicator.evidence,
                incarnation=self._agreement.member.incarnation,
            )
            self._journal.write(record)
            vote = Vote(is_complete=opinion.is_complete, plan_digest=action.plan_digest, params_digest=params_digest)
            with self._probe.during(Operation.VOTE):
                last_votes = self._agreement.vote(action.attempt, vote, action.voters)
        self._probe(Phase.AFTER_VOTE)
        return [] if last_votes is None else [last_votes]

    def _write_contribution(self, action: AttemptReduce, computed: Sequence[Microbatch]) -> None:
        if not self._agreement.is_leader:
            return
        microbatches: dict[str, list[int]] = defaultdict(list)
        for item in computed:
            microbatches[str(item.shard)].append(item.index)
        record = ContributionRecord(
            group=self._agreement.member.group,
            step=action.step,
            attempt=action.attempt,
            epoch=action.epoch,
            members=[int(member) for member in action.members],
            microbatches=dict(microbatches),
            incarnation=self._agreement.member.incarnation,
        )
        self._journal.write(record)
