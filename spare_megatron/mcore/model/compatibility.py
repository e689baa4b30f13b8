"""Differences between the supported versions of megatron-core, one function each, found by what it has.

A paragraph that begins with "Until" names the oldest version with which a branch, or the function, is dead.
"""

import sys
from functools import cache
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from spare_megatron.config.supported_versions import SUPPORTED, installed_version, release, version_problem

_TRITON_KERNELS = {
    "megatron.core.transformer.moe.ops.paged_stash": (
        "GLOBAL_BLOCK_SIZE",
        "paged_stash_copy_kernel",
        "paged_stash_pop_kernel",
    ),
    "emerging_optimizers.triton_kernels": (),
}
"""Modules that need triton, and what others import from them."""


def without_triton() -> None:
    """Lets megatron-core be imported without triton, which builds of torch for CPUs lack: from 0.18 on its schedules
    import the kernels of `moe_paged_stash`, which is refused, and Muon those of `use_syrk`, which Megatron does not
    set. To be called before the import.
    """
    for name, members in _TRITON_KERNELS.items() if find_spec("triton") is None else ():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__dict__.update(dict.fromkeys(members))


def require_muon() -> None:
    """Raises ValueError if megatron-core's Muon cannot be used.

    Until 0.19 is the oldest: 0.16 fits no release of emerging-optimizers on PyPI, and 0.17 names settings otherwise.
    """
    package, installed = "emerging-optimizers", installed_version("megatron-core") or ""
    problem = version_problem(package, installed_version(package))
    if release(installed) < (0, 19):
        newest = f"megatron-core>=0.19,<{SUPPORTED['megatron-core'].before}"
        problem = f"megatron-core {installed} is installed: pip install '{newest}' with Python 3.12 or later"
    if problem:
        raise ValueError(
            f"optimizer.kind=muon needs megatron-core from 0.19 on and {package}, and {problem}; or set "
            f"optimizer.kind=adam"
        )


def part_of_context_rank(batch: dict[str, Tensor], context_parallel: ProcessGroup) -> dict[str, Tensor]:
    """The part of each sequence that this context-parallel rank computes.

    Until 0.18 is the oldest: versions before it have no `is_hybrid_cp`, which later ones require.
    """
    from megatron.core.utils import get_batch_on_this_cp_rank

    options = {"is_hybrid_cp": False} if _takes(get_batch_on_this_cp_rank, "is_hybrid_cp") else {}
    part: dict[str, Tensor] = get_batch_on_this_cp_rank(batch, cp_group=context_parallel, **options)
    return part


def experts_submodules(mlp: Any) -> Any:
    """The submodules in the specification of a layer's experts.

    Until 0.19 is the oldest: 0.16 has a ModuleSpec, 0.19 a `functools.partial`.
    """
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]


def names_of_data_parallel_group() -> tuple[str, ...]:
    """Globals of `parallel_state` from which megatron-core reads the group of data- and context-parallel ranks.

    Until 0.19 is the oldest: versions before it lack the second.
    """
    from megatron.core import parallel_state

    names = ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT")
    return tuple(name for name in names if hasattr(parallel_state, name))


def is_counted_on_tensor_rank(parameter: Tensor, groups: Any) -> bool:
    """Whether this tensor-parallel rank counts a parameter in norms: it is divided, or the rank is the first.

    Until 0.19 is the oldest: versions before it do not take the group of experts, which equals the other one here.
    """
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as is_counted

    options = {"expert_tp_group": groups.expt_tp} if _takes(is_counted, "expert_tp_group") else {}
    return bool(is_counted(parameter, groups.tp, **options))


def frees_what_is_sent() -> bool:
    """Whether `deallocate_pipeline_outputs` frees what the interleaved schedule still sends; only the number shows it.

    Until 0.18 is the oldest: its schedule waits for the transfer first.
    """
    return release(installed_version("megatron-core") or "") < (0, 18)


def name_of_future_layer() -> str:
    """The name by which a module of multi-token prediction has its layer; in checkpoints it is `transformer_layer`.

    Until 0.19 is the oldest: versions before it have that name in the module, too, and build it with global groups.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

    names = MultiTokenPredictionLayerSubmodules.__dataclass_fields__
    return "mtp_model_layer" if "mtp_model_layer" in names else "transformer_layer"


def number_of_layer(mixture: Any) -> int:
    """The number of the layer that a mixture or its router belongs to, from 1; modules of multi-token prediction follow
    the model's layers.

    Until 0.19 is the oldest: versions before it number them so themselves, and do not say which they are.
    """
    before: int = mixture.config.num_layers if getattr(mixture, "is_mtp_layer", False) else 0
    return before + int(mixture.layer_number)


def know_absent_transformer_engine() -> None:
    """Lets latent attention be built without transformer-engine, whose classes are no types then.

    Until 0.19 is the oldest: versions before it ask only whether megatron-core's module of these classes is there.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = HAVE_TE


@cache
def _takes(function: Any, name: str) -> bool:
    return name in signature(function).parameters
