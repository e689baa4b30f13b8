"""The only importer of megatron-core: model, data, gradients, optimizer, adaptations. Start with `trainer`."""

import logging
import platform
import warnings

from spare_megatron.config.supported_versions import check_version, installed_version
from spare_megatron.devices import gpu
from spare_megatron.mcore.model.quick_import import import_megatron


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


check_version("Python", platform.python_version())
for _package in ("torch", "megatron-core"):
    check_version(_package, installed_version(_package))
_hide_irrelevant_warnings()
import_megatron()
