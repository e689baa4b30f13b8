"""The batch in samples: `train.global_batch_size` and `train.rampup_batch_size` become microbatches per shard and steps
where a configuration is built, and are absent from then on.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spare_megatron.config.schema import RunConfig, SpareConfig

IN_SAMPLES: Mapping[str, str] = {
    "spare.microbatches_per_shard": "train.global_batch_size",
    **dict.fromkeys(("spare.ramp_start", "spare.ramp_increment", "spare.ramp_steps"), "train.rampup_batch_size"),
}
"""Settings, and those in samples that they follow from where these are given."""


def sequences_per_microbatch(config: RunConfig) -> int:
    """Sequences in one microbatch of every shard."""
    return config.layout.num_groups * config.train.micro_batch_size


def in_microbatches(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, dict[str, str]]:
    """The configuration without settings in samples, and by key why they are impossible, also beside `given` ones."""
    train, spare, each = config.train, config.spare, sequences_per_microbatch(config)
    rules: Mapping[str, Callable[[SpareConfig, Any, int], SpareConfig]]
    rules = {"global_batch_size": with_batch, "rampup_batch_size": with_ramp}
    problems: dict[str, str] = {}
    for name, rule in rules.items():
        value = getattr(train, name)
        try:
            meant = spare if value is None or each < 1 else rule(spare, value, each)
            for key in (key for key in IN_SAMPLES if key in given):
                own, other = (getattr(one, key.partition(".")[2]) for one in (spare, meant))
                if own != other:
                    raise ValueError(
                        f"means {key}={other}, but {key}={own}; remove one of them, or set the latter to that"
                    )
            spare = meant
        except ValueError as error:
            problems[f"train.{name}"] = f"train.{name}={list(value) if isinstance(value, tuple) else value} {error}"
    return replace(config, spare=spare, train=replace(train, global_batch_size=None, rampup_batch_size=None)), problems


def with_batch(spare: SpareConfig, samples: int, each: int) -> SpareConfig:
    """With a batch of so many samples; a microbatch of each group has `each`. A ValueError continues these."""
    if samples < 1 or samples % each:
        low = max(samples // each * each, 0)
        raise ValueError(
            f"is no multiple of {each}, the samples in a microbatch of each group (layout.num_groups x "
            f"train.micro_batch_size); set it to {f'{low} or ' if low else ''}{low + each}, or change one of these"
        )
    return replace(spare, microbatches_per_shard=samples // each)


def with_ramp(spare: SpareConfig, values: Sequence[int], each: int) -> SpareConfig:
    """With Megatron's ramp; of its samples to within the batch of a step, as stages of equally many steps have (start +
    batch - increment) / 2 samples per step on average. A ValueError continues the values.
    """
    if len(values) != 3 or min(values) < 1:
        raise ValueError("must be three numbers above 0: samples of the first step, of each increase, and of the ramp")
    (start, increment, samples), batch = values, spare.microbatches_per_shard * each
    if start % each or increment % each or start >= batch or (batch - start) % increment:
        raise ValueError(
            f"does not lead from {start} to the global batch of {batch} samples by steps of {increment}, in multiples "
            f"of {each} (layout.num_groups x train.micro_batch_size); change one of these"
        )
    steps = max(-(-2 * samples // (start + batch - increment)), (batch - start) // increment)
    return replace(spare, ramp_start=start // each, ramp_increment=increment // each, ramp_steps=steps)
