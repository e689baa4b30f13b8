"""What rounds between sites cost: bytes over their links, and how long a site that is cut off holds up the others.

All sites run on this machine; those but the first reach the others and the outer store through a relay each, which
counts bytes, delays them and, stopped, cuts its site off. `ratio_to_model` is what came over the relay of the last site
in some rounds over what it fetched and gave in them by the model; `ratio_to_sums` a round's bytes over those of fp32
sums in each of `--every-model` steps. The last site is cut off until the others have done `--alone` rounds without it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import model_shape
from spare_megatron.config.schema import RunConfig
from tests.integration.relayed_site import Relay, Site, all_ended, end_together, later_port, until

LONGEST_S = 900.0
"""Until a number of rounds."""


def configs_of(options: argparse.Namespace, port: int, relays: list[Relay]) -> list[RunConfig]:
    settings = [
        *("data.corpus=data/demo/corpus", "train.steps=100000", "train.micro_batch_size=1", "optimizer.warmup_steps=0"),
        *('cluster.device="cpu"', f"layout.num_groups={options.groups}", f"spare.redundancy={options.groups}"),
        *(f"model.num_layers={options.layers}", f"model.hidden_size={options.hidden}", "model.seq_length=32"),
        *("model.num_attention_heads=4", "spare.microbatches_per_shard=1", "control.heartbeat_interval_s=5"),
        *(f"sites.num_sites={options.sites}", f"sites.every_steps={options.every}", f"sites.wait_s={options.wait}"),
        *(f"sites.bits={options.bits}", *options.set),
    ]
    found = []
    for site in range(options.sites):
        at = relays[site - 1].port(port) if site else port
        own = [f'sites.endpoints=["tcp://127.0.0.1:{at}"]', f"sites.site={site}", "name=sites"]
        found.append(load_run_config(None, [*settings, *own]).config)
    return found


def joint(site: Site, num_sites: int) -> list[dict[str, Any]]:
    return [one for one in site.rounds() if len(one["sites"]) == num_sites]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    port = later_port()
    relays = [Relay(options.delay) for _ in range(options.sites - 1)]
    with ExitStack() as stack:
        stack.enter_context(all_ended(*relays))
        configs = configs_of(options, port, relays)
        sites = [Site(config, folder, ([None, *relays])[number]) for number, config in enumerate(configs)]
        stack.enter_context(all_ended(*sites))
        first, last, relay = sites[0], sites[-1], relays[-1]

        def both(number: int) -> tuple[int, int]:
            """Bytes over the relay, and rounds, once all sites have ended so many, and none has begun another."""
            ends = (first, last)
            until(lambda: min(len(joint(one, options.sites)) for one in ends) >= number, LONGEST_S, "joint rounds")
            return relay.num_bytes(port), len(joint(last, options.sites))

        (before, begun), (after, ended) = both(1), both(1 + options.rounds)
        relayed = after - before, ended - begun
        cut_at_s = time.time()
        relay.cut()
        others = list(range(options.sites - 1))

        def num_alone() -> int:
            return sum(one["at_s"] > cut_at_s and one["sites"] == others for one in first.rounds())

        until(lambda: num_alone() >= options.alone, LONGEST_S, "rounds without")
        restored_at_s = time.time()
        relay.restore()
        until(lambda: joint(last, options.sites)[-1]["at_s"] > restored_at_s, LONGEST_S, "a joint round again")
        summaries = end_together(*sites)
        rounds = [site.rounds() for site in sites]
    return figures(options, configs[0], rounds, summaries, relayed, (cut_at_s, restored_at_s))


def figures(
    options: argparse.Namespace,
    config: RunConfig,
    rounds: list[list[dict[str, Any]]],
    summaries: list[dict[str, Any]],
    relayed: tuple[int, int],
    cut_s: tuple[float, float],
) -> dict[str, Any]:
    whole = [one for one in rounds[-1] if len(one["sites"]) == options.sites]
    of_link = statistics.median(one["num_bytes"] for one in whole) / (options.sites - 1)
    during = [one["spent_s"] for one in rounds[0] if cut_s[0] < one["at_s"] < cut_s[1]]
    sums = 4.0 * model_shape(config).num_parameters * options.every_model
    return {
        "parameters": model_shape(config).num_parameters,
        "bytes_of_a_message": of_link,
        "bits_of_a_number": 8 * of_link / model_shape(config).num_parameters,
        "ratio_to_model": relayed[0] / (relayed[1] * 2 * (options.sites - 1) * of_link),
        "ratio_to_sums": of_link / sums,
        "one_in": sums / of_link,
        "exchange_s": statistics.median(one["spent_s"] for one in whole),
        "longest_wait_s": max(during),
        "later_waits_s": sorted(during)[:-1],
        "limit_s": 2 * options.wait,
        "steps_lost": sum(summary["steps_lost"] for summary in summaries),
        "verdicts": sorted({summary["verdict"] for summary in summaries}),
        "rounds": len(whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--groups", type=int, default=1, help="of each site")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--every", type=int, default=5, help="steps between rounds")
    parser.add_argument("--every-model", type=int, default=100, help="steps between rounds that bytes are compared for")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--wait", type=float, default=5.0, help="sites.wait_s")
    parser.add_argument("--rounds", type=int, default=5, help="of all sites, before one is cut off")
    parser.add_argument("--alone", type=int, default=3, help="rounds of the others while it is")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that the relay holds bytes back")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="a further setting")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {**vars(options), **measure(options, Path(folder)), **origin()}
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
