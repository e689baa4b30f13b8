"""The terms of a program's loss: what to differentiate for a microbatch, and what to add to the sums of the step."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from spare_megatron.config.program_file import LossTerm
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.mcore.gradients.gradients import GradientSums, counts_tokens
from spare_megatron.mcore.model.program import LOSS, Terms


class LossTerms:
    """Combines the terms of each microbatch so that one backward pass gives the gradient of the sum of their means.

    With sums S and counts C over the global batch the loss is S_0/C_0 + sum of w_k S_k/C_k, and its gradient that of
    S_0 + sum of w_k (C_0/C_k) S_k, divided by C_0 once it is known. So C_0/C_k must be known before: it is the ratio
    of the counts of every single microbatch, or the program is refused.
    """

    def __init__(
        self,
        config: RunConfig,
        declared: Mapping[str, LossTerm],
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        self._declared = declared
        self._groups, self._device = groups, device
        # Of this rank: each context-parallel rank counts its part of the sequence.
        self._num_tokens = config.train.micro_batch_size * config.model.seq_length // groups.cp.size()
        self._counts = counts_tokens(config)
        self._ratios: dict[str, Fraction] = {}

    def weighted(self, terms: Terms) -> Tensor:
        """The value to differentiate. ValueError: a normaliser is not known before the backward pass."""
        if terms.keys() != {LOSS, *self._declared}:
            raise ValueError(
                f"forward_step returned the terms {sorted(terms)}, and loss_terms declares "
                f"{sorted([LOSS, *self._declared])}; return those"
            )
        total, _ = terms[LOSS]
        for name, term in self._declared.items():
            if term.weight:
                total = total + term.weight * float(self._ratio(name, terms)) * terms[name][0]
        return total

    def add_to(self, gradients: GradientSums, terms: Terms) -> tuple[Tensor, Tensor | None]:
        """Adds the microbatch's sums and counts to those of the step. Returns as `of_microbatch`."""
        total, number = self.of_microbatch(terms)
        gradients.add_loss(total, number)
        if self._declared:
            sums = torch.stack([terms[name][0].detach().to(total.device) for name in self._declared])
            counts = torch.stack([self._tensor(name, self._number(terms[name][1])) for name in self._declared])
            gradients.add_terms(self._over_context(sums), self._over_context(counts))
        return total, number

    def of_microbatch(self, terms: Terms) -> tuple[Tensor, Tensor | None]:
        """The sum of a microbatch's loss, and its count unless all tokens always count."""
        return self.whole_sum(terms), self.whole_count(terms) if self._counts else None

    def whole_sum(self, terms: Terms) -> Tensor:
        """The loss of a microbatch, over the whole sequence."""
        return self._over_context(terms[LOSS][0].detach())

    def whole_count(self, terms: Terms) -> Tensor:
        """What the loss of a microbatch is over: an int64 for the whole sequence."""
        return self._over_context(self._tensor(LOSS, self._number(terms[LOSS][1])))

    def check_totals(self, loss: LossSum, terms: Sequence[LossSum]) -> None:
        """ValueError: another group has counts in another ratio, so that the gradient is not that of the means."""
        for (name, term), total in zip(self._declared.items(), terms, strict=True):
            ratio = self._ratios.get(name)
            if term.weight and ratio is not None and loss.num_tokens != ratio * total.num_tokens:
                raise ValueError(self._refusal(name, f"{loss.num_tokens} to {total.num_tokens} over all groups"))

    def _ratio(self, name: str, terms: Terms) -> Fraction:
        """Count of the loss over that of a term, the same in all microbatches."""
        count, other = terms[LOSS][1], terms[name][1]
        if count is other:
            ratio = Fraction(1)
        elif isinstance(count, Tensor) or isinstance(other, Tensor):
            raise ValueError(
                f"the counts of 'loss' and of {name!r} are not known before the backward pass: return the count of "
                f"'loss' for both, numbers that do not vary, or give {name!r} the weight 0"
            )
        else:
            number, divisor = self._number(count), self._number(other)
            if not divisor:
                raise ValueError(self._refusal(name, f"{number} to 0"))
            ratio = Fraction(number) / Fraction(divisor)
        if self._ratios.setdefault(name, ratio) != ratio:
            raise ValueError(self._refusal(name, f"{self._ratios[name]} and {ratio}"))
        return ratio

    def _refusal(self, name: str, found: str) -> str:
        return (
            f"the ratio of the counts of 'loss' and of {name!r} is not the same in all microbatches ({found}); make it "
            f"so, or give {name!r} the weight 0"
        )

    def _number(self, count: Any) -> Any:
        """A count as a program gives it; None stands for all tokens of the microbatch."""
        return self._num_tokens if count is None else count

    def _tensor(self, name: str, count: Any) -> Tensor:
        is_whole = not count.is_floating_point() if isinstance(count, Tensor) else isinstance(count, int)
        if not is_whole:
            raise ValueError(
                f"the count of {name!r} is {count!r}; return an int, or an integer tensor such as mask.sum().long()"
            )
        return torch.as_tensor(count, dtype=torch.int64, device=self._device)

    def _over_context(self, part: Tensor) -> Tensor:
        """A sum over the whole sequence; each context-parallel rank computes its part."""
        if self._groups.cp.size() == 1:
            return part
        whole = part.clone()
        torch.distributed.all_reduce(whole, group=self._groups.cp)
        return whole
