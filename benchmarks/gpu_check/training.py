"""Parts that use the commands of the package: its tests, whole runs, and `spare bench throughput`."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.scene import ROOT, SPARE, NotRun, Scene, mib, seconds
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import AuditRecord, EntryRecord
from spare_megatron.journal.state.summary import Summary

BUCKET_MIB, OTHER_BUCKETS_MIB = 128, (32, 256)
NUM_AUDITS = 2000
_WITHOUT_TE = "not gpu-te and not transformer_engine"
"""Of tests/gpu, those that need no transformer-engine."""
_OUTCOME = re.compile(r"\[gw\d+\].*? (PASSED|FAILED|SKIPPED|ERROR) (tests/gpu/\S+)")
_PROCESSORS_PER_TEST = 3
"""Most tests start a few ranks, which import for seconds."""
_SHORT = "missing_member and cpu"
_FAULT_STEP = 6
"""The first steps are spared: without a known step time a hung rank is found only by a timeout."""


def has_transformer_engine() -> bool:
    return find_spec("transformer_engine") is not None  # `mcore` would import torch and Megatron to look for it


# ------------------------------------------------------------------------------------------------------------ tests


def run_tests_of_devices(scene: Scene) -> None:
    _run_tests(scene, "not test_whole_runs")


def run_bitwise_tests(scene: Scene) -> None:
    _run_tests(scene, "test_whole_runs and bit_for_bit")


def run_tests_of_runs(scene: Scene) -> None:
    _run_tests(scene, "test_whole_runs and not bit_for_bit")


def _run_tests(scene: Scene, which: str) -> None:
    """Raises RuntimeError if a test fails; what passed until then is reported line by line."""
    if not scene.is_dry and not has_transformer_engine():
        which = f"{which} and {_WITHOUT_TE}"
        scene.report(left_out="tests of transformer-engine, which is not installed")
    chosen = ["-k", _SHORT] if scene.is_dry else ["-m", "gpu or cuda_build", "--require", "gpu", "-k", which]
    at_once = max(1, min(6, (os.cpu_count() or 1) // _PROCESSORS_PER_TEST))
    chosen += ["--numprocesses", str(at_once), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider", "--durations=0", *chosen]
    counts: Counter[str] = Counter()
    failed: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="")
            if found := _OUTCOME.match(line):
                outcome, name = found.groups()
                counts[outcome.lower()] += 1
                failed += [name] if outcome in ("FAILED", "ERROR") else []
                scene.report(tests=dict(counts), failed=failed)
    scene.report(("tests of tests/gpu", ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))))
    if tests.returncode != 0 or not counts["passed"]:
        raise RuntimeError(f"pytest ended with exit code {tests.returncode}; failed: {', '.join(failed) or 'none'}")


# ------------------------------------------------------------------------------------------------------- whole runs


def lose_groups(scene: Scene) -> None:
    """One of two groups is lost, by a kill in a reduction and a hang in a backward pass. Raises RuntimeError if a run
    does not mask it.
    """
    cases = [(overlap, kind) for overlap in ("false", "true") for kind in ("kill", "hang")]
    for overlap, kind in cases[::3] if scene.is_dry else cases:
        phase, setting = "in_reduce" if kind == "kill" else "backward", f"reduce.overlap={overlap}"
        _lose_a_group(scene, f"{kind}, {setting}", kind, phase, setting)


def _lose_a_group(scene: Scene, name: str, kind: str, phase: str, *settings: str) -> None:
    wanted = ("layout.num_groups=2", "spare.redundancy=2", "cluster.ranks_per_gpu=2", "control.heartbeat_interval_s=1")
    shape = ("model.hidden_size=256", "model.seq_length=256", "model.precision=bf16", "reduce.bucket_mib=0.5")
    tiny = ("reduce.bucket_mib=0.01", "control.heartbeat_interval_s=3")  # others may use the processors, too
    fault = f'faults.trace=[{{phase="{phase}", step={_FAULT_STEP}, group=1, rank=0, kind="{kind}"}}]'
    all_settings = [*scene.settings(*wanted, *shape, *settings, tiny=tiny), fault, "train.steps=12"]
    summary = _train(scene, name.replace(", ", "-").replace(" ", "-"), all_settings)
    if summary.groups_lost != 1 or len(summary.recoveries) != 1:
        raise RuntimeError(f"{name}: {summary.groups_lost} groups were lost, {len(summary.recoveries)} recoveries")
    recovery = summary.recoveries[0]
    figures = {**dataclasses.asdict(recovery), "final_loss": summary.final_loss}
    text = f"{seconds(recovery.total_s)}, of which detection {seconds(recovery.detect_s)}"
    scene.report((f"{name}: whole recovery", text), **{name: figures})


def repeat_bitwise(scene: Scene) -> None:
    """Trains twice. Raises RuntimeError if parameters differ in a bit at the end."""
    shape = ("model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8", "model.seq_length=2048")
    rest = ("model.precision=bf16", "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "train.steps=8")
    alone = ("layout.num_groups=1", "spare.redundancy=1", "reduce.mode=reproducible")
    found = []
    for number in range(2):
        summary = _train(scene, f"run-{number}", scene.settings(*shape, *rest, *alone, "faults.trace=[]"))
        found.append((summary.params_sha256, summary.final_loss))
        scene.report(runs=found)
    if found[0] != found[1] or found[0][0] is None:
        raise RuntimeError(f"parameters (SHA-256) and losses of two runs differ: {found[0]}, {found[1]}")
    scene.report(("parameters after 8 steps with reduce.mode=reproducible, two runs", "bitwise equal"))


def audit_often(scene: Scene) -> None:
    """Audits every microbatch of three groups in `reproducible` mode. Raises RuntimeError at a false alarm."""
    num_audits = 12 if scene.is_dry else NUM_AUDITS
    summary = _train(scene, "run", [*_audited(scene), "faults.trace=[]", f"train.steps={-(-num_audits // 3)}"])
    records = read_journal(scene.folder / "run").of(AuditRecord)
    num_compared = sum(len(record.digests) for record in records) // 2  # a microbatch is computed by two groups
    alarms = _entries(scene.folder / "run", "retry")
    scene.report(("audits without a fault, three groups that share the GPU", f"{num_compared}, {len(alarms)} alarms"))
    if alarms or summary.groups_lost or num_compared < num_audits:
        raise RuntimeError(f"{len(alarms)} alarms in {num_compared} audits, of which {num_audits} were wanted")


def find_flip(scene: Scene) -> None:
    """Raises RuntimeError unless the audits find the group in which a bit of an activation flips."""
    fault = f'{{phase="forward", step={_FAULT_STEP}, group=1, rank=0, kind="activation_flip", bit=4}}'
    summary = _train(scene, "run", [*_audited(scene), f"faults.trace=[{fault}]", "train.steps=12"])
    reasons = [entry["reason"] for entry in _entries(scene.folder / "run", "fence")]
    if summary.groups_lost != 1 or len(reasons) != 1 or "agree on other values" not in reasons[0]:
        raise RuntimeError(f"a flipped bit: {summary.groups_lost} groups were lost: {', '.join(reasons)}")
    scene.report(("a bit that flips in an activation of one group", reasons[0]))


def _audited(scene: Scene) -> list[str]:
    shape = ("model.num_layers=2", "model.hidden_size=512", "model.num_attention_heads=8", "model.seq_length=1024")
    rest = ("model.precision=bf16", "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "audit.every_steps=1")
    three = ("layout.num_groups=3", "spare.redundancy=3", "cluster.ranks_per_gpu=3", "reduce.mode=reproducible")
    return [*scene.settings(*shape, *rest, *three, "train.micro_batch_size=1"), "spare.microbatches_per_shard=1"]


def _entries(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Those of the decision log, of this kind."""
    by_index = {record.index: record.entry for record in read_journal(run_dir).of(EntryRecord)}
    return [entry for entry in by_index.values() if entry["entry"] == kind]


