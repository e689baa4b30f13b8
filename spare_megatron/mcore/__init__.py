"""Everything that touches megatron-core: model, data, gradients, optimizer. Nothing else imports `megatron`."""

import warnings
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_MEGATRON_CORE = "0.16"
"""The minor version whose internals the adaptations in this package were checked against, from patch 1 on."""


def check_megatron_core(installed: str | None) -> None:
    """Nothing when this megatron-core is supported.

    Args:
        installed: Its version, or None when there is none.

    Raises:
        ImportError: There is none, or it is another version.
    """
    wanted = f"megatron-core >= {SUPPORTED_MEGATRON_CORE}.1 and < 0.17"
    if installed is None:
        raise ImportError(f"{wanted} is not installed; pip install 'megatron-core=={SUPPORTED_MEGATRON_CORE}.1'")
    major, minor, patch = [*installed.split("+")[0].split("."), "0", "0"][:3]
    if f"{major}.{minor}" != SUPPORTED_MEGATRON_CORE or not patch.isdigit() or int(patch) < 1:
        raise ImportError(
            f"megatron-core {installed} is installed, spare_megatron needs {wanted}: "
            f"pip install 'megatron-core=={SUPPORTED_MEGATRON_CORE}.1'"
        )


def _installed_megatron_core() -> str | None:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


def _hush_advice_nobody_can_follow() -> None:
    """Megatron's warnings about its own defaults, and about packages that only a GPU has a use for."""
    import torch

    warnings.filterwarnings("ignore", message=".*cuda_graph_scope", category=UserWarning)
    if torch.version.cuda is None:
        warnings.filterwarnings("ignore", message=".*Apex.*Falling back", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*Transformer Engine.*Falling back", category=UserWarning)


check_megatron_core(_installed_megatron_core())
_hush_advice_nobody_can_follow()
