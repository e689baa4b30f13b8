"""Builds a rank's chunks of the GPT model, with the layer kernels that the run and device select."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, Adam
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_te_version

from spare_megatron.config.megatron_fields import NOT_OF_TORCH_NORMS, OF_TRANSFORMER_ENGINE, fields_set
from spare_megatron.config.model.model_tensors import LATENT_NORMS, layer_has_experts, padded_vocab_size
from spare_megatron.config.model_fields import is_latent, num_future_tokens, uses_yarn
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.supported_versions import check_version, supported
from spare_megatron.mcore.model import rng
from spare_megatron.mcore.model.attention import TorchCoreAttention, within_documents
from spare_megatron.mcore.model.compatibility import know_absent_transformer_engine
from spare_megatron.mcore.model.experts import initialize_experts, prepare_experts, return_no_views
from spare_megatron.mcore.model.future_tokens import FutureLosses, as_stage, future_block
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.stacking.layout import Slabs

DETERMINISTIC_ALGORITHMS = frozenset({"Ring", "CollnetDirect", "CollnetChain", "^NVLS"})
"""Values of NCCL_ALGO, joined by commas, that Megatron counts as deterministic (training/determinism.py of 0.19): not
Tree, whose order of sums may change between runs.
"""


def kernels_of(config: RunConfig, device: torch.device) -> dict[str, str]:
    """Layer and Adam implementations, and Megatron's fusions that are on. Raises ValueError as `layer_spec` does."""
    transformer = transformer_config(config, device)
    if uses_transformer_engine(config, device):
        layers = f"transformer-engine {get_te_version()}"
    else:
        is_absent = device.type != "cpu" and not HAVE_TE
        layers = "megatron-core (transformer-engine is not installed)" if is_absent else "megatron-core"
    is_parted = config.optimizer.sharding == "stacked" or config.layout.data_parallel > 1
    of_torch = "torch, fused" if device.type != "cpu" else "torch"
    fusions = [field.name for field in fields(transformer) if "fus" in field.name]
    return {
        "layers": layers,
        "adam": of_torch if is_parted else adam_of_megatron(),
        "fusions": ", ".join(name for name in fusions if getattr(transformer, name) is True) or "none",
    }


def choose_deterministic_kernels(config: RunConfig) -> None:
    """With `reduce.mode=reproducible`, makes all kernels repeat their results bitwise; call it before any GPU use.
    Raises ValueError if the environment names algorithms of NCCL that do not.
    """
    if config.reduce.mode != "reproducible":
        return
    # cuBLAS reads this when it is first used; transformer-engine reads the other when it builds its attention.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    if config.layout.tensor_parallel * config.layout.context_parallel * config.row_size > 1:
        # Sums inside a group are floats, which switches of NVLink add in any order.
        _check_algorithms(os.environ.setdefault("NCCL_ALGO", "Ring"))
    # Not `warn_only`: with it, attention keeps its nondeterministic backward pass.
    torch.use_deterministic_algorithms(True)
    # It would fill every new tensor; uninitialized memory is never read here.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _check_algorithms(names: str) -> None:
    if not {*names.replace(" ", "").split(",")} <= DETERMINISTIC_ALGORITHMS:
        raise ValueError(
            f"NCCL_ALGO={names} is set in the environment, and with reduce.mode=reproducible only "
            f"{', '.join(sorted(DETERMINISTIC_ALGORITHMS))} are allowed, as others may change the order of sums inside "
            f"a group; unset NCCL_ALGO (Ring is then taken), or set reduce.mode to another"
        )


def adam_of_megatron() -> str:
    return "torch" if USING_PYTORCH_OPTIMIZER else f"{Adam.__module__.partition('.')[0]}, fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive layers of the model on one rank, in Megatron's wrapper with one fp32 gradient buffer: a slab.

    `stage` is the index among all chunks of the model; the first embeds the tokens, the last computes the loss. The
    schedule runs the chunks of a rank with one `virtual_stage` in turn, as one.
    """

    module: DistributedDataParallel
    stage: int
    is_first: bool
    is_last: bool
    virtual_stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What a model provider builds one chunk of the model from, in process groups that stay inside this group."""

    config: RunConfig
    transformer: TransformerConfig
    groups: ProcessGroupCollection
    device: torch.device
    stage: int
    num_stages: int
    layers: range
    virtual_stage: int | None

    @property
    def pre_process(self) -> bool:
        """Whether the chunk takes the batch; the others take the output of the stage before."""
        return self.stage == 0

    @property
    def post_process(self) -> bool:
        """Whether the chunk computes the loss."""
        return self.stage == self.num_stages - 1


ModelProvider = Callable[[ModelContext], MegatronModule]
"""Builds one chunk of the model, from the seeded default generators of torch."""


