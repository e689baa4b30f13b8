"""The parameters of a rank: their names in the whole model, and fingerprints of their values."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.flat_gradients import counts_for_norm, is_divided_expert
from spare_megatron.mcore.model.compatibility import name_of_future_layer
from spare_megatron.mcore.model.model import Chunk

_HASHED_BYTES = 32 * 2**20
"""Parameters that are hashed at a time: a small part of a heartbeat interval."""


GradientsForNorm = tuple[Sequence[tuple[torch.nn.Parameter, torch.Tensor]], dist.ProcessGroup]
"""Gradients that count for the norm on this rank, and the ranks whose squares add up to its square."""


def whole_for_norm(
    parameters: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection
) -> Iterator[GradientsForNorm]:
    """Where a rank has whole gradients: of parameters that every lane has, and of experts if lanes divide them."""
    counted = [(one, one.main_grad) for one in parameters if counts_for_norm(one, groups)]
    yield [one for one in counted if not is_divided_expert(one[0])], groups.mp
    if groups.ep.size() > 1:
        yield [one for one in counted if is_divided_expert(one[0])], groups.tp_ep_pp


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter of this rank. `name` counts a GPT's layers from 0 over all stages; that of the last stage's tied
    embeddings is `output_layer.weight`. `partition_dim`: divided over tensor-parallel ranks, if any is. `part` of the
    model: a layer, or what stands beside the layers.
    """

    name: str
    part: str
    parameter: torch.nn.Parameter
    main_grad: torch.Tensor
    partition_dim: int | None


def named_parameters(chunks: Sequence[Chunk]) -> Iterator[NamedParameter]:
    for chunk in chunks:
        model = unwrap_model(chunk.module)
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers] if isinstance(model, GPTModel) else []
        for local_name, parameter in model.named_parameters():
            parts = local_name.split(".")
            part = parts[0] if parts[0] != "decoder" else parts[1]
            if numbers and parts[:2] == ["decoder", "layers"]:
                parts[2] = str(numbers[int(parts[2])])
                part = f"layer_{parts[2]}"
            elif parts[0] == "mtp":
                part = f"mtp_{parts[2]}"
                parts = ["transformer_layer" if one == name_of_future_layer() else one for one in parts]
            is_divided = getattr(parameter, "tensor_model_parallel", False)
            yield NamedParameter(
                name=".".join(parts),
                part=part,
                parameter=parameter,
                main_grad=parameter.main_grad,
                partition_dim=parameter.partition_dim if is_divided else None,
            )


def sums_of_squares(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """By name, over all tensors that have it. Waits for the device, once."""
    norms: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named:
        norms.setdefault(name, []).append(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32))
    squares = [torch.stack(of_name).double().square().sum() for of_name in norms.values()]
    return dict(zip(norms, torch.stack(squares).tolist(), strict=True)) if norms else {}


def parameters_digest(chunks: Sequence[Chunk], further: Iterable[tuple[str, torch.Tensor]] = ()) -> TensorsDigest:
    """Digest of this rank's parameters, in bf16 models of the fp32 copies that it has, and of further tensors."""
    return TensorsDigest((*_optimized(chunks), *further))


def parameters_sha256(
    chunks: Sequence[Chunk], on_progress: Callable[[], None], further: Iterable[tuple[str, torch.Tensor]] = ()
) -> str:
    """SHA-256 of what `parameters_digest` is of, for files: on the host, and slow. Calls `on_progress` meanwhile."""
    digest = sha256()
    for name, tensor in (*_optimized(chunks), *further):
        digest.update(name.encode())
        for some in tensor.detach().reshape(-1).view(torch.uint8).split(_HASHED_BYTES):
            digest.update(some.cpu().numpy())
            on_progress()
    return digest.hexdigest()


def _optimized(chunks: Sequence[Chunk]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((named.name, optimized(named.parameter)) for named in named_parameters(chunks))


def optimized(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What the optimizer updates: Megatron's fp32 copy of a bf16 parameter, or the parameter."""
    return getattr(parameter, "main_param", parameter)
