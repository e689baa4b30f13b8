"""How long a configured run takes, and what a lost group, a slow machine and a wipe-out cost it, by the closed forms of
`spare plan`. All of a step counts as compute.
"""

from collections.abc import Iterator
from math import ceil, inf
from pathlib import Path

import numpy as np

from spare_megatron.config.model.model_tensors import flops_per_token
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import sequences_per_set
from spare_megatron.config.training.corpus import validation_names
from spare_megatron.config.training.run_sizes import RunSizes
from spare_megatron.core.saves.survival import optimal_cadence_s
from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.journal.state.goodput import tflops_per_rank
from spare_megatron.stacking.pace_evidence import STEPS_TO_ACT
from spare_megatron.stacking.paces import dealt_stacks
from spare_megatron.tools.plan.overhead import least_makespans, patch_stacks
from spare_megatron.tools.plan.plan_options import ASSUMED_SLOW_FACTOR

UTILIZATION, GPU_TFLOPS, THREAD_TFLOPS = 0.4, 989.0, 0.1
"""Assumed; the peaks of an H100 in bf16, and of a thread of a CPU."""
FORWARD_SHARE = 1 / 3
"""Of the operations that training on a token takes."""
ABSENCE_S, SLOW_S, SAVE_S, START_S = 600.0, 3600.0, 60.0, 300.0


def run_costs(
    config: RunConfig, sizes: RunSizes, endured_losses: float, measured: Path | None = None
) -> Iterator[tuple[str, float, str]]:
    """Costs: name, seconds of training, and the basis: figures that are measured or assumed, and the settings that
    change them. At the speed of a `measured` run or an assumed one. ValueError: that run has none.
    """
    spare, n, is_shared = config.spare, config.layout.num_groups, config.data.access == "shared"
    rate, speed, start_s, start = _assumed(config) if measured is None else _measured(measured)
    token_s = flops_per_token(config) / (rate * n * sizes.ranks_per_group)
    step_s, run_s = token_s * sizes.tokens_per_step, token_s * sizes.tokens
    run_s = min(run_s, 60.0 * (config.train.max_minutes or inf))
    yield "run", run_s, f"{speed}; train.steps, without losses, saves and evaluations"

    if config.eval.every_steps:
        steps = config.train.steps * run_s / (token_s * sizes.tokens)
        number = ceil(steps / config.eval.every_steps)  # the last one follows the last step
        num_sequences = number * len(validation_names(config.data)) * sequences_per_set(config)
        text = f"{number}, of forward passes alone, a third of training's; eval.every_steps, eval.sequences"
        yield "evaluations", num_sequences * config.model.seq_length * token_s * FORWARD_SHARE, text

    again_s, named = min(_copies(config, step_s, run_s, endured_losses))
    wipe_out = start_s + again_s / 2, f"{start}, and half of {format_duration(again_s)} again: {named}"
    units = 1 if spare.granularity == "stack" else ceil(config.unit_ramp.largest / config.units_at_once)
    if n == 1 or (spare.redundancy == 1 and not is_shared):
        yield "lost_group", wipe_out[0], "a wipe-out: no other group has its shard; spare.redundancy"
    else:
        fetch, away_s = 0.0 if is_shared else None, min(ABSENCE_S, run_s) if spare.rejoins else run_s / 2
        owed_s = step_s * float(patch_stacks(n, spare.redundancy, units, np.zeros(1), fetch=fetch)[0])
        longer = float(least_makespans(n, units, np.ones(1))[0])
        text = f"{format_duration(owed_s)} for what it owed, then steps {longer:.2f} x as long while it is away"
        away = f"assumed {format_duration(away_s)}; spare.redundancy, microbatches_per_shard and rejoins"
        yield "lost_group", owed_s + away_s * (1 - 1 / longer), f"{text}, {away}"

    num_slow, factor = min(len(config.parallel.groups_on(0)), n), ASSUMED_SLOW_FACTOR
    dealt = dealt_stacks(n, units, num_slow, factor) if spare.deal_by_pace else factor
    slow_s = min(SLOW_S, run_s)
    even_s = min(slow_s, STEPS_TO_ACT * factor * step_s)
    text = f"assumed: {factor:g} x the time for {format_duration(slow_s)}; groups on it: {num_slow}"
    slow = f"steps {dealt:.2f} x as long; spare.deal_by_pace, and spare.replace_slow ends it"
    yield "slow_machine", even_s * (1 - 1 / factor) + (slow_s - even_s) * (1 - 1 / dealt), f"{text}, {slow}"
    yield "wipe_out", *wipe_out


def _assumed(config: RunConfig) -> tuple[float, str, float, str]:
    """Operations per second of a rank, where they are from, and the same of the seconds of a start."""
    peak = GPU_TFLOPS if config.cluster.device == "gpu" else THREAD_TFLOPS * config.cluster.threads_per_rank
    peak = config.metrics.peak_tflops or peak
    speed = f"assumed: {UTILIZATION:.0%} of metrics.peak_tflops={peak:g}; --run measures the speed"
    return UTILIZATION * peak * 1e12, speed, START_S, f"assumed: {format_duration(START_S)} to start (--run)"


def _measured(run_dir: Path) -> tuple[float, str, float, str]:
    state = read_run_state(run_dir)
    goodput, run = state.goodput(state.newest_at_s), state.run
    tflops = tflops_per_rank(run, goodput.step_s, run.num_groups * run.ranks_per_group) if run and goodput else None
    if run is None or goodput is None or tflops is None or run.ramp:
        raise ValueError(f"--run {run_dir}: it has no steps, was simulated, or its batch grew; name another run")
    speed = f"measured: {tflops:.3g} TFLOP/s a rank, steps of {format_duration(goodput.step_s)}"
    start_s = goodput.lost_s.get("start", 0.0)
    return tflops * 1e12, speed, start_s, f"measured: {format_duration(start_s)} to start"


def _copies(config: RunConfig, step_s: float, run_s: float, endured_losses: float) -> Iterator[tuple[float, str]]:
    """Seconds between copies of the state, and the setting."""
    checkpoint = config.checkpoint
    yield run_s, "no copy of the state before; checkpoint.interval_s"
    yield (config.snapshot.every_steps or inf) * step_s, "snapshot.every_steps"
    yield (checkpoint.interval_steps or inf) * step_s, "checkpoint.interval_steps"
    yield checkpoint.interval_s or inf, "checkpoint.interval_s"
    if checkpoint.cadence == "optimal":
        lived_s = checkpoint.group_life_s / config.layout.num_groups * (endured_losses + 1)
        named = f"checkpoint.cadence=optimal, by group_life_s and saves of {format_duration(SAVE_S)} (assumed)"
        yield optimal_cadence_s(SAVE_S, lived_s), named
