"""The right parameters of a history, which all its processes have."""

from tests.protocol.partitions import WRONG
from tests.protocol.violation import Violation


class KnownParams:
    """By the number of restarts, committed steps, and whether a round with other sites is applied."""

    def __init__(self) -> None:
        self._params: dict[tuple[int, int, bool], str] = {}

    def after(self, generation: int, step: int) -> str | None:
        """With the round after that step, if there was one."""
        return self._params.get((generation, step, True), self._params.get((generation, step, False)))

    def undone(self, generation: int, step: int) -> None:
        """A new generation begins with those that this step had."""
        right = max(key for key in self._params if key[1] == step)
        self._params[generation, step, False] = self._params[right]

    def has(self, process: str, generation: int, step: int, params: str, *, is_synced: bool = False) -> None:
        """A process has these parameters after this many steps, since that many restarts, and after a round."""
        key = generation, step, is_synced or params == self._params.get((generation, step, True))  # a newcomer's
        if not params.startswith(WRONG) and self._params.setdefault(key, params) != params:
            raise Violation(f"{process} has other parameters after {step} steps than the others")
