"""Preloaded first in the fork server, before all that its children share.

The kernel kills the server when the process that started it ends. A running server notices that by itself; a stopped
one does not, and its children only die with it. The garbage collector would examine the objects that are imported
several times: it is off until a child begins, which exempts them. The digest of the code is computed once for all.
"""

import ctypes
import gc
import signal

from spare_megatron.config.own_code import code_digest
from spare_megatron.process import standard_streams

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
gc.disable()
standard_streams.open_closed()
code_digest()
