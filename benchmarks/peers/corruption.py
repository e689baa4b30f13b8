"""What finds the same wrong numbers: ours beside the peers, and whether the parameters end as without them.

Each case is a run of 4 groups of one process, of the same model on the same data by the same code, in which one number
of one group becomes wrong at the same moment. *Found*: anything at all was reported or done about it before the end: a
step discarded, a group replaced, an error, a suspicion. A case counts if it changes the parameters of a peer that does
nothing about it. The peers do not claim to find any of these; what they show is what passes without a search.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.origin import origin
from benchmarks.peers.environment import peer_python
from benchmarks.peers.history import read_events
from benchmarks.peers.peer_group import END_SUFFIX
from benchmarks.peers.peer_run import PATIENT, run_peer_in_turn
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import EntryRecord, FaultRecord, SuspicionRecord
from spare_megatron.tools.text.corpus_writer import write_corpus

NUM_GROUPS, MICROBATCHES, STEPS = 4, 16, 7
FIRST, LAST = 1, 6
"""The steps that may be hit. By default audits are in step 6 at m = 16."""
OURS: dict[str, list[str]] = {
    "ours": [],
    "ours_each_step": ["audit.every_steps=1", "train.params_check_every_steps=1"],
}
"""As it is by default; with an audit and a comparison of state in each step."""
SUSPICION, VERDICT = REPORTS = ("suspicion", "verdict")
"""What is reported of a run that goes on as if nothing were: outliers of the loss, and what `spare check` says."""
Kind = Literal[
    "drift", "stuck_bit", "activation_flip", "data_flip", "bit_flip", "param_flip", "moment_flip", "sum_flip"
]
PHASES: dict[Kind, tuple[str, ...]] = {
    "drift": ("forward",),
    "stuck_bit": ("forward",),
    "activation_flip": ("forward",),
    "data_flip": ("forward",),
    "bit_flip": ("before_reduce",),
    "param_flip": ("before_reduce",),
    "moment_flip": ("before_reduce",),
    "sum_flip": ("staged", "summed"),
}
"""When each kind strikes: at a microbatch, with the whole local sum there, or at the sum over groups."""
SUMMED = ("bit_flip", "sum_flip")
"""Kinds that hit gradient sums, which have 32 bits with the peers and 64 here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wrong number: `bit` of a value is inverted, once or from then on, or a layer drifts."""

    number: int
    kind: Kind
    phase: str
    step: int
    group: int
    bit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one way made of a case.

    Attributes:
        params_sha256: Of the parameters at the end; empty if groups end with different ones.
        did: What it did or reported, in the order of the log; empty if nothing.
        lost: The groups that were fenced.
        was_finite: Whether losses and local gradients were finite in all groups; unknown of ours.
    """

    params_sha256: str
    did: tuple[str, ...]
    lost: tuple[int, ...]
    was_finite: bool | None = None


def draw_cases(num_cases: int, seed: int) -> list[Case]:
    """As many of each kind, as far as that divides; everything else is drawn."""
    random, kinds = Random(seed), list(PHASES)
    cases = []
    for number in range(num_cases):
        kind = kinds[number % len(kinds)]
        cases.append(
            Case(
                number=number,
                kind=kind,
                phase=random.choice(PHASES[kind]),
                step=random.randint(FIRST, LAST),
                group=random.randrange(NUM_GROUPS),
                bit=random.randrange(7) if kind == "data_flip" else random.randrange(5, 31),
            )
        )
    return cases


def configure(corpus: Path, way: str, case: Case | None, more: Sequence[str] = ()) -> RunConfig:
    """One way's run, with further settings. The number of the case also draws the microbatch."""
    settings = [
        "name=corruption",
        *("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.seq_length=16"),
        *(f"layout.num_groups={NUM_GROUPS}", f"spare.microbatches_per_shard={MICROBATCHES}", "spare.redundancy=3"),
        *(f"train.steps={STEPS}", "train.micro_batch_size=1", f"data.corpus={corpus}", "optimizer.warmup_steps=0"),
        "spare.rejoins=0",
        *("spare.deal_by_pace=false", 'cluster.device="cpu"', "control.heartbeat_interval_s=10"),
        f"reduce.mode={'reproducible' if way in OURS else 'fast'}",
        *OURS.get(way, ()),
        *more,
    ]
    if case is not None:
        number = 2 * case.bit + 1 if way in OURS and case.kind in SUMMED else case.bit
        bit = "" if case.kind.endswith("drift") else f", bit={number}"
        fault = f'phase="{case.phase}", kind="{case.kind}", step={case.step}, group={case.group}, rank=0{bit}'
        settings += [f"faults.seed={case.number}", f"faults.trace=[{{{fault}}}]"]
    return load_run_config(None, settings).config


def run_ours(config: RunConfig, folder: Path) -> Outcome:
    summary = start_run(config, folder, lambda _: None)
    journal = read_journal(folder)
    _assert_struck(config, len(journal.of(FaultRecord)), folder)
    entries = [entry for _, entry in sorted({record.index: record.entry for record in journal.of(EntryRecord)}.items())]
    did = [str(entry["entry"]) for entry in entries if entry["entry"] not in ("commit", "finish")]
    reported = [SUSPICION] if journal.of(SuspicionRecord) else []
    reported += [] if summary.verdict == "valid" else [f"{VERDICT} {summary.verdict}"]
    return Outcome(
        params_sha256=summary.params_sha256 or "",
        did=(*did, *reported),
        lost=tuple(int(entry["group"]) for entry in entries if entry["entry"] == "fence"),
    )


