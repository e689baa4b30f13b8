"""Connections between leaders and relays that delay, repeat and lose what they carry."""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

from spare_megatron.stacking.layout import Member

_GIVES_UP = (0.2, 0.01)
"""Chances of doing so, at every moment of a wait, of which a history has one."""
_LOST, _REPEATED = 0.1, 0.1


@dataclass(slots=True)
class Box:
    """What has come for one process.

    Attributes:
        votes: With the attempt and the voter, for a relay.
        entries: What a relay says that stands in the log, by index.
    """

    votes: list[tuple[int, Member, str]] = field(default_factory=list)
    entries: dict[int, str] = field(default_factory=dict)


class Post:
    """All connections between leaders and relays.

    Args:
        random: Decides what becomes of a message, and how long a process waits.
    """

    def __init__(self, random: Random) -> None:
        self.boxes: defaultdict[Member, Box] = defaultdict(Box)
        self._random = random
        self._gives_up = random.choice(_GIVES_UP)

    def gives_up(self) -> bool:
        return self._random.random() < self._gives_up

    def num_copies(self) -> int:
        """How often a message arrives."""
        luck = self._random.random()
        return 0 if luck < _LOST else 2 if luck < _LOST + _REPEATED else 1
