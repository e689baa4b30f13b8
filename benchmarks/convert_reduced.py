"""Ten of Megatron-LM's functional-test configurations, reduced: converted here, and in Megatron's own training loop.

    python benchmarks/convert_reduced.py FOLDER          # tests/functional_tests/test_cases/gpt of a checkout

One rule for both sides, which get the same arguments: 10 steps of 4 sequences of 32 tokens, a vocabulary of 255, 2
layers (4 of an interleaved pipeline), at most 2 stages and 2 tensor-parallel ranks, 2 data-parallel ranks, each with
all optimizer state; fp32 on CPUs without dropout, fused kernels, sequence and context parallelism; one corpus, no
files, logs and evaluations. All else is as given. The ten are evenly spaced among those of hidden size 512 that differ
once reduced, by name. Initial parameters, samples and attention are ours on both sides; attention is Megatron's own on
its side with `--own-attention`.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.convert_megatron import launches, outcome
from benchmarks.origin import origin
from spare_megatron.config.building import build_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.tools.convert.arguments import read_arguments
from spare_megatron.tools.convert.launch import Launch
from spare_megatron.tools.convert.settings import convert_launch
from tests.integration import megatron_training
from tests.integration.mcore_group import CPU, Arrays, run_group, run_ranks
from tests.integration.stacked_groups import values_by_name
from tests.integration.text_corpus import write_text_corpus
from tests.integration.whole_run import complete_run

STEPS = 10
_LEFT_OUT = re.compile(
    # files, logs and evaluations
    "save.*|load|.*ckpt.*|async_.*|use_checkpoint.*|verify_integrity|tensorboard.*|log_.*|timing_.*|eval_.*|exit_.*"
    "|(train_|valid_|test_)?data_.*|split|vocab_file|merge_file|tokenizer.*|no_mmap.*|no_create_attention_mask.*"
    # devices and their kernels
    "|bf16|transformer_impl|attention_backend|distributed_backend|deterministic_mode|cross_entropy.*_fusion|manual_gc.*"
    "|(disable|no)_gloo.*|rerun_mode|error_injection.*"
    # ranks that are not there, and sizes that depend on those reduced
    "|sequence_parallel|context_parallel_size|cp_comm_type|hierarchical_.*|expert_.*|decoder_(first|last)_.*"
    "|use_distributed_optimizer|num_distributed_optimizer_instances|overlap_param_gather.*|microbatch_group_size.*|use_(torch|megatron)_fsdp.*|megatron_fsdp.*|data_parallel.*"
)
_REDUCED = {
    "train_iters": str(STEPS),
    "micro_batch_size": "1",
    "global_batch_size": "4",
    "vocab_size": "255",
    "seq_length": "32",
    "max_position_embeddings": "32",
    "attention_dropout": "0",
    "hidden_dropout": "0",
}
_FUSIONS = ("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one configuration: parameters on all ranks of a replica, ours and Megatron's, and the losses of the steps."""

    name: str
    num_ranks: int
    num_parameters: tuple[int, int]
    losses: tuple[list[float], list[float]]

    @property
    def is_bitwise(self) -> bool:
        return self.losses[0] == self.losses[1] and len(self.losses[0]) == STEPS

    @property
    def largest_difference(self) -> float:
        return max(abs(ours - theirs) / theirs for ours, theirs in zip(*self.losses, strict=True))


