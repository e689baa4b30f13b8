"""Preloaded first in the fork server: the kernel kills the server when the process that started it ends. A running
server notices that by itself. A stopped one does not, and its children only die with it.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
