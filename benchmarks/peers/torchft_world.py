"""Runs with torchft, in the peers' environment: for each its Lighthouse and a process for each group."""

import argparse
import ctypes
import signal
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from torchft.coordination import LighthouseServer

from benchmarks.peers.peer_world import forked_server, run_groups
from benchmarks.peers.torchft_group import train_group
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.planned_faults import groups_hit, resolve_trace
from spare_megatron.process.processes import log_to_file

_PR_SET_PDEATHSIG = 1


def serve_lighthouse(heartbeat_s: float, least_groups: int, folder: Path, answer: Connection) -> None:
    """Serves on the loopback until it is killed; sends the address first. Fewer groups make no quorum."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log_to_file(folder, "lighthouse")
    # It waits for groups that beat and have not asked yet: the first quorum is of all that beat by then.
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=least_groups,
        heartbeat_timeout_ms=int(heartbeat_s * 1000),
        join_timeout_ms=60_000,
    )
    answer.send(f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}")
    signal.pause()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heartbeat-s", type=float, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--restarts", action="store_true", help="start lost groups again")
    parser.add_argument("folders", type=Path, nargs="+", help="have config.toml; events and logs go there")
    options = parser.parse_args()
    timeout = timedelta(seconds=options.timeout_s)
    for folder in options.folders:
        config = load_run_config(folder / "config.toml").config
        may_lose = any(groups_hit(config, fault) for fault in resolve_trace(config))
        least = 1 if may_lose else config.layout.num_groups
        with forked_server(partial(serve_lighthouse, options.heartbeat_s, least, folder), folder) as lighthouse:
            train = partial(train_group, config, lighthouse, timeout, folder)
            run_groups(config, train, folder, restarts=options.restarts)


if __name__ == "__main__":
    main()
