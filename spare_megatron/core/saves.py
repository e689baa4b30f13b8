"""When a checkpoint is taken, and by which group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.core.experience import Cadence, Experience
from spare_megatron.core.placement import Placement
from spare_megatron.core.slices import Hosts, Ownership
from spare_megatron.core.topology import GroupId, Member

_FIRST_RETRY = 1 / 8
"""Of an interval in seconds passes after a save that has failed; with every further failure twice as much, up to the
whole. Steps that were stated stay as they are.
"""


class SaveEnd(NamedTuple):
    """How a save has ended.

    Attributes:
        step: Committed steps that it was to hold.
        is_saved: It is visible.
        stall_s: How long it kept training waiting.
    """

    step: int
    is_saved: bool
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """An action: save the parameters and all state after this many committed steps.

    Attributes:
        step: The committed steps.
        member: Who saves: everything, or all but slices.
        voters: Who takes part then, and may be writing an earlier checkpoint.
        epoch: Number of the set of groups.
        cadence: Why now, where the run decides by what it has measured.
        hosts: For each slice of the optimizer's state, who holds it; none where everybody has all state.
        owners: For each slice, the host that is to write it (`core.slice_saves`).
        is_last: The run has no further steps.
        doubtful: Steps after which something was saved that is not known to be right; this is one of them.
    """

    step: int
    member: Member
    voters: tuple[Member, ...]
    epoch: int
    cadence: Cadence | None = None
    hosts: Hosts = ()
    owners: tuple[Member, ...] = ()
    is_last: bool = False
    doubtful: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseCheckpoint:
    """An action: see to it that nobody begins with this checkpoint, for it holds state that was found to be wrong.

    Attributes:
        step: Committed steps that it holds.
        member: Who has saved it, or is about to.
        epoch: Number of the set of groups then.
        reason: What was wrong.
    """

    step: int
    member: Member
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When checkpoints are due.

    Attributes:
        interval_s: Seconds from one checkpoint to the next; None saves at no time.
        interval_steps: Steps from one checkpoint to the next; None saves after no number of steps.
        group_life_s: Instead: the best interval by what the run has measured; with this as prior mean time until a
            given group is lost.
        saves_last: The last step of the run is saved, too.
    """

    interval_s: float | None = None
    interval_steps: int | None = None
    group_life_s: float | None = None
    saves_last: bool = False


