"""Parameters whose gradients Megatron sums inside a group: tied embeddings, and what several ranks hold whole. Every
group needs them whole, and one rank counts them for the norm.
"""

from collections.abc import Sequence

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model

from spare_megatron.mcore.model.compatibility import is_counted_on_tensor_rank
from spare_megatron.mcore.model.model import Chunk


def sum_inside_group(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> None:
    """Sums gradients over context-parallel ranks, tied embeddings, and sequence-parallel norms, in place: after the
    commit. Collective over: all ranks of the group.
    """
    finalize_model_grads([chunk.module for chunk in chunks], None, pg_collection=groups)


def tied_embedding(chunk: Chunk) -> torch.nn.Parameter | None:
    """The chunk's copy of the tied embedding table, on the first and last stage of a model that ties them."""
    model = unwrap_model(chunk.module)
    ties = getattr(model, "share_embeddings_and_output_weights", False)
    if not ties or not (chunk.is_first or chunk.is_last):
        return None
    weight: torch.nn.Parameter = model.shared_embedding_or_output_weight()
    return weight


def shared_by_stages(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> frozenset[torch.nn.Parameter]:
    """The parameters whose gradients are summed over ranks that lay out their parameters in another way."""
    if groups.embd is None or groups.embd.size() == 1:
        return frozenset()
    return frozenset(weight for weight in map(tied_embedding, chunks) if weight is not None)


def needed_everywhere(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> frozenset[torch.nn.Parameter]:
    """The parameters whose gradients every group needs: those that may be summed inside a group."""
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    if groups.cp.size() > 1:
        return frozenset(parameters)
    found: set[torch.nn.Parameter] = set()
    if groups.tp.size() > 1:
        found |= {one for one in parameters if not getattr(one, "tensor_model_parallel", False)}
    return shared_by_stages(chunks, groups).union(found)


def is_divided_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether it belongs to an expert that not every lane has; Megatron marks such parameters."""
    return not getattr(parameter, "allreduce", True)


def counts_for_norm(parameter: torch.nn.Parameter, groups: ProcessGroupCollection) -> bool:
    """Whether Megatron counts the gradient on this rank for the norm; it skips duplicates within the group."""
    return bool(param_is_not_shared(parameter)) and is_counted_on_tensor_rank(parameter, groups)
