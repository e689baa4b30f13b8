"""Whether random faults leave every slice of the optimizer state a host that is known to be right.

Who holds a copy of a slice follows from when groups are lost and taken in, which nobody knows beforehand. So the losses
are counted that lie closer together than `faults.recovery_steps`, by when lost copies have been made anew: with h hosts
of each slice they are at most h - 1, whosever they are.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SliceMargin:
    """The losses so far.

    Attributes:
        redundancy: Hosts of each slice, r_o.
        recovery_steps: Steps within which lost copies are made anew and, again within as many, compared.
    """

    redundancy: int
    recovery_steps: int
    losses: list[int] = field(default_factory=list)
    """The step of each, without those of groups whose state went wrong."""
    flips: list[int] = field(default_factory=list)
    """The steps at which state went wrong on a group, which is lost for it."""

    def allows(self, step: int, num_lost: int, num_members: int, *, is_flip: bool) -> bool:
        """Whether it leaves every slice enough hosts.

        With wrong state on one of h hosts and k others that are lost, or have a copy that was not compared since, more
        than half of the h are to say what is right: 2 (h - k - 1) > h.

        Args:
            step: When.
            num_lost: Groups that are lost with it.
            num_members: Groups that take part before it.
            is_flip: Whether they are lost because their state has gone wrong.
        """
        hosts = min(self.redundancy, num_members)
        if self._num_since(step - self.recovery_steps) + num_lost >= hosts:
            return False
        if is_flip:
            return self._confirms(hosts, step, 0)
        return all(self._confirms(hosts, flip, num_lost) for flip in self.flips if flip + self.recovery_steps > step)

    def hit(self, step: int, num_lost: int, *, is_flip: bool) -> None:
        """It has been drawn."""
        (self.flips if is_flip else self.losses).extend([step] * num_lost)

    def changes(self) -> list[int]:
        """The steps at which more may be allowed."""
        hits = [*self.losses, *self.flips]
        return [step + times * self.recovery_steps for step in hits for times in (1, 2)]

    def _num_since(self, step: int) -> int:
        return sum(hit > step for hit in (*self.losses, *self.flips))

    def _confirms(self, hosts: int, flip: int, num_more: int) -> bool:
        """Whether wrong state on one host is found, with so many more losses than there have been."""
        num_others = sum(hit > flip - 2 * self.recovery_steps for hit in self.losses)
        num_others += sum(hit > flip - 2 * self.recovery_steps and hit != flip for hit in self.flips)
        return 2 * (hosts - num_others - num_more - 1) > hosts
