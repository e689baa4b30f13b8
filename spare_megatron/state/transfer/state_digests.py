"""The digests of a group's state, as its ranks agree on them, its journal has them and its votes say them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from spare_megatron.core.actions import StartRepairs
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.votes import Digests, SliceDigest
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import ParamsRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.stacking.layout import GroupId, SliceId
from spare_megatron.stacking.state_partitions import SliceCopy
from spare_megatron.voting.agreement import GroupAgreement


class StateDigests:
    """One rank's part in them.

    Args:
        trainer: The rank's part of the model.
        agreement: The group's voice.
        journal: The rank's journal; only leaders write here.
        probe: Told what the rank is about.
        every_steps: Steps between comparisons of the state of all groups; 0 for those after a recovery and at the end
            only.
        hosted: The slices that the group hosts at first, where there are any.
    """

    def __init__(
        self,
        *,
        trainer: GroupTrainer,
        agreement: GroupAgreement,
        journal: JournalWriter,
        probe: RankProbe,
        every_steps: int,
        hosted: Sequence[SliceId] = (),
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._journal = journal
        self._probe = probe
        self._every_steps = every_steps
        self._hosted = frozenset(hosted)
        self._copying: frozenset[SliceId] = frozenset()
        self._unproven: frozenset[SliceId] = frozenset()  # copied since all hosts were last compared
        self.value = Digests()
        """What is known of the state; empty where it is not compared."""
        self._hashing: Future[str] | None = None
        self._copied_from: GroupId | None = None
        self.is_wanted = False
        """Whether state is compared in any case as soon as it is held: after a loss, to save, before hosts let go."""
        self._after_save = 0  # steps after which what comes of saved state is compared

    def host(self, action: StartRepairs) -> None:
        """The group hosts other slices from now on."""
        member = self._agreement.member
        hosted = frozenset(SliceId(number) for number, row in enumerate(action.hosts) if member in row)
        # Whatever else comes to be hosted begins here, at the start or from a checkpoint.
        self._unproven = (self._unproven | (hosted - self._hosted) & self._copying) & hosted
        self._hosted = hosted
        self._copying = frozenset(copy.slice for copy in action.copies if copy.receiver == member)
        self.is_wanted |= action.is_compared

    def proven(self, copies: Iterable[SliceCopy]) -> None:
        """A commit says that these have been compared."""
        member = self._agreement.member
        self._unproven -= {copy.slice for copy in copies if copy.member == member}

    def check_saved(self, step: int, num_restarts: int, *, has_params: bool, is_last: bool) -> None:
        """The next vote compares the state that is saved after this many steps, and one compares what comes of it.

        What is wrong in the optimizer's moments shows in the parameters one update later, and so does what changes in
        this state while it is copied. After the last step there is no update, and moments are compared themselves.

        Collective over: all ranks of the group.

        Args:
            step: The steps.
            num_restarts: Of the run.
            has_params: Whether the group has all parameters; else they are compared when they are together.
            is_last: Whether the run has no further steps.
        """
        self._after_save = step + 1
        if not has_params:
            self.is_wanted = True
        elif not self.value.params:
            self.check(step, num_restarts)
        if is_last:
            self.hash_rest()

    def forget(self) -> None:
        """The state has changed."""
        self.value = Digests()

    def hold(self, step: int, num_restarts: int) -> None:
        """All parameters are those after this many steps. The next vote compares them if due or wanted.

        Collective over: all ranks of the group.
        """
        self.forget()
        is_due = step == self._after_save or (self._every_steps and step % self._every_steps == 0)
        if self.is_wanted or is_due:
            self.check(step, num_restarts)
        self.is_wanted = False

    def take(self) -> None:
        """Takes the digests of the state as it is.

        Collective over: all ranks of the group.
        """
        hosted, stacked = sorted(self._hosted), self._trainer.stacked
        with self._probe.during(Operation.CHECK):
            own = [self._trainer.params_sha256()]
            if stacked is not None:
                own += [stacked.state_sha256(number) for number in hosted]
        with self._probe.during(Operation.SETTLE):
            params, *slices = self._agreement.combine_digests(own)
        self.value = Digests(
            params=params,
            slices=tuple(
                SliceDigest(number, sha256, number not in self._unproven)
                for number, sha256 in zip(hosted, slices, strict=True)
            ),
        )

    def hash_rest(self, *, copied_from: GroupId | None = None) -> None:
        """The next vote tells of all other state, too, where every group holds all of it.

        It is hashed beside the training until that vote, and does not change before the update after it.

        Args:
            copied_from: The group that it has just been taken over from.
        """
        if self._trainer.stacked is None:
            self._hashing = _in_background(self._trainer.rest_of_state().sha256)
            self._copied_from = copied_from

    def told(self) -> Digests:
        """What the next vote says of the state.

        Collective over: all ranks of the group.
        """
        if self._hashing is not None:
            with self._probe.during(Operation.CHECK):
                own = self._hashing.result()
            with self._probe.during(Operation.SETTLE):
                [state] = self._agreement.combine_digests([own])
            self.value = replace(self.value, state=state, copied_from=self._copied_from)
            self._hashing = None
        return self.value

    def write(self, step: int, num_restarts: int) -> None:
        """Journals them as those after this many committed steps of a run that has started again so often."""
        if self._agreement.is_leader:
            record = ParamsRecord(
                group=self._agreement.member.group,
                step=step,
                sha256=self.value.params,
                num_restarts=num_restarts,
                slices={str(digest.slice): digest.sha256 for digest in self.value.slices},
            )
            self._journal.write(record)

    def check(self, step: int, num_restarts: int) -> None:
        """Takes and journals them.

        Collective over: all ranks of the group.
        """
        self.take()
        self.write(step, num_restarts)


def _in_background(work: Callable[[], str]) -> Future[str]:
    """What the work gives or raises, done by a thread that keeps no process from ending."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  (raised where it is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name="hash-state", daemon=True).start()
    return future