def access_illegally(scene: Scene) -> None:
    """Raises RuntimeError unless only the group that accesses memory which is not there is lost."""
    wanted = ("layout.num_groups=2", "spare.redundancy=2", "cluster.ranks_per_gpu=2", "faults.trace=[]")
    program = f"program.file={Path(__file__).with_name('illegal_access.py')}"
    summary = _train(scene, "run", [*scene.settings(*wanted, "model.precision=bf16"), program, "train.steps=12"])
    if summary.groups_lost != 1:
        raise RuntimeError(f"{summary.groups_lost} groups were lost, not one")
    text = seconds(summary.recoveries[0].total_s) if summary.recoveries else "no recovery in a step"
    scene.report(("an illegal access in one of two groups: whole recovery", text))


def _train(scene: Scene, name: str, settings: Sequence[str]) -> Summary:
    settings = ["layout.pipeline_parallel=1", "spare.microbatches_per_shard=4", *settings]
    config = load_run_config(Path("demo_cpu"), settings).config
    summary = start_run(config, scene.folder / name, lambda event: print(event))
    if summary.outcome != "finished" or summary.verdict != "valid":
        reasons = ", ".join(filter(None, (summary.outcome_reason, *summary.reasons)))
        raise RuntimeError(f"{name}: the run {summary.outcome}, {summary.verdict}: {reasons}")
    return summary


