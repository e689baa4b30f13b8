"""Runs with NVIDIA's resiliency extension, in the peers' environment: for each a store and a process for each group."""

import argparse
from functools import partial
from pathlib import Path

from benchmarks.peers.nvrx_group import train_group
from benchmarks.peers.peer_world import forked_server, run_groups
from spare_megatron.config.loader import load_run_config
from spare_megatron.store.tcp_store import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval-s", type=float, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("folders", type=Path, nargs="+", help="have config.toml; events and logs go there")
    options = parser.parse_args()
    times = (options.interval_s, options.timeout_s)
    for folder in options.folders:
        config = load_run_config(folder / "config.toml").config
        with forked_server(partial(serve, "127.0.0.1"), folder) as port:
            run_groups(config, partial(train_group, config, port, *times, folder), folder)


if __name__ == "__main__":
    main()
