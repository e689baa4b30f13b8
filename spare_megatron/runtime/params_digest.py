"""The digest of a group's parameters, as its ranks agree on it, its journal has it and its votes say it."""

from spare_megatron.core.liveness import Operation
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import ParamsRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.agreement import GroupAgreement
from spare_megatron.runtime.probe import RankProbe


class ParamsDigest:
    """One rank's part in it.

    Args:
        trainer: The rank's part of the model.
        agreement: The group's voice.
        journal: The rank's journal; only leaders write here.
        probe: Told what the rank is about.
    """

    def __init__(
        self, *, trainer: GroupTrainer, agreement: GroupAgreement, journal: JournalWriter, probe: RankProbe
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._journal = journal
        self._probe = probe
        self.value = ""
        """What the next vote says of the parameters; empty where they are not compared."""

    def take(self) -> None:
        """Takes it of the parameters as they are.

        Collective over: all ranks of the group.
        """
        with self._probe.during(Operation.CHECK):
            sha256 = self._trainer.params_sha256()
        with self._probe.during(Operation.SETTLE):
            self.value = self._agreement.combine_digests(sha256)

    def write(self, step: int, num_restarts: int) -> None:
        """Journals it as that after this many committed steps of a run that has started again so often."""
        if self._agreement.is_leader:
            group = self._agreement.member.group
            self._journal.write(ParamsRecord(group=group, step=step, sha256=self.value, num_restarts=num_restarts))

    def check(self, step: int, num_restarts: int) -> None:
        """Takes and journals it.

        Collective over: all ranks of the group.
        """
        self.take()
        self.write(step, num_restarts)
