"""Folders of Megatron-LM as torch writes them: names that are read, and what is refused with the key and the reason."""

import argparse
import enum
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from packaging.version import Version

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import model_tensors
from spare_megatron.config.schema import ModelConfig, ProgramConfig, RunConfig
from spare_megatron.mcore.weights import StoredWeights
from spare_megatron.tools.weights.megatron_args import args_of
from spare_megatron.tools.weights.megatron_folder import export_megatron, import_megatron
from spare_megatron.tools.weights.weights_folder import ExportOptions
from tests.megatron_folders.folders import digest, kept, read_by_megatron, unpack

CONFIG = RunConfig(model=ModelConfig(num_layers=2, hidden_size=16, vocab_size=20, activation="swiglu", qk_norm=True))

ARGS = {**args_of(CONFIG), "params_dtype": torch.float32}

COMMON = {"args": argparse.Namespace(**ARGS)}
COMMON_OBJECT = "common_state/shard_0_1"

Tensors = dict[str, torch.Tensor]


def layers_apart() -> Tensors:
    """Random tensors of the model, of each layer under names of its own."""
    random = torch.Generator().manual_seed(3)
    found = {}
    for tensor in model_tensors(CONFIG):
        key = tensor.key if tensor.layer is None else tensor.key.replace("layers", f"layers.{tensor.layer}", 1)
        found[key] = torch.randn(tensor.shape, generator=random)
    return found


def write(folder: Path, tensors: Mapping[str, Any], common: Any = COMMON, *, is_object: bool = False) -> Path:
    """`is_object`: what is common is stored among the tensors, as by Megatron 0.19, and not in a file beside them."""
    iteration = folder / "iter_0000012"
    iteration.mkdir(parents=True)
    objects = {COMMON_OBJECT: [common]} if is_object else {}
    planner = torch_checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    torch_checkpoint.save({**tensors, **objects}, checkpoint_id=iteration, planner=planner, no_dist=True)
    if not is_object:
        torch.save(common, iteration / "common.pt")
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    return folder


def imported(folder: Path) -> Tensors:
    """All tensors of what an import wrote, by the names that they have with their layers apart."""
    stored = StoredWeights(folder / "checkpoints" / "step-00000000")
    keys = zip(layers_apart(), model_tensors(CONFIG), strict=True)
    return {key: stored.read_tensor(tensor, torch.float32) for key, tensor in keys}


def local_names(tensors: Tensors) -> Tensors:
    def renamed(key: str) -> str:
        key = key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        return key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")

    return {renamed(key): value for key, value in tensors.items()}


