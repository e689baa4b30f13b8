"""How far one rank has come in the run and in the step under way. The stages of the training loop share it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.stacking.plans import Microbatch, Numbered
from spare_megatron.voting.agreement import GroupOpinion


@dataclass(slots=True)
class StepUnderWay:
    """The step or evaluation under way."""

    step: int
    started_s: float
    """Monotonic time."""
    makespan: int
    """Largest load of the plan, in microbatches."""
    num_alive: int
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
        head: Log entries folded so far.
        num_steps: Committed steps in the parameters.
        lacks_params: Whether some rank of the group has parameters of an earlier step: a gather is due or broke.
        gather_evidence: Why the last broken gather failed, as far as this rank knows.
        gather_failure: Which resource this rank lacked for it; empty if none.
        save_ends: Finished saves of the group, which its votes report until a commit records them.
        is_leave_asked: Whether the group is asked now to leave the run, which its votes report.
        is_end_asked: Likewise whether this rank is asked to end the run.
        is_cut_off: Whether the time for that is over, so that the step under way is to be given up.
    """

    head: int = 0
    num_steps: int = 0
    num_restarts: int = 0
    lacks_params: bool = False
    gather_evidence: str = ""
    gather_failure: str = ""
    save_ends: list[SaveEnd] = field(default_factory=list)
    is_leave_asked: Callable[[], bool] = lambda: False
    is_end_asked: Callable[[], bool] = lambda: False
    is_cut_off: Callable[[], bool] = lambda: False
    step: StepUnderWay | None = None

    @property
    def now(self) -> StepUnderWay:
        assert self.step is not None, "no step has begun"
        return self.step
