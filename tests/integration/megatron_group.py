"""What ranks are asked to do with Megatron-LM's folders, by Megatron's own classes alone: tasks of `run_ranks`."""

import argparse
import queue
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._dynamo import config as dynamo_config
from torch.distributed.checkpoint.api import CheckpointException

from spare_megatron.config.schema import RunConfig

Args = Mapping[str, Any]
EMPTY: Args = {}


def build(args: Args, num_tensor: int, num_stages: int) -> GPTModel:
    """The model as `gpt_builders.py` of Megatron-LM 0.16.1 builds it from the arguments, on this rank of the world."""
    dynamo_config.disable = True  # fused functions run as they are written; to compile them takes 20 s of a processor
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]  (Megatron names CUDA)
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign]
    parallel_state.initialize_model_parallel(num_tensor, num_stages)
    initialize_rng_tracker()
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # type: ignore[method-assign]  (no dropout happens)
    fields = {name: value for name, value in args.items() if name in TransformerConfig.__dataclass_fields__}
    if args["swiglu"]:
        fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    else:
        fields["bias_activation_fusion"] = args["bias_gelu_fusion"]
    if not args["group_query_attention"]:
        fields["num_query_groups"] = None
    sizes = {"tensor_model_parallel_size": num_tensor, "pipeline_model_parallel_size": num_stages}
    config = TransformerConfig(**{**fields, **sizes}, use_cpu_initialization=True, pipeline_dtype=torch.float32)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=args["qk_layernorm"], normalization=args["normalization"]
        ),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
    ).eval()


def save(
    _config: RunConfig, args: Args, sizes: tuple[int, int], folders: Mapping[Path, Args], others: Args = EMPTY
) -> None:
    """Saves random parameters as `save_checkpoint` of Megatron-LM does, with each metadata into its folder. `others`:
    arguments that are saved, too.
    """
    model = build(args, *sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_table = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            rank = (
                parallel_state.get_tensor_model_parallel_rank() if getattr(parameter, "tensor_model_parallel", 0) else 0
            )
            stage = 0 if is_table else parallel_state.get_pipeline_model_parallel_rank()
            random = torch.Generator().manual_seed(
                zlib.crc32(f"{'table' if is_table else name} {rank} {stage}".encode())
            )
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    filesystem_async._results_queue = queue.Queue()  # Megatron's is a process of its own, which takes seconds to start
    for folder, metadata in folders.items():
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = {
            "args": argparse.Namespace(**{**others, **args}),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": model.sharded_state_dict(metadata={**metadata, "dp_cp_group": data}),
        }
        if dist.get_rank() == 0:
            (folder / "iter_0000007").mkdir(parents=True)
            (folder / "latest_checkpointed_iteration.txt").write_text("7")
        dist.barrier()
        dist_checkpointing.save(state, str(folder / "iter_0000007"), content_metadata=dict(metadata))


def outputs(_config: RunConfig, folders: Sequence[Path], tokens: np.ndarray, changes: Args) -> list[np.ndarray]:
    """Logits of the model in each folder, loaded as `load_checkpoint` of Megatron-LM loads it without an optimizer."""
    found = []
    for folder in folders:
        iteration = folder / "iter_{:07d}".format(int((folder / "latest_checkpointed_iteration.txt").read_text()))
        common = dist_checkpointing.load_common_state_dict(str(iteration))
        assert common["checkpoint_version"] == 3.0
        assert common["iteration"] == int(iteration.name.removeprefix("iter_"))
        model = build({**vars(common["args"]), **changes}, 1, 1)
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
        asked = {"model": model.sharded_state_dict(metadata={**metadata, "dp_cp_group": data})}
        try:
            model.load_state_dict(dist_checkpointing.load(asked, str(iteration))["model"])
        except CheckpointException as error:  # no Exception: it would end this rank without an answer
            raise AssertionError(str(error)) from error
        ids = torch.from_numpy(tokens)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            found.append(model(ids, positions, mask).numpy())
        parallel_state.destroy_model_parallel()
    return found
