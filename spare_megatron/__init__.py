"""GPT pretraining on megatron-core that survives the loss of data-parallel groups.

The names in `__all__` are the public surface (docs/programs.md); all else may change with any version.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spare_megatron.version import __version__ as __version__

if TYPE_CHECKING:
    from spare_megatron.cli.pretrain import pretrain as pretrain
    from spare_megatron.config.program_file import LossTerm as LossTerm
    from spare_megatron.config.schema import RunConfig as RunConfig
    from spare_megatron.mcore.model.model import ModelContext as ModelContext
    from spare_megatron.mcore.model.model import gpt_model as gpt_model
    from spare_megatron.mcore.model.program import Batch as Batch
    from spare_megatron.mcore.model.program import StepContext as StepContext
    from spare_megatron.mcore.model.program import Terms as Terms
    from spare_megatron.mcore.model.program import gpt_forward_step as gpt_forward_step
    from spare_megatron.mcore.model.training_samples import corpus_dataset as corpus_dataset

_HOMES = {
    "Batch": "mcore.model.program",
    "LossTerm": "config.program_file",
    "ModelContext": "mcore.model.model",
    "RunConfig": "config.schema",
    "StepContext": "mcore.model.program",
    "Terms": "mcore.model.program",
    "corpus_dataset": "mcore.model.training_samples",
    "gpt_forward_step": "mcore.model.program",
    "gpt_model": "mcore.model.model",
    "pretrain": "cli.pretrain",
}
"""Modules of the public names, which are imported when they are used: most need torch."""

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - names all the same


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
