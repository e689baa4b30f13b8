"""Serves the page of a run on the loopback address, under a URL that contains a secret. Read-only."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")
"""Valid Host headers. Any other is of a foreign page that had its own name resolve to this address."""
_IDLE_S = 10.0
_LEAST_INTERVAL_S = 1.0
_MOST_SHARE = 0.1
"""Largest share of the time that updates of the content may take."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    version: int
    """Differs whenever there is something new."""
    text: str
    """JSON."""
    is_final: bool
    """Nothing more will come."""
    newest_at_s: float | None = None
    """When the newest journal line in it was written, in seconds since the epoch; None if unknown."""


class Updated:
    """Caches content, and updates it on request but not too often. Any thread may call it. `make`: makes the content
    from the former one; returns the same object if nothing is new.
    """

    def __init__(
        self, make: Callable[[PageContent | None], PageContent], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self.clock_s = clock_s
        self._lock = threading.Lock()
        self._content: PageContent | None = None
        self._next_at_s = 0.0

    def now(self) -> PageContent:
        with self._lock:
            began_s = self.clock_s()
            if self._content is None or (began_s >= self._next_at_s and not self._content.is_final):
                self._content = self._make(self._content)
                spent_s = self.clock_s() - began_s
                self._next_at_s = began_s + max(_LEAST_INTERVAL_S, spent_s / _MOST_SHARE)
            return self._content


class ReportServer(ThreadingHTTPServer):
    """Serves the page, and its content as `data` beside it, below a path that cannot be guessed. `port` 0 takes a free
    one; OSError: the port is taken. `now_s`: seconds since the epoch, from which pages learn how old the newest figure
    is.
    """

    daemon_threads = True

    def __init__(self, page: str, content: Updated, port: int, now_s: Callable[[], float] = time.time) -> None:
        self.now_s = now_s
        self.page = page.encode()
        self.content = content
        self.token = secrets.token_urlsafe(24)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors, as of a browser that disconnects during an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: ReportServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        _, token, *rest = path.split("/") if path.startswith("/") else ("", "")
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST)
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN)
        elif rest == [""]:
            self._answer(HTTPStatus.OK, self.server.page, {"Content-Type": "text/html; charset=utf-8"})
        elif rest == ["data"]:
            self._answer_content(parse_qs(query).get("have", [""])[0])
        else:
            self._answer(HTTPStatus.NOT_FOUND)

    def _answer_content(self, have: str) -> None:
        content = self.server.content.now()
        headers = {"X-Version": str(content.version), "X-Ended": "yes" if content.is_final else "no"}
        if content.newest_at_s is not None:
            headers["X-Age"] = f"{max(0.0, self.server.now_s() - content.newest_at_s):.3f}"
        if have == str(content.version):
            self._answer(HTTPStatus.NO_CONTENT, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            self._answer(HTTPStatus.OK, content.text.encode(), headers)

    def _answer(self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "spare"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name is the library's
        """Logs nothing, because URLs hold the token."""
