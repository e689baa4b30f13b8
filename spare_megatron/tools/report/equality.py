"""Compares two runs bit by bit, as far as their journals show: losses, gradient norms, parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from spare_megatron.tools.report.history import CommittedSteps, History

ParamsDigests = Mapping[tuple[int, str], frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """The first step in which two runs differ, with the value of the quantity in each run."""

    step: int
    quantity: str
    values: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    num_steps: tuple[int, int]
    num_common: int
    """Steps whose losses and gradient norms both journals hold."""
    difference: RunDifference | None
    """The first difference in these; None if there is none."""
    params_step: int | None
    """Committed steps after which parameters are compared: the first that differ, else the last; None if the journals
    have no digests after the same number of steps."""
    kind: str
    """Which digests these are, `digest` or `sha256`."""
    digests: tuple[str, ...]
    """Those of all parameters of each run; empty if there are none."""

    @property
    def is_bitwise(self) -> bool:
        """Whether everything that both journals hold is equal, steps and parameters."""
        return self.num_common > 0 and self.difference is None and len(set(self.digests)) == 1

    def describe(self) -> str:
        return " ".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        if not self.num_common:
            yield "The runs cannot be compared step by step: their journals have no committed step in common."
        elif self.difference is not None:
            first, (left, right) = self.difference, self.difference.values
            yield f"Not bitwise equal: the runs first differ in step {first.step}: {first.quantity} {left} and {right}."
        else:
            what = "loss and gradient norm"
            if self.digests:
                yield "Bitwise equal:" if self.is_bitwise else "Not bitwise equal:"
            else:
                what = what.capitalize()
            yield f"{what} of {self._steps()} are the same to the last bit."
        yield from self._of_params()

    def _steps(self) -> str:
        if set(self.num_steps) == {self.num_common}:
            return f"all {self.num_common} steps"
        first, second = self.num_steps
        return f"the {self.num_common} steps that both journals hold (of {first} and {second})"

    def _of_params(self) -> Iterator[str]:
        if not self.digests:
            yield "Parameters cannot be compared: the journals have no digests of them after the same number of steps."
        elif len(set(self.digests)) == 1:
            yield f"Parameters after {self.params_step} steps: {self.kind} {self.digests[0]} in both."
        else:
            left, right = self.digests
            yield f"Parameters differ after {self.params_step} steps: {self.kind} {left} and {right}."


def compare(first: History, second: History) -> Equality | None:
    """Compares two runs; None if one of them is simulated."""
    if first.began_s is None or second.began_s is None:
        return None
    num_common, difference = _compare_steps(first.steps, second.steps)
    params_step, kind, digests = _compare_params(first.params, second.params)
    return Equality(
        num_steps=(int(np.sum(~first.steps.is_undone)), int(np.sum(~second.steps.is_undone))),
        num_common=num_common,
        difference=difference,
        params_step=params_step,
        kind=kind,
        digests=digests,
    )


def _compare_steps(first: CommittedSteps, second: CommittedSteps) -> tuple[int, RunDifference | None]:
    left, right = (np.flatnonzero(~steps.is_undone & ~np.isnan(steps.loss)) for steps in (first, second))
    common, in_left, in_right = np.intersect1d(first.step[left], second.step[right], return_indices=True)
    left, right = left[in_left], right[in_right]
    curves = {
        "loss": (first.loss[left], second.loss[right]),
        "gradient norm": (first.grad_norm[left], second.grad_norm[right]),
    }
    found = []
    for quantity, (ours, theirs) in curves.items():
        for index in np.flatnonzero(ours.view(np.int64) != theirs.view(np.int64))[:1]:
            values = float(ours[index]), float(theirs[index])
            found.append(RunDifference(step=int(common[index]), quantity=quantity, values=values))
    return len(common), min(found, key=lambda item: item.step, default=None)


def _compare_params(first: ParamsDigests, second: ParamsDigests) -> tuple[int | None, str, tuple[str, ...]]:
    """The steps after which parameters first differ, or were last compared, and the digests in both runs. Skips steps
    after which the groups of one run had different parameters: one of them was wrong.
    """
    common = [place for place in sorted(first.keys() & second.keys()) if len(first[place]) == len(second[place]) == 1]
    if not common:
        return None, "", ()
    place = next((place for place in common if first[place] != second[place]), common[-1])
    return *place, (*first[place], *second[place])
