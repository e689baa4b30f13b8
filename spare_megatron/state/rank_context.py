"""What the components of one rank share, and how far the rank has come in the run and in the step under way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.formats.frames import Address
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import Record
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.heartbeats import RankProbe
from spare_megatron.process.specs import RankSpec
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch, Numbered
from spare_megatron.state.optimizer_state import OptimizerState
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.agreement import GroupAgreement, GroupOpinion
from spare_megatron.voting.voting import Voting


@dataclass(slots=True)
class StepUnderWay:
    step: int
    started_s: float
    """Monotonic time."""
    makespan: int
    """Largest load of the plan, in microbatches."""
    num_alive: int
    num_missing_stages: int = 0
    """Of the groups that began it."""
    computed: list[Microbatch] = field(default_factory=list)
    """The microbatches in the rank's local sums."""
    plans: list[str] = field(default_factory=list)
    """Digests of the plans that are computed."""
    num_recomputed: int = 0
    """Microbatches that all groups have computed again for recoveries that the commit of the step has ended."""
    epoch: int = 0
    """Of the last attempt."""
    is_evaluation: bool = False
    """It is the evaluation after `step` committed steps."""
    opinion: GroupOpinion | None = None
    """Of the last attempt to reduce; None if the group abstained."""
    has_audits: bool = False
    """Some group audits another one in this step."""
    audited: list[Microbatch] = field(default_factory=list)
    """The microbatches of which this group has digests."""
    num_planned: int = 0
    """Of these, audited by the plan of the step; they come first."""
    losses: dict[Numbered, float] = field(default_factory=dict)
    """Of the microbatches that this rank has counted, as far as it knows them."""
    suspects: set[Microbatch] = field(default_factory=set)
    """Those of them whose losses are suspect."""
    questioned: set[Microbatch] = field(default_factory=set)
    """The microbatches about whose losses this group was asked."""

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.started_s


@dataclass(slots=True)
class RankProgress:
    """How far one rank has come.

    Attributes:
        num_steps: Committed steps in the parameters.
        lacks_params: Whether some rank of the group has parameters of an earlier step: a gather is due or broke.
        gather_evidence: Why the last broken gather failed, as far as this rank knows.
        gather_failure: Which resource this rank lacked for it; empty if none.
        save_ends: Finished saves of the group, which its votes report until a commit records them.
        is_leave_asked: Whether the group is asked now to leave the run, which its votes report.
        is_end_asked: Likewise whether this rank is asked to end the run.
    """

    num_steps: int = 0
    num_restarts: int = 0
    lacks_params: bool = False
    gather_evidence: str = ""
    gather_failure: str = ""
    save_ends: list[SaveEnd] = field(default_factory=list)
    is_leave_asked: Callable[[], bool] = lambda: False
    is_end_asked: Callable[[], bool] = lambda: False
    step: StepUnderWay | None = None

    @property
    def now(self) -> StepUnderWay:
        assert self.step is not None, "no step has begun"
        return self.step


@dataclass(slots=True, kw_only=True)
class RankContext:
    """What one rank trains with, built by `rank.assembly`: a component takes this and what is its own."""

    spec: RankSpec
    controller: Controller
    trainer: GroupTrainer
    voting: Voting
    communicators: Sequence[CrossGroupCommunicator]
    """Of the slabs, in layer order."""
    store: ControlStore
    journal: JournalWriter
    send: Callable[[Any], None]
    probe: RankProbe
    progress: RankProgress
    optimizer_state: OptimizerState = field(init=False)
    """Set once the rest is there, which its stacked form takes."""

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

    def find_server(self, member: Member, slab: int = 0) -> Address:
        """The piece server of the member's rank that has a slab of this one, published before the member took part."""
        key = keys.piece_server(member, self.trainer.slabs[slab].position)
        return Address.parse(self.store.wait(key, self.config.reduce.timeout_s))