def reduced(given: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The arguments of both sides by the rule."""
    kept = {name: tuple(words) for name, words in given.items() if not _LEFT_OUT.fullmatch(name)}
    kept |= {name: (value,) for name, value in _REDUCED.items()}
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        kept[name] = (str(min(2, int(*kept.get(name, ("1",))))),)
    is_interleaved = "num_layers_per_virtual_pipeline_stage" in kept and kept["pipeline_model_parallel_size"] == ("2",)
    return kept | {"num_layers": ("4" if is_interleaved else "2",)}


def words_of(arguments: Mapping[str, Sequence[str]]) -> list[str]:
    return [word for name, words in sorted(arguments.items()) for word in (f"--{name.replace('_', '-')}", *words)]


def chosen(folder: Path, number: int) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """Names and reduced arguments. Raises ValueError if the folder has fewer."""
    names: list[str] = []
    found: list[dict[str, tuple[str, ...]]] = []
    for file in sorted(folder.glob("*/model_config.yaml")):
        if outcome(file)[0]:
            continue
        given = read_arguments(next(launches(file))[0].arguments)
        if given["hidden_size"] == ("512",) and (arguments := reduced(given)) not in found:
            names.append(file.parent.name)
            found.append(arguments)
    if len(found) < number:
        raise ValueError(f"{folder} has {len(found)} such configurations, fewer than {number}; set --configurations")
    places = [index * len(found) // number for index in range(number)]
    return ((names[place], found[place]) for place in places)


def converted(arguments: Mapping[str, Sequence[str]], num_ranks: int, corpus: Path) -> RunConfig:
    """The preset of the reduced arguments, on CPUs. Raises ValueError."""
    words = [*words_of(arguments), *_FUSIONS, "--data-path", str(corpus), "--split", "1,0,0"]
    _, preset, _ = convert_launch(Launch(arguments=tuple(words)), ["--nproc-per-node", str(num_ranks)], ())
    if missing := [name for name, found in preset.classes.items() if found.kind == "missing"]:
        raise ValueError(f"{missing[0]}: {preset.classes[missing[0]].text}")
    on_cpus = {"name": "reduced", "cluster.device": "cpu", "model.transformer_impl": "auto"}
    # A group has a shard of its own then, as Megatron's data-parallel ranks have: the same microbatches in each sum.
    alone = {"spare.redundancy": 1}
    config, mistakes = build_run_config(preset.settings | on_cpus | alone)
    if mistakes:
        raise ValueError(mistakes[0].text)
    return config


def initial_values(config: RunConfig) -> Arrays:
    return values_by_name(GroupTrainer(config, CPU))


def compare(name: str, arguments: Mapping[str, Sequence[str]], folder: Path, *, has_own_attention: bool) -> Outcome:
    """Trains both."""
    num_ranks = 2 * int(*arguments["tensor_model_parallel_size"]) * int(*arguments["pipeline_model_parallel_size"])
    config = converted(arguments, num_ranks, folder / "corpus")
    prepare_index(config)
    initial = run_group(initial_values, config)
    task = partial(megatron_training.pretrain, has_own_attention=has_own_attention)
    ranks = run_ranks(num_ranks, task, config, words_of(arguments), initial)
    run = complete_run(config, folder / name)
    losses = dict(sorted({(record.step, record.loss) for record in run.journal.of(UpdateRecord)}))
    ours = sum(value.size for rank in initial for value in rank.values())
    return Outcome(
        name=name,
        num_ranks=num_ranks,
        num_parameters=(ours, sum(rank.num_parameters for rank in ranks) // 2),
        losses=(list(losses.values()), next(rank.losses for rank in ranks if rank.losses)),
    )


@contextmanager
def _ranks_print_as_errors() -> Iterator[None]:
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def measure(folder: Path, number: int, *, has_own_attention: bool) -> dict[str, Any]:
    """Raises ValueError."""
    with TemporaryDirectory() as scratch, _ranks_print_as_errors():
        write_text_corpus(Path(scratch) / "corpus")
        rows = [
            compare(name, arguments, Path(scratch), has_own_attention=has_own_attention)
            for name, arguments in chosen(folder, number)
        ]
    return {
        "configurations": len(rows),
        "equal_parameters": sum(ours == theirs for ours, theirs in (row.num_parameters for row in rows)),
        "bitwise": sum(row.is_bitwise for row in rows),
        "largest_difference": max(row.largest_difference for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--configurations", type=int, default=10)
    parser.add_argument("--own-attention", action="store_true", help="Megatron's attention on its side")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = measure(options.folder, options.configurations, has_own_attention=options.own_attention)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(found | origin()))
        return
    for row in found["rows"]:
        print(f"{row['name']}: {row['num_ranks']} ranks, {row['num_parameters']} parameters, {row['losses'][0]}")
    print(
        f"{found['configurations']} configurations: {found['equal_parameters']} with equal parameters, "
        f"{found['bitwise']} with bitwise equal losses, largest difference {found['largest_difference']:.1e}"
    )


if __name__ == "__main__":
    main()
