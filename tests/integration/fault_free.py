"""Runs without faults that others are held against: one for each training, whichever process of the tests needs it."""

import fcntl
import hashlib
import os
from dataclasses import replace
from pathlib import Path

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import FaultsConfig, OptimizerConfig, ReduceConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig, SnapshotConfig
from tests.integration.whole_run import CALM_HEARTBEAT_S, CPU, Run, assert_masked, complete_run, read_run


class FaultFreeRuns:
    """Call it for the run that another one has to end like. `folder` is that of all processes of one call of pytest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, config: RunConfig) -> Run:
        """The same training in its plainest form: what is left out may not change a bit."""
        config = plainest(config)
        corpus = Path(config.data.corpus)
        content = dump_run_config(replace(config, data=replace(config.data, corpus=""))).encode()
        content += b"".join(corpus.with_suffix(end).read_bytes() for end in (".idx", ".bin"))
        run_dir = self._folder / f"fault-free-{hashlib.sha256(content).hexdigest()[:16]}"
        with run_dir.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not run_dir.exists():
                unfinished = run_dir.with_suffix(f".{os.getpid()}")
                assert_masked(complete_run(config, unfinished))
                unfinished.rename(run_dir)
        return read_run(config, run_dir, ())


def plainest(config: RunConfig) -> RunConfig:
    """One node, every group with all shards and all state, one bucket, no checkpoints, nothing that is lost."""
    assert config.reduce.mode == "reproducible", "otherwise sums depend on who adds what"
    num_groups = config.layout.num_groups
    return replace(
        config,
        spare=replace(
            config.spare, redundancy=num_groups, granularity="microbatch", groups_per_domain=1, rejoins=0, spares=0
        ),
        data=replace(config.data, access="stacked"),
        optimizer=replace(config.optimizer, sharding="replicated", redundancy=OptimizerConfig().redundancy),
        reduce=ReduceConfig(mode="reproducible", timeout_s=config.reduce.timeout_s),
        control=replace(config.control, heartbeat_interval_s=CALM_HEARTBEAT_S),
        checkpoint=CheckpointConfig(restart_wait_s=config.checkpoint.restart_wait_s),
        snapshot=SnapshotConfig(),
        faults=FaultsConfig(),
        cluster=CPU,
    )
