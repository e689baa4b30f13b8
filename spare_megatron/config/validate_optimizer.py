"""What is wrong with the optimizer's settings. Nothing is changed."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig


def optimizer_problems(config: RunConfig) -> Iterator[str]:
    """Every reason why the optimizer cannot be had as it is configured."""
    settings, steps = config.optimizer, config.train.steps
    for key, value in (("learning_rate", settings.learning_rate), ("eps", settings.eps)):
        if not value > 0.0:
            yield f"optimizer.{key}={value} must be above 0; raise it"
    for key, value in (
        ("min_learning_rate", settings.min_learning_rate),
        ("weight_decay", settings.weight_decay),
        ("clip_grad", settings.clip_grad),
    ):
        if not value >= 0.0:
            yield f"optimizer.{key}={value} must be at least 0; raise it"
    if settings.min_learning_rate > settings.learning_rate:
        yield (
            f"optimizer.min_learning_rate={settings.min_learning_rate} exceeds "
            f"optimizer.learning_rate={settings.learning_rate}; lower the first or raise the second"
        )
    if settings.warmup_steps > 0 and settings.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps={settings.warmup_steps} must be below train.steps={steps}; "
            f"lower the first or raise the second"
        )
    yield from _sharding(config)


def _sharding(config: RunConfig) -> Iterator[str]:
    redundancy, num_groups = config.optimizer.redundancy, config.layout.num_groups
    if redundancy < 1:
        yield f"optimizer.redundancy={redundancy} must be at least 1; raise it"
    if not config.optimizer.repair_mib_per_s > 0.0:
        yield f"optimizer.repair_mib_per_s={config.optimizer.repair_mib_per_s} must be above 0; raise it"
    if config.optimizer.sharding == "replicated":
        return
    if redundancy > num_groups:
        yield (
            f"optimizer.redundancy={redundancy} exceeds layout.num_groups={num_groups}: a slice cannot have more hosts "
            f"than there are groups; lower optimizer.redundancy or raise layout.num_groups"
        )
    # A gather sends a number of each group at least in one staging buffer.
    least = 4 * (num_groups + 1) / 2**20
    if config.reduce.bucket_mib < least:
        yield (
            f"reduce.bucket_mib={config.reduce.bucket_mib} must be at least {least:.2g} with "
            f"optimizer.sharding=stacked and layout.num_groups={num_groups}; raise it"
        )
