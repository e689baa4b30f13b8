"""What the ranks of a group are asked to do with weights for Hugging Face: tasks of `mcore_group.run_group`."""

import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import terms_of
from spare_megatron.mcore.group_checkpoint import model_state
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.state.checkpoint.checkpoint_folder import Manifest, StoredFile, publish
from spare_megatron.version import __version__
from tests.integration.mcore_group import CPU


def save_random(config: RunConfig, run_dir: Path) -> None:
    """Saves a checkpoint of random parameters, norms and biases too, as the run in `run_dir` would."""
    trainer = GroupTrainer(config, CPU)
    with torch.no_grad():
        for named in trainer.parameters_named():
            # Copies that ranks share must stay equal.
            name = named.name.replace("output_layer", "embedding.word_embeddings") if is_tied(config) else named.name
            part = trainer.process_groups.tp.rank() if named.partition_dim is not None else 0
            random = torch.Generator().manual_seed(zlib.crc32(f"{name} {part}".encode()))
            named.parameter.add_(0.2 * torch.randn(named.parameter.shape, generator=random))
        for name, bias in trainer.slabs[0].gradients.experts.biases():
            bias.add_(0.1 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))))
    _save(trainer, config, run_dir)


def save_state(config: RunConfig, run_dir: Path) -> None:
    """Saves a checkpoint of what the run begins with."""
    _save(GroupTrainer(config, CPU), config, run_dir)


def _save(trainer: GroupTrainer, config: RunConfig, run_dir: Path) -> None:
    aside = run_dir / "checkpoints" / "step-00000003.tmp"
    aside.mkdir(parents=True, exist_ok=True)
    state = trainer.checkpoint_state()
    state.copy()
    written = state.write(aside, dist.new_group(backend="gloo"), lambda: None)
    found: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, written)
    if dist.get_rank() == 0:
        write_run(config, run_dir, aside, {name: file for part in found for name, file in part.items()})


def is_tied(config: RunConfig) -> bool:
    return config.model.tie_embeddings


def write_run(config: RunConfig, run_dir: Path, aside: Path, files: dict[str, tuple[int, str]]) -> None:
    """Makes the checkpoint visible, with a manifest, and writes the run's configuration."""
    (run_dir / "config.toml").write_text(dump_run_config(config))
    manifest = Manifest(
        step=3,
        num_samples=0,
        terms=terms_of(config),
        layout={},
        placement={},
        group=0,
        incarnation=0,
        epoch=0,
        log_head=0,
        version=__version__,
        run_id="",
        files={name: StoredFile(num_bytes=size, sha256=sha256) for name, (size, sha256) in files.items()},
    )
    publish(aside, manifest, lambda _: None)


def outputs_of(config: RunConfig, checkpoint: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the loss of each token but the last, of the model on one rank, loaded with Megatron's own loader."""
    trainer = GroupTrainer(config, CPU)
    (chunk,) = trainer.chunks
    state = {"model": model_state(trainer.chunks, trainer.process_groups.lanes_and_cp)}
    chunk.module.module.load_state_dict(dist_checkpointing.load(state, str(checkpoint))["model"]["0"])
    model, ids = chunk.module.module.eval(), torch.from_numpy(tokens)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        logits = model(ids, positions, None)[..., : config.model.vocab_size]
        losses = model(ids, positions, None, labels=ids.roll(-1, dims=1))[:, :-1]
    return logits.numpy(), losses.numpy()
