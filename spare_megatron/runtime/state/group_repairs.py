"""A group's copies of slices: begun when the log asks for them, told in its votes when all of its ranks have them."""

from spare_megatron.core.liveness import Operation
from spare_megatron.core.slice_actions import StartRepairs
from spare_megatron.core.topology import SliceId
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import RedundancyRecord, RepairRecord
from spare_megatron.runtime.process.probe import RankProbe
from spare_megatron.runtime.state.repair import SliceRepairs
from spare_megatron.runtime.vote.agreement import GroupAgreement


class GroupRepairs:
    """One rank's part in the copies of its group.

    Args:
        repairs: The copies of this rank.
        agreement: The group's voice.
        journal: The rank's journal; only leaders write here.
        probe: Told what the rank is about.
    """

    def __init__(
        self, *, repairs: SliceRepairs, agreement: GroupAgreement, journal: JournalWriter, probe: RankProbe
    ) -> None:
        self._repairs = repairs
        self._agreement = agreement
        self._journal = journal
        self._probe = probe
        self._told: frozenset[SliceId] = frozenset()
        self._moving: frozenset[SliceId] = frozenset()  # to this group

    def start(self, action: StartRepairs) -> None:
        """Makes these copies from now on; they are all that any group is to make."""
        member = self._agreement.member
        self._repairs.assign(action)
        self._told &= frozenset(self._repairs.whole())
        self._moving = frozenset(move.slice for move in action.moves if move.receiver == member)
        if self._agreement.is_leader:
            record = RedundancyRecord(
                group=member.group,
                step=self._repairs.step,
                num_missing=len(action.repairs),
                num_hosted=sum(member in row for row in action.hosts),
            )
            self._journal.write(record)

    def restored(self) -> tuple[SliceId, ...]:
        """The slices that the group was to copy and whose copies are whole on all of its ranks.

        Collective over: all ranks of the group.
        """
        here = self._repairs.whole()
        if not here:
            return ()
        with self._probe.during(Operation.SETTLE):
            everywhere = self._agreement.shared(list(here.values()))
        restored = tuple(number for number, is_whole in zip(here, everywhere, strict=True) if is_whole)
        if self._agreement.is_leader:
            for number in restored:
                if number not in self._told:
                    self._write(number)
        self._told = frozenset(restored)
        return restored

    def _write(self, number: SliceId) -> None:
        made = self._repairs.made(number)
        record = RepairRecord(
            group=self._agreement.member.group,
            step=self._repairs.step,
            slice=number,
            donor=made.repair.donor.group,
            is_move=number in self._moving,
            num_bytes=self._repairs.num_bytes(number),
            repair_s=round(made.repair_s, 6),
        )
        self._journal.write(record)
