"""The page of a run in a real browser: it draws without an error, zooms, and follows a run that goes on."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, ViewportSize, sync_playwright
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import Line, encode_line
from spare_megatron.journal.records import EntryRecord, LossRecord
from spare_megatron.tools.report import page as report_page
from spare_megatron.tools.report.report_commands import open_server
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.integration.debian import fetch_with_dependencies, with_libraries
from tests.unit.long_run import long_history
from tests.unit.measured_run import BEGAN_S, measured_lines, write_journal

pytestmark = pytest.mark.timeout(900)  # the first test fetches the browser

TIMEOUT_S = 90.0
SCREEN = ViewportSize(width=1366, height=768)
SCENARIO = Scenario(
    name="browsed",
    num_groups=7,
    redundancy=2,
    microbatches_per_shard=3,
    num_steps=60,
    costs=CostModel(compute_s=60.0, reduce_s=6.0, jitter=0.1, detect_s=2.0, join_s=4.0, restart_s=120.0, save_s=5.0),
    failures=FailureSpec(kind="system", mean_s=200.0),
    repair_s=300.0,
)


def find_chromium(cache: Path) -> tuple[Path, dict[str, str]]:
    """A Chromium that starts, and its environment: this machine's, or Debian's in the cache."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    binary = Path(found) if found else cache / "usr" / "lib" / "chromium" / "chromium"
    if found is None:
        fetch_with_dependencies(cache, binary, "chromium")
    environment = dict(os.environ) if found else with_libraries(cache)
    result = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
    )
    if result.returncode:
        pytest.skip(f"needs chromium: {binary} does not start: {result.stderr.strip()[-300:]}")
    return binary, environment


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Iterator[Browser]:
    assert pytestconfig.cache is not None
    binary, environment = find_chromium(pytestconfig.cache.mkdir("chromium"))
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=str(binary),
                args=["--disable-gpu", "--disable-dev-shm-usage"],
                chromium_sandbox=False,  # it shows nothing but our own page, and containers have no namespaces for one
                timeout=TIMEOUT_S * 1e3,
                env=environment,
            )
        except Error as error:
            pytest.skip(f"needs chromium: {binary} does not start: {error}")
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these plots are of a kind."""
    monkeypatch.setattr(report_page, "MOST_LOADS", 2)


@contextmanager
def opened(browser: Browser, url: str, screen: ViewportSize = SCREEN) -> Iterator[Page]:
    """The page when it is ready. It may ask no server but its own for anything, and nothing may go wrong."""
    page = browser.new_page(viewport=screen)
    page.set_default_timeout(TIMEOUT_S * 1e3)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    origin = url.rpartition("/")[0]
    page.on(
        "request", lambda asked: None if asked.url.startswith((origin, "data:", "blob:")) else wrong.append(asked.url)
    )
    page.goto(url)
    page.wait_for_selector("body[data-ready=yes]")
    yield page
    assert wrong == []
    page.close()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    found: list[Line] = []
    simulate(SCENARIO, 2, journal=found.append)
    records = [line.record for line in found]
    assert any(isinstance(record, LossRecord) for record in records)
    entries = [record.entry for record in records if isinstance(record, EntryRecord)]
    assert any(entry["entry"] == "restart" for entry in entries)
    assert any(entry.get("admit") for entry in entries)
    return [encode_line(line) + "\n" for line in found]


def write(folder: Path, text: str) -> Path:
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / "simulator.jsonl").write_text(text)
    return folder


def reported(folder: Path, text: str) -> str:
    """Where the page of a run is that has this journal."""
    run_dir = write(folder / "run", text)
    result = CliRunner().invoke(app, ["report", str(run_dir)])
    assert result.exit_code == 0, result.output
    return (run_dir / "report.html").as_uri()


def draw_all(page: Page) -> int:
    """Scrolls through all plots; how many there are."""
    plots = page.locator(".plot")
    for number in range(plots.count()):
        plots.nth(number).scroll_into_view_if_needed()
        plots.nth(number).locator(".main-svg").first.wait_for()
    return plots.count()


def shown_range(page: Page) -> list[float]:
    """What the first plot shows of its x axis."""
    return [float(end) for end in page.evaluate("document.querySelector('.plot').layout.xaxis.range")]


def zoom(page: Page) -> None:
    """Drags over the middle third of the first plot."""
    page.locator(".plot").first.scroll_into_view_if_needed()
    box = page.locator(".plot .nsewdrag").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=3)
    page.mouse.move(box["x"] + box["width"] * 2 / 3, middle, steps=3)
    page.mouse.up()


def test_a_run_with_losses_returns_and_wipe_outs_is_drawn_and_zooms(
    browser: Browser, lines: list[str], tmp_path: Path
) -> None:
    with opened(browser, reported(tmp_path, "".join(lines))) as page:
        assert draw_all(page) > 6
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        before = shown_range(page)
        zoom(page)
        page.wait_for_function(
            "([low, high]) => { const [from, to] = document.querySelector('.plot').layout.xaxis.range;"
            " return to - from < (high - low) / 2; }",
            arg=before,
        )
        page.screenshot(path=tmp_path / "page.png")


def test_of_a_long_run_no_more_is_drawn_than_what_is_in_view_or_near_it(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(report_page.report(long_history(100_000, 8), ""))
    with opened(browser, file.as_uri()) as page:
        page.wait_for_selector(".plot .main-svg")
        assert draw_count(page) <= 3
        num_plots = draw_all(page)
        assert draw_count(page) == num_plots
        assert num_plots > 6


def draw_count(page: Page) -> int:
    """Plots that are drawn by now."""
    return int(page.evaluate("document.querySelectorAll('.plot:has(.main-svg)').length"))


def test_on_paper_every_plot_is_there_and_no_wider_than_the_page_and_nothing_to_click_on(
    browser: Browser, lines: list[str], tmp_path: Path
) -> None:
    room_px = (210 - 2 * 12) / 25.4 * 96  # of A4, the narrower one, without margins
    with opened(browser, reported(tmp_path, "".join(lines))) as page:
        paper = page.pdf(format="A4", tagged=True, outline=True)
        titles = [title.decode() for title in re.findall(rb"/Title \(([^)]*)\)", paper)]
        headings = page.locator("h2").all_inner_texts()
        assert len(headings) > 6
        assert [title for title in titles if title in headings] == headings
        page.wait_for_function(f"Math.min(...({WIDTHS})()) > {room_px}")
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        on_paper_px = page.evaluate(WIDTHS)
        assert len(on_paper_px) == page.locator(".plot").count()
        assert max(on_paper_px) < room_px
        assert not any(bar.is_visible() for bar in page.locator(".modebar").all())
        assert page.evaluate("getComputedStyle(document.querySelector('thead')).display") == "table-header-group"
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.emulate_media(media="screen")
        page.wait_for_function(f"Math.min(...({WIDTHS})()) > {room_px}")


WIDTHS = "() => [...document.querySelectorAll('.plot')].map((plot) => plot.querySelector('.main-svg').clientWidth)"


@pytest.mark.parametrize(("share", "plots"), [(0.0, 0), (0.4, 6)], ids=["empty", "truncated"])
def test_a_journal_that_has_hardly_begun_or_was_cut_off_is_drawn(
    browser: Browser, lines: list[str], tmp_path: Path, share: float, plots: int
) -> None:
    text = "".join(lines)
    cut = lines[0] if not share else text[: int(share * len(text))]
    assert share == 0 or not cut.endswith("\n")
    with opened(browser, reported(tmp_path, cut)) as page:
        assert draw_all(page) >= plots
        assert "going on" in page.inner_text("#head")


@pytest.mark.parametrize("width_px", [400, 360])
def test_the_page_fits_a_telephone(browser: Browser, lines: list[str], tmp_path: Path, width_px: int) -> None:
    """Only tables and the configuration scroll sideways, each within itself."""
    run_dir = write(tmp_path / "run", "".join(lines))
    (run_dir / "config.toml").write_text(f'name = "{"x" * 200}"')
    measured = write_journal(tmp_path / ("a-long-name-" * 8), measured_lines(20))
    alone, pair = tmp_path / "alone.html", tmp_path / "pair.html"
    for arguments in ([run_dir, "--out", alone], [measured, run_dir, "--out", pair]):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert result.exit_code == 0, result.output
    for page_file in (alone, pair):
        with opened(browser, page_file.as_uri(), ViewportSize(width=width_px, height=700)) as page:
            draw_all(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width_px
            assert max(page.evaluate(WIDTHS)) <= width_px
            assert min(page.evaluate(WIDTHS)) > width_px * 0.85
            assert max(page.evaluate(TABLE_WIDTHS)) > width_px


TABLE_WIDTHS = "() => [...document.querySelectorAll('.wide')].map((table) => table.scrollWidth)"


def test_a_page_says_how_old_its_newest_figure_is_also_when_the_server_is_gone(
    browser: Browser, tmp_path: Path
) -> None:
    found = measured_lines(20)[:41]
    newest_s = max(line.at_s for line in found)
    now_s = newest_s + 3.0
    server = open_server(write_journal(tmp_path, found), 0, lambda: now_s)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    page = browser.new_page(viewport=SCREEN)
    page.set_default_timeout(TIMEOUT_S * 1e3)
    try:
        page.clock.set_fixed_time(BEGAN_S / 2)  # the browser's clock is off by decades
        page.goto(server.url)
        page.locator("#state", has_text="Live. The newest figure is 3 s old.").wait_for()
        now_s += 40.0
        page.locator("#state", has_text="Live. The newest figure is 43 s old.").wait_for()
        page.route("**/data*", lambda route: route.abort())
        page.locator("#state", has_text=re.compile(r"^No answer from spare serve .* is 43 s old\.$")).wait_for()
        page.clock.set_fixed_time(BEGAN_S / 2 + 60.0)
        page.locator("#state", has_text=re.compile(r"^No answer from spare serve .* is 103 s old\.$")).wait_for()
    finally:
        page.close()
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()


def test_a_served_run_grows_in_the_page_and_what_is_zoomed_stays(
    browser: Browser, lines: list[str], tmp_path: Path
) -> None:
    run_dir = write(tmp_path, "".join(lines[: len(lines) // 2]))
    server = open_server(run_dir, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with opened(browser, server.url) as page:
            page.wait_for_selector(".plot .main-svg")
            zoom(page)
            zoomed, num_plots = shown_range(page), page.locator(".plot").count()
            with (run_dir / "journal" / "simulator.jsonl").open("a") as file:
                file.write("".join(lines[len(lines) // 2 :]))
            page.locator("#state", has_text="has ended").wait_for()
            assert "60 of 60" in page.inner_text("#head")
            assert page.locator(".plot").count() >= num_plots
            assert shown_range(page) == pytest.approx(zoomed)
            assert zoomed[1] - zoomed[0] < 30
    finally:
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()
