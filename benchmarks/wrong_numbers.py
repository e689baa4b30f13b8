"""Which wrong numbers are found, by the place where hardware makes them and the share of the passes that are checked.

Each case is a run as those of `peers/corruption.py`, in which one number of one group becomes wrong, once or from then
on: in a result of an operation, or in memory between two of them. The mix of places is `SITES`. Bits 5 to 30 of values
in fp32 are inverted or stuck (in bf16 bits 0 to 14), bits 11 to 61 of sums in 64-bit integers, and bits 0 to 6 of
tokens; what drifts is too large by a relative 1e-3.

`--bounds N` also has one rank compute steps with N faults in products of each kind, all of whose products are checked,
and prints the share that its checks do not see: errors below what rounding explains, which no check of sums can see.
`--sound N` has one rank train each of `SOUND` until N products have been checked, and prints how near one came to the
bound: 1 is a false alarm.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.origin import origin
from benchmarks.peers import corruption
from benchmarks.peers.corruption import FIRST, LAST, NUM_GROUPS, REPORTS, Outcome, run_ours
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.planned_faults import resolve_trace
from spare_megatron.faults.kinds import KINDS
from spare_megatron.faults.points import Fault, FaultKind, FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import EntryRecord
from spare_megatron.mcore import pass_checks
from spare_megatron.mcore.corruption import CORRUPTIONS, NO_FAULT, ChangedNothing, OperationFaults, site_of
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.tools.text.corpus_writer import write_corpus
from tests.integration.mcore_group import agreed_loss, all_work, reduce_alone

WAYS: dict[str, list[str]] = {
    "default": [],
    **{f"products_{share}": [f"audit.products={share}"] for share in ("0", "0.01", "0.1", "1")},
}
"""Settings of each way beside those of all; whatever a way does not set is as by default, audits too."""
SOUND: dict[str, list[str]] = {
    "LayerNorm, GELU": ["model.hidden_size=64"],
    "RMSNorm, SwiGLU, rotary, shared keys": [
        *("model.hidden_size=128", "model.num_layers=2", "model.num_attention_heads=4", "model.seq_length=64"),
        *("model.num_query_groups=2", "model.normalization=rmsnorm", "model.activation=swiglu"),
        *("model.position_embedding=rope", "model.linear_bias=false"),
    ],
    "mixture": [
        *("model.hidden_size=64", "model.num_layers=2", "model.seq_length=64", "model.num_experts=4"),
        *("model.experts_per_token=2", "model.activation=swiglu", "model.linear_bias=false"),
    ],
}
"""Models whose products are checked without any fault."""
CPU = torch.device("cpu")
_SEEDS_PER_CASE = 1000
_MOST_DRAWS = 20
"""A case whose fault changes no number is drawn again, with the microbatch after; in the second half with the bit
below, as some bits of an exponent are set in all numbers of a usual size."""


class Site(NamedTuple):
    """A place where numbers become wrong, with the faults there: kind, phase, and cases among `NUM_CASES`."""

    name: str
    faults: Sequence[tuple[str, str, int]]
    gradient: str = ""
    """Of what, where a fault in products draws that."""


def _of_products(name: str, phase: str, flips: int, stuck: int, gradient: str = "") -> Site:
    shares = {"flip": flips, "stuck": stuck, "drift": 4, "rare": 4}
    return Site(name, [(f"product_{kind}", phase, number) for kind, number in shares.items()], gradient)


SITES: tuple[Site, ...] = (
    _of_products("products, forward", "forward", 16, 6),
    _of_products("products, gradients of inputs", "backward", 12, 4, "inputs"),
    _of_products("products, gradients of weights", "backward", 12, 4, "weights"),
    Site("other operations", [("operation_flip", "forward", 14), ("operation_flip", "backward", 10)]),
    Site("between layers", [("activation_flip", "forward", 14), ("stuck_bit", "forward", 4), ("drift", "forward", 4)]),
    Site("tokens", [("data_flip", "forward", 14)]),
    Site("local sums, between microbatches", [("bit_flip", "forward", 8)]),
    Site("local sums, in a backward pass", [("bit_flip", "backward", 8)]),
    Site("local sums, before the reduction", [("bit_flip", "before_reduce", 8)]),
    Site("staged buckets", [("sum_flip", "staged", 10)]),
    Site("summed buckets", [("sum_flip", "summed", 10)]),
    Site("parameters", [("param_flip", "before_reduce", 10)]),
    Site("moments", [("moment_flip", "before_reduce", 8)]),
)
SUMMED = "summed buckets"
"""Of all groups: right is to name none."""
NUM_CASES = sum(number for site in SITES for _, _, number in site.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(corruption.Case):
    """`number` is the seed of the microbatch, which also draws the operation."""

    site: str


def draw_cases(num_cases: int, seed: int, precision: str = "fp32") -> list[Case]:
    """The first of a random order of the mix, which begins again after its last case."""
    random = Random(seed)
    cases: list[Case] = []
    while len(cases) < num_cases:
        mix = [(site, kind, phase) for site in SITES for kind, phase, number in site.faults for _ in range(number)]
        random.shuffle(mix)
        for site, kind, phase in mix:
            cases.append(_draw_case(random, len(cases), site, _existing(kind, precision), phase, precision))
    return cases[:num_cases]


def _existing(kind: str, precision: str) -> str:
    """Drift changes no number in bf16: a bit is stuck there."""
    return {"drift": "stuck_bit", "product_drift": "product_stuck"}.get(kind, kind) if precision == "bf16" else kind


def _draw_case(random: Random, number: int, site: Site, kind: str, phase: str, precision: str) -> Case:
    is_in_pass_after = phase == "backward" and KINDS[FaultKind(kind)].in_operations
    bits = range(7) if kind == "data_flip" else range(5, 31)
    if precision == "bf16" and KINDS[FaultKind(kind)].flips == "result":
        bits = range(15)
    case = Case(
        number=_SEEDS_PER_CASE * number,
        kind=cast(corruption.Kind, kind),
        phase=phase,
        step=random.randint(FIRST, LAST - is_in_pass_after),
        group=random.randrange(NUM_GROUPS),
        bit=random.choice(bits),
        site=site.name,
    )
    while site.gradient and site_of(_fault_of(case))[0][1] != site.gradient:
        case = replace(case, number=case.number + 1)  # of about every other microbatch
    return case


def _fault_of(case: Case) -> Fault:
    [fault] = resolve_trace(configure(Path("text"), "default", case))
    return fault


def configure(corpus: Path, way: str, case: Case | None, more: Sequence[str] = ()) -> RunConfig:
    return corruption.configure(corpus, "ours", case, [*WAYS[way], *more])


class NothingChanged(RuntimeError):
    """An injected fault has changed no number."""


def run_case(config: RunConfig, folder: Path) -> Outcome:
    """Raises NothingChanged."""
    outcome = run_ours(config, folder)
    entries = [record.entry for record in read_journal(folder).of(EntryRecord)] if "halt" in outcome.did else []
    for entry in entries:
        if str(entry.get("reason", "")).startswith(NO_FAULT):
            raise NothingChanged(f"{folder.name}: {entry['reason']}")
    return outcome


def measure(options: argparse.Namespace, corpus: Path, scratch: Path) -> dict[str, Any]:
    """The ways take turns, so that an early end has as many cases of each."""
    precision = [f"model.precision={options.precision}"]
    cases = draw_cases(options.cases, options.seed, options.precision)
    outcomes: dict[str, list[Outcome]] = {way: [] for way in options.ways}
    times_s: dict[str, list[float]] = {way: [] for way in options.ways}
    calm = {way: run_ours(configure(corpus, way, None, precision), scratch / f"{way}-calm") for way in options.ways}
    for way, outcome in calm.items():
        if outcome.did or outcome.params_sha256 != calm[options.ways[0]].params_sha256:
            raise RuntimeError(f"{way}: without any fault it ended as {outcome}")
    known = _kept(options.keep)
    for index, case in enumerate(cases):
        for number in range(_MOST_DRAWS):
            bit = case.bit - (number >= _MOST_DRAWS // 2)
            cases[index] = case = replace(case, number=case.number + bool(number), bit=bit)
            try:
                for way in options.ways:
                    key = json.dumps([way, options.precision, asdict(case)])
                    if key not in known:
                        began_s = time.monotonic()
                        config = configure(corpus, way, case, precision)
                        outcome = run_case(config, scratch / f"{way}-{index}-{number}")
                        _keep(options.keep, known, key, outcome, time.monotonic() - began_s)
                break
            except NothingChanged as error:
                print(f"case {index} is drawn again: {error}", file=sys.stderr)
        else:
            raise NothingChanged(f"case {index}: no microbatch of {_MOST_DRAWS} shows an effect of {case}")
        for way in options.ways:
            outcome, seconds = known[json.dumps([way, options.precision, asdict(case)])]
            outcomes[way].append(outcome)
            times_s[way].append(seconds)
        found = ", ".join(f"{way}: {' '.join(of_way[-1].did) or 'nothing'}" for way, of_way in outcomes.items())
        print(f"case {index}, {case.kind} at {case.phase} of step {case.step}: {found}", file=sys.stderr)
    params = calm[options.ways[0]].params_sha256
    return {
        "seed": options.seed,
        "precision": options.precision,
        **summarize(cases, outcomes, params),
        "seconds_per_case": {way: statistics.mean(of_way) for way, of_way in times_s.items() if of_way},
    }


def _kept(file: Path | None) -> dict[str, tuple[Outcome, float]]:
    """What an earlier call has found, by way, precision and case, and how long it took."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    found = {}
    for key, outcome, seconds in map(json.loads, lines):
        found[key] = Outcome(**outcome | {name: tuple(outcome[name]) for name in ("did", "lost")}), seconds
    return found


