"""The GPUs of this machine: which there are, which a process sees, how they stand, and what their errors mean. Without
torch, and without using any: the part with torch is `devices`.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from spare_megatron.machine.gpus import amd, nvidia
from spare_megatron.machine.gpus.gpu import Gpu as Gpu
from spare_megatron.machine.gpus.gpu import Shown
from spare_megatron.machine.gpus.gpu import name_in_torch as name_in_torch

_RECENT_S = 60.0
"""The exception of a rank comes within seconds of the event; earlier ones have nothing to do with it."""
_KEPT_EVENTS = 256


def visible_gpus() -> tuple[Gpu, ...]:
    """The devices that this process sees, in its order. Empty where no driver is loaded."""
    return maker().visible_gpus(shown_now())


def maker() -> ModuleType:
    """The part of this room for the GPUs of this machine; both have the same names. AMD's processors have GPUs."""
    return amd if amd.is_there() and not nvidia.is_there() else nvidia


def list_file(run_dir: Path, node: int) -> Path:
    """The list of the GPUs of this node's machine, by UUID, in the order in which its ranks have them."""
    return run_dir / "gpus" / f"node-{node}"


def read_list(file: Path) -> tuple[str, ...]:
    with contextlib.suppress(FileNotFoundError):
        return tuple(file.read_text().split())
    return ()


def write_list(file: Path, uuids: Sequence[str]) -> None:
    """Writes it as a whole or not at all; OSError: the disk does not take it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text("".join(f"{uuid}\n" for uuid in uuids))
    unfinished.replace(file)


def gpus_of_machine(kept: Sequence[str], here: Sequence[str]) -> tuple[str, ...]:
    """The GPUs of a machine in the order of the list `kept`, of which some may be lost, where it has those of `here`
    now. With none of the list here, this is another machine, which begins a list of its own.
    """
    return tuple(kept if not here or set(kept).intersection(here) else here)


def show(uuids: Sequence[str]) -> None:
    """Has this process, and those that it starts, see these GPUs alone, in this order. None is in use yet."""
    restore_shown(maker().showing(uuids))


@contextlib.contextmanager
def shown_to_children(uuid: str | None) -> Iterator[None]:
    """Processes that are spawned meanwhile see this GPU alone, from before their first import; with None, what this
    process sees. Not for two threads at a time.
    """
    own = shown_now()
    if uuid is not None:
        show([uuid])
    try:
        yield
    finally:
        restore_shown(own)


def restore_shown(shown: Shown) -> None:
    for name in maker().VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(shown)


def shown_now() -> Shown:
    return {name: os.environ[name] for name in maker().VARIABLES if name in os.environ}


class ClockReader:
    """Returns why the clock of each GPU that this process sees now was reduced, and to what, when it was called last;
    empty for one that was not. It asks in a thread: with a broken GPU the driver may not return.
    """

    def __init__(self) -> None:
        self._shown = shown_now()
        self._found: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def __call__(self) -> tuple[str, ...]:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read, name="gpu-clocks", daemon=True)
            self._thread.start()
        return self._found

    def _read(self) -> None:
        self._found = maker().reduced_clocks(self._shown)


class XidWatch:
    """Watches events of the driver, NVIDIA's Xids, which exceptions do not name. A daemon thread waits for them, as the
    driver may hang with a broken GPU. A GPU off the bus counts as event 79, even if no event arrives.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._found: deque[tuple[float, str, int]] = deque(maxlen=_KEPT_EVENTS)
        if uuids:
            threading.Thread(target=maker().watch, args=(uuids, self._note), name="gpu-events", daemon=True).start()

    def recent(self, uuids: Collection[str], since_s: float = 0.0) -> tuple[tuple[str, int], ...]:
        """The events of these GPUs in the last minute, and after this time (monotonic), each once, as UUID and Xid."""
        since_s = max(since_s, time.monotonic() - _RECENT_S)
        return tuple(
            dict.fromkeys((uuid, xid) for at_s, uuid, xid in list(self._found) if at_s > since_s and uuid in uuids)
        )

    def _note(self, uuid: str, xid: int) -> None:
        self._found.append((time.monotonic(), uuid, xid))
