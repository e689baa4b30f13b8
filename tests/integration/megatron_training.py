"""Megatron's own training loop, `pretrain` of `megatron.training`, on CPUs: tasks of `run_ranks`.

Arguments are parsed and checked, and model, optimizer, scheduler and data loaders built, by Megatron. Of ours are the
initial parameters and the samples, and attention unless it is Megatron's own.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import random
from megatron.core.transformer.spec_utils import ModuleSpec

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.attention import TorchCoreAttention
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.mcore.optimizer.parameters import named_parameters, parameters_sha256
from tests.integration.mcore_group import Arrays

CPU_ARGUMENTS = (
    *("--transformer-impl", "local", "--use-cpu-initialization", "--distributed-backend", "gloo"),
    *("--tokenizer-type", "NullTokenizer", "--dataloader-type", "single", "--num-workers", "0"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
    *("--rerun-mode", "disabled", "--eval-iters", "0", "--eval-interval", "1000000", "--log-interval", "1"),
)
"""What Megatron needs to train without CUDA, its fused kernels, or a tokenizer, and not to evaluate."""


@dataclass(kw_only=True)
class Trained:
    """Of one rank: Megatron's loss of each step, on the last stage, its parameters, and their SHA-256 at the end."""

    losses: list[float]
    num_parameters: int = 0
    params_sha256: str = ""


def pretrain(
    config: RunConfig, arguments: Sequence[str], initial: Sequence[Arrays], *, has_own_attention: bool = False
) -> Trained:
    """Trains by Megatron's arguments on the samples of a run.

    Args:
        initial: Parameters of each rank of a group.
    """
    _run_without_cuda()
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": str(dist.get_world_size())}
    sys.argv = ["pretrain", *CPU_ARGUMENTS, *arguments]
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    model.post_wrap_hooks.append(partial(_load, initial))
    if not has_own_attention:
        model.transformer_layer_spec = _with_our_attention
    trained = Trained(losses=[])
    step_of_megatron = training.train_step

    def train_step(forward: Any, samples: Any, modules: Any, *given: Any, **options: Any) -> Any:
        answer = step_of_megatron(forward, samples, modules, *given, **options)
        trained.losses += map(float, answer[0].values())
        trained.num_parameters = sum(one.numel() for module in modules for one in module.parameters())
        trained.params_sha256 = parameters_sha256(_chunks(modules), lambda: None)
        return answer

    training.train_step = train_step
    training.pretrain(
        pretrain_cfg_container_from_args(args, model),
        _provide(config),
        ModelType.encoder_or_decoder,
        partial(_forward, _causal_mask(args.seq_length) if has_own_attention else None),
    )
    return trained


def _load(initial: Sequence[Arrays], modules: list[DistributedDataParallel]) -> list[DistributedDataParallel]:
    stage, num_tensor = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    values = initial[stage * num_tensor + mpu.get_tensor_model_parallel_rank()]
    named = {one.name: one.parameter for one in named_parameters(_chunks(modules))}
    assert {name: tuple(one.shape) for name, one in named.items()} == {name: one.shape for name, one in values.items()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(values[name]))
    return modules


def _chunks(modules: Sequence[DistributedDataParallel]) -> list[Chunk]:
    stage, num_stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    is_last = stage == num_stages - 1
    return [Chunk(module=module, stage=stage, is_first=stage == 0, is_last=is_last) for module in modules]


class _Stream:
    def wait_stream(self, _other: object) -> None:
        """Nothing runs on streams here."""


def _run_without_cuda() -> None:
    """Replaces what Megatron's loop does with CUDA beyond what `cpu.install` replaces, the compilation of kernels and
    the seeds of CUDA's generators.
    """
    cpu.install()
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *_: _Stream()
    torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    random.get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # nothing is dropped
    from megatron.training import arguments, initialize, training

    arguments.get_device_arch_version = lambda: 10  # the first that needs no environment variable for its streams
    training.initialize_megatron = _initialize
    training.set_jit_fusion_options = lambda **_: None
    initialize._compile_dependencies = lambda: None
    initialize._set_random_seed = lambda *_, **_options: None


def _initialize(**options: Any) -> None:
    """As pretrain asks for it, but without CUDA, and with a device to be counted, without which it builds no groups."""
    from megatron.training.initialize import initialize_megatron

    count = torch.cuda.device_count
    torch.cuda.device_count = lambda: 1
    try:
        initialize_megatron(allow_no_cuda=True, **options)
    finally:
        torch.cuda.device_count = count


def _with_our_attention(model: Any) -> Any:
    from megatron.training.models.gpt import default_layer_spec

    spec = default_layer_spec(model, None)
    for layer in [spec] if isinstance(spec, ModuleSpec) else spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    return spec


def _provide(config: RunConfig) -> Callable[..., tuple[Any, None, None]]:
    """The datasets provider of a run: `Samples` to train on, nothing to evaluate on."""

    def provide(_num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, None, None]:
        return Samples(config), None, None

    provide.is_distributed = True
    return provide


class Samples:
    """The samples of a run in the order in which Megatron deals them to data-parallel ranks, one microbatch each."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._corpus = config, Corpus(config)
        self._num_ranks = mpu.get_data_parallel_world_size()

    def __len__(self) -> int:
        config = self._config
        return config.train.steps * self._num_microbatches * config.train.micro_batch_size

    @property
    def _num_microbatches(self) -> int:
        return self._config.layout.num_groups * self._config.spare.microbatches_per_shard

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A sample; a rank computes the microbatches that are one group's in a run."""
        dealt, place = divmod(index, self._config.train.micro_batch_size)
        step, order = divmod(dealt, self._num_microbatches)
        turn, rank = divmod(order, self._num_ranks)
        number = rank * (self._num_microbatches // self._num_ranks) + turn
        return {key: values[place] for key, values in self._corpus.microbatch(step, number).items()}


def _causal_mask(length: int) -> torch.Tensor:
    """As Megatron's dataset makes it: what no token attends to, [1, 1, query, key]."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]


def _forward(mask: torch.Tensor | None, batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """As `forward_step` of Megatron-LM's pretrain_gpt.py, of samples whose tokens all count."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.view(-1).float().sum()
        num_tokens = torch.tensor(losses.numel(), dtype=torch.int)
        return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}

    return output, loss_function
