"""Where the seconds of a simulated run go."""

from collections.abc import Sequence

CAUSES = (
    "compute",
    "extra_compute",
    "jitter",
    "reduce",
    "detect",
    "agree",
    "rebuild",
    "patch",
    "fetch",
    "save",
    "restart",
    "rework",
    "join",
)
"""compute and jitter are what the steps take without losses; extra_compute what their compute takes beyond that, below
0 where lost groups leave processors to others; rebuild all that reducing again takes beyond a first reduction."""


class Ledger:
    """Virtual time, and what it was spent on. What a restart throws away becomes rework.

    Attributes:
        now_s: Virtual time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._kept = dict.fromkeys(CAUSES, 0.0)
        self._unsaved = dict.fromkeys(CAUSES, 0.0)

    def spend(self, cause: str, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self._unsaved[cause] += seconds

    def spend_until(self, at_s: float, phases: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
        """Time passes phase by phase, up to `at_s` at most. Returns what is left of the phases."""
        for index, (cause, seconds) in enumerate(phases):
            if self.now_s + seconds >= at_s:
                passed_s = max(at_s - self.now_s, 0.0)
                self.spend(cause, passed_s)
                return [(cause, max(seconds - passed_s, 0.0)), *phases[index + 1 :]]
            self.spend(cause, seconds)
        return []

    def keep(self) -> None:
        """All that was done so far is saved, or is the end of the run."""
        for cause, seconds in self._unsaved.items():
            self._kept[cause] += seconds
            self._unsaved[cause] = 0.0

    def throw_away(self) -> None:
        """All that was done since the last save has to be done again."""
        rework_s = sum(self._unsaved.values())
        self._unsaved = dict.fromkeys(CAUSES, 0.0)
        self._kept["rework"] += rework_s

    def terms(self) -> dict[str, float]:
        """Seconds by cause. They add up to `now_s`."""
        return {cause: self._kept[cause] + self._unsaved[cause] for cause in CAUSES}