def gates_apart(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for key, value in tensors.items():
        is_gated = "linear_fc1.weight" in key or "linear_fc1.bias" in key
        halves = dict(zip((f"{key}_w", f"{key}_v"), value.chunk(2), strict=True))
        found |= {name: half.clone() for name, half in halves.items()} if is_gated else {key: value}
    return found


def with_an_optimizer(tensors: Tensors) -> Tensors:
    moment = torch.zeros(3)
    names = ("optimizer.state.exp_avg.output_layer.weight", "chained_0.optimizer.distributed.param", "optimizer.x")
    return {**tensors, **dict.fromkeys(names, moment)}


@pytest.mark.parametrize("change", [dict, local_names, gates_apart, with_an_optimizer])
def test_all_names_that_megatron_gives_tensors_are_read(tmp_path: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = layers_apart()
    folder = write(tmp_path / "saved", change(tensors))
    for path, name in ((folder, "newest"), (folder / "iter_0000012", "one")):
        import_megatron(path, tmp_path / name)
        found = imported(tmp_path / name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    folder.joinpath("iter_0000012").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    import_megatron(folder, tmp_path / "release")


def test_bf16_stays_and_other_types_become_fp32(tmp_path: Path) -> None:
    tensors = {key: value.bfloat16() for key, value in layers_apart().items()}
    import_megatron(write(tmp_path / "bf16", tensors), tmp_path / "a")
    halves = {key: value.half() for key, value in layers_apart().items()}
    import_megatron(write(tmp_path / "fp16", halves), tmp_path / "b")
    assert 'precision = "bf16"' in (tmp_path / "a" / "config.toml").read_text()
    assert 'precision = "fp32"' in (tmp_path / "b" / "config.toml").read_text()
    found = imported(tmp_path / "b")
    assert all(torch.equal(found[key], halves[key].float()) for key in halves)
    key = "embedding.word_embeddings.weight"
    for kind in (torch.int8, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn):
        folder = write(tmp_path / str(kind), {**tensors, key: tensors[key].to(kind)})
        with pytest.raises(ValueError, match=f"{key} is stored as {kind}; only fp32, bf16 and fp16 can be imported"):
            import_megatron(folder, tmp_path / "c")


def test_only_a_program_with_the_model_of_the_settings_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = import_megatron(write(tmp_path / "saved", layers_apart()), tmp_path / "run")
    settings = load_run_config(tmp_path / "run" / "config.toml").config
    config = replace(settings, program=ProgramConfig(file="mine.py"))
    export_megatron(checkpoint, config, tmp_path / "alike", ExportOptions())
    with monkeypatch.context() as patched:
        patched.setattr(StoredWeights, "shape", lambda *_: (20, 7))
        with pytest.raises(ValueError, match=r"embedding.word_embeddings.weight is none .* program.file=mine.py built"):
            export_megatron(checkpoint, config, tmp_path / "other", ExportOptions())
    monkeypatch.setattr(StoredWeights, "names", lambda _: frozenset({"a.head", "optimizer.state.exp_avg.a.head"}))
    with pytest.raises(ValueError, match=r"a\.head is none of the tensors"):
        export_megatron(checkpoint, config, tmp_path / "other", ExportOptions())
    assert not (tmp_path / "other").exists()


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({QKV: None}, f"has no tensor decoder.layers.self_attention.linear_qkv.weight nor {QKV}, which the model of"),
        ({"embedding.word_embeddings.weight": None}, "has no tensor embedding.word_embeddings.weight"),
        (
            {"decoder.layers.2.mlp.linear_fc2.bias": torch.zeros(16)},
            "has a tensor decoder.layers.2.mlp.linear_fc2.bias",
        ),
        ({"mtp.layers.0.eh_proj.weight": torch.zeros(2)}, "mtp.layers.0.eh_proj.weight, which has no place in the"),
        ({QKV: torch.zeros(47, 16)}, f"{QKV} is of (47, 16), and (48, 16) by its arguments"),
        (
            {"output_layer.weight": torch.zeros(20, 16)},
            "has a tensor output_layer.weight, which has no place in the model",
        ),
        ({"embedding.word_embeddings.weight": torch.zeros(())}, "embedding.word_embeddings.weight is of ()"),
    ],
)
def test_missing_foreign_and_wrongly_shaped_tensors_are_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], reason: str
) -> None:
    tensors = {key: value for key, value in {**layers_apart(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(reason)):
        import_megatron(write(tmp_path / "saved", tensors), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_parts_of_the_model_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    common = {"args": argparse.Namespace(**ARGS), "model": {}, "model0": {"decoder.gate": torch.ones(2)}}
    folder = write(tmp_path / "saved", layers_apart(), common)
    with pytest.raises(ValueError, match=r"common\.pt has model0\.decoder\.gate pickled, and only tensors are read"):
        import_megatron(folder, tmp_path / "out")
    objects = {"decoder.layers.0.mlp._extra_state/shard_0_1": None, "rng_state": 1, "decoder.gate": [1]}
    folder = write(tmp_path / "other", {**layers_apart(), **objects})
    with pytest.raises(ValueError, match=r"\.metadata has decoder\.gate pickled"):
        import_megatron(folder, tmp_path / "out")


def test_a_number_of_layers_that_no_folder_has_is_refused_at_once(tmp_path: Path) -> None:
    common = {"args": argparse.Namespace(**{**ARGS, "num_layers": 10**12})}
    with pytest.raises(ValueError, match=r"has no tensor .* nor decoder\.layers\.2\."):
        import_megatron(write(tmp_path / "saved", layers_apart(), common), tmp_path / "out")


@pytest.mark.parametrize("is_object", [False, True])
def test_drawn_damage_is_named_in_one_line(tmp_path: Path, is_object: bool) -> None:
    folder = write(tmp_path / "saved", layers_apart(), is_object=is_object)
    names = [".metadata", "__0_0.distcp", *([] if is_object else ["common.pt"])]
    files = {name: (folder / "iter_0000012" / name).read_bytes() for name in names}
    draw = random.Random(2)
    num_refused = 0
    for number in range(300):
        name = draw.choice(list(files))
        content = bytearray(files[name])
        match draw.randrange(3):
            case 0:
                for _ in range(draw.choice([1, 1, 2, 8])):
                    content[draw.randrange(len(content))] = draw.randrange(256)
            case 1:
                del content[draw.randrange(len(content)) :]
            case 2:
                start = draw.randrange(len(content))
                del content[start : start + draw.randrange(1, 40)]
        (folder / "iter_0000012" / name).write_bytes(content)
        error = ""
        try:
            import_megatron(folder, tmp_path / str(number))
        except ValueError as found:
            error = str(found)
        if error:
            assert str(folder) in error
            assert error.isprintable()
            num_refused += 1
        (folder / "iter_0000012" / name).write_bytes(files[name])
    assert num_refused > 200


def test_a_folder_that_is_none_of_torch_dist_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = write(tmp_path / "saved", layers_apart())
    iteration = folder / "iter_0000012"

    def refusal(path: Path) -> str:
        with pytest.raises(ValueError, match=str(path.name)) as error:
            import_megatron(path, tmp_path / "out")
        return str(error.value)

    assert "is no directory; name Megatron-LM's --save" in refusal(tmp_path / "absent")
    assert "has no metadata.json and .metadata" in refusal(tmp_path)
    torch.save({"iteration": 12}, iteration / "common.pt")
    assert "common.pt has no args" in refusal(folder)
    (iteration / "common.pt").write_bytes(b"no archive")
    assert "common.pt cannot be read" in refusal(folder)
    torch.save({"args": argparse.Namespace(**ARGS)}, iteration / "common.pt")
    data = iteration / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refusal(folder)
    data.write_bytes(whole)
    (iteration / ".metadata").write_bytes(b"\x80\x04.")
    assert ".metadata cannot be read" in refusal(folder)
    for text in ("\u00b2", "12\n13", "../saved/iter_0000012"):
        (folder / "latest_checkpointed_iteration.txt").write_text(text)
        assert f"names iteration {text!r}, whose folder is missing" in refusal(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("13")
    assert "names iteration '13', whose folder is missing" in refusal(folder)
    shutil.rmtree(iteration)
    (folder / "iter_0000013" / "mp_rank_00").mkdir(parents=True)
    assert "--auto-detect-ckpt-format --ckpt-convert-format torch_dist" in refusal(folder)


def test_arguments_among_the_tensors_are_refused_by_name_where_they_are_missing_or_damaged(tmp_path: Path) -> None:
    def refusal(name: str, common: Any) -> str:
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / name / "iter_0000012"))) as error:
            import_megatron(write(tmp_path / name, layers_apart(), common, is_object=True), tmp_path / "out")
        return str(error.value)

    assert f"{COMMON_OBJECT} has no args, which describe the model" in refusal("without", {"iteration": 12})
    assert f"{COMMON_OBJECT} holds no dictionary" in refusal("list", [COMMON])
    assert f"{COMMON_OBJECT} has model.decoder.gate pickled" in refusal(
        "pickled", {**COMMON, "model": {"decoder.gate": torch.ones(2)}}
    )
    folder = write(tmp_path / "neither", layers_apart())
    (folder / "iter_0000012" / "common.pt").unlink()
    with pytest.raises(ValueError, match=f"has neither common.pt nor an object {COMMON_OBJECT} in .metadata"):
        import_megatron(folder, tmp_path / "out")
    folder = write(tmp_path / "object", {**layers_apart(), COMMON_OBJECT: {"no": "list"}})
    (folder / "iter_0000012" / "common.pt").unlink()
    with pytest.raises(ValueError, match=f"iter_0000012: {COMMON_OBJECT} cannot be read"):
        import_megatron(folder, tmp_path / "out")


@pytest.mark.parametrize("of_version", kept())
def test_a_kept_folder_of_each_form_becomes_the_tensors_that_its_own_version_read(
    tmp_path: Path, of_version: str
) -> None:
    folder = unpack(of_version, tmp_path)
    assert (folder / "iter_0000007" / "common.pt").exists() == (of_version == "0.16.1")
    import_megatron(folder, tmp_path / "out")
    stored = StoredWeights(tmp_path / "out" / "checkpoints" / "step-00000000")
    found = {}
    for key in stored.names():
        values = torch.empty(stored.shape(key), dtype=stored.dtype(key))
        stored.read(key, [0 for _ in values.shape], values)
        found[key] = digest(values)
    assert found == kept()[of_version]
    model = load_run_config(tmp_path / "out" / "config.toml").config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (2, 16, 24, 32)
    assert (model.num_attention_heads, model.num_query_groups, model.norm_eps) == (4, 2, 1e-6)


@pytest.mark.parametrize("of_version", [name for name in kept() if Version(name) <= Version(version("megatron-core"))])
def test_the_installed_megatron_reads_the_same_of_a_kept_folder(tmp_path: Path, of_version: str) -> None:
    found = read_by_megatron(unpack(of_version, tmp_path) / "iter_0000007")
    assert {key: digest(values) for key, values in found.items()} == kept()[of_version]


class Color(enum.Enum):
    """Stands for an enum of a package that is not installed."""

    RED = 1


class Harmful:
    """Runs a command when a usual unpickler meets it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


@pytest.mark.parametrize("is_object", [False, True])
def test_no_code_of_a_folder_runs_and_unknown_classes_do_no_harm(tmp_path: Path, is_object: bool) -> None:
    touched = tmp_path / "touched"
    args = argparse.Namespace(**ARGS, color=Color.RED, harmful=Harmful(touched))
    common = {"args": args, "rng": torch.zeros(3), "harmful": [Harmful(touched)], Color.RED: {1}}
    folder = write(tmp_path / "saved", layers_apart(), common, is_object=is_object)
    import_megatron(folder, tmp_path / "out")
    assert imported(tmp_path / "out").keys() == layers_apart().keys()
    metadata = folder / "iter_0000012" / ".metadata"
    read = torch_checkpoint.FileSystemReader(metadata.parent).read_metadata()
    read.planner_data = Harmful(touched)
    torch_checkpoint.filesystem.pickle.dump(read, metadata.open("wb"))
    import_megatron(folder, tmp_path / "again")
    assert not touched.exists()
