"""The metrics of a step beside its loss, norm and learning rate: their keys, how they are drawn, and their values."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spare_megatron.journal.records import UpdateRecord


class Family(NamedTuple):
    """Metrics in one plot: the keys that begin with `prefix`; what follows is the name of a `kind`, if there is one.
    Values are divided by `unit` for the axis.
    """

    prefix: str
    kind: str
    title: str
    axis: str
    unit: float = 1.0

    @property
    def exported(self) -> str:
        """The metric that all of them are for Prometheus, whose label is `kind`."""
        return f"{self.prefix.replace('/', '_')}by_{self.kind}"


FAMILIES = (
    Family("train/loss/", "corpus", "Loss by corpus", "loss, nats per token"),
    Family("perf/memory_", "", "Memory of the fullest rank", "GiB", 2.0**30),
    Family("data/epochs/", "corpus", "Epochs of each corpus", "epochs"),
    Family("data/tokens/", "corpus", "Tokens of each corpus", "tokens"),
)

MEMORY = ("perf/memory_allocated_bytes", "perf/memory_reserved_bytes", "perf/memory_peak_bytes")
"""Of the fullest rank: groups report the values of their own."""


def metrics_of(record: UpdateRecord) -> dict[str, float]:
    """The further metrics of a committed step, by their keys."""
    return {**{f"train/{name}": mean for name, mean in record.terms.items()}, **record.values}


class StepValues:
    """Further metrics of attempts: of each the largest value that a group reports."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[array[int], array[float]]] = {}  # attempts, ascending, and values

    def add(self, attempt: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            attempts, values = self._found.setdefault(key, (array("q"), array("d")))
            place = bisect_left(attempts, attempt)
            if place < len(attempts) and attempts[place] == attempt:
                values[place] = max(values[place], value)
            else:
                attempts.insert(place, attempt)
                values.insert(place, value)

    def of(
        self, family: Family, attempts: npt.NDArray[np.intp]
    ) -> dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]]:
        """By what follows the prefix of a family: indices into ascending `attempts`, and the values there."""
        found = {}
        for key, (known, values) in self._found.items():
            if key.startswith(family.prefix):
                own, is_wanted = np.array(known), np.isin(known, attempts)
                places = np.searchsorted(attempts, own[is_wanted])
                found[key.removeprefix(family.prefix)] = places, np.array(values)[is_wanted] / family.unit
        return found
