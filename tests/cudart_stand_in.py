"""Stands in for what `torch.cuda.cudart()` returns: refuses and complains as the CUDA runtime does."""

import threading

MEMORY_ALLOCATION, ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 2, 712, 713, 801
"""Codes of cudaError (driver_types.h)."""


class CudartStandIn:
    """Keeps what is registered. `refuses_from`: the call of `cudaHostRegister` from which on all return `refusal`."""

    def __init__(self, refuses_from: int | None = None, refusal: int = MEMORY_ALLOCATION) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refusal = refusal
        self.refuses_from = refuses_from
        self.failed_in: set[int] = set()
        """Threads of which CUDA's last error is set: the next launch of a kernel by one of them would raise it."""

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        if self.refuses_from is not None and self.calls >= self.refuses_from:
            return self._fail(self.refusal)
        if any(ptr < other + length and other < ptr + size for other, length in self.registered.items()):
            return self._fail(ALREADY_REGISTERED)
        self.registered[ptr] = size
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        return 0 if self.registered.pop(ptr, None) else self._fail(NOT_REGISTERED)

    def _fail(self, code: int) -> int:
        self.failed_in.add(threading.get_ident())
        return code
