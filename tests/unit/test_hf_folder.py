"""Folders in Hugging Face's format: every stored tensor is used, equals what is used, or is named in an error."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spare_megatron.config.building import build_run_config
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import model_tensors
from spare_megatron.config.schema import DataConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.state.checkpoint.checkpoint_folder import Checkpoint
from spare_megatron.tools.weights import hf_folder
from spare_megatron.tools.weights.hf_folder import export_hf, import_hf
from spare_megatron.tools.weights.weights_folder import ExportOptions, Reader

transformers.logging.set_verbosity(transformers.logging.CRITICAL)

ROPE_MODEL = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROPE_MODEL,
    "qwen2": ROPE_MODEL,
    "qwen3": ROPE_MODEL,
    "mixtral": {**ROPE_MODEL, "num_local_experts": 2},
    "qwen3_moe": {**ROPE_MODEL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4},
    "deepseek_v3": {
        **ROPE_MODEL,
        "num_key_value_heads": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "gpt2": {"vocab_size": 12, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
}

EMBEDDING = {"gpt2": "transformer.wte.weight"}

OUTPUT = "lm_head.weight"

Tensors = dict[str, Tensor]


@dataclass
class Folder:
    """What is written: tensors by file, an index if there are several, and what in it is not in order."""

    family: str
    config: dict[str, Any]
    files: dict[str, Tensors]
    places: dict[str, str] | None = None
    wrong: set[str] = field(default_factory=set)

    @property
    def embedding(self) -> str:
        return EMBEDDING.get(self.family, "model.embed_tokens.weight")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for tensors in self.files.values():
            yield from tensors.items()

    def write(self, path: Path) -> Path:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        for name, tensors in self.files.items():
            safetensors.torch.save_file(tensors, path / name)
        if self.places is not None:
            index = {"metadata": {"total_size": 0}, "weight_map": self.places}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Folder]:
    """A random model of each family as transformers saves it, whose output layer is not tied."""
    found = {}
    for family, fields in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, tie_word_embeddings=False, **fields))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        path = tmp_path_factory.mktemp(family)
        model.save_pretrained(path)
        files = {"model.safetensors": safetensors.torch.load_file(path / "model.safetensors")}
        found[family] = Folder(family, json.loads((path / "config.json").read_text()), files)
    return found


def copy_of(model: Folder) -> Folder:
    return Folder(model.family, dict(model.config), {name: dict(tensors) for name, tensors in model.files.items()})


def config_of(checkpoint: Checkpoint) -> RunConfig:
    return load_run_config(checkpoint.path.parents[1] / "config.toml").config


def exported(checkpoint: Checkpoint, out: Path) -> Tensors:
    export_hf(checkpoint, config_of(checkpoint), out, ExportOptions())
    return safetensors.torch.load_file(out / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_output_layer_is_kept_where_it_is_not_the_embedding(
    models: Mapping[str, Folder], tmp_path: Path, family: str
) -> None:
    other = copy_of(models[family])
    other.config["tie_word_embeddings"] = True
    stored = other.files["model.safetensors"]
    back = exported(import_hf(other.write(tmp_path / "other"), tmp_path / "a"), tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"] is False
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)

    stored[OUTPUT] = stored[other.embedding].clone()
    back = exported(import_hf(other.write(tmp_path / "same"), tmp_path / "c"), tmp_path / "d")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["tie_word_embeddings"] is True
    assert back.keys() == stored.keys() - {OUTPUT}


def test_an_index_is_never_followed_out_of_its_folder(models: Mapping[str, Folder], tmp_path: Path) -> None:
    folder = copy_of(models["llama"])
    divided(folder, random.Random(1))
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "1234"
    (cache / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.write(snapshot)
    file = snapshot / min(folder.files)
    file.rename(cache / "blobs" / "abcd")
    file.symlink_to("../../blobs/abcd")  # as Hugging Face's cache has its files
    import_hf(snapshot, tmp_path / "of-the-cache")
    (cache / "blobs" / "abcd").rename(tmp_path / "elsewhere")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=rf"index\.json: weight_map names {file.name}, a link that leads out of its folder"
    ):
        import_hf(snapshot, tmp_path / "out")
    for name in (
        "/etc/x.safetensors",
        "../x.safetensors",
        "",
        "..",
        "a\0.safetensors",
        "x.bin",
        3,
        None,
        ["x.safetensors"],
    ):
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ValueError, match=r"index\.json: weight_map") as error:
            import_hf(snapshot, tmp_path / "out")
        assert str(error.value).isprintable()
    for text in ("[]", "{}", '{"weight_map": []}', "null", "{", "[" * 1000):
        (snapshot / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json"):
            import_hf(snapshot, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_are_damaged_or_missing_are_named(models: Mapping[str, Folder], tmp_path: Path) -> None:
    path = models["gpt2"].write(tmp_path / "folder")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"folder/model\.safetensors cannot be read"):
            import_hf(path, tmp_path / "out")
    file.unlink()
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing, and there is no model\.safetensors\.index\.json"
    ):
        import_hf(path, tmp_path / "out")
    file.write_bytes(whole)
    (path / "generation_config.json").write_text("[" * 1000)
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        import_hf(path, tmp_path / "out")
    (path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing; name a folder in Hugging Face's format"):
        import_hf(path, tmp_path / "out")


def test_more_layers_or_experts_than_tensors_are_refused_at_once(models: Mapping[str, Folder], tmp_path: Path) -> None:
    folder = copy_of(models["mixtral"])
    for number, field_name in enumerate(("num_hidden_layers", "num_local_experts")):
        folder.config = {**models["mixtral"].config, field_name: 10**12}
        with pytest.raises(ValueError, match=r"config\.json has 1000000000000 (layers|experts), and there are"):
            import_hf(folder.write(tmp_path / str(number)), tmp_path / "out")


# -------------------------------------------------------------------------------------------- ids of special tokens


def written(out: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The ids in config.json, and all of generation_config.json."""
    config = json.loads((out / "config.json").read_text())
    generation = out / "generation_config.json"
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    return ids, json.loads(generation.read_text()) if generation.exists() else None


