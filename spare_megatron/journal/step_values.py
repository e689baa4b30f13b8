"""The metrics of a step beside its loss, norm and learning rate: their keys, how they are drawn, and their values."""

import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spare_megatron.journal.records import UpdateRecord


class Family(NamedTuple):
    """Metrics in one plot. `pattern`: of their keys, with a group for what tells them apart, if anything does; for
    Prometheus that is the label `exported[1]` of `exported[0]`. `unit`: what values are divided by for the axis.
    """

    pattern: str
    title: str
    note: str
    axis: str
    exported: tuple[str, str] = ("", "")
    unit: float = 1.0


FAMILIES = (
    Family(
        r"train/loss/(.+)",
        "Loss by corpus",
        "Over the tokens of each corpus of the blend.",
        "loss, nats per token",
        ("train_corpus_loss", "corpus"),
    ),
)


def metrics_of(record: UpdateRecord) -> dict[str, float]:
    """The further metrics of a committed step, by their keys."""
    return {f"train/{name}": mean for name, mean in record.terms.items()}


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
        """By what tells the metrics of a family apart: indices into ascending `attempts`, and the values there."""
        found = {}
        for key, (known, values) in self._found.items():
            if of_key := re.fullmatch(family.pattern, key):
                own, is_wanted = np.array(known), np.isin(known, attempts)
                places = np.searchsorted(attempts, own[is_wanted])
                found[of_key[1] if of_key.groups() else key] = places, np.array(values)[is_wanted] / family.unit
        return found
