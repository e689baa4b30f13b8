"""Runs the parts of the check one after another, each in processes of its own and with a time limit.

Results are on disk after each part. A part that fails or takes too long does not stop the others; on an unsupported
machine nothing runs after the first.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.scene import ROOT, NotRun, Scene, write_json
from benchmarks.gpu_check.table import as_table
from benchmarks.gpu_check.wheels import add_wheel_options, make_wheels

Command = Callable[[Part, Path], list[str]]

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
INTERRUPTED = 130
_DRY_PATIENCE = 5
"""Times its limit is what a part may take in a dry run, whose processors may have other work."""
_LOG_LINES = 40
"""End of a failed part's log that is printed."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch/gpu-check", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="all of the logic, in short form on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there, after each part")
    parser.add_argument("--folder", type=Path, help="for logs and results [default: runs/gpu-check-TIME]")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # in its own process
    add_wheel_options(parser)
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the parts have process groups of their own
    if options.make_wheels:
        return make_wheels(options)
    if options.part:
        return _be_part(PARTS[options.part], Scene(options.folder, options.dry_run))
    folder = options.folder or ROOT / "runs" / f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    files = [folder / "results.json", *([options.json] if options.json else [])]
    # The first part says where the figures come from, and whether the machine is supported.
    names = list(dict.fromkeys([next(iter(PARTS)), *(options.only or PARTS)]))
    return Check(folder, files, is_dry=options.dry_run).run([PARTS[name] for name in names])


def command_of_part(part: Part, folder: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_check", "--part", part.name, "--folder", str(folder)]


class Check:
    """Runs parts and keeps their results. `command` makes the process of a part, given the part and its folder."""

    def __init__(
        self, folder: Path, files: Sequence[Path], *, is_dry: bool, command: Command = command_of_part
    ) -> None:
        self._folder, self._files, self._is_dry = folder.resolve(), files, is_dry
        self._command = command
        self._results: list[dict[str, Any]] = []

    def run(self, parts: Sequence[Part]) -> int:
        """Returns the exit code: 0 only if no part failed."""
        try:
            for part in parts:
                if self._results and self._results[0]["verdict"] == FAILED:
                    self._add(part, {"verdict": NOT_RUN, "reason": f"{self._results[0]['name']} failed"}, 0.0)
                    continue
                began_s = time.monotonic()
                result = self._run_part(part)
                self._add(part, result, time.monotonic() - began_s)
        except KeyboardInterrupt:
            return INTERRUPTED
        print(as_table(self._document()))
        print(f"logs and results: {self._folder}")
        return int(any(result["verdict"] == FAILED for result in self._results))

    def _run_part(self, part: Part) -> dict[str, Any]:
        if self._is_dry and part.not_on_cpu:
            return {"verdict": NOT_RUN, "reason": part.not_on_cpu}
        limit_s = part.limit_s * (_DRY_PATIENCE if self._is_dry else 1)
        print(f"{part.name}: {part.measures}, at most {limit_s:g} s ...", flush=True)
        folder = self._folder / part.name
        folder.mkdir()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*self._command(part, folder), *(["--dry-run"] if self._is_dry else [])],
                cwd=ROOT,
                env=environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # What it started, too: even a part that ends well may leave a process behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = _read(folder / "result.json")
        if code is None:
            result |= {"verdict": FAILED, "reason": f"took longer than its limit of {limit_s:g} s"}
        elif "verdict" not in result:
            result |= {"verdict": FAILED, "reason": f"its process ended with exit code {code}: {_last_line(folder)}"}
        if result["verdict"] == FAILED:
            print("\n".join(_log(folder)[-_LOG_LINES:]), file=sys.stderr)
        return result

    def _add(self, part: Part, result: Mapping[str, Any], spent_s: float) -> None:
        first = {"name": part.name, "verdict": result["verdict"], "reason": result["reason"]}
        rest = {"measures": part.measures, "seconds": round(spent_s, 1), "limit_s": part.limit_s}
        self._results.append({"figures": {}, "rows": [], **result, **first, **rest})
        print(f"{part.name}: {result['verdict']}" + (f": {result['reason']}" if result["reason"] else ""), flush=True)
        for file in self._files:
            write_json(file, self._document())

    def _document(self) -> dict[str, Any]:
        origin = self._results[0].get("figures", {})
        about = {key: origin.get(key, "unknown") for key in ("machine", "versions", "commit")}
        return {**about, "date": time.strftime("%Y-%m-%d"), "dry_run": self._is_dry, "parts": self._results}


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """That of the parts' processes, which find this checkout before what they would find otherwise."""
    paths = [str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    return {**given, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _be_part(part: Part, scene: Scene) -> int:
    scene.report()
    try:
        part.run(scene)
        verdict, reason = PASSED, ""
    except NotRun as error:
        verdict, reason = NOT_RUN, str(error)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the part's verdict)
        traceback.print_exc()
        verdict, reason = FAILED, f"{type(error).__name__}: {error}".partition("\n")[0]
    write_json(
        scene.folder / "result.json", _read(scene.folder / "result.json") | {"verdict": verdict, "reason": reason}
    )
    return int(verdict == FAILED)


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _log(folder: Path) -> list[str]:
    return (folder / "log").read_text(errors="replace").strip().splitlines()


def _last_line(folder: Path) -> str:
    return next(reversed(_log(folder)), "it printed nothing")
