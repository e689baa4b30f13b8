"""`spare checkpoint export` and `import`: weights for other programs, and of theirs."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from spare_megatron.cli.printing import say

_FORMAT = Annotated[
    Literal["hf", "megatron"],
    typer.Option(
        "--format",
        help="hf: Hugging Face's safetensors and config.json; megatron: Megatron-LM's iter_* folders of torch_dist.",
    ),
]
_OUT = Annotated[Path, typer.Option("--out", help="The folder to write, which must not exist.")]


def export_weights(
    path: Annotated[Path, typer.Argument(help="The directory of a run, or a checkpoint in it.")],
    to: _FORMAT,
    out: _OUT,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="Format of the numbers; model.precision if absent.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer file, or folder with tokenizer files, to copy beside the weights.")
    ] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="megatron: name the tensors of each layer, instead of stacking them.")
    ] = False,
) -> None:
    """Export the weights of a run's newest valid checkpoint.

    Its layout does not matter. hf: Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V3, gpt-oss and GPT-2 models;
    megatron: what pretrain_gpt.py has arguments for. Settings that it does not support are refused by name. --dtype
    fp32 takes the optimizer's fp32 copies of bf16 parameters.
    """
    from spare_megatron.state.checkpoint.start_checkpoint import checkpoint_of_run

    if per_layer and to != "megatron":
        raise ValueError("--per-layer goes with --format megatron; Hugging Face's names always have the layer")
    if to == "hf":
        from spare_megatron.tools.weights.hf_folder import export_hf as export
    else:
        from spare_megatron.tools.weights.megatron_folder import export_megatron as export
    from spare_megatron.tools.weights.weights_folder import ExportOptions, has_tokenizer

    checkpoint, config = checkpoint_of_run(path)
    export(checkpoint, config, out, ExportOptions(dtype=dtype, tokenizer=tokenizer, per_layer=per_layer))
    say(f"{out}: the weights of {checkpoint.path}")
    if to == "hf" and not has_tokenizer(out):
        say("without a tokenizer: name its folder with --tokenizer to have its files copied")
    if to == "megatron":
        from spare_megatron.tools.weights.megatron_args import args_of, flags_of

        flags = " ".join(["--use-checkpoint-args", "--finetune", *map(shlex.quote, flags_of(args_of(config)))])
        say(f"pretrain_gpt.py takes them with: --load {shlex.quote(str(out))} {flags}")


def import_weights(
    path: Annotated[Path, typer.Argument(help="A folder in the format; of megatron the one of all iterations or one.")],
    from_: _FORMAT,
    out: _OUT,
) -> None:
    """Import weights, which runs start from with load_weights.

    Writes a checkpoint that has weights alone, config.toml with the model's settings, and the tokenizer's files into
    `tokenizer`. Runs name the folder in checkpoint.load_weights.
    """
    if from_ == "hf":
        from spare_megatron.tools.weights.hf_folder import import_hf as import_folder
    else:
        from spare_megatron.tools.weights.megatron_folder import import_megatron as import_folder

    checkpoint = import_folder(path, out)
    say(f"{checkpoint.path}: the weights of {path}")
