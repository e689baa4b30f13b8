"""The parts of the check, in their order. The limits add up to 25 minutes."""

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


_ALL = (
    Part(name="versions", limit_s=50, measures="versions and devices", code="versions.examine"),
    Part(name="tests", limit_s=420, measures="tests/gpu on one GPU", code="training.run_tests"),
    Part(
        name="two-groups",
        limit_s=120,
        measures="two groups on one GPU, a kill and a hang, without and with reduce.overlap",
        code="training.lose_groups",
    ),
    Part(
        name="aborts",
        limit_s=80,
        measures="memory over ten aborts of a communicator of two ranks on one GPU",
        code="on_device.abort_often",
    ),
    Part(
        name="step-125m",
        limit_s=210,
        measures="step of 125M parameters beside plain Megatron, one group",
        code="training.time_steps_of_125m",
    ),
    Part(
        name="step-1p3b",
        limit_s=270,
        measures="step of 1.3B parameters beside plain Megatron, one group",
        code="training.time_steps_of_1p3b",
        not_on_cpu="on a CPU it would train the tiny model of step-125m",
    ),
    Part(
        name="costs",
        limit_s=160,
        measures="digest, norms, staging and snapshot copy of 1.3B parameters",
        code="on_device.time_costs",
    ),
    Part(
        name="reproducible",
        limit_s=90,
        measures="two runs with reduce.mode=reproducible, bitwise",
        code="training.repeat_bitwise",
    ),
    Part(
        name="transformer-engine",
        limit_s=100,
        measures="bf16 and fp8 with layers of transformer-engine, 125M parameters",
        code="training.try_transformer_engine",
        not_on_cpu="transformer-engine needs a GPU",
    ),
)

PARTS = {part.name: part for part in _ALL}
