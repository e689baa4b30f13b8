"""The only importer of megatron-core: model, data, gradients, optimizer, adaptations. Start with `trainer`."""

import platform
import warnings

from spare_megatron.config.supported_versions import check_version, installed_version
from spare_megatron.mcore.model.quick_import import import_megatron


def _hide_irrelevant_warnings() -> None:
    """Megatron's warnings about its own defaults, and about packages that only a GPU has a use for."""
    import torch

    warnings.filterwarnings("ignore", message=".*cuda_graph_scope", category=UserWarning)
    if torch.version.cuda is None:
        warnings.filterwarnings("ignore", message=".*Apex.*Falling back", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*Transformer Engine.*Falling back", category=UserWarning)


check_version("Python", platform.python_version())
for _package in ("torch", "megatron-core"):
    check_version(_package, installed_version(_package))
_hide_irrelevant_warnings()
import_megatron()
