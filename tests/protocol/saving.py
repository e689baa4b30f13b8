"""How a simulated group writes checkpoints, beside everything else that it does."""

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.stacking.layout import Member
from tests.protocol.saved import Content
from tests.protocol.store import conversation
from tests.protocol.surroundings import Steps, Surroundings, Until

_MOVES_TO_COPY = 10
"""Until there is a folder: about as long as a step takes."""
_MOVES_TO_END = 5
"""Of a process that finds itself fenced."""


class Saving:
    """One process's: all of it ends with the process."""

    def __init__(self, member: Member, world: Surroundings) -> None:
        self._member = member
        self._world = world
        self._num_under_way = 0

    def begin(self, action: SaveCheckpoint, head: int, content: Content) -> None:
        """Writes what it holds now, where so many entries of the log have been folded."""
        self._num_under_way += 1
        self._world.start_in_background(f"{self._member} saves {action.step}", self._write(action, head, content))

    def finish(self) -> Steps:
        """Waits until all of it is written."""
        yield Until(lambda: not self._num_under_way)

    def go_on_for_a_while(self) -> Steps:
        """The process is about to end, and has not yet."""
        for _ in range(_MOVES_TO_END if self._num_under_way else 0):
            yield None

    def _write(self, action: SaveCheckpoint, head: int, content: Content) -> Steps:
        saves = self._world.invariants.saves
        for _ in range(_MOVES_TO_COPY):
            yield None
        if self._world.is_there(self._member):
            saves.begun(self._member, action.step, content, head)
            yield None
            reason = yield from self._refusal(action, head)
            yield None
            if self._world.is_there(self._member) and not reason:
                saves.published(self._member, action.step)
                yield None
                if self._world.is_there(self._member):
                    earlier = [step for step in saves.visible if step <= action.step]
                    superseded = self._world.superseded(
                        earlier, action.doubtful, self._world.keep_last, None, action.audited_steps
                    )
                    saves.dropped(superseded)
                    self._world.invariants.counts["superseded checkpoint"] += len(superseded)
        self._num_under_way -= 1

    def _refusal(self, action: SaveCheckpoint, head: int) -> Steps:
        world = self._world
        return (yield from conversation(lambda store: world.refusal_in_log(world.log_type(store), head, action)))
