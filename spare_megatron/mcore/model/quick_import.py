"""Imports megatron-core faster, by deferring the compiler and services that it imports."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from spare_megatron.mcore.model.compatibility import without_triton

_SERVICES = ("wandb", "torch.utils.tensorboard")


def import_megatron() -> None:
    """Imports megatron-core in two thirds of the time, by deferring Inductor, wandb and TensorBoard to first use."""
    import torch
    import torch._dynamo  # optimizers need it; imported once here rather than in every forked process

    compile_now = torch.compile
    hidden = [name for name in _SERVICES if name not in sys.modules]
    torch.compile = partial(compile_when_called, compile_now)
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    without_triton()
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_now
        for name in hidden:
            del sys.modules[name]


def compile_when_called(
    compile_now: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """`torch.compile` (given as `compile_now`), but the compiler is imported at the first call."""
    if function is None:
        return partial(compile_when_called, compile_now, **options)
    compiled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = compile_now(function, **options)
        return compiled(*args, **kwargs)

    return call
