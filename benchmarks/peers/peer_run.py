"""One run with a peer, started from our environment in the peers' own."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environment import NVRX, ROOT, TORCHFT, peer_variables
from benchmarks.peers.history import Event, read_events
from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import RunConfig

_TIMEOUT_S = 480.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftTimes:
    """When torchft gives a group up.

    Attributes:
        heartbeat_s: Without a heartbeat for so long a group is dead to the Lighthouse.
        timeout_s: Longest wait for a collective.
        restarts: Whether a group that ends early is started again at once, as the launcher of a user does.
    """

    heartbeat_s: float
    timeout_s: float
    restarts: bool = False
    package: str = TORCHFT
    program: str = "torchft_world.py"

    @property
    def options(self) -> list[str]:
        """Of its program."""
        times = ["--heartbeat-s", str(self.heartbeat_s), "--timeout-s", str(self.timeout_s)]
        return [*times, "--restarts"] if self.restarts else times


@dataclass(frozen=True, slots=True, kw_only=True)
class NvrxTimes:
    """When NVIDIA's resiliency extension looks for lost groups, and when it gives one up.

    Attributes:
        interval_s: Between two looks of every monitor, and how long it waits for further losses before a restart.
        timeout_s: Longest wait for a collective, and for progress; a group without any is killed after twice that.
    """

    interval_s: float
    timeout_s: float
    package: str = NVRX
    program: str = "nvrx_world.py"

    @property
    def options(self) -> list[str]:
        """Of its program."""
        return ["--interval-s", str(self.interval_s), "--timeout-s", str(self.timeout_s)]


PATIENT: dict[str, TorchftTimes | NvrxTimes] = {
    "torchft": TorchftTimes(heartbeat_s=10.0, timeout_s=60.0),
    "nvrx": NvrxTimes(interval_s=0.1, timeout_s=15.0),
}
"""So long that neither a slow group nor a busy machine looks like a loss."""


def run_peer(python: Path, config: RunConfig, peer: TorchftTimes | NvrxTimes, folder: Path) -> list[Event]:
    """Trains with a peer through the faults of the configuration, whose sample index is there already.

    Raises:
        RuntimeError: A survivor did not come to the end; the last output of its processes is in the text.
    """
    run_peer_in_turn(python, {folder: config}, peer)
    return read_events(sorted(folder.glob("*.jsonl")))


def run_peer_in_turn(python: Path, configs: Mapping[Path, RunConfig], peer: TorchftTimes | NvrxTimes) -> None:
    """The same for several runs, each in its folder, whose processes are forked from one. Raises as `run_peer`."""
    for folder, config in configs.items():
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(dump_run_config(config))
    program = str(ROOT / "benchmarks/peers" / peer.program)
    # Its processes die with it, should this one be interrupted or the time be up.
    done = subprocess.run(
        [str(python), program, *peer.options, *map(str, configs)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S * len(configs),
        env=peer_variables(),
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        last = max(configs, key=lambda folder: (folder / "logs").is_dir() and (folder / "logs").stat().st_mtime)
        logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted((last / "logs").glob("*")))
        raise RuntimeError(f"{last.name} ended with {done.returncode}: {done.stderr[-1500:]}\n{logs}")
