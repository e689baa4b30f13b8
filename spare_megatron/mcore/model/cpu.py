"""Patches of hard-coded CUDA devices that let megatron-core run on a CPU, each with the files that need it."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_MARK = "_spare_megatron_cpu"


def install() -> None:
    """Applies all patches, once per process."""
    if hasattr(torch.cuda.current_device, _MARK):
        return
    _current_device_is_the_cpu()
    _cuda_literals_mean_the_cpu()
    _cuda_moves_nothing()
    _no_stream_is_current()
    _optimizer_takes_cpu_tensors()


def _current_device_is_the_cpu() -> None:
    """Handles torch.cuda.current_device(): p2p_communication.py, param_and_grad_buffer.py, rotary_pos_embedding.py."""

    def current_device() -> torch.device:
        return torch.device("cpu")

    setattr(current_device, _MARK, True)
    torch.cuda.current_device = current_device  # type: ignore[assignment]


def _cuda_literals_mean_the_cpu() -> None:
    """Handles `device="cuda"`: pipeline_parallel/schedules.py, optimizer/optimizer.py, optimizer/clip_grads.py; and
    pinned memory: models/common/embeddings/rope_utils.py.
    """

    def on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(create)
        def wrapped(*args: Any, **options: Any) -> torch.Tensor:
            if options.get("device") == "cuda":
                options["device"] = "cpu"
            options.pop("pin_memory", None)
            return create(*args, **options)

        return wrapped

    # torch collects the functions that obey `with torch.device(...)` at the first call below one: let it find its own
    # and not those that call them, which it would pass over.
    with torch.device("cpu"):
        torch.empty(0)
    for name in ("zeros", "tensor"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _cuda_moves_nothing() -> None:
    """Handles `tensor.cuda()`: models/common/language_module/language_module.py (tied embeddings of the last stage)."""
    torch.Tensor.cuda = lambda tensor, *_, **_options: tensor  # type: ignore[method-assign]


def _no_stream_is_current() -> None:
    """Handles `torch.cuda.current_stream()`: distributed/param_and_grad_buffer.py (from megatron-core 0.19 on)."""
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]


def _optimizer_takes_cpu_tensors() -> None:
    """Handles comparisons of `tensor.type()` with 'torch.cuda.FloatTensor': optimizer/{optimizer,clip_grads}.py."""
    true_type = torch.Tensor.type

    def type_seen_by_the_caller(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        answer = true_type(tensor, *args, **options)
        if isinstance(answer, str) and sys._getframe(1).f_globals["__name__"].startswith("megatron.core.optimizer."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_seen_by_the_caller  # type: ignore[method-assign]