# ------------------------------------------------------------------------------------------------------- step times


def time_steps_of_125m(scene: Scene) -> None:
    _time_steps(scene, "gpt_125m_node", "125M")


def time_steps_of_1p3b(scene: Scene) -> None:
    _time_steps(scene, "gpt_1p3b_node", "1.3B")


def time_reproducible_steps_of_1p3b(scene: Scene) -> None:
    _time_steps(scene, "gpt_1p3b_node", "1.3B, reproducible", "reduce.mode=reproducible")


def _time_steps(scene: Scene, preset: str, what: str, *settings: str) -> None:
    """Ours and plain Megatron in turn."""
    found = _bench(scene, preset, "pair", ["--pairs", "1"], [f"reduce.bucket_mib={BUCKET_MIB}", *settings])
    ratios = ", ".join(f"{ratio:.3f}" for ratio in found["ratios"])
    text = f"{_speed(found['speeds']['ours'])}; plain {seconds(found['speeds']['plain']['step_s'])}; ratio {ratios}"
    scene.report((f"median step, {what}, buckets of {BUCKET_MIB} MiB", text), pair=found)


def time_other_buckets(scene: Scene) -> None:
    for bucket_mib in OTHER_BUCKETS_MIB:
        name, words = f"bucket_{bucket_mib}", ["--alone", "--pairs", "1"]
        found = _bench(scene, "gpt_1p3b_node", name, words, [f"reduce.bucket_mib={bucket_mib}"])
        row = (f"median step, 1.3B, buckets of {bucket_mib} MiB", _speed(found["speeds"]["ours"]))
        scene.report(row, **{name: found})


def try_transformer_engine(scene: Scene) -> None:
    if not has_transformer_engine():
        raise NotRun("transformer-engine is not installed")
    layers = "model.transformer_impl=transformer_engine"
    _lose_a_group(scene, "kill, layers of transformer-engine", "kill", "in_reduce", layers)
    fp8 = ['megatron.fp8="hybrid"', 'megatron.fp8_recipe="tensorwise"']
    for name, settings in (("bf16", []), ("fp8", fp8)):
        found = _bench(scene, "gpt_125m_node", name, ["--alone", "--pairs", "1"], [layers, *settings])
        row = (f"median step, 125M, transformer-engine, {name}", _speed(found["speeds"]["ours"]))
        scene.report(row, **{name: found})


def _speed(speed: dict[str, Any]) -> str:
    memory = speed["memory"]["device_bytes"]
    text = f"{seconds(speed['step_s'])}, {speed['tflops_per_rank']:.4g} TFLOP/s"
    return text + (f", {mib(memory)} of the GPU" if memory else "")


def _bench(scene: Scene, preset: str, name: str, words: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """The figures of `spare bench throughput`. Raises CalledProcessError; what it printed is in the log."""
    alone = ("layout.num_groups=1", "spare.redundancy=1", "spare.microbatches_per_shard=8")
    settings = [*scene.settings(*alone, *settings)]
    out = scene.folder / f"{name}.json"
    command = ["bench", "throughput", "--config", preset, "--out", str(out), *words]
    steps = ["--steps", "8" if scene.is_dry else "12" if preset == "gpt_1p3b_node" else "25"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    subprocess.run([sys.executable, "-c", SPARE, *command, *steps, *overrides], env=os.environ, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found
