"""How commands write lines; with `console`, which has tables and live views, all that writes to stdout and stderr. Text
from elsewhere appears as it is: nothing in it is markup, and what a terminal would obey is escaped.
"""

import json
import sys
from typing import IO, Any

from spare_megatron.formats.output import printable


def say(*lines: str, err: bool = False) -> None:
    """Prints each text as one line."""
    stream = sys.stderr if err else sys.stdout
    _write("".join(f"{shown(line, stream)}\n" for line in lines), stream)


def message(command: str, text: str) -> None:
    """Prints a message on stderr. All its lines but the first are indented, so that none passes for another message."""
    first, *others = text.split("\n")
    say(f"{f'spare {command}'.rstrip()}: {first}", *(f"  {line.removeprefix('  ')}" for line in others), err=True)


def say_json(value: Any) -> None:
    """Prints the value as one line of JSON."""
    _write(f"{json.dumps(value)}\n", sys.stdout)


def write_exactly(text: str) -> None:
    """Prints what a program is to read, such as a script, without any change."""
    _write(text, sys.stdout)


def shown(line: str, stream: IO[str] | None) -> str:
    """The text as one line that the stream can take: characters that its encoding lacks are escaped, too."""
    line = printable(line)
    encoding = getattr(stream, "encoding", None)
    return line.encode(encoding, "backslashreplace").decode(encoding) if encoding else line


def _write(text: str, stream: IO[str] | None) -> None:
    if stream is not None:  # the process may have begun without it
        stream.write(text)
        stream.flush()
