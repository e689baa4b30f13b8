"""What the controller says to a driver where the optimizer state is cut into slices (`core.slices`).

GatherParams follows an update, and StartRepairs a loss, a return or a finished copy. A step counts as done only when
all parameters are whole: a group that could not gather them computes nothing and says so in its next vote; after the
Retry all groups gather once more, from the owners that are left, and those groups compute what the others have. After
the last step AttemptFinish is the vote that says so, and the entry Finish its answer. A slice without a host is a
wipe-out at once, for nobody can update it. Copies that have become whole are named in votes; the commit that these
decide makes their members hosts. If that is for a move, the next votes compare all state, and the commit that they
decide has the donors let go. Where hosts differ (`core.comparison`) all groups gather all parameters anew.
"""

from dataclasses import dataclass

from spare_megatron.core.slices import Hosts, Ownership, Repair
from spare_megatron.core.topology import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherParams:
    """Gather all parameters over the cross-group communicator, unless this group has them.

    Every member takes part, also those that have them. Where it breaks, or the log goes on, the group lacks parameters:
    it skips what needs them, and says so in its next vote. Whoever sees it break says so at once, and all others, who
    would have to do it again in any case, give it up.

    Attributes:
        step: Committed steps that they hold.
        owners: For each slice, who sends it.
        is_anew: Nobody has them: those that were gathered may come from an owner that was put out for wrong ones. The
            next vote compares them again.
    """

    step: int
    owners: tuple[Member, ...]
    is_anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRepairs:
    """Make these copies in the background; they take the place of all that were to be made before.

    Attributes:
        repairs: Those that are missing, the most urgent first.
        hosts: For each slice, who holds the whole state. Whoever is neither a host of a slice nor to copy it lets go of
            what it has of it.
        moves: Copies that take the place of their donors', those included that are made and about to be compared.
        first_step: Committed steps that state must have seen to go into a copy that was not asked for before: gradients
            of the step under way may have been summed without its receiver (`core.scatter`).
    """

    repairs: tuple[Repair, ...]
    hosts: Hosts
    moves: tuple[Repair, ...] = ()
    first_step: int = 0

    @classmethod
    def of(cls, ownership: Ownership, first_step: int) -> "StartRepairs":
        """All copies that the log asks for."""
        return cls(repairs=ownership.repairs, moves=ownership.moves, hosts=ownership.hosts, first_step=first_step)

    @property
    def copies(self) -> tuple[Repair, ...]:
        """What is still to be copied, the most urgent first."""
        return (*self.repairs, *(move for move in self.moves if not self._is_made(move)))

    @property
    def is_compared(self) -> bool:
        """Whether the next vote compares all state: nobody lets go of a slice for a copy that may differ."""
        return any(map(self._is_made, self.moves))

    def _is_made(self, move: Repair) -> bool:
        return move.receiver in self.hosts[move.slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinish:
    """Vote on the state after the last step, so that the run can end. Nothing is computed or reduced.

    On whether this group holds all parameters, and what is in the checkpoint that was taken of it.

    Attributes:
        step: Committed steps.
        attempt: The attempt.
        voters: All groups that are left, each with its incarnation.
        plan_digest: Digest of the work of the last step, for the vote.
    """

    step: int
    attempt: int
    voters: tuple[Member, ...]
    plan_digest: str
