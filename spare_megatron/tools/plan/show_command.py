"""`spare config show`: every setting with its origin, and the sizes, times and costs that follow."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.config import AsJson, Preset, fitting_machine
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.preset import OverridesOption, load_without_problems
from spare_megatron.cli.printing import say_json
from spare_megatron.formats.quantities import format_bytes, format_count, format_large

if TYPE_CHECKING:
    from spare_megatron.config.loader import LoadedConfig
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.config.training.run_sizes import RunSizes


def show(
    preset: Preset,
    overrides: OverridesOption = None,
    run: Annotated[Path | None, typer.Option("--run", help="A run whose speed and start count, measured.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print every setting with its origin; sizes, time and costs.

    Sizes: ranks, parameters, global batch, memory of the fullest rank, a checkpoint. Costs: seconds of training for a
    lost group, a slow machine and a wipe-out, with the figures that are measured or assumed and the settings that
    change them. Needs no corpus, so a preset of a model can be shown, too.
    """
    from spare_megatron.config.checks.validate import on_device
    from spare_megatron.config.training.run_sizes import run_sizes
    from spare_megatron.tools.plan.run_costs import run_costs

    _, loaded = load_without_problems(
        preset, overrides or (), fitting_machine, restrict=_with_some_corpus, where=_alone(preset)
    )
    config = loaded.config
    resolved = on_device(config, fitting_machine(config))
    facts, endured = run_sizes(resolved), _endured_losses(config)
    costs = list(run_costs(resolved, facts, endured, run))
    if as_json:
        table = {
            key: {"value": value, "origin": loaded.provenance.get(key, "default")}
            for key, value in every_setting(config)
        }
        figures = {name: {"seconds": seconds, "basis": basis} for name, seconds, basis in costs}
        say_json({"settings": table, **dataclasses.asdict(facts), "endured_losses": endured, "costs": figures})
        return
    print_config(loaded, facts, endured)
    rows = [
        ({"wipe_out": "wipe-out"}.get(name, name.replace("_", " ")), _time(name, seconds), basis)
        for name, seconds, basis in costs
    ]
    RunConsole().tables(Table(columns=("cost", "of training", "measured or assumed, and what changes it"), rows=rows))


def _time(name: str, seconds: float) -> str:
    return (
        f"{seconds / 3600:.3g} hours" if name == "run" else f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    )


def _endured_losses(config: "RunConfig") -> float:
    """Expected losses before a wipe-out of shards; where every group reads all data, the last group is enough."""
    from spare_megatron.core.saves.endurance import endured_losses

    if config.data.access == "shared":
        return config.layout.num_groups - 1
    return endured_losses(config.layout.num_groups, config.spare.redundancy)


def _alone(preset: Path) -> str:
    """What a preset of a cluster lacks, if it is one that ships."""
    from spare_megatron.config.loader import preset_file

    if preset_file(preset).parent.name != "cluster":
        return ""
    return f" alone, as {preset} is a preset of a cluster: add the groups that fill it, as --set layout.num_groups=8"


def _with_some_corpus(config: "RunConfig") -> "RunConfig":
    """The configuration, with a corpus in the place of a missing one; a blend is one."""
    if config.data.corpora:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, corpus="any"))


def print_config(loaded: "LoadedConfig", facts: "RunSizes", endured_losses: float) -> None:
    """Every setting, its value, and the file or argument that set it; and the sizes that follow."""
    rows = [(key, _text(value), loaded.provenance.get(key, "")) for key, value in every_setting(loaded.config)]
    RunConsole().tables(
        Table(columns=("setting", "value", "from"), rows=rows), Table(rows=list(_rows(facts, endured_losses)))
    )


def every_setting(config: "RunConfig") -> Iterator[tuple[str, Any]]:
    """Every setting, those in samples, too, whether or not they were given."""
    from spare_megatron.config.batch_size import sequences_per_microbatch
    from spare_megatron.config.loader import settings

    each, ramp = sequences_per_microbatch(config), config.spare.ramp
    grows = [ramp.start * each, ramp.increment * each, ramp.before(ramp.steps) * each] if ramp.steps else None
    in_samples = {"train.global_batch_size": ramp.largest * each, "train.rampup_batch_size": grows}
    return ((key, in_samples.get(key, value)) for key, value in settings(config))


def _rows(facts: "RunSizes", endured_losses: float) -> Iterator[tuple[str, str]]:
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
    whole, *fewer = facts.memory_by_stages.items()
    for stages, size in fewer:
        yield f"  with {stages} of {whole[0]} stages", format_bytes(size)
    yield "a checkpoint", format_bytes(facts.checkpoint_bytes)


def _text(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)
