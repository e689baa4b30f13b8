"""Serving a run's page: to clients that have its URL, and to no others."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import Line, encode_line
from spare_megatron.tools.report.report_commands import open_server
from spare_megatron.tools.report.server import PageContent, ReportServer, Updated
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.measured_run import BEGAN_S, measured_lines, write_journal

TIMEOUT_S = 30.0
SCENARIO = Scenario(
    name="served",
    num_groups=5,
    redundancy=3,
    microbatches_per_shard=3,
    num_steps=12,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.0, detect_s=2.0, join_s=4.0),
    failures=FailureSpec(kind="system", mean_s=300.0),
    repair_s=100.0,
)


def lines() -> list[str]:
    found: list[Line] = []
    simulate(SCENARIO, 1, journal=found.append)
    return [encode_line(line) + "\n" for line in found]


@contextmanager
def answering(server: ReportServer) -> Iterator[ReportServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()
    assert not thread.is_alive()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "simulator.jsonl").write_text("".join(lines()[:50]))
    (tmp_path / "config.toml").write_text('name = "</pre><script>"')
    return tmp_path


def get(server: ReportServer, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_only_the_path_with_the_token_is_answered(run_dir: Path) -> None:
    with answering(open_server(run_dir, 0)) as server:
        token = server.token
        assert get(server, f"/{token}/")[0] == 200
        wrong = ("/", "//", "/data", f"/{token[:-1]}/", f"/{token}x/", f"/x{token}/", "/%2e%2e/", f"/?{token}")
        for path in wrong:
            status, body, _ = get(server, path)
            assert (status, body) == (403, b""), path
        for path in (f"/{token}", f"/{token}/journal/simulator.jsonl", f"/{token}/../config.toml", f"/{token}//"):
            assert get(server, path)[:2] == (404, b""), path


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org", "127.0.0.1@example.org", "", "[::1"])
def test_a_name_that_leads_here_from_elsewhere_is_refused(run_dir: Path, host: str) -> None:
    with answering(open_server(run_dir, 0)) as server:
        assert get(server, f"/{server.token}/", Host=host)[0] == 421
        assert get(server, f"/{server.token}/", Host="localhost:9000")[0] == 200  # through a tunnel


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_but_reading_is_offered(run_dir: Path, method: str) -> None:
    with answering(open_server(run_dir, 0)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=TIMEOUT_S)
        connection.request(method, f"/{server.token}/")
        assert connection.getresponse().status == 501
        connection.close()


def test_the_page_asks_for_its_content_and_shares_nothing(run_dir: Path) -> None:
    with answering(open_server(run_dir, 0)) as server:
        _, page, headers = get(server, f"/{server.token}/")
    text = page.decode()
    assert 'POLL = "data"' in text
    assert "&lt;/pre&gt;&lt;script&gt;" in text
    assert server.token not in text
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Python" not in headers["Server"]


def test_content_grows_with_the_journal_until_the_run_has_ended(run_dir: Path) -> None:
    clock_s = 0.0
    with answering(open_server(run_dir, 0)) as server:
        server.content.clock_s = lambda: clock_s
        path = f"/{server.token}/data"
        status, body, headers = get(server, f"{path}?have=0")
        first = json.loads(body)
        assert (status, headers["X-Ended"]) == (200, "no")
        clock_s = 1000.0
        assert get(server, f"{path}?have={headers['X-Version']}")[:2] == (204, b"")
        with (run_dir / "journal" / "simulator.jsonl").open("a") as file:
            file.write("".join(lines()[50:]))
        clock_s = 2000.0
        status, body, headers = get(server, f"{path}?have={headers['X-Version']}")
        last = json.loads(body)
        assert (status, headers["X-Ended"]) == (200, "yes")
        assert "spare check finds nothing wrong so far" in first["head"]
        assert "12 of 12" in last["head"]
        assert len(last["plots"]) > len(first["plots"])
        assert get(server, f"{path}?have={headers['X-Version']}")[2]["X-Ended"] == "yes"


def test_the_age_of_the_newest_figure_grows_while_nothing_arrives(tmp_path: Path) -> None:
    """By the clock of the server, however often a browser asks."""
    now_s, clock_s = BEGAN_S + 20.5, 0.0
    found = measured_lines(20)
    newest_s = (found[40].at_s, found[80].at_s)
    write_journal(tmp_path, found[:41])
    with answering(open_server(tmp_path, 0, lambda: now_s)) as server:
        server.content.clock_s = lambda: clock_s
        path = f"/{server.token}/data"
        _, _, headers = get(server, f"{path}?have=0")
        assert float(headers["X-Age"]) == pytest.approx(now_s - newest_s[0])
        now_s, clock_s = now_s + 60.0, 60.0
        status, _, headers = get(server, f"{path}?have={headers['X-Version']}")
        assert status == 204
        assert float(headers["X-Age"]) == pytest.approx(now_s - newest_s[0])
        write_journal(tmp_path, found[41:81])
        clock_s = 120.0
        status, _, headers = get(server, f"{path}?have={headers['X-Version']}")
        assert status == 200
        assert float(headers["X-Age"]) == pytest.approx(now_s - newest_s[1])
        now_s = newest_s[1] - 3.0  # another machine's clock is ahead of this one's
        assert get(server, f"{path}?have={headers['X-Version']}")[2]["X-Age"] == "0.000"


def test_an_alarm_opens_on_the_page_although_nothing_arrives(tmp_path: Path) -> None:
    now_s, clock_s = BEGAN_S + 41.0, 0.0
    write_journal(tmp_path, measured_lines(40)[:41])
    with answering(open_server(tmp_path, 0, lambda: now_s)) as server:
        server.content.clock_s = lambda: clock_s
        path = f"/{server.token}/data"
        _, body, headers = get(server, f"{path}?have=0")
        assert "no step has been committed" not in json.loads(body)["head"]
        now_s, clock_s = now_s + 700.0, 700.0
        status, body, _ = get(server, f"{path}?have={headers['X-Version']}")
        assert status == 200
        assert "not healthy" in json.loads(body)["head"]
        assert "no step has been committed for more than 10 min" in json.loads(body)["head"]


def test_a_simulated_run_has_no_age(run_dir: Path) -> None:
    """Its times are not those of a clock."""
    with answering(open_server(run_dir, 0)) as server:
        assert "X-Age" not in get(server, f"/{server.token}/data?have=0")[2]


def test_content_that_is_dear_is_made_less_often() -> None:
    clock_s, made = 100.0, []

    def make(before: PageContent | None) -> PageContent:
        nonlocal clock_s
        made.append(clock_s)
        clock_s += 3.0
        return PageContent(version=len(made), text="", is_final=len(made) == 3)

    content = Updated(make, clock_s=lambda: clock_s)
    for at_s in (100.0, 110.0, 129.9, 130.0, 161.0, 500.0):
        clock_s = at_s
        content.now()
    assert made == [100.0, 130.0, 161.0]  # takes 3 s, so 30 s pass; and what is final stays


def test_what_has_no_journal_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert result.exit_code == 2
    assert str(tmp_path) in result.output
