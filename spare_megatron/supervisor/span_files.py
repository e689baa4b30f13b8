"""Writes what ranks did around losses, returns of groups and outages of the control store, and at the end of a run."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spare_megatron.journal.records import RestartRecord
from spare_megatron.journal.spans import RankSpans, Span, SpansFile
from spare_megatron.process.heartbeats import HeartbeatPage
from spare_megatron.process.processes import say
from spare_megatron.process.reports import GroupLost, GroupRejoined, RankKey, StepCommitted, StoreAway
from spare_megatron.process.span_ring import read_spans
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId
from spare_megatron.supervisor.rank_processes import RankProcesses

STEPS_BEFORE = 2
STEPS_AFTER = 2
"""Whole steps before and after an event that are kept with it."""


class Timeline:
    """Writes the spans around each event, also of dead ranks: they write to memory shared with this process."""

    def __init__(self, spec: NodeSpec, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self._layout = spec.config.parallel
        self._file = SpansFile(spec.run_dir, spec.node)
        self._machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._written: dict[RankKey, tuple[HeartbeatPage, int]] = {}  # number of spans in the ring of a process's page
        self._step = -1
        self._epoch = 0
        self._first_step = 0
        self._due_at: int | None = None

    def on_event(self, report: object) -> None:
        """Handles a report. Must be called before the report has consequences."""
        match report:
            case StepCommitted(step=step, epoch=epoch):
                if epoch > self._epoch:  # groups were lost or came back, here or on another node
                    self._open()
                self._step, self._epoch = step, max(epoch, self._epoch)  # groups report one after another
                if self._due_at is not None and step >= self._due_at:
                    self._write_all()
            case GroupLost(record=record):
                self._open()
                for key in self._ranks.of(GroupId(record.group)):
                    self._write(key, is_lost=True)
            case GroupRejoined() | RestartRecord() | StoreAway():
                self._open()

    def close(self) -> None:
        self._open()
        self._write_all()
        with self._forgiving():
            self._file.close()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Makes a full disk cost the timeline only."""
        try:
            yield
        except OSError as error:
            say(f"the timeline is incomplete: {error}")

    def _open(self) -> None:
        """Opens a window of some steps before and after now, or extends the open one."""
        if self._due_at is None:
            self._first_step = self._step - STEPS_BEFORE
        self._due_at = self._step + 1 + STEPS_AFTER

    def _write_all(self) -> None:
        for key in self._ranks.pids:
            self._write(key)
        self._due_at = None

    def _unfinished(self, key: RankKey, spans: Sequence[Span]) -> Span:
        pulse = self._ranks.pulse(key)
        # A pass that has ended may have begun before the last progress: spans that overlap cannot be shown.
        began_s = max([pulse.progress_at_s, *(span.ended_s for span in spans)])
        return Span(name=f"lost in {pulse.operation}", step=pulse.step, began_s=began_s, ended_s=time.monotonic())

    def _write(self, key: RankKey, *, is_lost: bool = False) -> None:
        group, rank = key
        page = self._ranks.page(key)
        if page is None:
            return
        of_page, num_written = self._written.get(key, (page, 0))
        spans, end = read_spans(page.ring, num_written if of_page is page else 0)
        self._written[key] = page, end
        # The spans of a recovery are written after those that follow them.
        inside = sorted((span for span in spans if span.step >= self._first_step), key=lambda span: span.ended_s)
        if is_lost:
            inside.append(self._unfinished(key, inside))
        if not inside:
            return
        spans_of_rank = RankSpans(
            group=group,
            rank=rank,
            incarnation=self._ranks.member(GroupId(group)).incarnation,
            stage=rank // self._layout.ranks_per_stage,
            lane=self._layout.lane_of(rank),
            machine=self._machine,
            wall_s=time.time() - time.monotonic(),
            spans=inside,
        )
        with self._forgiving():
            self._file.write(spans_of_rank)
