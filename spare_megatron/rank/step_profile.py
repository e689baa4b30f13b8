"""Traces of single steps by torch's profiler, in `RUN_DIR/profile`, with the spans of the rank as ranges in them."""

from torch.profiler import ProfilerActivity, profile, record_function

from spare_megatron.config.schema import ProfileConfig
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.devices import gpu
from spare_megatron.formats.output import whole_file
from spare_megatron.process.processes import say
from spare_megatron.state.rank_context import RankContext

FOLDER = "profile"

_SETTING = "profile.steps"


def wants_profile(profile: ProfileConfig, group: int, rank: int) -> bool:
    """Whether any step of this rank is to be traced."""
    return bool(profile.steps) and group in profile.groups and rank in profile.ranks


class StepProfile:
    """Traces the steps of `profile.steps`, each until the next step or evaluation; errors of storage cost the trace
    alone.
    """

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._has_gpu = ctx.spec.device != "cpu"
        self._step = -1
        self._profile: profile | None = None
        self._open: list[record_function] = []

    def begin_step(self, step: int) -> None:
        """Traces this step if it is chosen. Call it between two spans of the rank, after `end_step`."""
        if step not in self._ctx.spec.config.profile.steps:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        self._step, self._profile = step, profile(activities=activities)
        with self._ctx.probe.during(Operation.PROFILE):
            self._profile.start()
        self._ctx.probe.heartbeat.spans.ranges = self
        self.push(f"ProfilerStep#{step}")  # as torch's tools expect it

    def end_step(self) -> None:
        """Writes the trace of the step that is traced, if one is."""
        traced, self._profile = self._profile, None
        if traced is None:
            return
        self._ctx.probe.heartbeat.spans.ranges = None
        self.pop()
        with self._ctx.probe.during(Operation.PROFILE):
            traced.stop()
            self._write(traced)

    def push(self, name: str, /) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)
        if self._has_gpu:
            gpu.nvtx.range_push(name)

    def pop(self) -> None:
        if self._has_gpu:
            gpu.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)

    def _write(self, traced: profile) -> None:
        folder = self._ctx.spec.run_dir / FOLDER
        file = folder / f"step-{self._step:08d}-{self._ctx.spec.name}.json"
        try:
            folder.mkdir(exist_ok=True)
            with whole_file(_SETTING, file) as aside:
                traced.export_chrome_trace(str(aside))
        except OSError as error:
            say(f"step {self._step} has no profile: {error}")
