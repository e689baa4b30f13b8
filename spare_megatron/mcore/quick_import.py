"""Imports megatron-core without the compiler and the services that it asks for while it is imported."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

_SERVICES = ("wandb", "torch.utils.tensorboard")


def import_megatron() -> None:
    """Imports it in two thirds of the time, which every process of a run that is not forked waits for.

    Megatron decorates functions with `torch.compile`, which imports Inductor, its inference imports wandb, and its
    timers TensorBoard. All come when they are first used, if they are; `torch.compile` compiles no earlier either.
    """
    import torch
    import torch._dynamo  # optimizers need it: once here, not in every process that is forked

    compile_now = torch.compile
    hidden = [name for name in _SERVICES if name not in sys.modules]
    torch.compile = partial(compile_when_called, compile_now)
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_now
        for name in hidden:
            del sys.modules[name]


def compile_when_called(
    compile_now: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """What `torch.compile` returns, but for the import of the compiler: that waits for the first call.

    Args:
        compile_now: `torch.compile` itself.
        function: What to compile; without it the result is a decorator.
        options: Of `torch.compile`.
    """
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
