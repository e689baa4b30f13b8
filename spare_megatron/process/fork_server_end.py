"""Imported in the fork server alone, before all else: from then on it is gone when the process that started it is.

A fork server that runs sees that by itself. One that is stopped does not, and what it has forked dies with it only.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