class Saves:
    """What the log has said of saves so far. All times are those of the log's clock.

    Args:
        policy: When they are due; None: never.
        placement: Who hosts what.
        first_step: Committed steps with which the run begins.
        num_steps: Those with which it ends at the latest.
        last_resort: Every group can compute every shard.
    """

    def __init__(
        self, policy: SavePolicy | None, placement: Placement, first_step: int, num_steps: int, *, last_resort: bool
    ) -> None:
        self._policy = SavePolicy() if policy is None else policy
        self._num_steps = num_steps
        self._last_at_s = 0.0
        self._last_step = first_step
        self._num_saves = 0
        self._num_failed = 0  # in a row
        self._share = 1.0  # of an interval in seconds, until the next save
        self._under_way: tuple[int, Member] | None = None
        self._gone: set[Member] = set()  # since the last save was begun
        self._lost_since_commit: set[Member] = set()
        self._first_step = first_step
        self._taken: set[int] = set()  # committed steps, but for what is refused, or undone
        self._refused: Member | None = None  # who has saved what was refused last
        self.void: set[int] = set()
        """Steps after which was saved what is refused, or undone."""
        life_s = self._policy.group_life_s
        self._experience = None if life_s is None else Experience(life_s, placement, last_resort=last_resort)

    @property
    def saved(self) -> frozenset[int]:
        """Committed steps of which this training may have checkpoints that are sound, those it began with included."""
        return frozenset((self._first_step, *self._taken))

    def is_due(self, step: int, at_s: float, members: Sequence[GroupId], *, is_last: bool) -> bool:
        """Whether the commit after which this many steps are committed takes a checkpoint.

        Args:
            step: The steps.
            at_s: The time.
            members: The groups that take part.
            is_last: It ends the run before all steps are trained.
        """
        policy = self._policy
        if policy.saves_last and (is_last or step == self._num_steps):
            return True
        interval_s = policy.interval_s
        if self._experience is not None:
            interval_s = self._experience.cadence(members).interval_s
        if interval_s is not None and at_s - self._last_at_s >= interval_s * self._share:
            return True
        return policy.interval_steps is not None and step - self._last_step >= policy.interval_steps

    def committed(self, at_s: float, num_members: int, ends: Iterable[SaveEnd]) -> None:
        """A step is committed, and with it saves are told to have ended."""
        self._lost_since_commit = set()
        if self._experience is not None:
            self._experience.committed(at_s, num_members)
        for end in ends:
            self._ended(end, at_s)
        if self._under_way is not None and self._under_way[1] in self._gone:
            self._under_way, self._share = None, 0.0

    def _ended(self, end: SaveEnd, at_s: float) -> None:
        if end.is_saved and self._experience is not None:
            self._experience.saved(end.stall_s)
        if self._under_way is None or self._under_way[0] != end.step:
            return
        self._under_way = None
        if end.is_saved:
            self._num_failed = 0
            return
        self._num_failed += 1
        self._last_at_s = at_s
        self._share = min(1.0, _FIRST_RETRY * 2 ** (self._num_failed - 1))

    def lost(self, members: Iterable[Member]) -> None:
        """These are lost. What one of them was saving is due again at once, but where steps are stated."""
        gone = set(members) - self._lost_since_commit
        self._gone |= gone
        self._lost_since_commit |= gone
        if self._experience is not None:
            self._experience.lost(member.group for member in gone)

    def refused(self, refusals: Iterable[RefuseCheckpoint]) -> None:
        """These checkpoints do not count."""
        for refusal in refusals:
            self._taken.remove(refusal.step)
            self.void.add(refusal.step)
            self._refused = refusal.member

    def lacks_last(self, step: int) -> bool:
        """Whether the run ends after this many steps, and nothing that was saved of them counts."""
        return self._policy.saves_last and step not in self.saved

    def admitted(self, members: Iterable[Member]) -> None:
        """These take part again."""
        if self._experience is not None:
            self._experience.admitted(member.group for member in members)

    def restarted(self, step: int, at_s: float) -> None:
        """Training begins again after this many committed steps: later ones are undone."""
        self.void |= {saved for saved in self._taken if saved > step}
        self._taken = {saved for saved in self._taken if saved <= step}
        self._begin(step, at_s)
        self._under_way = None
        self._lost_since_commit = set()
        if self._experience is not None:
            self._experience.restarted()

    def take(
        self,
        step: int,
        at_s: float,
        voters: tuple[Member, ...],
        epoch: int,
        slices: Ownership | None = None,
        *,
        is_last: bool = False,
    ) -> SaveCheckpoint:
        """The save that a commit asks for: by the groups in turn, for where one cannot write, the next may.

        Or another one of the same steps, by somebody else: whoever has written what is refused may be at it still.
        """
        cadence = None
        if self._experience is not None:
            cadence = self._experience.cadence(tuple(voter.group for voter in voters))
        self._begin(step, at_s)
        able = [voter for voter in voters if voter != self._refused] or voters
        member = able[self._num_saves % len(able)]
        self._num_saves += 1
        self._refused = None
        self._under_way = (step, member)
        self._taken.add(step)
        self.void.discard(step)
        return SaveCheckpoint(
            step=step,
            member=member,
            voters=voters,
            epoch=epoch,
            cadence=cadence,
            hosts=slices.hosts if slices else (),
            owners=slices.owners if slices else (),
            is_last=is_last,
        )

    def _begin(self, step: int, at_s: float) -> None:
        self._last_at_s, self._last_step, self._share = at_s, step, 1.0
        self._gone.clear()
