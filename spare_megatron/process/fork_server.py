"""Preloaded first in the fork server, before all that its children share. The kernel kills the server when its starter
ends, as a stopped one would not notice. The garbage collector is off until a child begins, which exempts what is
imported. The code's digest is computed once. An exception in an import ends the server with one line. Only its children
see GPUs: what it imports would hold one from then on, as transformer-engine asks for its kind.
"""

import ctypes
import gc
import signal
import sys
import traceback
from types import TracebackType

from spare_megatron.machine import gpus, standard_streams
from spare_megatron.version import code_digest

_PR_SET_PDEATHSIG = 1


def _print_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    frame = traceback.extract_tb(trace)[-1]
    text = " ".join(traceback.format_exception_only(kind, error)[-1].splitlines())
    print(f"the server that forks ranks: {frame.filename}:{frame.lineno}: {text}", file=sys.stderr)


sys.excepthook = _print_line
ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
gc.disable()
standard_streams.open_closed()
code_digest()
VISIBLE_TO_CHILDREN = gpus.shown_now()
gpus.show([])