def _keep(file: Path | None, known: dict[str, tuple[Outcome, float]], key: str, outcome: Outcome, s: float) -> None:
    known[key] = outcome, s
    if file:
        with file.open("a") as lines:
            lines.write(json.dumps([key, asdict(outcome), s]) + "\n")


def summarize(cases: Sequence[Case], outcomes: Mapping[str, Sequence[Outcome]], params: str) -> dict[str, Any]:
    """Counts of each way over the cases with an effect: after which some way did anything, or has other parameters."""
    struck = [
        number
        for number in range(len(cases))
        if any(of_way[number].did or of_way[number].params_sha256 != params for of_way in outcomes.values())
    ]
    by_site: dict[str, list[int]] = defaultdict(list)
    for number in struck:
        by_site[cases[number].site].append(number)
    return {
        "cases": len(struck),
        "without_effect": len(cases) - len(struck),
        "ways": {
            way: {
                **_counts(cases, of_way, struck, params),
                "by_site": {site.name: _counts(cases, of_way, by_site[site.name], params) for site in SITES},
            }
            for way, of_way in outcomes.items()
        },
        "outcomes": [
            {**asdict(case), **{way: asdict(of_way[index]) for way, of_way in outcomes.items()}}
            for index, case in enumerate(cases)
        ],
    }


