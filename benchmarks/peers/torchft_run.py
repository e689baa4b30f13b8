"""One run with torchft, started from our environment in its own."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environment import ROOT, peer_variables
from benchmarks.peers.history import Event, read_events
from spare_megatron.config.resolved import dump_run_config
from spare_megatron.config.schema import RunConfig

_TIMEOUT_S = 480.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftTimes:
    """When torchft gives somebody up.

    Attributes:
        heartbeat_s: Without a heartbeat for so long a group is dead to the Lighthouse.
        timeout_s: Longest wait for a collective.
    """

    heartbeat_s: float
    timeout_s: float


def run_torchft(python: Path, config: RunConfig, times: TorchftTimes, folder: Path) -> list[Event]:
    """Trains with torchft through the faults of the configuration, whose sample index is there already.

    Raises:
        RuntimeError: A survivor did not come to the end; what its processes said last is in the text.
    """
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_run_config(config))
    options = ["--heartbeat-s", str(times.heartbeat_s), "--timeout-s", str(times.timeout_s), str(folder)]
    program = str(ROOT / "benchmarks/peers/torchft_world.py")
    # Its processes die with it, should this one be interrupted or the time be up.
    done = subprocess.run(
        [str(python), program, *options],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=peer_variables(),
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted((folder / "logs").glob("*")))
        raise RuntimeError(f"{folder.name} ended with {done.returncode}: {done.stderr[-1500:]}\n{logs}")
    return read_events(sorted(folder.glob("*.jsonl")))
