"""Runs a site in a process of its own, all of whose traffic with other sites goes through a relay.

The relay is a process, too: it counts bytes, delays them, and cuts the site off while it is stopped (SIGSTOP).
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.frames import Address, ConnectionBroken
from spare_megatron.machine import end_signal
from spare_megatron.process.specs import RankSpec

_CHUNK = 1 << 16
_ANSWER_S = 2.0


def ask(relay: int, line: str) -> int:
    """The relay's answer. OSError: it is stopped."""
    with socket.create_connection(("127.0.0.1", relay), timeout=_ANSWER_S) as control:
        control.settimeout(_ANSWER_S)
        control.sendall(f"{line}\n".encode())
        return int(control.makefile().readline())


class _Relaying:
    """Forwards connections to targets that it is asked for, each on a port of its own."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._ports: dict[str, int] = {}
        self._num_bytes: Counter[str] = Counter()

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode().strip()
        answer = self._num_bytes.total() - self._num_bytes[line.removeprefix("but ")]
        if not line.startswith("but "):
            if line not in self._ports:
                server = await asyncio.start_server(partial(self._forward, *line.split()), "127.0.0.1", 0)
                self._ports[line] = server.sockets[0].getsockname()[1]
            answer = self._ports[line]
        writer.write(f"{answer}\n".encode())
        await writer.drain()
        writer.close()

    async def _forward(self, host: str, port: str, reader: Any, writer: Any) -> None:
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            target = f"{host} {port}"
            await asyncio.gather(self._pipe(target, reader, there_writer), self._pipe(target, there_reader, writer))
        writer.close()  # nobody serves there any more

    async def _pipe(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes leaves in order, each part the delay after it came: the link's rate is not bounded by that."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        leaving = asyncio.create_task(self._leave(target, under_way, writer))
        loop, some = asyncio.get_running_loop(), b"?"
        while some:
            try:
                some = await reader.read(_CHUNK)
            except OSError:
                some = b""
            under_way.put_nowait((loop.time() + self._delay_s, some))
        await leaving

    async def _leave(self, target: str, under_way: Any, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while (part := await under_way.get())[1]:
                await asyncio.sleep(part[0] - loop.time())
                self._num_bytes[target] += len(part[1])
                writer.write(part[1])
                await writer.drain()
        writer.close()


async def _relay(delay_s: float) -> None:
    server = await asyncio.start_server(_Relaying(delay_s).control, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Relay:
    def __init__(self, delay_s: float = 0.0) -> None:
        command = [sys.executable, "-m", __name__, "relay", str(delay_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.control = int(self._process.stdout.readline())

    def num_bytes(self, port: int) -> int:
        """Bytes so far, either way, but for those to and from this port of this machine."""
        return ask(self.control, f"but 127.0.0.1 {port}")

    def port(self, port: int) -> int:
        """Where the relay forwards to this port of this machine."""
        return ask(self.control, f"127.0.0.1 {port}")

    def cut(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def restore(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Site:
    """A run as a site, from its start to its end."""

    def __init__(self, config: RunConfig, folder: Path, relay: Relay | None = None) -> None:
        self.run_dir = folder / f"site-{config.sites.site}"
        file = folder / f"site-{config.sites.site}.toml"
        file.write_text(dump_run_config(config))
        control = "0" if relay is None else str(relay.control)
        with (folder / f"site-{config.sites.site}.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, "site", str(file), str(self.run_dir), control],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a thread of numpy would take the signal to end
            )

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Those of a kind in the journal so far, in time order."""
        found = []
        for file in self.run_dir.glob("journal/*"):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (record := json.loads(line))["record"] == kind:
                    found.append(record)
        return sorted(found, key=lambda record: float(record["at_s"]))

    def rounds(self) -> list[dict[str, Any]]:
        return self.records("round")

    def end(self) -> dict[str, Any]:
        """Has it end with the step under way. Returns its summary."""
        self._process.send_signal(signal.SIGUSR1)
        self._process.wait(60.0)
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def all_ended(*parts: Site | Relay) -> Iterator[None]:
    try:
        yield
    finally:
        for part in parts:
            part.kill() if isinstance(part, Site) else part.end()


def until(is_met: Callable[[], bool], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_met():
        assert time.monotonic() < end_s, f"{what} not within {timeout_s:g} s"
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------------- in the site


@cache
def _relayed_port(relay: int, host: str, port: int) -> int:
    try:
        return ask(relay, f"{host} {port}")
    except OSError as error:
        raise ConnectionBroken(str(error)) from error


def relayed_rank(relay: int, spec: RankSpec, reports: Connection) -> None:
    from spare_megatron.rank import outer_exchange, rank, sync

    def through(address: Address) -> Address:
        return replace(address, port=_relayed_port(relay, address.host, address.port))

    def server(*args: Any) -> Any:
        made = make_server(*args)
        made.address = through(made.address)
        return made

    make_server, make_client = sync.PieceServer, outer_exchange.PieceClient
    if relay:
        sync.PieceServer = server  # type: ignore[assignment,misc]
        outer_exchange.PieceClient = lambda address, *args, **kwargs: make_client(through(address), *args, **kwargs)  # type: ignore[assignment,misc]
    rank.run_rank(spec, reports)


def _run_site(file: Path, run_dir: Path, relay: int) -> None:
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.driver.run import start_run

    config, rank_main = load_run_config(file).config, partial(relayed_rank, relay)
    with end_signal.blocked():
        start_run(config, run_dir, lambda event: None, rank_main=rank_main, takes_requests=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["relay", delay_s]:
            asyncio.run(_relay(float(delay_s)))
        case ["site", file, run_dir, relay]:
            from tests.integration import relayed_site  # its functions are found by that name in forked ranks

            relayed_site._run_site(Path(file), Path(run_dir), int(relay))