def _counts(cases: Sequence[Case], outcomes: Sequence[Outcome], numbers: Sequence[int], params: str) -> dict[str, int]:
    """`found`: anything was done or reported; `right_group`: and no other group was lost than the one that was hit."""
    found = [(cases[number], outcomes[number]) for number in numbers if outcomes[number].did]
    return {
        "cases": len(numbers),
        "found": len(found),
        "reported_only": sum(all(what.startswith(REPORTS) for what in one.did) for _, one in found),
        "right_group": sum(one.lost == (() if case.site == SUMMED else (case.group,)) for case, one in found),
        "bitwise": sum(outcomes[number].params_sha256 == params for number in numbers),
    }


# ----------------------------------------------------------------------------------- what the checks of products miss


class _Striking(SilentProbe):
    """Strikes with a fault at the first passes of a step."""

    phases = frozenset({FaultPoint.FORWARD, FaultPoint.BACKWARD})

    def __init__(self) -> None:
        self.strike: dict[FaultPoint, Callable[[], object]] = {}

    def __call__(self, phase: FaultPoint, /) -> None:
        self.strike.pop(phase, lambda: None)()


def measure_bounds(config: RunConfig, num_faults: int, seed: int, precision: str) -> Iterator[tuple[str, bool]]:
    """The kind and site of each fault that changes a product, and whether the rank's checks of all products see it."""
    random, probe = Random(seed), _Striking()
    trainer: Any = GroupTrainer(config, CPU, probe)  # which has checks in versions with the setting
    work = [Microbatch(ShardId(0), index) for index in range(2)]  # a fault may strike in the pass after
    kinds = dict.fromkeys(_existing(kind, precision) for site in SITES[:3] for kind, _, _ in site.faults)
    for number in range(num_faults):
        for kind in kinds:
            phase = random.choice((FaultPoint.FORWARD, FaultPoint.BACKWARD))
            bit = random.choice(range(15) if precision == "bf16" else range(5, 31))
            fault = Fault(step=number, group=GroupId(0), rank=0, phase=phase, kind=FaultKind(kind), ordinal=1, bit=bit)
            trainer.injector = OperationFaults(trainer)
            probe.strike[phase] = lambda fault=fault: CORRUPTIONS[fault.kind](trainer, fault, None)  # type: ignore[misc]
            trainer.begin_step(random.randrange(config.train.steps))
            try:
                trainer.compute(work)
            except ChangedNothing:  # as a bit that is stuck where it was set
                continue
            (_, site), _ = site_of(fault)
            yield f"{kind}, {site}", bool(trainer.checks.found())


