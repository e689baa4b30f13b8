"""From a launch of Megatron-LM to a preset: reads its arguments, by Megatron's own parser where there is one, finds the
settings that they mean, and says what becomes of each.
"""

import argparse
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from spare_megatron.cli.config import fitting_machine
from spare_megatron.config.batch_size import with_batch, with_ramp
from spare_megatron.config.building import build_run_config
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import SpareConfig
from spare_megatron.tools.convert.arguments import TAKEN, Arguments, Class, class_of, megatron_value, read_arguments
from spare_megatron.tools.convert.launch import Launch
from spare_megatron.tools.weights.megatron_args import ModelArgs, settings_in

OF_LAUNCHER = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone", "max_restarts"}
_LAUNCHER = re.compile(r"(.*/)?(torchrun|ft_launcher|torch\.distributed\.(run|launch))")
_MOST_HOSTS = 3
_DEFAULT_SPLIT = "969,30,1"
"""Of Megatron, where --data-path is given alone."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of a preset by dotted key, what each follows from, and what becomes of each given argument.
    `notes`: by argument, how what it became differs.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def put(self, setting: str, value: Any, *names: str) -> None:
        if value is not None:
            self.settings[setting] = value
            self.sources[setting] = names

    def refuse(self, name: str, reason: str) -> None:
        self.classes[name] = Class("missing", reason)

    def rounded(self, name: str, steps: float, *, up: bool = True) -> int:
        """A whole number of steps; the report names what is rounded."""
        near = round(steps)
        if math.isclose(steps, near, rel_tol=1e-9):
            return near
        self.notes[name] = f"rounded from {steps:g} steps"
        return math.ceil(steps) if up else math.floor(steps)


def convert_launch(
    launch: Launch | None, further: Sequence[str], without: Sequence[str]
) -> tuple[Arguments, Preset, str]:
    """The arguments, what they become, and how they were read. Later arguments win over those of the launch."""
    words = launch.launcher if launch else ()
    first = next((index + 1 for index, word in enumerate(words) if _LAUNCHER.fullmatch(word)), len(words))
    given = read_arguments(words[first:])
    given |= read_arguments([*(launch.arguments if launch else ()), *further])
    for name in [name.lstrip("-").replace("-", "_") for name in without]:
        if given.pop(name, None) is None:
            raise ValueError(f"--without {name}: the launch does not have it; remove that")
    parser, reader = own_parser()
    defaults: dict[str, Any] = {}
    unknown: set[str] = set()
    if parser is not None:
        flags = {name_of(flag): (flag, action) for action in parser._actions for flag in action.option_strings}
        defaults = {name: action.default for name, (_, action) in flags.items()}
        unknown = given.keys() - flags - OF_LAUNCHER
        parser.parse_args([word for name in given.keys() & flags for word in (flags[name][0], *given[name])])
    args = Arguments(given=given, defaults=defaults)
    preset = preset_of(args)
    for name in unknown:
        preset.refuse(name, "the installed Megatron has no such argument; remove it")
    return args, preset, reader


def name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's parser: {message}; correct it")


def own_parser() -> tuple[argparse.ArgumentParser | None, str]:
    """Megatron's own parser, if it can be imported, and which one reads the arguments."""
    if find_spec("megatron.training") is None:
        return None, "by the table of spare, as megatron.training is not installed"
    try:
        import_module("spare_megatron.mcore")  # what Megatron needs to be imported
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        return None, f"by the table of spare, as megatron.training cannot be imported ({error})"
    parser = _Parser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser, "by Megatron's own parser"


def preset_of(args: Arguments) -> Preset:
    """The preset, as far as it can be had; its classes name everything that stands against it."""
    preset = Preset()
    for name in args.given:
        preset.classes[name] = _as_here(name, args) or class_of(name, args)
    of_training = (_steps, _optimizer, _schedule, _reduction)
    for part in (_copies, _layout, _model, _experts, *of_training, _data, _evaluation, _saves):
        try:
            part(args, preset)
        except ValueError as error:
            name = re.split(r"\W", str(error))[0]
            preset.refuse(name if name in TAKEN else "num_layers", str(error).removeprefix(f"{name}: "))
    for name, found in preset.classes.items():
        if found.kind == "taken" and name not in TAKEN:
            preset.put(found.text, megatron_value(args.given[name]), name)
    return preset


