"""The only importer of megatron-core: model, data, gradients, optimizer, adaptations. Start with `trainer`."""

import logging
import platform
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from spare_megatron.config.supported_versions import check_version, installed_version
from spare_megatron.devices import gpu
from spare_megatron.mcore.model.compatibility import without_triton

_SERVICES = ("wandb", "torch.utils.tensorboard")


def _hide_irrelevant_warnings() -> None:
    """Megatron's warnings about its own defaults and imports, and about packages that only a GPU has a use for.

    That GPTModel is deprecated is the project's concern: 0.16, the oldest supported release, has nothing in its place.
    """
    for message in (".*cuda_graph_scope", "MimoModelConfig is experimental", "Could not determine rank"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    gpt_model = logging.getLogger("megatron.core.models.gpt.gpt_model")
    gpt_model.addFilter(lambda record: not record.getMessage().startswith("GPTModel IS DEPRECATED"))
    if not gpu.is_available():
        logging.getLogger("torch.utils.cpp_extension").addFilter(
            lambda record: not record.getMessage().startswith("No CUDA runtime is found")
        )
        warnings.filterwarnings("ignore", message=".*Apex.*Falling back", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*Transformer Engine.*Falling back", category=UserWarning)


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


check_version("Python", platform.python_version())
for _package in ("torch", "megatron-core"):
    check_version(_package, installed_version(_package))
_hide_irrelevant_warnings()
import_megatron()
