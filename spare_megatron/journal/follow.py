"""How a run stands, brought up to date from its directory whenever that is asked for."""

from pathlib import Path

from spare_megatron.journal.format import require_known_format
from spare_megatron.journal.standing import UNREAD, Standing
from spare_megatron.journal.tail import JournalTail


class Follower:
    """Reads of a run's journal what is new, each time.

    Raises:
        ValueError: It is of a later format.

    Attributes:
        standing: How the run stood the last time.
    """

    def __init__(self, run_dir: Path) -> None:
        require_known_format(run_dir)
        self._tail = JournalTail(run_dir, without=UNREAD)
        self.standing = Standing()

    def poll(self) -> Standing:
        """How the run stands now."""
        standing = self.standing
        for line in self._tail.poll():
            standing.take(line)
        standing.begun(self._tail.sources)
        standing.settle(is_whole=standing.end is not None)
        return standing

    @property
    def damage(self) -> tuple[str, ...]:
        """What could not be read, or made sense of."""
        return (*self._tail.damage, *self.standing.damage)


def read_standing(run_dir: Path) -> Standing:
    """How the run stands by everything that is in its journal now.

    Raises:
        FileNotFoundError: The run directory has no journal.
        ValueError: It is of a later format.
    """
    if not any((run_dir / "journal").glob("*.jsonl")):
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    follower = Follower(run_dir)
    follower.poll().settle(is_whole=True)
    follower.standing.damage[:] = follower.damage
    return follower.standing
