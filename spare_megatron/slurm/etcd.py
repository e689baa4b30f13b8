"""An etcd on the nodes of the job, for a run without one of its own: it stands the loss of one of three members."""

import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from spare_megatron.slurm.allocation import address_of
from spare_megatron.slurm.commands import require
from spare_megatron.slurm.steps import step_command

_NUM_MEMBERS = 3
_START_S = 60.0
_END_S = 5.0
_POLL_S = 0.2

_RUN_AND_CLEAN_UP = """
data=$(mktemp -d) || exit
trap "" USR1
etcd --data-dir "$data" "$@" &
trap "kill $!" USR2
wait # is interrupted by the signal
wait
rm -rf "$data"
"""
"""Its data are of no use after the job. USR1, which ends training early, is not for etcd; srun passes USR2 on."""


def member_commands(
    names: Sequence[str], addresses: Sequence[str], first_port: int, token: str
) -> list[tuple[str, ...]]:
    """The srun of each member.

    Args:
        names: The nodes of Slurm that members go to.
        addresses: Where each of them is reached.
        first_port: Member i listens on this port + 2 i, and on the next one to the other members.
        token: Tells the members of this cluster from those of another one that may have been there before.
    """
    peers = [f"http://{address}:{first_port + 2 * i + 1}" for i, address in enumerate(addresses)]
    cluster = ",".join(f"member-{i}={peer}" for i, peer in enumerate(peers))
    commands = []
    for i, (name, client, peer) in enumerate(zip(names, endpoints_of(addresses, first_port), peers, strict=True)):
        options = (
            f"--name=member-{i}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            f"--initial-cluster-token={token}",
            "--auto-compaction-retention=10m",
            "--logger=zap",
            "--log-level=warn",
        )
        commands.append(step_command(f"etcd-{i}", name, ("sh", "-c", _RUN_AND_CLEAN_UP, "etcd", *options)))
    return commands


def endpoints_of(addresses: Sequence[str], first_port: int) -> tuple[str, ...]:
    """The members' client URLs."""
    return tuple(f"http://{address}:{first_port + 2 * i}" for i, address in enumerate(addresses))


@contextmanager
def etcd_of_the_job(nodes: Sequence[str], first_port: int, token: str, log: Path) -> Iterator[tuple[str, ...]]:
    """The endpoints of an etcd that answers, on the first nodes of the job: three members, or one on fewer nodes.

    Args:
        nodes: The nodes of the job.
        first_port: As for `member_commands`.
        token: As for `member_commands`.
        log: Where all that the members print goes.

    Raises:
        ValueError: It did not come up.
    """
    require("etcd", "install it on the nodes, add its folder in slurm.setup, or name an etcd in control.endpoints")
    names = nodes[: _NUM_MEMBERS if len(nodes) >= _NUM_MEMBERS else 1]
    addresses = [address_of(name) for name in names]
    with log.open("ab") as file:
        steps = [
            subprocess.Popen(command, start_new_session=True, stdout=file, stderr=file)
            for command in member_commands(names, addresses, first_port, token)
        ]
    try:
        endpoints = endpoints_of(addresses, first_port)
        _wait_until_healthy(endpoints, log)
        yield endpoints
    finally:
        for number in (signal.SIGUSR2, signal.SIGKILL):
            for step in steps:
                step.send_signal(number)  # not to one that has ended
            for step in steps:
                with suppress(subprocess.TimeoutExpired):
                    step.wait(_END_S)


def _wait_until_healthy(endpoints: Sequence[str], log: Path) -> None:
    end_s = time.monotonic() + _START_S
    while not all(_is_healthy(endpoint) for endpoint in endpoints):
        if time.monotonic() > end_s:
            raise ValueError(
                f"etcd on {', '.join(endpoints)} has not come up within {_START_S:g} s: see {log}, and whether "
                f"slurm.etcd_port and the 5 ports after it are free on these nodes"
            )
        time.sleep(_POLL_S)


def _is_healthy(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
