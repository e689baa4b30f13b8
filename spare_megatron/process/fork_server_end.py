"""Preloaded first in the fork server: the kernel kills the server when the process that started it ends. A running
server notices that by itself. A stopped one does not, and its children only die with it. The garbage collector, which
would examine all imported objects several times, is off until `imported_code` is preloaded.
"""

import ctypes
import gc
import signal

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
gc.disable()