def build_chunks(
    config: RunConfig,
    transformer: TransformerConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    reduction: DistributedDataParallelConfig | None = None,
    provider: ModelProvider | None = None,
    slabs: Slabs | None = None,
) -> list[Chunk]:
    """This rank's chunks on `device`, in layer order: several if the pipeline is virtual, or a stage several slabs.
    Equal in every data-parallel group. `reduction` says how Megatron's wrapper reduces gradients, for plain Megatron;
    ours never ask it to. `provider` builds each chunk; `gpt_model` unless stated. `slabs`: unless all pipelines are of
    this length.

    Collective over: all ranks of the group (stages that share embeddings synchronize them).
    """
    num_virtual, num_stages = config.layout.virtual_pipeline, groups.pp.size() * config.layout.virtual_pipeline
    slabs = slabs or Slabs(config.model.num_layers, (num_stages,))
    places = [
        (virtual, number)
        for virtual in range(num_virtual)
        for number in slabs.of_stage(virtual * groups.pp.size() + groups.pp.rank(), num_stages)
    ]
    chunks = []
    for virtual, number in places:
        context = ModelContext(
            config=config,
            transformer=transformer,
            groups=groups,
            device=device,
            stage=number,
            num_stages=len(slabs.layers),
            layers=slabs.layers[number],
            virtual_stage=virtual if num_virtual > 1 else None,
        )
        rng.seed_parameters(config.train.seed, number, groups.tp.rank(), device)
        # Megatron leaves position embeddings and the norms of torch on the CPU.
        model = checked((provider or gpt_model)(context), context).to(device)
        return_no_views(model, transformer)
        initialize_experts(model, transformer, partial(rng.seed_expert, config.train.seed, groups.tp.rank(), device))
        module = DistributedDataParallel(
            transformer,
            reduction or DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            Float16Module(transformer, model) if transformer.bf16 else model,
            pg_collection=groups,
        )
        ends = {"is_first": context.pre_process, "is_last": context.post_process}
        chunks.append(Chunk(module=module, stage=number, virtual_stage=virtual, **ends))
    return chunks


def gpt_model(context: ModelContext) -> GPTModel:
    """A chunk of the GPT of the settings, in the layers that the device selects; the default model provider."""
    config, groups = context.config, context.groups
    transformer, groups_of_layers = _placed(context)
    stretches = uses_yarn(config) and not is_latent(config)  # latent attention encodes positions itself
    layers, future = _layers(context), None
    if context.post_process and num_future_tokens(config):
        is_fused = uses_transformer_engine(config, context.device)
        future = future_block(config, layers.layer_specs[-1], groups_of_layers, is_fused=is_fused)
    with as_stage(context.stage, context.num_stages):
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab_size(config.model.vocab_size, groups.tp.size()),
            max_sequence_length=config.model.seq_length,
            pre_process=context.pre_process,
            post_process=context.post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=config.model.tie_embeddings,
            position_embedding_type="yarn" if stretches else config.model.position_embedding,
            rotary_percent=config.megatron.get("rotary_percent", 1.0),
            rotary_base=config.model.rope_base,
            rope_scaling=config.model.rope_scaling_factor != 1.0,
            rope_scaling_factor=config.model.rope_scaling_factor,
            mtp_block_spec=future,
            pg_collection=groups_of_layers,
        )
    if future is not None:
        model.compute_language_model_loss = FutureLosses(model.compute_language_model_loss)
    if context.post_process:
        _mask_padding(model, config.model.vocab_size, groups.tp.rank())
    return model


@dataclass(frozen=True, slots=True)
class _PipelinePlace:
    """Stands in for the pipeline group where Megatron only asks for the place of a chunk in it."""

    number: int
    num_places: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.num_places


def _placed(context: ModelContext) -> tuple[TransformerConfig, ProcessGroupCollection]:
    """Configuration and groups for the layers of a chunk, as if it were a stage of a pipeline of all chunks: Megatron
    then numbers its layers as those of the whole model, however many they are.
    """
    transformer, groups = copy.copy(context.transformer), copy.copy(context.groups)
    transformer.pipeline_model_parallel_size = context.num_stages
    # Latent attention of megatron-core 0.19 chooses the kind of its norms by this.
    is_fused = uses_transformer_engine(context.config, context.device)
    transformer.transformer_impl = "transformer_engine" if is_fused else "local"
    transformer.virtual_pipeline_model_parallel_size = None
    if context.num_stages > 1:
        transformer.num_layers_in_first_pipeline_stage = context.layers.start
        transformer.num_layers_in_last_pipeline_stage = transformer.num_layers - context.layers.start
    groups.pp = _PipelinePlace(context.stage, context.num_stages)
    if isinstance(groups, GroupCollection):
        # Experts ask in checkpoints which ranks have the same ones. Megatron's wrapper, which sums gradients over these
        # ranks, must not know them.
        groups.expt_dp = groups.expert_lanes_and_cp
    return transformer, groups


