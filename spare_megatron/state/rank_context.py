"""What the components of one rank share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.controller.controller import Controller
from spare_megatron.formats.piece_frames import Address
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import Record
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.process.specs import RankSpec
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.rank_progress import RankProgress
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.voting import Voting


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank: what it trains with and how it reaches the others. `rank.assembly` builds it.

    A component of a rank takes this and what is its own. `send` sends a report to the supervisor.
    """

    spec: RankSpec
    controller: Controller
    trainer: GroupTrainer
    voting: Voting
    communicator: CrossGroupCommunicator
    store: ControlStore
    journal: JournalWriter
    send: Callable[[Any], None]
    probe: RankProbe
    progress: RankProgress

    @property
    def config(self) -> RunConfig:
        return self.spec.config

    @property
    def member(self) -> Member:
        return self.spec.member

    @property
    def agreement(self) -> GroupAgreement:
        return self.voting.agreement

    @property
    def groups(self) -> list[GroupId]:
        """All that may ever take part."""
        return [GroupId(group) for group in range(self.config.layout.most_groups)]

    def write_if_leader(self, record: Record) -> None:
        """Journals what one rank records for its group."""
        if self.agreement.is_leader:
            self.journal.write(record)

    def find_server(self, member: Member) -> Address:
        """The piece server of the member's rank at the same position, published before the member took part."""
        key = keys.piece_server(member, self.spec.rank)
        return Address.parse(self.store.wait(key, self.config.reduce.timeout_s))