def _as_here(name: str, args: Arguments) -> Class | None:
    """Of arguments that ask for what holds anyway with others of the launch."""
    value, tensor_parallel = args.given[name], args["tensor_model_parallel_size"]
    if "finetune" in args.given and "load" in args.given:
        if name == "load":
            return Class("taken", "checkpoint.load_weights")
        if name in ("finetune", "no_load_optim", "no_load_rng"):
            return Class("implied", "`spare checkpoint import` brings weights alone; set load_weights to what it wrote")
    elif name == "load" and value == args.given.get("save"):
        return Class("implied", "`spare train --resume` goes on from the newest checkpoint of checkpoint.folder")
    recomputes = "recompute_granularity" in args.given or args["recompute_activations"]
    if name in ("recompute_method", "recompute_num_layers") and not recomputes:
        return Class("without effect", "Megatron reads it with --recompute-granularity alone")
    if name == "expert_tensor_parallel_size" and value == (str(tensor_parallel),):
        return Class("implied", "experts are always split like other layers")
    if name == "sequence_parallel" and tensor_parallel == 1:
        return Class("without effect", "Megatron switches it off with one tensor-parallel rank")
    if name == "cp_comm_type" and value == ("a2a+p2p",):
        return Class("without effect", "it changes how context-parallel ranks exchange; here they do so by p2p")
    return None


def _copies(args: Arguments, preset: Preset) -> None:
    for name in (name for name, row in TAKEN.items() if row.is_copied):
        preset.put(TAKEN[name].setting, args[name], name)
    preset.put("cluster.device", "gpu")
    if args["nnodes"] > 1:
        preset.put("cluster.launcher", "hand", "nnodes")
    preset.put("megatron.recompute_granularity", "selective" if args["recompute_activations"] else None)


def _replica(args: Arguments) -> int:
    return int(
        args["tensor_model_parallel_size"] * args["pipeline_model_parallel_size"] * args["context_parallel_size"]
    )


