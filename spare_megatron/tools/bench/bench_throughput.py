"""Measures how fast a configuration trains without failures, alternating with plain Megatron."""

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spare_megatron.config.checks.validate import on_device, resolve_device
from spare_megatron.config.model.model_tensors import flops_per_token
from spare_megatron.config.schema import FaultsConfig, MetricsConfig, ProfileConfig, RunConfig
from spare_megatron.config.schema_sections import EvalConfig, SnapshotConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.driver.run import look_at_machine, start_run
from spare_megatron.driver.telemetry import split_of_step
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.machine.gpus import name_in_torch, visible_gpus
from spare_megatron.process.reports import GroupLost, RanksStarted, RunEvent, StepCommitted

NUM_WARMUP = 5
"""Steps at the start of each run that are not measured."""
_STEPS_TO_GO = 3
"""Steps before the end at which memory is measured, while no rank has exited."""
OURS, PLAIN = "ours", "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    host_bytes: int
    """Largest peak (VmHWM, proc(5)) of any of the processes."""
    device_bytes: int
    """Memory in use on the fullest visible GPU, reserves of driver and allocator included; 0 on CPUs."""


def memory_of(pids: Iterable[int], *, is_gpu: bool) -> Memory:
    """Memory of these local processes; those that have ended count as zero."""
    device_bytes = max(gpu.memory_bytes - gpu.free_bytes for gpu in visible_gpus()) if is_gpu else 0
    return Memory(host_bytes=max(map(_most_ever, pids), default=0), device_bytes=device_bytes)