def bounds(options: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    config = configure(corpus, "products_1", None, [f"model.precision={options.precision}"])
    prepare_index(config)
    seen = list(measure_bounds(config, options.bounds, options.seed, options.precision))
    faults, unseen = Counter(what for what, _ in seen), Counter(what for what, is_seen in seen if not is_seen)
    return {
        "bounds": {what: {"faults": faults[what], "unseen": unseen[what] / faults[what]} for what in sorted(faults)}
    }


# ---------------------------------------------------------------------------------------------- products without faults


def measure_sound(config: RunConfig, num_products: int) -> list[float]:
    """The excess of each product that one rank has checked while it trained; raises RuntimeError after an alarm."""
    found: list[Tensor] = []
    excess_of = pass_checks._excess_of

    def counted(*of_product: Any) -> Tensor:
        found.append(excess_of(*of_product))
        return found[-1]

    trainer = GroupTrainer(config, CPU)
    with mock.patch.object(pass_checks, "_excess_of", counted):
        step = 0
        while len(found) < num_products:
            trainer.begin_step(step % config.train.steps)
            trainer.compute(all_work(config, step % config.train.steps))
            if alarm := trainer.checks.found():
                raise RuntimeError(f"false alarm in step {step}, after {len(found)} products: {alarm}")
            reduce_alone(trainer)
            trainer.update(agreed_loss(trainer))
            step += 1
    return torch.stack(found).tolist()


def sound(options: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    excesses = {}
    for name, settings in SOUND.items():
        more = [f"model.precision={options.precision}", "train.steps=2000", "optimizer.warmup_steps=10", *settings]
        config = configure(corpus, "products_1", None, more)
        prepare_index(config)
        excesses[name] = measure_sound(config, options.sound)
        print(f"{name}: {len(excesses[name])} products, nearest {max(excesses[name]):.3g}", file=sys.stderr)
    return {"sound": {name: {"products": len(of_it), "nearest": max(of_it)} for name, of_it in excesses.items()}}


def print_tables(result: Mapping[str, Any]) -> None:
    if ways := result.get("ways"):
        print_cases(result, ways)
    for what, one in result.get("bounds", {}).items():
        print(f"{what}: of {one['faults']} faults {one['unseen']:.1%} are below the bound")
    for name, one in result.get("sound", {}).items():
        print(f"{name}: {one['products']} sound products, the nearest at {one['nearest']:.3g} of its bound")


def print_cases(result: Mapping[str, Any], ways: Mapping[str, Any]) -> None:
    print(f"{result['cases']} cases, {result['without_effect']} without effect; found, right group, bitwise:")
    print(f"{'':34}{'cases':>6}" + "".join(f"{way:>19}" for way in ways))
    for name in ("all", *(site.name for site in SITES)):
        cells = [found if name == "all" else found["by_site"][name] for found in ways.values()]
        counts = "".join(f"{cell['found']:>9},{cell['right_group']:>4},{cell['bitwise']:>4}" for cell in cells)
        print(f"{name:34}{cells[0]['cases']:>6}{counts}")
    print("seconds per case: " + ", ".join(f"{way} {s:.1f}" for way, s in result["seconds_per_case"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=NUM_CASES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if way != "default"])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--bounds", type=int, default=0, help="faults of each kind in products of one rank")
    parser.add_argument("--sound", type=int, default=0, help="products of each model that are checked without faults")
    parser.add_argument("--keep", type=Path, help="file of outcomes; those that it has are not computed again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for way in (*options.ways, *(["products_1"] if options.bounds or options.sound else [])):
        try:
            configure(Path("text"), way, None)
        except ValueError as error:
            parser.error(f"{way}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        scratch, generator = Path(folder), np.random.default_rng(3)
        corpus = scratch / "text"
        write_corpus((generator.integers(0, 256, 400, dtype=np.uint8).tobytes() for _ in range(200)), corpus)
        result = measure(options, corpus, scratch) if options.cases else {}
        if options.bounds or options.sound:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", store=dist.FileStore(f"{scratch}/store", 1), rank=0, world_size=1)
            result |= bounds(options, corpus) if options.bounds else {}
            result |= sound(options, corpus) if options.sound else {}
            dist.destroy_process_group()
    print(json.dumps(result | origin())) if options.json else print_tables(result)


if __name__ == "__main__":
    main()