def _layers(context: ModelContext) -> TransformerBlockSubmodules:
    """What the layers of a chunk are built of."""
    config = context.config
    of_kinds = {
        has_experts: layer_spec(config, context.transformer, context.device, has_experts=has_experts)
        for has_experts in {layer_has_experts(config, number) for number in context.layers}
    }
    specs = [of_kinds[layer_has_experts(config, number)] for number in context.layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=LayerNormImpl)


_OF_STAGES = ("set_input_tensor", "pre_process", "share_embeddings_and_output_weights")
"""Attributes of a model that Megatron's schedules and its sums over tied embeddings use in a pipeline."""


def checked(model: object, context: ModelContext) -> MegatronModule:
    """What a provider returned, as Megatron's schedules need it. Raises ValueError if they cannot run it."""
    if not isinstance(model, MegatronModule):
        raise ValueError(
            f"model_provider returned {type(model).__name__}; return a subclass of MegatronModule "
            f"(megatron.core.transformer)"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"the model of model_provider has no parameters to train in stage {context.stage}; add some")
    if frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        raise ValueError(
            f"{frozen[0]} of the model of model_provider has requires_grad=False; make it a buffer, or train it with "
            f'optimizer.rules=[{{pattern="{frozen[0]}", learning_rate_factor=0.0}}], which leaves it as it is'
        )
    missing = [name for name in _OF_STAGES if not hasattr(model, name)]
    if missing and context.num_stages > 1:
        raise ValueError(
            f"{type(model).__name__} has no {' and no '.join(missing)}, which Megatron's pipeline needs, as in its "
            f"GPTModel; add them, or set layout.pipeline_parallel=1"
        )
    if "set_input_tensor" in missing:
        model.set_input_tensor = lambda _: None  # the schedule of one stage calls it, with nothing
    if not hasattr(model, "model_type"):
        model.model_type = ModelType.encoder_or_decoder
    return model


def _mask_padding(model: GPTModel, vocab_size: int, tensor_rank: int) -> None:
    """Gives no probability to the columns that pad the vocabulary, so that the loss does not depend on the layout."""
    num_columns = model.output_layer.output_size_per_partition
    first = max(0, vocab_size - tensor_rank * num_columns)

    def mask(_layer: torch.nn.Module, _given: object, output: tuple[torch.Tensor, object]) -> None:
        logits, _ = output
        # Not -inf: a fused softmax subtracts the maximum of a block, which may be padding alone.
        logits[..., first:] = torch.finfo(logits.dtype).min

    if first < num_columns:
        model.output_layer.register_forward_hook(mask)


def layer_spec(
    config: RunConfig, transformer: TransformerConfig, device: torch.device, *, has_experts: bool = True
) -> ModuleSpec:
    """The layer implementation. ImportError: an unsupported transformer-engine. ValueError: it is required and absent,
    or what is used needs it, or norms other than torch's.
    """
    num_experts = transformer.num_moe_experts if has_experts else None
    if uses_transformer_engine(config, device):
        check_version("transformer-engine", str(get_te_version()))  # cluster images build it without metadata
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=config.megatron.get("moe_grouped_gemm", True),
            qk_layernorm=transformer.qk_layernorm,
            multi_latent_attention=transformer.multi_latent_attention,
        )
        if config.data.reset_attention_mask:
            attention = spec.submodules.self_attention.submodules
            attention.core_attention = within_documents(attention.core_attention)
        if num_experts is not None:
            prepare_experts(spec)
        return spec
    if passed_over := ", ".join(fields_set(config, OF_TRANSFORMER_ENGINE)):
        raise ValueError(f"{passed_over}: only layers of transformer-engine have that, and these are not; remove it")
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=transformer.qk_layernorm,
        multi_latent_attention=transformer.multi_latent_attention,
        normalization=transformer.normalization,
    )
    if transformer.multi_latent_attention:
        know_absent_transformer_engine()
        # Megatron leaves them out, and layers of transformer-engine would not find their norms in a checkpoint.
        spec.submodules.sharded_state_dict_keys_map = {local: stored for stored, local in LATENT_NORMS.items()}
    refused = ", ".join(fields_set(config, NOT_OF_TORCH_NORMS))
    if refused and spec.submodules.input_layernorm is WrappedTorchNorm:
        raise ValueError(
            f"{refused}: these layers have the norms of torch, which do not support it; remove it, or install "
            f"'transformer-engine{supported('transformer-engine')}' (or, for LayerNorm, apex) and set "
            f"model.transformer_impl=auto, which is {config.model.transformer_impl}"
        )
    spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    if num_experts is not None:
        prepare_experts(spec)
    return spec


def uses_transformer_engine(config: RunConfig, device: torch.device) -> bool:
    wanted = config.model.transformer_impl
    if wanted == "transformer_engine" and not (HAVE_TE and device.type != "cpu"):
        raise ValueError(
            f"model.transformer_impl=transformer_engine needs GPUs and the package transformer-engine "
            f"(device {device.type}, installed: {HAVE_TE}); set it to auto or local"
        )
    return HAVE_TE and device.type != "cpu" and wanted != "local"
