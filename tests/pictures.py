"""Draws the pictures of docs/watching.md from a run: python -m tests.pictures RUN_DIR [FOLDER]

While the run goes on the first screen of `spare serve`, afterwards those of `spare report` and `spare status`, in a
Chromium: this machine's, or Debian's in pytest's cache.
"""

import html
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

from spare_megatron.journal.state.follow import read_run_state
from tests.integration.test_report_browser import find_chromium
from tests.search_path import ROOT

SPARE = (sys.executable, "-m", "spare_megatron")
SCREEN = ViewportSize(width=1100, height=760)
WIDE = ViewportSize(width=1300, height=10)
TERMINAL = "<body style='margin:0;padding:12px'><pre style='font:13px/1.35 monospace;white-space:pre-wrap'>"
TIMEOUT_MS = 90e3


def main(run_dir: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with drawn() as page:
        if read_run_state(run_dir).end is None:
            with served(run_dir) as url:
                draw(page, url, folder / "live.png")
        else:
            report = Path(run("report", str(run_dir)).strip()).absolute()
            draw(page, report.as_uri(), folder / "report.png")
            page.set_viewport_size(WIDE)
            page.set_content(TERMINAL + html.escape(f"$ spare status RUN_DIR\n{run('status', str(run_dir))}"))
            page.screenshot(path=folder / "status.png", full_page=True)


def run(*words: str) -> str:
    return subprocess.run((*SPARE, *words), check=True, capture_output=True, text=True, cwd=ROOT).stdout


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    with subprocess.Popen((*SPARE, "serve", str(run_dir)), stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@contextmanager
def drawn() -> Iterator[Page]:
    binary, environment = find_chromium(ROOT / ".pytest_cache/d/chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(binary),
            args=["--disable-gpu", "--disable-dev-shm-usage"],
            chromium_sandbox=False,
            timeout=TIMEOUT_MS,
            env=dict(environment),
        )
        page = browser.new_page(viewport=SCREEN)
        page.set_default_timeout(TIMEOUT_MS)
        yield page
        browser.close()


def draw(page: Page, url: str, file: Path) -> None:
    page.goto(url)
    page.wait_for_selector("body[data-ready=yes]")
    page.screenshot(path=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/pictures")
