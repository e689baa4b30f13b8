"""Text from elsewhere (names, paths, causes, errors) appears as it is, wherever it is shown."""

import ast
import codecs
import html.parser
import io
import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pytest
from typer.testing import CliRunner

from spare_megatron.cli.config import print_presets
from spare_megatron.cli.console import LiveView, RunConsole, Table
from spare_megatron.cli.printing import message, say, shown
from spare_megatron.cli.progress import RunProgress, print_summary
from spare_megatron.commands import app
from spare_megatron.config.loader import LoadedConfig
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.formats.output import printable
from spare_megatron.journal.records import EndRecord, LossRecord, StorageRecord
from spare_megatron.journal.state.summary import Summary
from spare_megatron.process.reports import GroupLost, Message
from spare_megatron.tools.bench import bench
from spare_megatron.tools.campaign.campaign_figures import CampaignFigures, FaultCount, print_campaign
from spare_megatron.tools.campaign.process_watch import Holdings, ProcessReport
from spare_megatron.tools.doctor import doctor
from spare_megatron.tools.doctor.diagnosis import NodeFinding, NodeMeasurements
from spare_megatron.tools.plan import plan_plot
from spare_megatron.tools.plan.show_command import print_config
from spare_megatron.tools.report import page
from spare_megatron.tools.simulate.simulate_table import print_figures
from spare_megatron.tools.simulate.sweep import Estimate, SweepFigures
from tests.unit.test_run_state import RUN, commit, entry, line, write

PACKAGE = Path(__file__).parents[2] / "spare_megatron"
NUM_TEXTS = 1000

PARTS = (
    *(
        "[/x]",
        "[b]",
        "[/]",
        "[",
        "]",
        "[red]r[/red]",
        "[link=x:y]",
        "[@click=x]",
        ":smile:",
        ":x:",
        "{task.x}",
        "%s",
    ),
    *("<b>", "</pre>", "&lt;", "&", "<script>", "<br>", "$x$", "$\\frac", "%{x}", '"', "'", "`", "*", "_"),
    *("\x1b[31m", "\x1b[2J", "\x1b]0;title\x07", "\r", "\n", "\t", "\0", "\x7f", "\x85", "\x9b1m", "\x08", "\x0c"),
    *("\u202e", "\u2066", "\u200f", "\u2028", "\u2029", "\ufeff", "\u200b", "\udc80", "\udcff", "\u00ad"),
    *("\u6f22\u5b57", "\u3000", "e\u0301", "\U0001f468\u200d\U0001f469", "\u0645\u06cc\u200c\u062e", "\u00a0"),
    *string.ascii_letters,
    " ",
)
"""What texts are drawn of: markup of rich, HTML, plotly and matplotlib, control characters, scripts."""
FIRST, LAST = "\u00ab", "\u00bb"
"""They enclose each text, so that it is found again, with its spaces."""


def drawn_texts() -> list[str]:
    random_ = random.Random(7)
    return [f"{FIRST}{''.join(random_.choices(PARTS, k=random_.randint(0, 9)))}{LAST}" for _ in range(NUM_TEXTS)]


TEXTS = drawn_texts()


def original(text: str) -> str:
    """What was escaped in a text that had no backslash."""
    escape = r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
    return re.sub(escape, lambda found: codecs.decode(found[0], "unicode_escape"), text)


def is_harmless(text: str) -> bool:
    """No character is one that a terminal obeys, or that is invisible."""
    return all(char.isprintable() or char in "\n\u3000\u00a0\u200c\u200d" for char in text)


def check(output: str, texts: Sequence[str]) -> None:
    """All texts are in the output as they are, and nothing in it moves the cursor."""
    assert is_harmless(output), ascii(output)[:1000]
    found = [original(text) for text in re.findall(f"{FIRST}.*?{LAST}", output)]
    assert sorted({*texts} - {*found}) == []