@pytest.mark.parametrize(
    ("ids", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, {"eos_token_id": 2}),
        ({"eos_token_id": [2, 3], "bos_token_id": 1}, None, {"eos_token_id": [2, 3], "bos_token_id": 1}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 5], "top_p": 0.9}, {"eos_token_id": [2, 5], "top_p": 0.9}),
        ({"bos_token_id": None, "pad_token_id": 7}, None, {"pad_token_id": 7}),
        ({}, None, None),
    ],
)
def test_ids_of_special_tokens_go_through_an_import(
    models: Mapping[str, Folder],
    tmp_path: Path,
    ids: dict[str, Any],
    generation: dict[str, Any] | None,
    expected: dict[str, Any] | None,
) -> None:
    folder = copy_of(models["llama"])
    folder.config = {name: value for name, value in folder.config.items() if not name.endswith("_token_id")} | ids
    path = folder.write(tmp_path / "folder")
    (path / "tokenizer.json").write_text("{}")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = import_hf(path, tmp_path / "imported")
    kept = tmp_path / "imported" / "tokenizer"
    for name, tokenizer in (("alone", None), ("named", kept), ("file", kept / "tokenizer.json")):
        export_hf(checkpoint, config_of(checkpoint), tmp_path / name, ExportOptions(tokenizer=tokenizer))
        assert written(tmp_path / name) == (ids, expected)


@pytest.mark.parametrize(
    ("kept", "end", "expected"),
    [
        ({}, None, {}),
        ({}, 0, {"eos_token_id": 0}),
        ({"bos_token_id": 1, "eos_token_id": 2}, 5, {"bos_token_id": 1, "eos_token_id": 5}),
        ({"bos_token_id": 1, "eos_token_id": [2, 5]}, 5, {"bos_token_id": 1, "eos_token_id": [2, 5]}),
        ({"bos_token_id": 1, "eos_token_id": 2}, None, {"bos_token_id": 1, "eos_token_id": 2}),
    ],
)
def test_a_training_exports_what_ends_its_documents_and_what_its_import_knew(
    models: Mapping[str, Folder], tmp_path: Path, kept: dict[str, Any], end: int | None, expected: dict[str, Any]
) -> None:
    folder = copy_of(models["gpt2"])
    folder.config = {name: value for name, value in folder.config.items() if not name.endswith("_token_id")} | kept
    origin = import_hf(folder.write(tmp_path / "folder"), tmp_path / "imported")
    run = tmp_path / "run"
    shutil.copytree(origin.path, run / "checkpoints" / origin.path.name)
    config = replace(
        config_of(origin),
        data=DataConfig(end_of_document=end),
        checkpoint=CheckpointConfig(load_weights=str(origin.path)),
    )
    export_hf(replace(origin, path=run / "checkpoints" / origin.path.name), config, tmp_path / "out", ExportOptions())
    assert written(tmp_path / "out") == (expected, expected or None)


