"""Random numbers that depend on what is computed, never on who computes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from spare_megatron.stacking.plans import Microbatch


def seed_of(purpose: str, *numbers: int) -> int:
    """A seed of 62 bits for a purpose and a tuple of integers.

    62 bits leave room for the small offsets that Megatron adds. The generator of the CPU keeps the low 32.
    """
    text = f"{purpose}:{','.join(map(str, numbers))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def seed_parameters(seed: int, stage: int, tensor_rank: int, device: torch.device) -> None:
    """Seed the generators for building the parameters of one stage.

    Args:
        seed: The run's seed.
        stage: Index of the model chunk among all chunks of the model, in the order of the layers.
        tensor_rank: Tensor-parallel rank.
        device: Where the rank computes.
    """
    _seed_generators(seed_of("parameters", seed, stage), tensor_rank, device)


def seed_microbatch(
    seed: int, step: int, microbatch: Microbatch, stage: int, tensor_rank: int, device: torch.device
) -> None:
    """Seed the generators for the forward pass of one microbatch through one stage.

    Masks differ between stages, and between tensor-parallel ranks where those hold different things, but no
    number here tells which group computes.
    """
    number = seed_of("microbatch", seed, step, microbatch.shard, microbatch.index, stage)
    _seed_generators(number, tensor_rank, device)


def _seed_generators(seed: int, tensor_rank: int, device: torch.device) -> None:
    # torch.manual_seed would walk every device type and cost 100 times as much.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # Seeds the default CUDA generator too, and the states that Megatron's tracker swaps in for what
        # differs between tensor-parallel ranks.
        model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=tensor_rank)


@contextmanager
def distinct_on_tensor_ranks(tensor_rank: int) -> Iterator[None]:
    """Random numbers of the CPU that differ between tensor-parallel ranks, as Megatron's tracker does on a GPU.

    The generators outside stay in step: each draws the one number that the inner seed is made of.
    """
    generator = torch.default_generator
    seed = int(torch.randint(2**31, (), generator=generator)) + tensor_rank
    outside = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(outside)