def _groups(args: Arguments) -> int:
    if "nproc_per_node" not in args.given:
        raise ValueError("nproc_per_node: the launch names no GPUs; give --nproc-per-node and --nnodes behind --")
    num_gpus, lanes = args["nproc_per_node"] * args["nnodes"], _lanes(args)
    if num_gpus % (_replica(args) * lanes):
        raise ValueError(
            f"nproc_per_node: {num_gpus} GPUs are no multiple of {_replica(args)} x {lanes}, those of a replica times "
            f"the lanes that divide experts; change --nproc-per-node or --nnodes"
        )
    return int(num_gpus // (_replica(args) * lanes))


def _lanes(args: Arguments) -> int:
    return 1 if args["num_experts"] is None else int(args["expert_model_parallel_size"])


def _layout(args: Arguments, preset: Preset) -> None:
    num_groups, lanes = _groups(args), _lanes(args)
    preset.put("layout.num_groups", num_groups, "nproc_per_node", "nnodes")
    preset.put("layout.data_parallel", lanes, "expert_model_parallel_size")
    preset.put("spare.redundancy", min(_MOST_HOSTS, num_groups))
    stages, chunk = args["pipeline_model_parallel_size"], args["num_layers_per_virtual_pipeline_stage"]
    chunks = args["num_virtual_stages_per_pipeline_rank"] or 1
    if chunk is not None:
        chunks = _divided(args, "num_layers", stages * chunk)
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    preset.put("layout.virtual_pipeline", chunks, *names)
    spare, rampup = _spare(args), args["rampup_batch_size"]
    preset.put("train.global_batch_size", _global_batch(args), "global_batch_size")
    preset.put("train.rampup_batch_size", rampup, "rampup_batch_size")
    if rampup is not None:
        sizes = range(rampup[0], _global_batch(args), rampup[1])
        theirs = sum(rampup[2] / len(sizes) / size for size in sizes)
        preset.notes["rampup_batch_size"] = (
            f"in stages of equally many steps, {spare.ramp_steps} together; those of Megatron have equally many "
            f"samples, and take about {theirs:.0f} steps"
        )
    is_divisible = args["optimizer"] == "adam" and num_groups > 1 and lanes == 1
    is_stacked = args["use_distributed_optimizer"] and is_divisible
    preset.put("optimizer.sharding", "stacked" if is_stacked else "replicated", "use_distributed_optimizer")
    copies = min(num_groups, max(2, args["num_distributed_optimizer_instances"])) if is_stacked else None
    preset.put("optimizer.redundancy", copies, "num_distributed_optimizer_instances")


def _spare(args: Arguments) -> SpareConfig:
    """With the batch of each step."""
    name, value, rampup = "global_batch_size", _global_batch(args), args["rampup_batch_size"]
    each = args["micro_batch_size"] * _groups(args)
    try:
        spare = with_batch(SpareConfig(), value, each)
        name, value = "rampup_batch_size", rampup
        return spare if rampup is None else with_ramp(spare, rampup, each)
    except ValueError as error:
        raise ValueError(f"{name}: {value} {error}") from error


def steps_of(args: Arguments, num_samples: float) -> float:
    """The steps, the last one in part, that read so many samples."""
    ramp = _spare(args).ramp
    microbatches: float = num_samples / (args["micro_batch_size"] * _groups(args))
    step = bisect_right(range(int(microbatches) + 1), microbatches, key=ramp.before) - 1
    return step + (microbatches - ramp.before(step)) / ramp.at(step)


def _divided(args: Arguments, name: str, divisor: int) -> int:
    if args[name] is None or args[name] % divisor:
        raise ValueError(f"{name}: {args[name]} is no multiple of {divisor}; change it")
    return int(args[name] // divisor)


def _global_batch(args: Arguments) -> int:
    if args["micro_batch_size"] is None:
        raise ValueError("micro_batch_size: it is absent, and Megatron has no default; give it")
    return int(args["global_batch_size"] or args["micro_batch_size"] * _groups(args) * _lanes(args))


def _model(args: Arguments, preset: Preset) -> None:
    if absent := [
        name for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length") if not args[name]
    ]:
        raise ValueError(f"{absent[0]}: it is absent, and Megatron has no default; give it")
    given = {name: args[name] for name in ModelArgs.__annotations__ if name in TAKEN}
    given |= {"max_position_embeddings": args["seq_length"]}
    given |= {f"bias_{kind}_fusion": f"no_bias_{kind}_fusion" not in args.given for kind in ("gelu", "swiglu")}
    if args["swiglu"] and args["ffn_hidden_size"] is None:
        given["ffn_hidden_size"] = int((4 * args["hidden_size"] * 2 / 3) / 64) * 64
    if (args["max_position_embeddings"] or args["seq_length"]) < args["seq_length"]:
        raise ValueError(f"max_position_embeddings: it is below --seq-length {args['seq_length']}; raise it")
    tables = settings_in(given, _vocabulary(args, preset), "bf16" if args["bf16"] else "fp32")
    for table, values in tables.items():
        for key, value in values.items():
            setting = f"{table}.{key}"
            preset.put(setting, value, *(name for name, row in TAKEN.items() if setting == row.setting))
    clamp = "activation_func_clamp_value"
    if clamp in args.given and TAKEN[clamp].setting not in preset.settings:
        preset.classes[clamp] = Class("without effect", "fused swiglu ignores it (--no-bias-swiglu-fusion)")
    if tables["model"]["position_embedding"] != "rope":
        for key in ("rope_base", "rope_scaling_factor"):
            preset.settings.pop(f"model.{key}", None)
        for name in ("rotary_base", "use_rope_scaling", "rope_scaling_factor"):
            if name in args.given:
                preset.classes[name] = Class("without effect", "positions are learned here")


def _vocabulary(args: Arguments, preset: Preset) -> int:
    """Rows of the table, padded as Megatron does, whose softmax has the padding, too."""
    size, file = args["vocab_size"], args["vocab_file"]
    try:
        size = len(json.loads(Path(file or "").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        if size is None:
            raise ValueError(
                f"vocab_size: the tokenizer is not here ({file or 'no --vocab-file'}); give --vocab-size behind --"
            ) from None
    if args.given.get("tokenizer_type") == ("NullTokenizer",):
        preset.notes["vocab_size"] = "as of Megatron 0.19; up to 0.16 its NullTokenizer has one token more: add it"
    multiple = args["make_vocab_size_divisible_by"] * args["tensor_model_parallel_size"]
    return int(-(-size // multiple) * multiple)


def _experts(args: Arguments, preset: Preset) -> None:
    if args["num_experts"] is None:
        return
    for name in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        preset.put(TAKEN[name].setting, args[name], name)
    if args["moe_layer_freq"] != "1":
        match = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", args["moe_layer_freq"].replace(" ", ""))
        if match is None:
            raise ValueError("moe_layer_freq: only ([0]*N+[1]*M), dense layers before the others; change it")
        preset.put("model.num_dense_layers", int(match[1]), "moe_layer_freq")


def _samples(args: Arguments, *names: str) -> tuple[str, float]:
    """The first of these arguments that is given, and its samples: a schedule counts an iteration as a whole batch."""
    name = next((name for name in names if args[name]), names[0])
    return name, (args[name] or 0) * (_global_batch(args) if name.endswith("iters") else 1)


def _in_steps(args: Arguments, preset: Preset, name: str, num_samples: float) -> int:
    """Steps that read these samples, of an argument; samples that do not fill a step count as one."""
    return preset.rounded(name, steps_of(args, num_samples)) if num_samples else 0


def _steps(args: Arguments, preset: Preset) -> None:
    steps = args["train_iters"] or (
        args["train_samples"] and preset.rounded("train_samples", steps_of(args, args["train_samples"]), up=False)
    )
    if not steps:
        raise ValueError("train_iters: it is absent, and so is --train-samples; give one")
    end = min(steps, args["exit_interval"] or steps)
    preset.put("train.steps", end, "train_iters", "train_samples", "exit_interval")
    names = ("lr_decay_iters", "lr_decay_samples")
    name, samples = _samples(args, *names, "train_iters")
    preset.put("optimizer.decay_steps", _in_steps(args, preset, name, samples) or steps, *names)


def _optimizer(args: Arguments, preset: Preset) -> None:
    kind = args["optimizer"]
    if kind not in ("adam", "muon"):
        raise ValueError(f"optimizer: {kind} is not had here; choose adam or muon")
    preset.put("optimizer.kind", kind, "optimizer")
    for name in (name for name in TAKEN if name.startswith("muon_") and kind == "muon"):
        value = args[name]
        preset.put(TAKEN[name].setting, not value if name == "muon_no_split_qkv" else value, name)


def _schedule(args: Arguments, preset: Preset) -> None:
    style = args["lr_decay_style"].lower().replace("-", "_")
    preset.put("optimizer.decay_style", style, "lr_decay_style")
    name, samples = _samples(args, "lr_warmup_iters", "lr_warmup_samples")
    if args["lr_warmup_fraction"] is not None:
        name, decay = "lr_warmup_fraction", ("lr_decay_iters", "lr_decay_samples", "train_iters", "train_samples")
        samples = args[name] * _samples(args, *decay)[1]
    warmup = _in_steps(args, preset, name, samples)
    if style == "inverse_square_root" and not warmup:
        raise ValueError("lr_decay_style: without a warm-up it falls by samples, and by steps here; give a warm-up")
    preset.put("optimizer.warmup_steps", warmup, "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
    if args["decoupled_lr"] is not None:
        preset.put("optimizer.rules", list(_decoupled(args)), "decoupled_lr", "decoupled_min_lr")
    if style == "wsd":
        name = "lr_wsd_decay_samples"  # of the end, where a ramp is over
        steps = args["lr_wsd_decay_iters"] or (args[name] and preset.rounded(name, args[name] / _global_batch(args)))
        preset.put("optimizer.wsd_decay_steps", steps, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        preset.put("optimizer.wsd_decay_style", args["lr_wsd_decay_style"].lower(), "lr_wsd_decay_style")


def _decoupled(args: Arguments) -> Iterator[dict[str, Any]]:
    """Rules for the rates of word embeddings and the output layer."""
    low = args["min_lr"] if args["decoupled_min_lr"] is None else args["decoupled_min_lr"]
    if low and not args["min_lr"]:
        raise ValueError("decoupled_min_lr: --min-lr is 0, and no factor makes it that; set it above 0")
    factors = {
        "learning_rate_factor": args["decoupled_lr"] / args["lr"],
        "min_learning_rate_factor": low / args["min_lr"] if low else 0.0,
    }
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    for pattern in tables if args["untie_embeddings_and_output_weights"] else tables[:1]:
        yield {"pattern": pattern, **factors}


def _reduction(args: Arguments, preset: Preset) -> None:
    mode = "reproducible" if args["deterministic_mode"] else "fast_bf16" if args["grad_reduce_in_bf16"] else "fast"
    preset.put("reduce.mode", mode, "deterministic_mode", "grad_reduce_in_bf16")
    preset.put("metrics.tensorboard", args["tensorboard_dir"] is not None, "tensorboard_dir")


def _data(args: Arguments, preset: Preset) -> None:
    name = "train_data_path" if args["train_data_path"] else "data_path"
    parts = list(_blend(name, args[name] or []))
    if len(parts) == 1:
        preset.put("data.corpus", parts[0]["corpus"], name)
    elif parts:
        preset.put("data.blend", parts, name)
    if name == "data_path" and parts:
        preset.put("data.split", (args["split"] or _DEFAULT_SPLIT).replace(" ", ""), "split")
    sets = [part["corpus"] for part in _blend("valid_data_path", args["valid_data_path"] or [])]
    validation = [{"name": f"valid{index}", "corpus": corpus} for index, corpus in enumerate(sets)]
    preset.put("data.validation", validation or None, "valid_data_path")
    if args["reset_attention_mask"] and args["transformer_impl"] == "transformer_engine":
        preset.notes["reset_attention_mask"] = (
            "and attention stays within documents; Megatron's layers of transformer-engine ignore the mask"
        )
    if args["eod_mask_loss"] and "calculate_per_token_loss" not in args.given:
        preset.notes["eod_mask_loss"] = (
            "and the loss is divided by the tokens that count in the whole step; without --calculate-per-token-loss "
            "Megatron divides that of each microbatch by its own, and averages"
        )


def _blend(name: str, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    if len(words) <= 1:
        yield from ({"corpus": word} for word in words)
        return
    try:
        for weight, corpus in zip(words[::2], words[1::2], strict=True):
            yield {"corpus": corpus, "weight": float(weight)}
    except ValueError:
        raise ValueError(f"{name}: corpora without weights are drawn by their sizes; give each a weight") from None


def _evaluation(args: Arguments, preset: Preset) -> None:
    interval, iters = args["eval_interval"], args["eval_iters"]
    preset.put("eval.every_steps", interval if interval and iters else 0, "eval_interval", "eval_iters")
    if interval and iters:
        preset.put("eval.sequences", iters * _global_batch(args), "eval_iters")


def _saves(args: Arguments, preset: Preset) -> None:
    kept = args["save_retain_interval"] or args["save_interval"]  # Megatron keeps all without the former
    preset.put("checkpoint.keep_every_steps", kept, "save_retain_interval", "save_interval")
    preset.put("checkpoint.asynchronous", args["async_save"] or None, "async_save")


def tables_of(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings as the tables of a TOML file."""
    tables: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "run"}
    for key, value in settings.items():
        table, _, last = key.partition(".")
        tables.setdefault(table, {})[last] = value
    return tables


def toml_of(preset: Preset, name: str) -> str:
    return f"# Of {name}, by `spare convert`.\n{tomli_w.dumps(tables_of(preset.settings, name))}"


def problems_of(preset: Preset, name: str) -> list[str]:
    """Why the preset could run on no machine, with its data."""
    run_name = tables_of({}, name)["name"]
    config, mistakes = build_run_config({"name": run_name, **preset.settings})
    return [mistake.text for mistake in mistakes] or problems(config, fitting_machine(config))