class Shown:
    """The ways in which texts are shown, each of which gets all of them."""

    def __init__(self) -> None:
        self.console = RunConsole(file=io.StringIO())

    def lines(self) -> None:
        for text in TEXTS:
            self.console.line(text)
            self.console.line(text, style="bold red")

    def tables(self) -> None:
        thirds = [TEXTS[number::3] for number in range(3)]
        rows = list(zip(*thirds, strict=False))
        self.console.tables(Table(rows=[*rows, (*TEXTS[-1:], "", "")], has_numbers=True, bold_row=3))
        for first, *others in zip(TEXTS, TEXTS[1:], TEXTS[2:], TEXTS[3:], strict=False):
            self.console.tables(Table(title=first, caption=others[0], columns=others[1:], rows=[("", "")]))

    def presets(self) -> None:
        print_presets({text: {"kind": text, "description": text} for text in TEXTS})

    def settings(self) -> None:
        config = RunConfig(data=DataConfig(corpus="a"))
        sizes = run_sizes(config)
        for part in range(0, NUM_TEXTS, 250):
            fields = {f"field_{number}": text for number, text in enumerate(TEXTS[part : part + 250])}
            origins = {f"megatron.{name}": text for name, text in fields.items()}
            print_config(LoadedConfig(config=replace(config, megatron=fields), provenance=origins), sizes, 1.0)

    def summary(self) -> None:
        for first, *reasons in zip(TEXTS[::10], *(TEXTS[number::10] for number in range(1, 10)), strict=True):
            summary = Summary(
                verdict=reasons[0],
                reasons=tuple(reasons[1:6]),
                outcome=reasons[6],
                outcome_reason=first,
                steps_committed=1,
                eval={reasons[7]: {"step": 1, "loss": 1.0}},  # type: ignore[dict-item]
            )
            print_summary(summary, Path(reasons[8]), self.console)

    def campaign(self) -> None:
        nothing = Holdings(memory_bytes=0, threads=0, file_descriptors=0)
        processes = ProcessReport(growth=nothing, grown_most={}, largest=nothing, num_processes=0, orphans=[])
        counts = {text: FaultCount(planned=1, due=1, fired=1, masked=1) for text in TEXTS}
        figures = SimpleNamespace(faults=counts, goodput=None, losses=0, admissions=0, recovery_p50_s=None)
        summary = Summary(verdict="v", reasons=(), outcome="o", outcome_reason=TEXTS[0], steps_committed=1)
        print_campaign(summary, as_figures(figures), processes, TEXTS, Path(TEXTS[1]), self.console)

    def nodes(self) -> None:
        findings = [NodeFinding(node=text, check=text, text=text) for text in TEXTS]
        doctor._show([NodeMeasurements(name=text) for text in TEXTS], findings)

    def speeds(self) -> None:
        result: Any = SimpleNamespace(speeds={}, ratio=None)
        for text in TEXTS:
            self.console.line(f"kernels: {text}")
        bench._print(result, self.console)

    def simulations(self) -> None:
        estimate = Estimate(mean=1.5, ci95=None)
        for first, second in zip(TEXTS[::2], TEXTS[1::2], strict=True):
            one = SweepFigures(
                policy="spare",
                granularity="stack",
                num_groups=4,
                redundancy=2,
                seeds=1,
                time_to_train_ratio=estimate,
                availability=estimate,
                restarts=0,
                losses=1,
                state_wipe_outs=0,
                pauses=0,
                losses_by_cause={second.replace("_", ""): 1.0},
                name=first,
                terms={},
                decision_s=0.0,
                wall_s=0.0,
            )
            print_figures([one], self.console)

    def progress(self) -> None:
        with RunProgress(RunConfig(), self.console, Path("nowhere")) as progress:
            for first, second, third in zip(TEXTS[:400], TEXTS[300:700], TEXTS[600:], strict=False):
                progress.on_event(Message(text=first))
                progress.on_event(Message(text=second))
                lost = LossRecord(group=0, rank=0, cause="", entry_index=0)
                progress.on_event(GroupLost(record=lost, traceback=f"a\n{third}\nb"))

    def printed(self) -> None:
        say(*TEXTS)
        for text in TEXTS:
            message("train", text)


def as_figures(found: Any) -> CampaignFigures:
    return found  # type: ignore[no-any-return]


