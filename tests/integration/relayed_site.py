"""Runs a site in a process of its own, all of whose traffic with other sites goes through a relay.

The relay is a process, too: it counts bytes, delays them, and cuts the site off while it is stopped (SIGSTOP). A
script of the site may stop it at a moment of a round.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.frames import Address, ConnectionBroken
from spare_megatron.machine import end_signal
from spare_megatron.process.specs import RankSpec

_CHUNK = 1 << 16
_ANSWER_S = 2.0
_POLL_S = 0.01
CUT_ROUND, FLIP_ROUND = 3, 2
Script = Literal["", "exchange", "vote", "alike", "flip"]
"""What is done to the ranks of a site:
`exchange`: it is cut off when another site asks for what it contributes to its third round.
`vote`: it is cut off when it and site 0 have voted on its third round.
`alike`: it arrives in a round with `sites.every_steps` steps, no less, and in the first one when all sites have begun;
what it applies is written down.
`flip`: likewise, and a bit of its momentum is flipped after its second round.
"""


def later_port() -> int:
    """For a server that begins later, as all sites name it in their settings: none that the kernel would give to others
    meanwhile.
    """
    for port in random.SystemRandom().sample(range(10_000, 17_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no such port is free")


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
        if line == "pid":
            answer = os.getpid()
        elif not line.startswith("but "):
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

    def is_cut(self) -> bool:
        return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED

    def restore(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Site:
    """A run as a site, from its start to its end."""

    def __init__(self, config: RunConfig, folder: Path, relay: Relay | None = None, script: Script = "") -> None:
        self.run_dir = folder / f"site-{config.sites.site}"
        file = folder / f"site-{config.sites.site}.toml"
        file.write_text(dump_run_config(config))
        control = "0" if relay is None else str(relay.control)
        with (folder / f"site-{config.sites.site}.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, "site", str(file), str(self.run_dir), control, script],
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

    def applied(self, base_round: int, rank: int) -> dict[str, np.ndarray]:
        """What a rank had before it took the next state than that of this round, and that state; flat."""
        with np.load(self.run_dir / f"round-{base_round}-rank-{rank}.npz") as arrays:
            return dict(arrays)

    def ask_to_end(self) -> None:
        """With the step under way."""
        self._process.send_signal(signal.SIGUSR1)

    def await_end(self) -> dict[str, Any]:
        """Returns its summary."""
        self._process.wait(60.0)
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def end_together(*sites: Site) -> list[dict[str, Any]]:
    """Summaries. All are asked at once, since one that goes on may end a round without those that have ended."""
    for site in sites:
        site.ask_to_end()
    return [site.await_end() for site in sites]


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


def _cut_in_exchange(cut: Callable[[], None]) -> None:
    from spare_megatron.rank.outer_exchange import OuterSource

    read, steps = OuterSource.read, []

    def cut_and_read(source: OuterSource, name: str, step: int, piece: Any) -> bytes | memoryview:
        if name.startswith("differences") and step not in steps:
            steps.append(step)
            if len(steps) == CUT_ROUND:
                cut()
        return read(source, name, step, piece)

    OuterSource.read = cut_and_read  # type: ignore[method-assign]


def _cut_after_vote(cut: Callable[[], None]) -> None:
    from spare_megatron.store import keys
    from spare_megatron.store.outer_log import OuterLog

    finish, rounds = OuterLog.finish, []

    def finish_and_cut(log: OuterLog, vote: Any) -> Any:
        counted = finish(log, vote)
        if vote.round not in rounds:
            rounds.append(vote.round)
            if len(rounds) == CUT_ROUND:
                while not log._store.exists(keys.done(vote.round, vote.attempt, 0, 0)):
                    time.sleep(_POLL_S)
                cut()
        return counted

    OuterLog.finish = finish_and_cut  # type: ignore[method-assign]


def _arrive_alike() -> None:
    from spare_megatron.rank import outer_link
    from spare_megatron.store.outer_log import OuterLog

    leases, view, have_begun = OuterLog.leases, outer_link.View, threading.Event()

    def leases_of_all(log: OuterLog) -> Any:
        while len(found := leases(log)) < len(log._sites) and not have_begun.is_set():
            time.sleep(_POLL_S)
        have_begun.set()
        return found

    OuterLog.leases = leases_of_all  # type: ignore[method-assign]
    outer_link.View = lambda **said: view(**{**said, "is_wanted": False})  # type: ignore[assignment,misc]


def _write_down(spec: RankSpec, *, flips: bool) -> None:
    import torch

    from spare_megatron.mcore.optimizer.outer_step import OuterState

    apply = OuterState.apply

    def write_and_apply(outer: OuterState, chunks: Any, result: torch.Tensor) -> None:
        start, momentum = torch.cat(outer.content(chunks)).chunk(2)
        values = outer.message(chunks, 32).view(torch.float32)
        arrays = {"start": start, "momentum": momentum, "values": values, "result": result}
        sizes = np.array(outer.sizes(chunks))
        file = spec.run_dir / f"round-{outer.revision.round}-rank-{spec.rank}.npz"
        np.savez(file, sizes=sizes, **{name: one.numpy() for name, one in arrays.items()})
        apply(outer, chunks, result)
        if flips and outer.revision.round == FLIP_ROUND - 1:
            next(iter(outer.momentum.values())).view(torch.int32)[0] ^= 1 << 20

    OuterState.apply = write_and_apply  # type: ignore[method-assign]


def relayed_rank(relay: int, script: Script, spec: RankSpec, reports: Connection) -> None:
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
    if script in ("exchange", "vote"):
        cut = partial(os.kill, ask(relay, "pid"), signal.SIGSTOP)
        _cut_in_exchange(cut) if script == "exchange" else _cut_after_vote(cut)
    elif script:
        _arrive_alike()
        _write_down(spec, flips=script == "flip")
    rank.run_rank(spec, reports)


def _run_site(file: Path, run_dir: Path, relay: int, script: Script) -> None:
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.driver.run import start_run

    config, rank_main = load_run_config(file).config, partial(relayed_rank, relay, script)
    with end_signal.blocked():
        start_run(config, run_dir, lambda event: None, rank_main=rank_main, takes_requests=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["relay", delay_s]:
            asyncio.run(_relay(float(delay_s)))
        case ["site", file, run_dir, relay, ("" | "exchange" | "vote" | "alike" | "flip") as script]:
            from tests.integration import relayed_site  # its functions are found by that name in forked ranks

            relayed_site._run_site(Path(file), Path(run_dir), int(relay), script)
