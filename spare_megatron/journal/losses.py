"""Values of evaluations, which log entries hold as exact sums."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spare_megatron.formats.quantities import format_steps

FRACTION_BITS = 32
"""Losses are sums in multiples of 2^-32 nats."""

Sums = Sequence[Sequence[Any]]
"""(name, loss, tokens) of each validation set; no loss if it is not finite."""


def mean_loss(sums: Sums) -> float:
    """Mean cross entropy per token over these sets, in nats; NaN if it is not finite or nothing was counted.

    >>> mean_loss([("a", 3 << 32, 1), ("b", 5 << 32, 3)])
    2.0
    """
    num_tokens = sum(num for _, _, num in sums)
    losses = [loss for _, loss, _ in sums if loss is not None]
    # Division of integers rounds once.
    return sum(losses) / (num_tokens << FRACTION_BITS) if num_tokens and len(losses) == len(sums) else math.nan


def losses_of(sums: Sums) -> dict[str, float]:
    """`mean_loss` of each set."""
    return {name: mean_loss([(name, loss, num_tokens)]) for name, loss, num_tokens in sums}


LastLosses = dict[str, dict[str, float | None]]
"""Validation set -> `step` and `loss`."""


def last_losses(entries: Mapping[int, Mapping[str, Any]]) -> LastLosses:
    """The last evaluation of each set, as `summary.json` has it; a loss that is not finite is None."""
    found: LastLosses = {}
    for index in sorted(entries):
        if entries[index]["entry"] == "evaluated":
            found |= losses_of_entry(entries[index])
    return found


def text_of_evaluation(last: Mapping[str, float | None]) -> str:
    """A set's last evaluation for people."""
    loss = last["loss"]
    return f"{'not finite' if loss is None else f'{loss:.4f}'} after {format_steps(int(last['step'] or 0))}"


def losses_of_entry(entry: Mapping[str, Any]) -> LastLosses:
    """Step and loss of each set by the entry of an evaluation."""
    return {
        name: {"step": entry["step"], "loss": None if math.isnan(loss) else loss}
        for name, loss in losses_of(entry.get("sums", ())).items()
    }
