"""Names what holds the run back, from the windows that the machines report."""

from collections.abc import Callable
from dataclasses import asdict
from statistics import median

from spare_megatron.core.slow_machines.culprit import Culprit, CulpritWatch, Window
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import CulpritRecord
from spare_megatron.process.reports import NodeMeasured
from spare_megatron.stacking.layout import MachineId


class Culprits:
    """Judges the machines' windows together, and journals and reports each change. A window of the run has one of each
    machine, of about the same steps: the next begins when a machine reports again. `shares_processors`: as in `Window`.
    `on_named` is called after each window with what is named, and the length of a step.
    """

    def __init__(
        self,
        journal: JournalWriter,
        on_event: Callable[[CulpritRecord], None],
        *,
        shares_processors: bool,
        on_named: Callable[[Culprit, float], None] = lambda *_: None,
    ) -> None:
        self._journal = journal
        self._on_named = on_named
        self._shares_processors = shares_processors
        self._on_event = on_event
        self._watch = CulpritWatch()
        self._reports: dict[MachineId, NodeMeasured] = {}

    def add(self, report: NodeMeasured) -> None:
        if report.machine in self._reports:
            self._judge()
            self._reports.clear()
        self._reports[report.machine] = report

    def _judge(self) -> None:
        reports = self._reports
        window = Window(
            step_s=median(report.step_s for report in reports.values()),
            ranks=[times for machine in sorted(reports) for times in reports[machine].ranks],
            machines={machine: reports[machine].signs for machine in sorted(reports)},
            shares_processors=self._shares_processors,
        )
        before = self._watch.named
        has_changed = self._watch.add(window)
        named = self._watch.named
        if has_changed and named is None:
            assert before is not None, "what is named no longer was named"
            self._report(before, is_over=True)
        elif has_changed and named is not None:
            self._report(named, is_over=False)
        if named is not None:
            self._on_named(named, window.step_s)

    def _report(self, culprit: Culprit, *, is_over: bool) -> None:
        record = record_of(culprit, is_over=is_over)
        self._journal.write(record)
        self._on_event(record)


def record_of(culprit: Culprit, *, is_over: bool = False) -> CulpritRecord:
    fields = asdict(culprit)
    fields |= {"of_group": fields.pop("group"), "cause": str(culprit.cause)}
    return CulpritRecord(**fields, is_over=is_over)
