"""The parts of the check, in order of what they are worth: the first ones fit into 15 minutes of a borrowed GPU."""

from dataclasses import dataclass
from importlib import import_module

from benchmarks.gpu_check.scene import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. It fails if `run` raises or takes longer than `limit_s`, and is not run if that raises NotRun.

    Attributes:
        code: Module here and its function, imported only in the part's own process: torch may be broken.
        not_on_cpu: Why a dry run leaves it out; empty if it does not.
    """

    name: str
    limit_s: float
    measures: str
    code: str
    not_on_cpu: str = ""

    def run(self, scene: Scene) -> None:
        module, _, function = self.code.partition(".")
        getattr(import_module(f"benchmarks.gpu_check.{module}"), function)(scene)


_NEEDS_GPU = "on a CPU it would train the tiny model of step-125m"

_ALL = (
    Part(name="versions", limit_s=40, measures="versions and devices", code="versions.examine"),
    Part(
        name="costs",
        limit_s=150,
        measures="digest, norms, staging, checksums and snapshot copy of 1.3B parameters",
        code="on_device.time_costs",
    ),
    Part(
        name="step-1p3b",
        limit_s=100,
        measures="step of 1.3B parameters beside plain Megatron, one group",
        code="training.time_steps_of_1p3b",
        not_on_cpu=_NEEDS_GPU,
    ),
    Part(
        name="step-1p3b-reproducible",
        limit_s=120,
        measures="the same with reduce.mode=reproducible and its deterministic kernels",
        code="training.time_reproducible_steps_of_1p3b",
        not_on_cpu=_NEEDS_GPU,
    ),
    Part(
        name="audits",
        limit_s=150,
        measures="2,000 audited microbatches without a false alarm",
        code="training.audit_often",
    ),
    Part(
        name="audited-flip",
        limit_s=60,
        measures="a bit that flips in one of three groups, found by an audit",
        code="training.find_flip",
    ),
    Part(
        name="aborts",
        limit_s=60,
        measures="memory over ten aborts of a communicator of two ranks on one GPU",
        code="on_device.abort_often",
    ),
    Part(
        name="illegal-access",
        limit_s=60,
        measures="an illegal access to memory in one of two groups",
        code="training.access_illegally",
    ),
    Part(
        name="examination",
        limit_s=60,
        measures="products with known results, patterns in memory and a transfer, as of a machine in quarantine",
        code="on_device.examine_device",
    ),
    Part(
        name="transformer-engine",
        limit_s=140,
        measures="layers of transformer-engine: a kill in one of two groups; bf16 and fp8 of 125M parameters",
        code="training.try_transformer_engine",
        not_on_cpu="transformer-engine needs a GPU",
    ),
    Part(
        name="two-groups",
        limit_s=120,
        measures="two groups on one GPU, a kill and a hang, without and with reduce.overlap",
        code="training.lose_groups",
    ),
    Part(
        name="reproducible",
        limit_s=90,
        measures="two runs with reduce.mode=reproducible, bitwise",
        code="training.repeat_bitwise",
    ),
    Part(
        name="step-125m",
        limit_s=120,
        measures="step of 125M parameters beside plain Megatron, one group",
        code="training.time_steps_of_125m",
    ),
    Part(
        name="buckets",
        limit_s=130,
        measures="step of 1.3B parameters with buckets of 32 and 256 MiB",
        code="training.time_other_buckets",
        not_on_cpu=_NEEDS_GPU,
    ),
    Part(
        name="tests-devices",
        limit_s=150,
        measures="tests/gpu on one GPU but whole runs",
        code="training.run_tests_of_devices",
    ),
    Part(
        name="tests-bitwise",
        limit_s=150,
        measures="whole runs of tests/gpu that end with the bits of the run without faults",
        code="training.run_bitwise_tests",
        not_on_cpu="they train on GPUs",
    ),
    Part(
        name="tests-runs",
        limit_s=150,
        measures="the other whole runs of tests/gpu",
        code="training.run_tests_of_runs",
        not_on_cpu="they train on GPUs",
    ),
)

PARTS = {part.name: part for part in _ALL}