WAYS = [name for name in vars(Shown) if not name.startswith("_")]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_showing_texts_shows_them_as_they_are(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sink = Shown()
    getattr(sink, way)()
    assert isinstance(sink.console.file, io.StringIO)
    captured = capsys.readouterr()
    output = sink.console.file.getvalue() + captured.out + captured.err
    unchanged = {"progress": "\n\t", "simulations": "_"}.get(way, "")  # one in a name of a cause becomes a space
    check(output, [text for text in TEXTS if not set(text) & set(unchanged)])
    assert not re.search(r" $", output, re.MULTILINE), "lines end where their text ends"


def test_a_live_view_and_a_bar_show_texts_as_they_are() -> None:
    console = RunConsole(file=io.StringIO(), force_terminal=True)
    texts = [text for text in TEXTS if len(text) < 30]
    with console.live() as show:
        for text in texts:
            show(LiveView(lines=[text, [(text, "bold red")]], done=1, total=3))
    with console.bar("reading", 10) as update:
        for number, text in enumerate(texts):
            update(number % 10, text)
    assert isinstance(console.file, io.StringIO)
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", console.file.getvalue())
    assert is_harmless(output), ascii(output)[:1000]
    assert {original(text) for text in re.findall(f"{FIRST}[^\n]*?{LAST}", output)} >= set(texts[-1:])


# ------------------------------------------------------------------------------------------------ whole commands


def run_with_causes(folder: Path, causes: Sequence[str]) -> Path:
    """A run that lost a group for each of the causes, and ended for the last one."""
    lines = [line(100.0, RUN), commit(101.0, 0, 0)]
    for number, cause in enumerate(causes):
        lost = LossRecord(group=1, rank=0, cause=cause, entry_index=number + 1, incarnation=number)
        lines.append(line(102.0 + number, lost))
        lines.append(entry(102.5 + number, number + 1, entry="fence", group=1, incarnation=number, reason=cause))
    lines.append(line(9000.0, StorageRecord(outcome="held", path=causes[0], reason=causes[1], num_files=1)))
    lines.append(line(9001.0, EndRecord(outcome="halted", reason=causes[-1])))
    return write(folder, lines)


def visible(name: str) -> str:
    """A text as the name of a folder."""
    return name.replace("/", "").replace("\0", "")[:60]


@pytest.mark.parametrize("words", [["status"], ["status", "--watch"], ["check"], ["audit"], ["logs"]], ids=" ".join)
def test_commands_show_what_a_journal_has_as_it_is(tmp_path: Path, words: Sequence[str]) -> None:
    for number in range(10):
        causes = TEXTS[number::10]
        run_dir = run_with_causes(tmp_path / visible(TEXTS[number]), causes)
        (run_dir / "logs").mkdir()
        logged = [text.encode(errors="replace").decode() for text in causes if text.splitlines() == [text]]
        (run_dir / "logs" / "group-0000-rank-0.log").write_text("\n".join(logged))
        result = CliRunner().invoke(app, [words[0], str(run_dir), *words[1:], *["--lines=999"] * (words == ["logs"])])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        expected = {"logs": logged, "check": [], "audit": []}.get(words[0], causes[-1:])
        check(result.output, [text for text in expected if "\t" not in text])


class Texts(html.parser.HTMLParser):
    """The cells of a page, as a browser shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.found += data


def test_a_report_shows_texts_as_they_are_in_tables_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents: list[str] = []
    monkeypatch.setattr(page, "_pack", lambda text: contents.append(text) or "")
    monkeypatch.setattr(page, "_library", lambda: "")  # it keeps what was packed
    for number in range(4):
        causes = TEXTS[number::4][:290]
        run_dir = run_with_causes(tmp_path / f"run{number}", causes)
        result = CliRunner().invoke(app, ["report", str(run_dir)])
        assert result.exit_code == 0, result.output
        seen = Texts()
        seen.feed((run_dir / "report.html").read_text().partition("<script>")[0])
        assert "b" not in seen.tags
        check(seen.found, causes)
        plots = json.loads([text for text in contents if text.startswith("{")][-1])["plots"]
        labels = [text for plot in plots for trace in plot["figure"]["data"] for text in trace.get("text") or ()]
        check("\n".join(map(html.unescape, labels)), causes)
        assert not [text for text in labels if "<" in text], "plotly.js would see a tag"


def test_a_name_is_no_formula_in_a_plot() -> None:
    with mpl.rc_context(plan_plot.SETTINGS):
        figure = plan_plot.plt.figure()
        figure.suptitle(r"$\frac and $x$")
        figure.savefig(io.BytesIO(), format="png")
        plan_plot.plt.close(figure)


def test_arguments_that_are_wrong_are_named_in_one_line() -> None:
    for text in TEXTS[:70]:
        for words in (["status", f"--x{text}"], [f"x{text}"], ["config", "show", f"s3://{text}"]):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 2, result.output
            assert result.stdout == ""
            first, *others = result.stderr.rstrip("\n").split("\n")
            assert first.startswith("spare"), first
            assert all(other.startswith("  ") for other in others)
            assert is_harmless(result.stderr), ascii(result.stderr)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_stream_cannot_encode_is_escaped(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = RunConsole(file=stream)
    console.tables(Table(columns=("name", "value"), rows=[(text, text) for text in TEXTS]))
    for text in TEXTS:
        console.line(text)
        stream.write(shown(text, stream))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_columns_are_divided_by_spaces_whatever_the_encoding(encoding: str) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    RunConsole(file=stream).tables(
        Table(columns=("name", "value", "from"), rows=[("a", "long", ""), ("b", "", "here")])
    )
    stream.flush()
    head, rule, *rows = written.getvalue().decode(encoding).splitlines()
    assert (head, rows) == ("name  value  from", ["a     long", "b            here"])
    assert set(rule) <= {"-", "\u2500"}


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("columns", ["0", "1", "5", "-3", "wide", " ", "39"])
def test_no_cell_is_left_out_whatever_columns_says(
    monkeypatch: pytest.MonkeyPatch, columns: str, is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = io.StringIO()
    RunConsole(file=stream, force_terminal=is_terminal).tables(Table(columns=list("abcdefgh"), rows=["ijklmnop"]))
    assert set("abcdefghijklmnop") <= {*stream.getvalue()}


def test_what_can_be_seen_stays_as_it_is() -> None:
    for text in (
        "",
        "a b",
        "\u6f22\u5b57\u3000",
        "[/x] :smile: \\n",
        "\u0645\u06cc\u200c\u062e",
        "\U0001f468\u200d\U0001f469",
    ):
        assert printable(text) == text
    for text in TEXTS:
        assert original(printable(text)) == text or "\\" in text
        assert printable(printable(text)) == printable(text)


# ----------------------------------------------------------------------------------------------------- one way

WRITERS = {"cli/printing.py", "cli/console.py"}
"""The modules that write to stdout and stderr."""
PROCESSES = {
    "process/processes.py",
    "process/fork_server.py",
    "tools/replay/replay_ranks.py",
    "tools/doctor/program_trial.py",
}
"""Processes that write to a log, or lines that their parent reads."""


def writes_directly(tree: ast.AST) -> Iterator[str]:
    """Calls that print past the two modules, and imports of what does."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in ("rich", "click"))
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in ("rich", "click"):
                yield module
            case (
                ast.Call(func=ast.Name(id="print" as name))
                | ast.Call(func=ast.Attribute(attr="echo" | "secho" as name))
            ):
                yield name
            case ast.Call(
                func=ast.Attribute(
                    attr="write" | "writelines", value=ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr")
                )
            ):
                yield "sys.stdout.write"


def test_all_output_goes_through_one_way() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(writes_directly(ast.parse(path.read_text())))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert {name for name, calls in found.items() if calls} <= WRITERS | PROCESSES
    assert set(found["cli/console.py"]) >= {"rich.console"}
    assert found["process/processes.py"] == ["print"]


@pytest.mark.parametrize(
    "source",
    ["print(1)", "import rich", "from rich.table import Table", "typer.echo(1)", "import sys\nsys.stderr.write('x')"],
)
def test_another_way_is_noticed(source: str) -> None:
    assert list(writes_directly(ast.parse(source)))