def _most_ever(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training, from its first measured step to its last."""

    step_s: Sequence[float]
    """Seconds between the ends of successive steps."""
    split_s: Mapping[str, float]
    """Median seconds of a step that the leader's main thread spends on each activity; empty for plain Megatron."""
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed over all runs of one kind."""

    step_s: float
    """The median step; `tokens_per_s`, `tflops_per_rank` and `mfu` are those of it."""
    mean_step_s: float
    """The mean, which includes what happens every few steps, such as comparisons of parameters."""
    tokens_per_s: float
    """Of the global batch."""
    tflops_per_rank: float
    """10^12 model operations a second by `flops_per_token`, without redundant or repeated ones."""
    mfu: float | None
    """`tflops_per_rank` over `metrics.peak_tflops`; None if that is absent."""
    split_s: Mapping[str, float]
    """As in `Run`, the median over runs."""
    memory: Memory
    """Of the fullest run."""
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The measured speeds by kind of run. `ratio`: median step of ours over that of plain Megatron; None without it.
    `ratios`: the same for each pair of runs; `ratio_of_means`: of the mean steps.
    """

    speeds: Mapping[str, Speed]
    ratio: float | None
    ratios: Sequence[float]
    ratio_of_means: float | None


def training_alone(config: RunConfig) -> RunConfig:
    """The configuration with one batch, and without all that is not compared: faults, evaluations, saves, and so on."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, max_minutes=None),
        spare=dataclasses.replace(config.spare, ramp_start=None, ramp_increment=1, ramp_steps=None),
        eval=EvalConfig(),
        faults=FaultsConfig(),
        # The restart settings stay: other settings were chosen to fit them.
        checkpoint=dataclasses.replace(
            config.checkpoint,
            cadence="fixed",
            interval_steps=None,
            interval_s=None,
            keep_every_steps=None,
            folder="",
            load="",
        ),
        snapshot=SnapshotConfig(),
        sites=SitesConfig(),
        metrics=MetricsConfig(peak_tflops=config.metrics.peak_tflops),
        profile=ProfileConfig(),
    )


def problems_of(config: RunConfig, *, has_plain: bool) -> Iterator[str]:
    """Why this configuration cannot be measured, in addition to what `validate` reports."""
    if config.train.steps <= NUM_WARMUP + 1:
        yield (
            f"train.steps={config.train.steps}: the first {NUM_WARMUP} steps are not measured; set --steps to more "
            f"than {NUM_WARMUP + 1}"
        )
    if config.cluster.num_nodes > 1 or config.cluster.launcher != "local":
        yield (
            f"cluster.num_nodes={config.cluster.num_nodes}, cluster.launcher={config.cluster.launcher}: this measures "
            f"one machine; set 1 and local"
        )
    if config.cluster.ranks_per_gpu > 1:
        yield (
            f"cluster.ranks_per_gpu={config.cluster.ranks_per_gpu}: ranks that wait for each other's GPU are not "
            f"measured; set 1"
        )
    if has_plain and config.layout.virtual_pipeline > 1:
        yield f"layout.virtual_pipeline={config.layout.virtual_pipeline}: plain Megatron is not interleaved here; set 1"
    if has_plain and config.program.file:
        yield f"program.file={config.program.file}: plain Megatron trains the GPT of [model]; clear it, or set --alone"
    if has_plain and config.layout.context_parallel > 1:
        yield f"layout.context_parallel={config.layout.context_parallel}: the plain Megatron baseline has none; set 1"


def measure(config: RunConfig, num_pairs: int, *, has_plain: bool, report: Callable[[str], None]) -> Throughput:
    """Runs `num_pairs` trainings of each kind in turn, alternating which kind goes first. On GPUs plain Megatron uses
    its DistributedOptimizer and overlaps all its transfers; on CPUs the former only if our optimizer state is divided,
    over groups or lanes, and the latter only if ours overlap. `report` receives lines of progress. Raises RuntimeError
    if a run does not end as it should.
    """
    config = on_device(config, look_at_machine(config))
    ways: dict[str, Callable[[RunConfig], Run]] = {PLAIN: _plain, OURS: _ours} if has_plain else {OURS: _ours}
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    ratios: list[float] = []
    for pair in range(num_pairs):
        for way in ways if pair % 2 == 0 else reversed(ways):
            runs[way].append(ways[way](config))
            step_ms = statistics.median(runs[way][-1].step_s) * 1e3
            report(f"run {pair + 1} of {num_pairs}, {way}: {step_ms:.1f} ms a step")
        if has_plain:
            ours_s, plain_s = (statistics.median(runs[way][-1].step_s) for way in (OURS, PLAIN))
            ratios.append(ours_s / plain_s)
    speeds = {way: _speed(config, some) for way, some in runs.items()}
    return Throughput(
        speeds=speeds,
        ratio=speeds[OURS].step_s / speeds[PLAIN].step_s if has_plain else None,
        ratios=ratios,
        ratio_of_means=speeds[OURS].mean_step_s / speeds[PLAIN].mean_step_s if has_plain else None,
    )


def train_without_losses(config: RunConfig, folder: Path, on_event: Callable[[RunEvent], None]) -> None:
    """Trains, with the journal in `folder`, which must not exist. RuntimeError: the run is not finished and valid, or a
    group was lost, whose masking makes steps slower.
    """
    losses: list[str] = []

    def observe(event: RunEvent) -> None:
        if isinstance(event, GroupLost):
            losses.append(f"group {event.record.group}: rank {event.record.rank}: {event.record.cause}")
        on_event(event)

    summary = start_run(config, folder, observe)
    if summary.outcome != "finished" or summary.verdict != "valid":
        reasons = ", ".join(filter(None, (summary.outcome_reason, *summary.reasons)))
        raise RuntimeError(f"the run {summary.outcome}, {summary.verdict}: {reasons}")
    if summary.groups_lost:
        raise RuntimeError(
            f"groups were lost {summary.groups_lost} times, so the run does not measure fault-free steps "
            f"fails: {'; '.join(losses)}"
        )


def kernels_measured(config: RunConfig, *, has_plain: bool) -> Mapping[str, str]:
    """Names the kernels in use. Call it after `measure`: no process with a GPU can be started afterwards."""
    import torch

    from spare_megatron.mcore.model.model import adam_of_megatron, kernels_of

    device = resolve_device(config, look_at_machine(config))
    found = kernels_of(config, torch.device(name_in_torch(device)))
    return {**found, "adam_of_plain": adam_of_megatron()} if has_plain else found


def _speed(config: RunConfig, runs: Sequence[Run]) -> Speed:
    steps = [value for run in runs for value in run.step_s]
    step_s = statistics.median(steps)
    tokens = run_sizes(config).tokens_per_step
    tflops = flops_per_token(config) * tokens / step_s / config.parallel.num_ranks / 1e12
    peak = config.metrics.peak_tflops
    return Speed(
        step_s=step_s,
        mean_step_s=statistics.mean(steps),
        tokens_per_s=tokens / step_s,
        tflops_per_rank=tflops,
        mfu=None if peak is None else tflops / peak,
        split_s={name: statistics.median(run.split_s[name] for run in runs) for name in runs[0].split_s},
        memory=Memory(
            host_bytes=max(run.memory.host_bytes for run in runs),
            device_bytes=max(run.memory.device_bytes for run in runs),
        ),
        num_steps=len(steps),
    )


def _plain(config: RunConfig) -> Run:
    from spare_megatron.tools.bench.plain_megatron import run_plain

    ends, memory = run_plain(config, partial(memory_of, is_gpu=config.cluster.device == "gpu"))
    return Run(step_s=_intervals(ends), split_s={}, memory=memory)


def _ours(config: RunConfig) -> Run:
    pids: set[int] = set()
    splits: list[Mapping[str, float]] = []
    memories: list[Memory] = []

    def observe(event: RunEvent) -> None:
        match event:
            case RanksStarted():
                pids.update(event.pids.values())
            case StepCommitted(update=UpdateRecord(group=0)):
                if event.step >= NUM_WARMUP:
                    splits.append(split_of_step(event.split_s))
                if event.step == config.train.steps - _STEPS_TO_GO:
                    memories.append(memory_of(pids, is_gpu=config.cluster.device == "gpu"))

    with tempfile.TemporaryDirectory(prefix="spare-bench-") as scratch:
        folder = Path(scratch) / "run"
        train_without_losses(config, folder, observe)
        lines = [line for line in read_journal(folder).lines if line.source == "group-0000-rank-0"]
    ends = [line.at_s for line in lines if isinstance(line.record, UpdateRecord)]
    split_s = {name: statistics.median(split[name] for split in splits) for name in splits[0]}
    return Run(step_s=_intervals(ends), split_s=split_s, memory=memories[0])


def _intervals(ends: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(ends[NUM_WARMUP:], ends[NUM_WARMUP + 1 :], strict=False)]
