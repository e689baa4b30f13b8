"""torch asks for the host name of whoever it connects to or accepts, for its log alone, and the rest waits for that.

The control store's server does so in the loop that serves everybody, each rank in the middle of a recovery, and all
ranks at once. A name server that is far away, busy, or loses one packet in a thousand would decide how long a recovery
takes: glibc asks again after 5 s. torch 2.13 gives up for the life of the process once a name could not be looked up,
so it is made to give up with the first.
"""

import contextlib
import ctypes
from collections.abc import Iterator

_RES_INIT = 1
"""Of the options of a `_Resolver`: the rest holds."""


@contextlib.contextmanager
def without_name_lookups() -> Iterator[None]:
    """Fails what this thread asks name servers meanwhile, at once. Names in /etc/hosts are found.

    torch logs a warning that a host name cannot be retrieved, once per process.
    """
    libc = ctypes.CDLL(None)
    try:
        resolver = libc.__res_state
    except AttributeError:  # another C library than glibc
        yield
        return
    resolver.restype = ctypes.POINTER(_Resolver)
    state = resolver().contents
    if not state.options & _RES_INIT:
        libc.__res_init()  # else the first look would do that, and overwrite what is set here
    before, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = before


class _Resolver(ctypes.Structure):
    """The beginning of glibc's `struct __res_state`, one for each thread (resolv.h)."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))
