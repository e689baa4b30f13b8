"""Names what holds the run back, from the windows that the machines report."""

from collections.abc import Callable
from dataclasses import asdict
from statistics import median

from spare_megatron.core.culprit import Culprit, CulpritWatch, Window
from spare_megatron.core.reforming import MachineId
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import CulpritRecord
from spare_megatron.process.reports import CulpritChanged, NodeMeasured


class Culprits:
    """Judges the machines' windows together, and journals and reports each change. A window of the run has one of each
    machine, of about the same steps: the next begins when a machine reports again. `shares_processors`: as in `Window`.
    """

    def __init__(
        self, journal: JournalWriter, on_event: Callable[[CulpritChanged], None], *, shares_processors: bool
    ) -> None:
        self._journal = journal
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
        if not self._watch.add(window):
            return
        if self._watch.named is None:
            assert before is not None, "what is named no longer was named"
            self._report(before, is_over=True)
        else:
            self._report(self._watch.named, is_over=False)

    def _report(self, culprit: Culprit, *, is_over: bool) -> None:
        fields = asdict(culprit)
        fields |= {"of_group": fields.pop("group"), "cause": str(culprit.cause)}
        record = CulpritRecord(**fields, is_over=is_over)
        self._journal.write(record)
        self._on_event(CulpritChanged(record=record))