def read_peer(config: RunConfig, folder: Path) -> Outcome:
    events = read_events(sorted(folder.glob("*.jsonl")))
    _assert_struck(config, sum(event.kind == "fault" for event in events), folder)
    ends = {
        int(file.stem.removeprefix("group-")): json.loads(file.read_text()) for file in folder.glob(f"*{END_SUFFIX}")
    }
    digests = {end["params_sha256"] for end in ends.values()}
    lost = tuple(sorted(set(range(NUM_GROUPS)) - ends.keys()))
    did = sorted({event.kind for event in events if event.kind in ("discarded", "joined")})
    return Outcome(
        params_sha256=digests.pop() if len(digests) == 1 else "",
        did=(*did, *("lost" for _ in lost)),
        lost=lost,
        was_finite=all(end["was_finite"] for end in ends.values()),
    )


def _assert_struck(config: RunConfig, num_struck: int, folder: Path) -> None:
    if num_struck != len(config.faults.trace):
        raise RuntimeError(f"{folder.name}: {num_struck} of {len(config.faults.trace)} faults struck")


def run_batch(way: str, corpus: Path, cases: Sequence[Case | None], scratch: Path) -> list[Outcome]:
    """What the way makes of each of the cases; None is a run without one, and comes first."""
    configs = {
        scratch / f"{way}-{'calm' if case is None else case.number}": configure(corpus, way, case) for case in cases
    }
    if way in OURS:
        return [run_ours(config, folder) for folder, config in configs.items()]
    if None in cases:
        preflight(configure(corpus, way, None))  # the sample index is that of all cases
    run_peer_in_turn(peer_python(), configs, PATIENT[way])
    return [read_peer(config, folder) for folder, config in configs.items()]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The ways take turns, so that an early end has some cases of each."""
    cases = draw_cases(options.cases, options.seed)
    outcomes: dict[str, list[Outcome]] = {way: [] for way in options.ways}
    with tempfile.TemporaryDirectory() as folder:
        scratch, generator = Path(folder), np.random.default_rng(3)
        corpus = scratch / "text"
        write_corpus((generator.integers(0, 256, 400, dtype=np.uint8).tobytes() for _ in range(200)), corpus)
        calm: dict[str, Outcome] = {}
        for way in options.ways:
            [calm[way]] = run_batch(way, corpus, [None], scratch)
            if calm[way].did or not calm[way].params_sha256:
                raise RuntimeError(f"{way}: without any fault it ended as {calm[way]}")
        for first in range(0, len(cases), options.batch):
            batch = cases[first : first + options.batch]
            for way in options.ways:
                began_s = time.monotonic()
                found = run_batch(way, corpus, batch, scratch)
                outcomes[way] += found
                counts = _counts(batch, found, calm[way])
                print(f"cases from {first}, {way}, {time.monotonic() - began_s:.0f} s: {counts}", file=sys.stderr)
    return {"steps": STEPS, "microbatches": MICROBATCHES, "seed": options.seed, **summarize(cases, outcomes, calm)}


def summarize(
    cases: Sequence[Case], outcomes: Mapping[str, Sequence[Outcome]], calm: Mapping[str, Outcome]
) -> dict[str, Any]:
    """Counts over the cases with an effect: after which some way has other parameters than without, or did something.

    `not_finite`: in how many of them a peer's run met a loss or a local gradient that is not finite.
    """
    struck = [
        number
        for number in range(len(cases))
        if any(
            of_way[number].did or of_way[number].params_sha256 != calm[way].params_sha256
            for way, of_way in outcomes.items()
        )
    ]
    by_kind = {kind: [number for number in struck if cases[number].kind == kind] for kind in sorted(PHASES)}

    def counts(way: str, numbers: Sequence[int]) -> dict[str, int]:
        return _counts([cases[number] for number in numbers], [outcomes[way][number] for number in numbers], calm[way])

    return {
        "cases": len(struck),
        "without_effect": len(cases) - len(struck),
        "kinds": {kind: len(numbers) for kind, numbers in by_kind.items()},
        "not_finite": sum(any(of_way[n].was_finite is False for of_way in outcomes.values()) for n in struck),
        "ways": {
            way: {
                **counts(way, struck),
                "by_kind": {kind: counts(way, numbers) for kind, numbers in by_kind.items()},
            }
            for way in outcomes
        },
        "calm": {way: asdict(outcome) for way, outcome in calm.items()},
        "outcomes": [
            {**asdict(case), **{way: asdict(of_way[case.number]) for way, of_way in outcomes.items()}} for case in cases
        ],
    }


def _counts(cases: Sequence[Case], outcomes: Sequence[Outcome], calm: Outcome) -> dict[str, int]:
    return {
        "found": sum(bool(one.did) for one in outcomes),
        "reported_only": sum(bool(one.did) and all(what.startswith(REPORTS) for what in one.did) for one in outcomes),
        "right_group": sum(one.lost == (case.group,) for case, one in zip(cases, outcomes, strict=True)),
        "bitwise": sum(one.params_sha256 == calm.params_sha256 for one in outcomes),
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['cases']} cases, {result['without_effect']} without effect; found, bitwise as without them:")
    print(f"{'':16}{'cases':>6}" + "".join(f"{way:>18}" for way in result["ways"]))
    rows = [("all", result["cases"]), *result["kinds"].items()]
    for kind, count in rows:
        cells = [found if kind == "all" else found["by_kind"][kind] for found in result["ways"].values()]
        print(f"{kind:16}{count:>6}" + "".join(f"{cell['found']:>11}, {cell['bitwise']:>5}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=10, help="cases of one way before the next has its turn")
    parser.add_argument("--ways", nargs="+", choices=[*OURS, *PATIENT], default=[*OURS, *PATIENT])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options) | origin()
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
