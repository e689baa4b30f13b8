"""One run with torchft, in the peers' environment: its Lighthouse and a process for each group.

All are forked from this process, which has imported torch and Megatron once and started nothing else, as ours are.
"""

import argparse
import ctypes
import multiprocessing
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from torchft.coordination import LighthouseServer

from benchmarks.peers.torchft_group import train_group
from spare_megatron.config.loader import loads_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.trace import resolve_trace
from spare_megatron.runtime.processes import log_to_file

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 60.0
_TRAIN_TIMEOUT_S = 300.0
_REAP_TIMEOUT_S = 10.0


def serve_lighthouse(heartbeat_s: float, folder: Path, answer: Connection) -> None:
    """Serves on the loopback until it is killed; sends the address first."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log_to_file(folder, "lighthouse")
    # It waits for groups that beat and have not asked yet, so that the first quorum is of all.
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=int(heartbeat_s * 1000), join_timeout_ms=60_000
    )
    answer.send(f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}")
    signal.pause()


def run_world(config: RunConfig, heartbeat_s: float, timeout_s: float, folder: Path) -> None:
    """Trains to the last step.

    Raises:
        RuntimeError: A group that no fault hits did not come to the end.
    """
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    try:
        ours, its = context.Pipe()
        processes.append(context.Process(target=serve_lighthouse, args=(heartbeat_s, folder, its)))
        processes[0].start()
        if not ours.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"the Lighthouse was not up after {_START_TIMEOUT_S} s: see {folder}")
        lighthouse, num_groups = ours.recv(), config.layout.num_groups
        up = context.Barrier(num_groups)
        for group in range(num_groups):
            arguments = (config, group, lighthouse, timedelta(seconds=timeout_s), folder, up)
            processes.append(context.Process(target=train_group, args=arguments))
            processes[-1].start()
        hit = {fault.group for fault in resolve_trace(config)}
        end_s = time.monotonic() + _TRAIN_TIMEOUT_S
        for group in sorted(set(range(num_groups)) - hit):
            processes[1 + group].join(max(0.0, end_s - time.monotonic()))
            if processes[1 + group].exitcode != 0:
                raise RuntimeError(f"group {group} ended with {processes[1 + group].exitcode}: see {folder}")
    finally:
        for process in processes:
            process.kill()
            process.join(_REAP_TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heartbeat-s", type=float, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("folder", type=Path, help="has config.toml; events and logs go there")
    options = parser.parse_args()
    config = loads_run_config((options.folder / "config.toml").read_text()).config
    run_world(config, options.heartbeat_s, options.timeout_s, options.folder)


if __name__ == "__main__":
    main()
