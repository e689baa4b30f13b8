"""What is wrong with the settings of checkpoints and restarts."""

from collections.abc import Iterator

from spare_megatron.config.schema import RunConfig


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Why training could not start again with these settings."""
    settings = config.checkpoint
    if settings.max_restarts < 0:
        yield f"checkpoint.max_restarts={settings.max_restarts} must be at least 0; raise it"
    for key, value in (
        ("restart_window_s", settings.restart_window_s),
        ("restart_wait_s", settings.restart_wait_s),
    ):
        if not value > 0.0:
            yield f"checkpoint.{key}={value} must be above 0; raise it"
    if settings.max_restarts and settings.restart_wait_s > config.control.decision_timeout_s:
        yield (
            f"checkpoint.restart_wait_s={settings.restart_wait_s} exceeds control.decision_timeout_s="
            f"{config.control.decision_timeout_s}, for which ranks wait for a log entry; lower the first or raise "
            f"the second"
        )
