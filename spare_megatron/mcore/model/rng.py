"""Seeds that depend on what is computed, never on which group computes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def seed_of(purpose: str, *numbers: int) -> int:
    """A 62-bit seed, which leaves room for Megatron's small offsets; the CPU generator keeps the low 32 bits."""
    text = f"{purpose}:{','.join(map(str, numbers))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def seed_parameters(seed: int, stage: int, tensor_rank: int, device: torch.device) -> None:
    """Seeds the generators for building the parameters of one stage, which counts all model chunks in layer order."""
    _seed_generators(seed_of("parameters", seed, stage), tensor_rank, device)


def seed_expert(seed: int, tensor_rank: int, device: torch.device, *place: int) -> None:
    """The same for a matrix of an expert, by its place in the whole model."""
    _seed_generators(seed_of("expert", seed, tensor_rank, *place), tensor_rank, device)


def seed_microbatch(seed: int, step: int, number: int, stage: int, tensor_rank: int, device: torch.device) -> None:
    """Seeds the generators for one microbatch, by its number in the batch: masks differ between stages and between
    tensor-parallel ranks that hold different elements, never between groups or lanes.
    """
    _seed_generators(seed_of("microbatch", seed, step, number, stage), tensor_rank, device)


def _seed_generators(seed: int, tensor_rank: int, device: torch.device) -> None:
    # torch.manual_seed seeds every device type and costs 100 times as much.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # Also seeds the default CUDA generator, and the states of Megatron's tracker that differ between
        # tensor-parallel ranks.
        model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=tensor_rank)


@contextmanager
def distinct_on_tensor_ranks(tensor_rank: int) -> Iterator[None]:
    """In this context, CPU random numbers differ between tensor-parallel ranks, as with Megatron's tracker on a GPU.

    The outer generators stay in step: each draws one number, from which the inner seed is made.
    """
    generator = torch.default_generator
    seed = int(torch.randint(2**31, (), generator=generator)) + tensor_rank
    outside = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(outside)
