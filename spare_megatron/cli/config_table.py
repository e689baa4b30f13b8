"""The tables of `spare config`."""

from collections.abc import Iterator, Mapping
from typing import Any

from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.config.loader import LoadedConfig
from spare_megatron.config.resolved import settings
from spare_megatron.config.training.run_sizes import RunSizes
from spare_megatron.formats.quantities import format_bytes, format_count, format_large


def print_presets(presets: Mapping[str, Mapping[str, str]]) -> None:
    rows = [(name, preset["kind"], preset["description"]) for name, preset in presets.items()]
    RunConsole().tables(Table(columns=("preset", "kind", "description"), rows=rows))


def print_config(loaded: LoadedConfig, facts: RunSizes, endured_losses: float) -> None:
    """Every setting, its value, and the file or argument that set it; and the sizes that follow."""
    rows = [(key, _text(value), loaded.provenance.get(key, "")) for key, value in settings(loaded.config)]
    RunConsole().tables(
        Table(columns=("setting", "value", "from"), rows=rows), Table(rows=list(_rows(facts, endured_losses)))
    )


def _rows(facts: RunSizes, endured_losses: float) -> Iterator[tuple[str, str]]:
    memory = facts.memory
    lanes = f", {facts.lanes_per_group} lanes" if facts.lanes_per_group > 1 else ""
    yield "ranks", f"{facts.num_ranks}, {facts.ranks_per_group} in each group{lanes}"
    yield "parameters", format_large(facts.num_parameters)
    if facts.num_active_parameters != facts.num_parameters:
        yield "  active for a token", format_large(facts.num_active_parameters)
    batch = f"{facts.microbatches_per_step} microbatches, {facts.sequences_per_step} sequences"
    yield "global batch", f"{batch}, {format_large(facts.tokens_per_step)} tokens"
    yield "tokens of the run", format_large(facts.tokens)
    yield "losses endured", f"{format_count(endured_losses)} on average, without rejoins"
    yield "gradient bucket", f"{facts.bucket_mib:g} MiB"
    if facts.nvlink_traffic > 1:
        yield "tensor-parallel sums", f"{facts.nvlink_traffic:.2g} times the bytes of NVLink SHARP, which is off here"
    yield "memory of the fullest rank", f"{format_bytes(memory.total_bytes)}, plus libraries"
    for name, size in (
        ("parameters", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("reduction", memory.reduction_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations, at most about", memory.activations_bytes),
        ("NCCL between groups, about", memory.communicators_bytes),
    ):
        yield f"  {name}", format_bytes(size)
    yield "a checkpoint", format_bytes(facts.checkpoint_bytes)


def _text(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)
