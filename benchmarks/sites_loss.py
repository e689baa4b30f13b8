"""What outer steps cost in loss: sites beside one run that sums in each step, after equal tokens, over several seeds.

The run that sums has a group for each site, and reads in a step what all sites together read in one. Losses are those
of the same validation text after the last step, at sites the mean over them: of the steps after its last round, fewer
than those between two, each has its own alone. `--torchft` adds its DiLoCo, whose last step ends a round, with the
samples and the inner and outer steps of our sites. Waits are long, so that no site is left out on a busy machine; how
many rounds had all sites is printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.peers.environment import ROOT, peer_python, peer_variables
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.loader import dump_run_config, load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.core.log.loss_sums import mean_loss
from spare_megatron.driver.run import look_at_machine, start_run
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import EntryRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration.relayed_site import Site, all_ended, later_port, until

WAIT_S = 120.0
LONGEST_S = 3600.0


def config_of(options: argparse.Namespace, seed: int, num_groups: int) -> RunConfig:
    settings = [
        *("data.corpus=data/demo/corpus", "data.split=95,5", f"train.seed={seed}", f"train.steps={options.steps}"),
        *(
            'cluster.device="cpu"',
            f"layout.num_groups={num_groups}",
            f"spare.redundancy={num_groups}",
            "train.micro_batch_size=4",
        ),
        *(
            "spare.microbatches_per_shard=1",
            "optimizer.learning_rate=1e-3",
            f"optimizer.warmup_steps={min(20, options.steps // 4)}",
        ),
        *("model.num_layers=2", "model.hidden_size=128", "model.num_attention_heads=4", "model.seq_length=128"),
        *(f"eval.every_steps={options.steps}", f"eval.sequences={options.sequences}", "audit.every_steps=0"),
        *("control.heartbeat_interval_s=30", "name=sites", *options.set),
    ]
    return load_run_config(None, settings).config


def with_sites(config: RunConfig, options: argparse.Namespace, every: int, site: int, port: int) -> RunConfig:
    return replace(
        config,
        sites=SitesConfig(
            endpoints=(f"tcp://127.0.0.1:{port}",),
            num_sites=options.sites,
            site=site,
            every_steps=every,
            learning_rate=options.learning_rate,
            momentum=options.momentum,
            bits=options.bits,
            wait_s=WAIT_S,
        ),
    )


def loss_of(run_dir: Path) -> float:
    """Of the evaluation after the last step. RuntimeError: the run has not finished."""
    summary = json.loads((run_dir / "summary.json").read_text())
    if summary["outcome"] != "finished":
        raise RuntimeError(f"{run_dir.name} {summary['outcome']}: {summary['reason']}")
    entries = [record.entry for record in read_journal(run_dir).of(EntryRecord)]
    *_, last = (entry for entry in entries if entry["entry"] == "evaluated")
    return mean_loss(last["sums"])


def summing(options: argparse.Namespace, seed: int, folder: Path) -> float:
    start_run(config_of(options, seed, options.sites), folder, lambda _: None)
    return loss_of(folder)


def joined(options: argparse.Namespace, seed: int, every: int, folder: Path) -> float:
    """The mean over sites, each at its own end."""
    port = later_port()
    config = config_of(options, seed, 1)
    folder.mkdir()
    sites = [Site(with_sites(config, options, every, site, port), folder) for site in range(options.sites)]
    with all_ended(*sites):
        until(
            lambda: all((site.run_dir / "summary.json").exists() for site in sites), LONGEST_S, "the end of all sites"
        )
    rounds = [len(one["sites"]) == options.sites for one in sites[0].rounds()]
    print(f"{sum(rounds)} of {len(rounds)} rounds had all sites", file=sys.stderr)
    return statistics.mean(loss_of(site.run_dir) for site in sites)


def of_torchft(options: argparse.Namespace, seed: int, every: int, folder: Path) -> float:
    config = with_sites(config_of(options, seed, 1), options, every, 0, 1)
    prepare_index(config)
    folder.mkdir()
    (folder / "config.toml").write_text(dump_run_config(config))
    program = str(ROOT / "benchmarks/peers/torchft_diloco.py")
    subprocess.run([str(peer_python()), program, str(folder)], env=peer_variables(), cwd=ROOT, check=True)
    losses = {mean_loss(json.loads((folder / f"site-{site}.json").read_text())) for site in range(options.sites)}
    return statistics.mean(losses)  # sums over sites round alike


def measure(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int, float, float]]:
    """Way, seed, loss and hours."""
    for seed in range(1, options.seeds + 1):
        ways: dict[str, Callable[[], float]] = {"sums": partial(summing, options, seed, folder / f"sums-{seed}")}
        for every in options.every:
            name = f"{every}-{seed}"
            ways[f"every {every}"] = partial(joined, options, seed, every, folder / f"sites-{name}")
            if options.torchft:
                ways[f"torchft {every}"] = partial(of_torchft, options, seed, every, folder / f"torchft-{name}")
        for way, train in ways.items():
            began_s = time.monotonic()
            loss = train()
            hours = (time.monotonic() - began_s) / 3600
            print(f"seed {seed}, {way}: {loss:.4f} after {hours:.3f} h", file=sys.stderr)
            yield way, seed, loss, hours


def summarize(found: list[tuple[str, int, float, float]]) -> dict[str, Any]:
    """Mean and spread of each way, and of its difference from sums of the same seed."""
    losses: dict[str, dict[int, float]] = {}
    for way, seed, loss, _ in found:
        losses.setdefault(way, {})[seed] = loss
    differences = {way: [loss - losses["sums"][seed] for seed, loss in of.items()] for way, of in losses.items()}
    return {
        "losses": losses,
        "mean": {way: statistics.mean(of.values()) for way, of in losses.items()},
        "spread": {way: max(of.values()) - min(of.values()) for way, of in losses.items()},
        "above_sums": {way: [min(of), statistics.mean(of), max(of)] for way, of in differences.items()},
        "hours": sum(hours for *_, hours in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, nargs="+", default=[10, 30], help="steps between rounds")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.7, help="of the outer step")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--sequences", type=int, default=64, help="of the validation text")
    parser.add_argument("--torchft", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="a further setting")
    options = parser.parse_args()
    config = config_of(options, 1, options.sites)
    if found := problems(config, look_at_machine(config)):
        parser.error("; ".join(found))
    with tempfile.TemporaryDirectory() as folder:
        result = {**vars(options), **summarize(list(measure(options, Path(folder)))), **origin()}
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
