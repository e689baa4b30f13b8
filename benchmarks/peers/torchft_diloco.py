"""Sites whose outer steps are torchft's DiLoCo, in the peers' environment; else our model, samples and optimizer.

Each site is a process, with the configuration of one of our sites: the same samples, inner steps, outer learning rate
and momentum. At the end each writes its validation sums, as a journal has them, to `site-N.json`.
"""

import argparse
import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torchft import Manager
from torchft.local_sgd import DiLoCo

from benchmarks.peers.peer_group import begin_group
from benchmarks.peers.peer_world import forked_server, run_groups
from benchmarks.peers.torchft_group import loopback_manager
from benchmarks.peers.torchft_world import serve_lighthouse
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import units_per_shard
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.store.tcp_store import listen
from tests.integration.mcore_group import agreed_loss, all_work, reduce_alone

_TIMEOUT = timedelta(seconds=300)
_UP_TIMEOUT_S = 120.0
_LOOPBACK = "127.0.0.1"


def train_site(config: RunConfig, lighthouse: str, folder: Path, site: int, up: Barrier | None) -> None:
    """Trains all steps as one site."""
    assert up is not None, "no site is lost"
    config = replace(config, sites=replace(config.sites, site=site))
    begin_group(config, site, folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = GroupTrainer(config, torch.device("cpu"))
    store = listen(_LOOPBACK, _TIMEOUT)
    manager = loopback_manager(f"site-{site}", lighthouse, _TIMEOUT, store.port, use_async_quorum=False)
    up.wait(_UP_TIMEOUT_S)
    _train(config, trainer, manager)
    trainer.evaluator.reset(config.train.steps)
    trainer.evaluator.compute([Microbatch(ShardId(0), index) for index in range(units_per_shard(config))])
    (folder / f"site-{site}.json").write_text(json.dumps([list(one) for one in trainer.evaluator.sums]))


def _train(config: RunConfig, trainer: GroupTrainer, manager: Manager) -> None:
    module = trainer.chunks[0].module
    # DiLoCo counts steps of an optimizer. This one changes nothing: the trainer has its own.
    counted = torch.optim.SGD(module.parameters(), lr=0.0)
    rate, momentum = config.sites.learning_rate, config.sites.momentum
    outer = torch.optim.SGD(module.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    with DiLoCo(manager, [module], counted, outer, sync_every=config.sites.every_steps, pin_memory=False):
        for step in range(config.train.steps):
            trainer.begin_step(step)
            trainer.compute(all_work(config, step))
            reduce_alone(trainer)
            trainer.update(agreed_loss(trainer))
            counted.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has config.toml; results and logs go there")
    folder = parser.parse_args().folder
    config = load_run_config(folder / "config.toml").config
    sites = config.sites.num_sites
    world = replace(config, layout=replace(config.layout, num_groups=sites))  # a process for each
    serve = partial(serve_lighthouse, 10.0, sites, folder)
    with forked_server(serve, folder) as lighthouse:
        run_groups(world, partial(train_site, cast(Any, config), lighthouse, folder), folder)


if __name__ == "__main__":
    main()
