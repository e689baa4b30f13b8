"""Ends `spare train` by a signal at moments spread over its start: python -m tests.interrupts."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.text_corpus import write_text_corpus
from tests.interrupts.trial import interrupt, time_of_start, write_preset


def main() -> int:
    """Prints the outcome at every moment; returns 1 if one was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts", description=__doc__)
    parser.add_argument("--moments", type=int, default=200, help="how many; default 200")
    parser.add_argument("--signal", default="SIGINT", help="which; default SIGINT")
    options = parser.parse_args()
    count, number = options.moments, signal.Signals[options.signal]
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="spare-interrupts-"))
    write_text_corpus(folder / "corpus")
    write_preset(folder / "corpus", folder / "preset.toml")
    start_s = min(time_of_start(folder / "preset.toml", folder / f"start-{index}") for index in range(2))
    num_failed = 0
    for index in range(count):
        found = interrupt(folder / "preset.toml", folder / str(index), index / count * start_s, number=number)
        num_failed += bool(found.problem)
        print(f"{found.after_s:6.3f} s, {found.seen:54} {found.problem or 'one clean line'}", flush=True)
        if not found.problem:
            shutil.rmtree(folder / str(index))
    print(
        f"{count - num_failed} of {count} moments of a start of {start_s:.1f} s ended in one clean line, "
        f"{time.monotonic() - began_s:.0f} s"
    )
    if num_failed:
        print(f"the output of the others is in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
