"""A rank that a test looks into: what runs in the ranks' processes instead of `run_rank`.

The classes that a rank is made of are replaced, in its process alone, by subclasses that write down what they see
or choose the moment of a fault more closely than a configuration can.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import AttemptReduce, UpdateModel
from spare_megatron.core.log.entries import Commit, Entry, decode_entry
from spare_megatron.core.log.events import Event
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.injection import Injector
from spare_megatron.faults.points import Fault, FaultPoint
from spare_megatron.formats.frames import NotOffered
from spare_megatron.formats.pieces import Piece
from spare_megatron.journal.spans import spans_file
from spare_megatron.mcore import trainer
from spare_megatron.mcore.optimizer.optimizer import Optimizer
from spare_megatron.mcore.optimizer.parameters import named_parameters
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import assembly, rank, train_step
from spare_megatron.rank.bootstrap import wait_for_all_groups
from spare_megatron.rank.train_step import Components
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.state.optimizer_state import OptimizerState
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.stacked import stacked_state
from spare_megatron.state.stacked.partition_copier import PartitionContent
from spare_megatron.state.stacked.scattered_buckets import ScatteredBuckets
from spare_megatron.state.stacked.stacked_state import StackedState
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, read_values
from spare_megatron.store.open_store import open_store
from spare_megatron.voting.agreement import Announcement, GroupAgreement

_TIMEOUT_S = 20.0
_RESTART_TIMEOUT_S = 60.0
_POLL_S = 0.002

Moment = tuple[int, int, FaultPoint]
"""Group, step and phase of a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a test wants of the ranks of a run.

    Attributes:
        dump_steps: Steps whose parameters and mean gradients each rank writes down just before the update.
        after_other_votes: Moments at which the rank waits, before the fault strikes, until all other groups have
            voted on the attempt.
        in_second_attempt: Moments that count only from the second attempt of their step on.
        unfinished_reduces: Moments inside a reduction at which it cannot be complete anywhere: one other group comes
            to it only when the log has moved on.
        awaited: Steps at whose end members are admitted: before, these do not ask for it, and all who take part
            enter the reduction only when they have.
        awaited_first: Likewise, where which of these members is there to be admitted depends on the order of losses:
            the first one is waited for.
        leaving: Steps and groups that are asked to leave: their votes of the step are the first to say so, and are cast
            only once they are asked.
        late_groups: Groups that begin to train, and report that they are ready, only when the first entry is written.
        census_steps: Steps after which each rank counts its threads, file descriptors and bytes.
        whole_spares: Steps in which a rank enters the reduction only when all ranks and spares of its node are there.
        whole_copies: Steps in which a rank enters the reduction only when its copies of state partitions are whole.
        windows: Steps in which a rank enters the reduction only when this node has written some of its timeline.
        files: Steps in which a rank enters the reduction only when this file is there.
        no_pieces_before: Committed steps up to which no donor gives anything of a state partition.
        scatters: Whether gradients of partitions go only to the groups that update them, as they do over NCCL.
    """

    dump_steps: frozenset[int] = frozenset()
    after_other_votes: frozenset[Moment] = frozenset()
    in_second_attempt: frozenset[Moment] = frozenset()
    unfinished_reduces: frozenset[Moment] = frozenset()
    awaited: frozenset[tuple[int, Member]] = frozenset()
    awaited_first: frozenset[tuple[int, Member]] = frozenset()
    leaving: frozenset[tuple[int, int]] = frozenset()
    late_groups: frozenset[int] = frozenset()
    census_steps: frozenset[int] = frozenset()
    whole_spares: frozenset[int] = frozenset()
    whole_copies: frozenset[int] = frozenset()
    windows: frozenset[tuple[int, int]] = frozenset()
    files: frozenset[tuple[int, Path]] = frozenset()
    no_pieces_before: int = 0
    scatters: bool = False


def watched_rank(watch: Watch, spec: RankSpec, reports: Connection) -> None:
    """Runs a rank under watch. Give `partial(watched_rank, watch)` to `start_run`."""
    now = _Now(spec)
    trainer.Optimizer = partial(_DumpingOptimizer, watch, spec)
    rank.Injector = partial(_ChoosyInjector, watch, now)
    attempts = _WatchedAttempts(watch, now)
    train_step.attempt_reduce, train_step._begin_early = attempts.attempt_reduce, attempts.begin_early
    train_step.update_model = attempts.update_model
    assembly.GroupAgreement = partial(_TimelyAgreement, watch)
    stacked_state.partition_contents = partial(_late_contents, watch)
    if watch.scatters:
        stacked_state.make_bucket_sums = ScatteredBuckets
    if spec.group in watch.late_groups:
        rank.wait_for_all_groups = _wait_for_the_first_entry
    rank.run_rank(spec, reports)


# ------------------------------------------------------------------------------------------------------------ dumps


def dump_file(run_dir: Path, step: int, group: int, position: int) -> Path:
    return run_dir / "dumps" / f"step-{step}-group-{group}-rank-{position}.npz"


class _DumpingOptimizer(Optimizer):
    """Writes down what it is about to apply."""

    def __init__(self, watch: Watch, spec: RankSpec, config: Any, chunks: Any, *further: Any) -> None:
        super().__init__(config, chunks, *further)
        self._watch, self._spec, self._chunks = watch, spec, chunks

    def step(self, norm: float | None = None) -> tuple[float, float]:
        step = self.schedule.num_steps  # comes with the state of a group that came back
        if step in self._watch.dump_steps:
            self._dump(dump_file(self._spec.run_dir, step, self._spec.group, self._spec.rank))
        return super().step(norm)

    def _dump(self, file: Path) -> None:
        arrays: dict[str, np.ndarray] = {}
        for named in named_parameters(self._chunks):
            arrays[f"value/{named.name}"] = named.parameter.detach().float().numpy()
            arrays[f"gradient/{named.name}"] = named.main_grad.numpy()
            arrays[f"dim/{named.name}"] = np.array(-1 if named.partition_dim is None else named.partition_dim)
        file.parent.mkdir(exist_ok=True)
        np.savez(file, **arrays)


def read_dump(file: Path) -> dict[str, tuple[np.ndarray, np.ndarray, int | None]]:
    """Name -> value, mean gradient, divided dimension, of the parameters of one rank."""
    with np.load(file) as arrays:
        names = [key.removeprefix("value/") for key in arrays.files if key.startswith("value/")]
        dims = {name: int(arrays[f"dim/{name}"]) for name in names}
        return {
            name: (arrays[f"value/{name}"], arrays[f"gradient/{name}"], None if dims[name] < 0 else dims[name])
            for name in names
        }


# ---------------------------------------------------------------------------------------------------------- moments


class _Now:
    """The attempt that this rank is in."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.action: AttemptReduce | None = None
        self.num_attempts = 0
        self.step = -1

    def attempt(self, action: AttemptReduce) -> None:
        self.num_attempts = self.num_attempts + 1 if action.step == self.step else 1
        self.step, self.action = action.step, action

    def wait_for_other_votes(self) -> None:
        """Waits until every other group has voted on the attempt.

        TimeoutError: they did not in time; then the fault never strikes, and the test that wants it fails.
        """
        assert self.action is not None
        others = [voter for voter in self.action.voters if voter.group != self.spec.group]
        log = DecisionLog(open_store(self.spec.store))
        end_s = time.monotonic() + _TIMEOUT_S
        attempt = self.action.attempt
        # A vote is there before it is counted, and whose count is the last decides.
        while len(log.votes(attempt, others)) < len(others) or log.num_votes(attempt) < len(others):
            if time.monotonic() > end_s:
                raise TimeoutError(f"not all of {others} voted on attempt {attempt}")
            time.sleep(_POLL_S)


