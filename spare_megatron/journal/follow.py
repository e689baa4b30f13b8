"""How a run stands, brought up to date from its directory whenever that is asked for."""

from pathlib import Path

from spare_megatron.journal.format import require_known_format
from spare_megatron.journal.standing import PARAMS, UNREAD, Standing
from spare_megatron.journal.tail import JournalTail


class Follower:
    """Reads of a run's journal what is new, each time.

    Args:
        run_dir: The directory of the run.
        with_params: Reads digests of parameters, too.

    Raises:
        ValueError: It is of a later format.

    Attributes:
        standing: How the run stood the last time.
    """

    def __init__(self, run_dir: Path, *, with_params: bool = False) -> None:
        require_known_format(run_dir)
        self._tail = JournalTail(run_dir, without=UNREAD if with_params else (*UNREAD, PARAMS))
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


def read_standing(run_dir: Path, *, with_params: bool = False) -> Standing:
    """How the run stands by everything that is in its journal now. The arguments are those of `Follower`.

    Raises:
        FileNotFoundError: The run directory has no journal.
        ValueError: It is of a later format.
    """
    if not any((run_dir / "journal").glob("*.jsonl")):
        raise FileNotFoundError(f"{run_dir} holds no journal (journal/*.jsonl); is it the directory of a run?")
    follower = Follower(run_dir, with_params=with_params)
    follower.poll().settle(is_whole=True)
    follower.standing.damage[:] = follower.damage
    return follower.standing
