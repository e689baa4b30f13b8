"""The terms of a run: what its settings fix for all groups, keyed as in the run record of the journal."""

from pathlib import Path
from typing import Any

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_shape import flops_per_token
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import audit_policy, units_per_shard
from spare_megatron.config.training.read_samples import skipped_places
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.config.training.terms import ORDER, masks_of


def terms_of_run(config: RunConfig) -> dict[str, Any]:
    """The terms that a resolved configuration fixes; equal in the driver and in every rank."""
    layout, spare, ramp = config.layout, config.spare, config.unit_ramp
    tokens = run_sizes(config).tokens_per_step
    return {
        "name": config.name,
        "num_groups": layout.num_groups,
        "max_groups": layout.max_groups or 0,
        "ranks_per_group": config.parallel.ranks_per_group,
        "ranks_per_stage": config.parallel.ranks_per_stage,
        "lanes": layout.data_parallel,
        "row_size": config.row_size,
        # While the pipeline fills, each lane could have computed as much as later.
        "pipeline_fill": (layout.pipeline_parallel - 1) / layout.virtual_pipeline * config.units_at_once,
        "redundancy": spare.redundancy,
        "microbatches_per_shard": ramp.largest,
        "ramp": [ramp.start, ramp.increment, ramp.steps] if ramp.steps else [],
        "placement": "golomb",
        "groups_per_domain": spare.groups_per_domain,
        "granularity": spare.granularity,
        "deal_by_pace": spare.deal_by_pace,
        "last_resort": config.data.access == "shared",
        "slice_redundancy": config.optimizer.redundancy if config.optimizer.sharding == "stacked" else 0,
        "reduce_mode": config.reduce.mode,
        "num_steps": config.train.steps,
        "params_check_every_steps": config.train.params_check_every_steps,
        "loaded": config.checkpoint.load,
        "tokens_per_step": tokens,
        "flops_per_step": flops_per_token(config) * tokens,
        "peak_tflops": config.metrics.peak_tflops,
        "max_minutes": config.train.max_minutes,
        "corpus": config.data.identity,
        "order": ORDER,
        "weights": config.checkpoint.weights_identity,
        "validation": ", ".join(f"{one.name}: {one.identity}" for one in config.data.validation),
        "program": config.program.sha256,
        "skip": str(skipped_places(config.data.skip)),
        "offset": config.data.offset,
        "phases": ",".join(config.data.phases),
        "masks": ", ".join(f"{key}={value}" for key, value in masks_of(config).items()),
        "audit_every_steps": 0 if (audits := audit_policy(config)) is None else audits.every_steps,
        "eval_every_steps": config.eval.every_steps,
        "eval_microbatches_per_shard": units_per_shard(config),
        "least_stages": layout.least_pipeline_parallel or 0,
        "num_layers": config.model.num_layers if layout.least_pipeline_parallel else 0,
    }


_LATER_SETTINGS = {"audit.every_steps": "audit_every_steps", "spare.deal_by_pace": "deal_by_pace"}
"""Settings that earlier versions did not know, whose defaults change how a run behaves, and their terms."""


def terms_in(run_dir: Path) -> dict[str, Any]:
    """The terms that a run directory's `config.toml` fixes; empty if this version cannot load it. That file spells out
    all settings that the version of the run knew.
    """
    try:
        loaded = load_run_config(run_dir / "config.toml")
        terms = terms_of_run(loaded.config)
    except (ValueError, OSError):
        return {}
    unknown = {"order", *(term for setting, term in _LATER_SETTINGS.items() if setting not in loaded.provenance)}
    return {name: value for name, value in terms.items() if name not in unknown}  # the order is the code's