# ---------------------------------------------------------------------------------------------------- drawn folders


def constants_of(folder: Folder) -> dict[str, Tensor]:
    """What older versions of transformers have stored beside the parameters."""
    if folder.family == "gpt2":
        mask = torch.ones(16, 16, dtype=torch.uint8).tril().view(1, 1, 16, 16)
        return {"transformer.h.0.attn.bias": mask, "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    base = folder.config["rope_parameters"]["rope_theta"]
    frequencies = torch.tensor([base**0.0, base**-0.5])
    return {
        "model.rotary_emb.inv_freq": frequencies,
        "model.layers.1.self_attn.rotary_emb.inv_freq": frequencies.half(),
    }


def any_name(folder: Folder, draw: random.Random) -> str:
    return draw.choice(sorted(name for name, _ in folder.tensors()))


def replaced(folder: Folder, name: str, values: Tensor | None) -> None:
    for tensors in folder.files.values():
        if name in tensors:
            del tensors[name]
            if values is not None:
                tensors[name] = values


def tied(folder: Folder, draw: random.Random) -> None:
    folder.config["tie_word_embeddings"] = True
    stored = dict(folder.tensors())
    if draw.random() < 0.5 and OUTPUT in stored:
        replaced(folder, OUTPUT, draw.choice([None, stored[folder.embedding].clone()]))


def of_another_type(folder: Folder, draw: random.Random) -> None:
    name = any_name(folder, draw)
    kind = draw.choice(
        [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
    )
    replaced(folder, name, dict(folder.tensors())[name].to(kind))
    if kind not in (torch.float16, torch.bfloat16):
        folder.wrong.add(name)


def all_in_bf16(folder: Folder, draw: random.Random) -> None:
    for name, values in list(folder.tensors()):
        replaced(folder, name, values.bfloat16())


def foreign(folder: Folder, draw: random.Random) -> None:
    names = [
        "model.layers.2.mlp.up_proj.weight",
        "score.weight",
        f"{any_name(folder, draw)}_scale",
        "x\n\u00e9",
        "lm_head.bias",
    ]
    name = draw.choice(names)
    draw.choice(list(folder.files.values()))[name] = torch.randn(draw.choice([(1,), (6, 8)]))
    folder.wrong.add(name)


def dropped(folder: Folder, draw: random.Random) -> None:
    name = any_name(folder, draw)
    replaced(folder, name, None)
    if name != OUTPUT or not folder.config["tie_word_embeddings"]:
        folder.wrong.add(name)


def reshaped(folder: Folder, draw: random.Random) -> None:
    name = any_name(folder, draw)
    replaced(folder, name, dict(folder.tensors())[name][:-1].clone())
    folder.wrong.add(name)


def with_a_constant(folder: Folder, draw: random.Random) -> None:
    name, values = draw.choice(list(constants_of(folder).items()))
    if draw.random() < 0.5:
        values = values + 1e5 if values.numel() == 1 else values * 2
        folder.wrong.add(name)
    draw.choice(list(folder.files.values()))[name] = values


def under_a_short_name(folder: Folder, draw: random.Random) -> None:
    """GPT-2's tensors may lack the first part of their names; in other families that is another tensor."""
    name = any_name(folder, draw)
    short = name.removeprefix("transformer.").removeprefix("model.")
    if short == name:
        return
    is_copy = draw.random() < 0.3
    values = dict(folder.tensors())[name].clone()
    if not is_copy:
        replaced(folder, name, None)
    draw.choice(list(folder.files.values()))[short] = values
    if is_copy or folder.family != "gpt2":
        folder.wrong |= {name, short}


TENSOR_CHANGES: list[Callable[[Folder, random.Random], None]] = [
    all_in_bf16, tied, dropped, reshaped, of_another_type, under_a_short_name, foreign, with_a_constant,
]  # fmt: skip
"""In an order in which none undoes another."""


def divided(folder: Folder, draw: random.Random) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    files: dict[str, Tensors] = {name: {} for name in names}
    places = {}
    for name, values in folder.tensors():
        places[name] = draw.choice(names)
        files[places[name]][name] = values
    folder.files, folder.places = {name: tensors for name, tensors in files.items() if tensors}, places


def with_a_wrong_index(folder: Folder, draw: random.Random) -> None:
    assert folder.places is not None
    name = draw.choice(sorted(folder.places))
    match draw.randrange(5):
        case 0:
            del folder.places[name]
        case 1:
            folder.places["model.absent"] = folder.places[name]
            name = "model.absent"
        case 2:
            others = sorted(folder.files.keys() - {folder.places[name]})
            folder.places[name] = draw.choice(
                [*others, "model-00009-of-00009.safetensors", "../x.safetensors", "/x.safetensors"]
            )
            folder.wrong.add(folder.places[name])
        case 3:
            other = draw.choice(
                sorted(folder.files.keys() - {folder.places[name]}) or ["model-00004-of-00003.safetensors"]
            )
            folder.files.setdefault(other, {})[name] = torch.zeros(1)
            folder.wrong.add(other)
        case 4:
            folder.files["model.safetensors"] = {name: torch.zeros(1)}
            folder.wrong.add("model.safetensors")
    folder.wrong.add(name)


def drawn(models: Mapping[str, Folder], draw: random.Random) -> Folder:
    folder = copy_of(models[draw.choice(list(models))])
    for change in sorted(draw.sample(TENSOR_CHANGES, k=draw.choice([0, 1, 1, 2])), key=TENSOR_CHANGES.index):
        change(folder, draw)
    if draw.random() < 0.5:
        divided(folder, draw)
        if draw.random() < 0.4:
            with_a_wrong_index(folder, draw)
    return folder


def sorted_values(tensors: list[Tensor]) -> Tensor:
    return torch.cat([values.float().flatten() for values in tensors]).sort().values


def test_every_tensor_of_a_drawn_folder_is_used_or_equal_to_what_is_used_or_named(
    models: Mapping[str, Folder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Tensor] = []

    def read_all(
        source: Path, out: Path, settings: Mapping[str, Any], reader_of: Callable[[RunConfig], Reader]
    ) -> None:
        """Takes the place of what writes an import: the values of all tensors of the model that it would write."""
        flat = {f"{table}.{key}": value for table, values in settings.items() for key, value in values.items()}
        config, mistakes = build_run_config(flat)
        assert not mistakes
        read = reader_of(config)
        used[:] = [read(tensor) for tensor in model_tensors(config)]

    monkeypatch.setattr(hf_folder, "write_import", read_all)
    draw = random.Random(11)
    torch.manual_seed(5)
    num_refused, num_read = 0, 0
    for number in range(1000):
        folder = drawn(models, draw)
        path = folder.write(tmp_path / str(number))
        try:
            import_hf(path, tmp_path / "out")
        except ValueError as found:
            error = str(found)
        else:
            error = ""
        if error:
            assert any(name in error for name in folder.wrong), (error, folder.wrong)
            num_refused += 1
            continue
        stored = dict(folder.tensors())
        for name in constants_of(folder):
            stored.pop(name, None)
        if folder.config["tie_word_embeddings"] and OUTPUT in stored:
            embedding = stored.get(folder.embedding, stored.get("wte.weight"))
            if torch.equal(stored[OUTPUT].float(), embedding.float()):
                del stored[OUTPUT]
        assert torch.equal(sorted_values(list(stored.values())), sorted_values(used)), folder.wrong
        assert not folder.wrong
        num_read += 1
    assert min(num_refused, num_read) > 300
