"""The metrics of a step beside its loss, norm and learning rate: their keys, and their values in a run."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from spare_megatron.journal.records import UpdateRecord

KINDS = {
    "train/loss/": "corpus",
    "train/grad_norm/": "part",
    "train/expert_load/": "layer",
    "data/epochs/": "corpus",
    "data/tokens/": "corpus",
}
"""How the keys of metrics begin of which there are several, and what the names are of that follow."""

MEMORY = ("perf/memory_allocated_bytes", "perf/memory_reserved_bytes", "perf/memory_peak_bytes")
"""Of the fullest rank: groups report the values of their own."""


def metrics_of(record: UpdateRecord) -> dict[str, float]:
    """The further metrics of a committed step, by their keys."""
    return {**{f"train/{name}": mean for name, mean in record.terms.items()}, **record.values}


def model_figures(of_ranks: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Figures of a whole model, of what its ranks add: the root of one sum, and of several the largest over their mean.

    >>> model_figures([{"norm": [9.0]}, {"norm": [16.0], "load": [1, 3]}, {"load": [3, 5]}])
    {'norm': 5.0, 'load': 1.3333333333333333}
    """
    sums: dict[str, list[float]] = {}
    for of_rank in of_ranks:
        for key, own in of_rank.items():
            sums[key] = [one + other for one, other in zip(sums.get(key, [0.0] * len(own)), own, strict=True)]
    return {
        key: max(of_key) * len(of_key) / sum(of_key) if len(of_key) > 1 else of_key[0] ** 0.5
        for key, of_key in sums.items()
    }


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

    def of(self, attempts: npt.NDArray[np.intp]) -> dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]]:
        """By key, numbers in their order: indices into ascending `attempts`, and the values there."""
        found = {}
        for key, (known, values) in sorted(self._found.items(), key=lambda item: (len(item[0]), item[0])):
            is_wanted = np.isin(known, attempts)
            found[key] = np.searchsorted(attempts, np.array(known)[is_wanted]), np.array(values)[is_wanted]
        return found