def _wait_for_the_first_entry(spec: RankSpec, store: ControlStore, ranks: Any) -> None:
    wait_for_all_groups(spec, store, ranks)
    DecisionLog(open_store(spec.store)).wait(0, _TIMEOUT_S)


class _TimelyAgreement(GroupAgreement):
    """Asks to be admitted in the step at whose end that is wanted."""

    def __init__(self, watch: Watch, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._steps = {member: step for step, member in watch.awaited | watch.awaited_first}

    def announce(self) -> None:
        if self.is_leader and self.member in self._steps:
            step, index = self._steps[self.member] - 1, 0
            while not _is_commit(decode_entry(self.log.wait(index, _RESTART_TIMEOUT_S)), step):
                index += 1
        super().announce()


def _is_commit(entry: Entry, step: int) -> bool:
    return isinstance(entry, Commit) and entry.step == step


def _wait_until_waiting(spec: RankSpec, one_of: Sequence[Member]) -> None:
    store = open_store(spec.store)
    end_s = time.monotonic() + _RESTART_TIMEOUT_S
    waiting = [keys.waiting(member.group) for member in one_of]
    while not any(
        announced is not None and announced.incarnation == member.incarnation
        for announced, member in zip(read_values(store, waiting, Announcement), one_of, strict=True)
    ):
        if time.monotonic() > end_s:
            raise TimeoutError(f"none of {one_of} waits to be admitted")
        time.sleep(_POLL_S)


def _wait_for_file(file: Path) -> None:
    end_s = time.monotonic() + _RESTART_TIMEOUT_S
    while not file.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{file} is not there")
        time.sleep(_POLL_S)


def _wait_until_asked(is_asked: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while not is_asked():
        if time.monotonic() > end_s:
            raise TimeoutError("the group is not asked to leave")
        time.sleep(_POLL_S)


def _wait_for_spares(config: RunConfig) -> None:
    """Of a run on one node, none of whose groups is lost."""
    supervisor = psutil.Process(os.getppid())
    num_wanted = config.parallel.num_ranks + config.spare.spares * config.parallel.ranks_per_group
    end_s = time.monotonic() + _TIMEOUT_S
    while len(supervisor.children()) < num_wanted:
        if time.monotonic() > end_s:
            raise TimeoutError(f"the node has {len(supervisor.children())} processes, not {num_wanted}")
        time.sleep(_POLL_S)


def _wait_for_window(run_dir: Path, node: int) -> None:
    file = spans_file(run_dir, node)
    end_s = time.monotonic() + _TIMEOUT_S
    while not (file.exists() and file.stat().st_size):
        if time.monotonic() > end_s:
            raise TimeoutError(f"node {node} has written nothing of its timeline")
        time.sleep(_POLL_S)


def _wait_for_copies(stacked: OptimizerState) -> None:
    assert isinstance(stacked, StackedState)
    repairs = stacked._repairs
    end_s = time.monotonic() + _TIMEOUT_S
    while not all(repairs.whole().values()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"copies of state partitions are not whole: {repairs.whole()}")
        time.sleep(_POLL_S)


class _LateContent(PartitionContent):
    """A partition of which nothing is given before so many updates."""

    first_update = 0

    def read(self, piece: Piece) -> bytes:
        if self._optimizer.num_updates < self.first_update:
            raise NotOffered(f"not before {self.first_update} updates")
        return super().read(piece)


def _late_contents(watch: Watch, optimizer: StackedOptimizer) -> list[PartitionContent]:
    contents: list[PartitionContent] = []
    for number in optimizer.partitions.numbers:
        content = _LateContent(optimizer, PartitionId(number))
        content.first_update = watch.no_pieces_before
        contents.append(content)
    return contents


class _ChoosyInjector(Injector):
    """Carries out the faults of the trace at moments that are named more closely."""

    def __init__(
        self,
        watch: Watch,
        now: _Now,
        faults: Sequence[Fault],
        report: Callable[[Fault], None],
        request: Callable[[Fault], None],
    ) -> None:
        super().__init__(faults, report, request)
        self._watch, self._now = watch, now

    def __call__(self, phase: FaultPoint) -> None:
        moment = (int(self._now.spec.group), self.step, phase)
        is_second = self._now.step == self.step and self._now.num_attempts >= 2
        if moment in self._watch.in_second_attempt and not is_second:
            return
        if moment in self._watch.after_other_votes:
            self._now.wait_for_other_votes()
        super().__call__(phase)


class _WatchedAttempts:
    """Knows the attempt, and enters it only when what is watched for is there; counts what the process holds."""

    def __init__(self, watch: Watch, now: _Now) -> None:
        self._watch, self._attempts = watch, now
        self._attempt_reduce, self._update_model = train_step.attempt_reduce, train_step.update_model
        self._begin_early = train_step._begin_early
        self._entered = -1
        self._first = min((step for step, group in watch.leaving if group == now.spec.group), default=0)
        self._is_leave_asked: Callable[[], bool] | None = None

    def begin_early(self, ctx: RankContext, parts: Components, action: AttemptReduce, *brought: Any) -> Any:
        """With `reduce.overlap` the reduction begins with the pass."""
        self._enter(ctx, action)
        return self._begin_early(ctx, parts, action, *brought)

    def attempt_reduce(self, ctx: RankContext, parts: Components, action: AttemptReduce) -> Sequence[Event]:
        self._enter(ctx, action)
        return self._attempt_reduce(ctx, parts, action)

    def _enter(self, ctx: RankContext, action: AttemptReduce) -> None:
        if action.attempt == self._entered:
            return
        self._entered = action.attempt
        self._attempts.attempt(action)
        if self._is_leave_asked is None:
            is_leave_asked = self._is_leave_asked = ctx.progress.is_leave_asked
            ctx.progress.is_leave_asked = lambda: self._attempts.step >= self._first and is_leave_asked()
        watch, spec, waits = self._watch, self._attempts.spec, []
        awaited = [[member] for step, member in watch.awaited if step == action.step]
        if first := [member for step, member in watch.awaited_first if step == action.step]:
            awaited.append(first)
        waits += [partial(_wait_until_waiting, spec, one_of) for one_of in awaited]
        waits += [partial(_wait_for_file, file) for step, file in watch.files if step == action.step]
        if (action.step, spec.group) in watch.leaving:
            waits.append(partial(_wait_until_asked, self._is_leave_asked))
        if action.step in watch.whole_spares:
            waits.append(partial(_wait_for_spares, spec.config))
        if action.step in watch.whole_copies:
            waits.append(partial(_wait_for_copies, ctx.optimizer_state))
        waits += [partial(_wait_for_window, spec.run_dir, node) for step, node in watch.windows if step == action.step]
        if self._is_held_back(action):
            waits.append(partial(DecisionLog(open_store(spec.store)).wait, ctx.controller.head, _TIMEOUT_S))
        for wait in waits:
            with ctx.probe.during(Operation.AWAIT_ENTRY):
                wait()

    def _is_held_back(self, action: AttemptReduce) -> bool:
        """Whether this group is the one without which a reduction stays unfinished: the last that is not hit in it."""
        hit = {
            moment[0]
            for moment in self._watch.unfinished_reduces
            if moment[1] == action.step
            and self._attempts.num_attempts == (2 if moment in self._watch.in_second_attempt else 1)
        }
        is_hit = any(member in hit for member in action.members)
        return is_hit and self._attempts.spec.group == max(member for member in action.members if member not in hit)

    def update_model(self, ctx: RankContext, parts: Components, action: UpdateModel) -> None:
        self._update_model(ctx, parts, action)
        if action.step in self._watch.census_steps:
            _take_census(ctx.spec, action.step)


# ----------------------------------------------------------------------------------------------------------- census


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What one rank's process held after a step."""

    num_threads: int
    num_files: int
    anonymous_bytes: int
    """Resident memory without the pages of mapped files, of which the corpus brings in ever more."""


def _take_census(spec: RankSpec, step: int) -> None:
    census = {
        "num_threads": len(os.listdir("/proc/self/task")),
        "num_files": len(os.listdir("/proc/self/fd")),
        "anonymous_bytes": _anonymous_bytes(),
    }
    with (spec.run_dir / f"census-{spec.name}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **census}) + "\n")


def _anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def read_census(run_dir: Path, group: int, position: int) -> dict[int, Census]:
    """Step -> what the rank held after it."""
    text = (run_dir / f"census-group-{group:04d}-rank-{position}.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return {row.pop("step"): Census(**row) for row in rows}
