"""What each step and each evaluation of a history counts."""

from collections import Counter
from collections.abc import Sequence

from spare_megatron.core.log.loss_sums import EvaluationPolicy, SetSum
from spare_megatron.stacking.plans import Microbatch
from tests.protocol.communicators import Sums
from tests.protocol.evaluations import SET, loss_of
from tests.protocol.violation import Violation


class Work:
    """The microbatches of every step, and those of an evaluation."""

    def __init__(
        self, num_shards: int, sizes: Sequence[int], num_steps: int, evaluation: EvaluationPolicy | None
    ) -> None:
        self.num_shards, self.num_steps = num_shards, num_steps
        self._batches = [Counter(_microbatches(num_shards, size)) for size in sizes]
        self._eval_every = evaluation.every_steps if evaluation else 0
        self._evaluated = _microbatches(num_shards, evaluation.microbatches_per_shard if evaluation else 0)

    def has_evaluation(self, step: int) -> bool:
        """Whether one is due after so many steps."""
        is_last = step == self.num_steps
        return bool(self._eval_every and step and (is_last or step % self._eval_every == 0))

    def applied(self, process: str, step: int, buckets: Sequence[Sums]) -> None:
        """A process updates its parameters by the sums of its buckets."""
        batch = self._batches[step]
        for sums in buckets:
            counted = Counter(item for brought in sums.values() for item in brought)
            if counted != batch:
                wrong = {tuple(item): counted[item] for item in {*counted, *batch} if counted[item] != 1}
                raise Violation(f"{process} applies step {step}, which counts {wrong} times: {dict(sums)}")

    def evaluated(
        self, process: str, step: int, sums: Sequence[SetSum], params: str | None, *, may_be_wrong: bool
    ) -> None:
        """A process learns the value of an evaluation of these parameters."""
        [(name, loss, num_counted)] = sums
        expected = None if params is None else sum(loss_of(params, item) for item in self._evaluated)
        is_right = may_be_wrong or (name, loss) == (SET, expected)
        if not is_right or num_counted != len(self._evaluated):
            raise Violation(f"{process} learns {sums} after {step} steps, of {len(self._evaluated)} and {expected}")


def _microbatches(num_shards: int, size: int) -> list[Microbatch]:
    return [Microbatch(shard, k) for shard in range(num_shards) for k in range(size)]
